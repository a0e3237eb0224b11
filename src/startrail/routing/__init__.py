"""Which programs a call of attention runs: one for each zone of its batch. No torch.

May import ``schedule`` and ``geometry``. Start reading at ``route``.

- ``route``: for each zone, the plan or ``direct``, whichever sends fewer bytes
- ``proof``: every visible pair computed once, no unseen key sent, every gradient returned to its owner
- ``explain``: the choice in words; ``work``: how much each rank has to do
"""

"""Which programs a call of attention runs: one for each zone of its batch. No torch.

May import ``schedule`` and ``geometry``. Start reading at ``route``.
"""

"""Schedules as data: the transfers, blocks and merges of every rank, step by step. No torch.

Imports no other package. Start reading at ``values`` and ``plan``, then ``program``.

- ``values``, ``places``: pieces, transfers, blocks and steps; the coordinates of a rank at every level
- ``plan``, ``program``: plans and their text form; the program of one rank
- ``families/``, ``timeline``: the schedule families, and the list of steps that they build
- ``demand``: the keys that each rank needs of others, from which the programs of ``direct`` follow
- ``compose``: adds the exchange over heads and runs groups one after the other
- ``parts``: the order of the programs of several zones
- ``walk``: a program as the events that the engine runs and the planner times
- ``proof``: simulates the programs of all ranks without data and checks them
- ``sizes``: the bytes of pieces, and the peak memory of a pass
"""

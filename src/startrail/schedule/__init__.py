"""Schedules as data: what every rank sends, computes and merges, step by step. No torch.

Imports no other package. Start reading at ``values`` and ``plan``, then ``program``, which builds one rank's program.

- ``values``, ``places``: steps, transfers and blocks; a rank's digits at every level
- ``plan``, ``program``, ``timeline``: plans and their text form; programs; building a list of steps
- ``walk``: a program as the events that the executor runs and the planner times
- ``families/``, ``compose``: the families of schedules; the exchange over heads and the groups around them
- ``proof``: runs the programs of all ranks against each other, without data, and checks them
- ``sizes``: the sizes of pieces, and the most that a pass holds
"""

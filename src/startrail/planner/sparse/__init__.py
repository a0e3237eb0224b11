"""Packed documents and windows in the planner: the programs that run, priced by what the mask leaves visible.

- ``documents``: the lengths of documents to plan for, from a file or a distribution
- ``predict``: the time of one call; the layout, routes and tiles are those of the engine
- ``rule``: the plan or ``direct`` for a layer with a window, whichever is faster as simulated
- ``advice``: the plans of a search, priced and ranked for their documents and windows
"""

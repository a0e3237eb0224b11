"""Packed documents and windows in the planner: the programs that run, priced by what the mask leaves visible.

- ``documents``: the lengths of documents to plan for, from a file or a distribution
- ``predict``: the time of one call; the layout, routes and tiles are those of the engine
- ``advice``: the plans of a search, priced and ranked for their documents and windows
"""

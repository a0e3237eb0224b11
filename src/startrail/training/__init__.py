"""Training runs: recipes, data, models, checkpoints and the loop.

May import the public API, the packages below it, ``launch`` and ``view``. Start reading at ``trainer``, the loop of one
rank; ``recipes`` has every setting of a run and needs no torch.

- ``data/``, ``models/``, ``checkpoints/``: what a run reads, trains and saves.
- ``tasks``: text with a GPT, images with a DiT.
- ``sharding``, ``collectives``: parameters over ranks, host collectives.
- ``memory``: recomputed and offloaded activations, and what a process holds.
- ``metrics``, ``display``, ``report``: what a run records and shows.
- ``recognise``: a classifier that judges a DiT's digits.
"""

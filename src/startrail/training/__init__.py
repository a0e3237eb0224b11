"""Training runs: recipes, data, models, checkpoints and the loop.

May import the public API, the packages below it, ``launch`` and ``view``. Start reading at ``loop``, the loop of one
rank; ``recipes`` has every setting of a run and needs no torch.

- ``data/``, ``models/``, ``checkpoints/``: what a run reads, trains and saves.
- ``tasks``: text with a GPT, images with a DiT.
- ``sharding``, ``ranks``: parameters over ranks; what ranks tell each other.
- ``forecast``, ``record``, ``display``: what a run expects, writes and shows.
- ``files``, ``footprint``: files that are opened safely, the memory of a process.
- ``start``: starts a run on local ranks, or joins it under torchrun.
- ``recognise``: a classifier that judges a DiT's digits.
"""

"""Training on near-infinite contexts: the models, their named shapes, and a loss that is right over all ranks.

``shapes`` is plain data and needs no torch; ``gpt``, ``dit`` and ``loss`` run alike on one process and
sequence-parallel.
"""

"""Training on near-infinite contexts: the models, their data, a loss that is right over all ranks, and the runs.

``model_configs`` and ``recipes`` are plain data and need no torch; ``gpt``, ``dit`` and ``loss`` run alike on one
process and sequence-parallel.
"""

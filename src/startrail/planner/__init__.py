"""Which plan on which cluster, why, and how sure: no torch.

``describe`` reads files of numbers with units, ``hardware`` and ``workload`` are what they describe: a cluster, a model
and a run. ``simulate`` plays the programs that the executor walks with a clock, ``step`` puts a whole training step
around them, ``search`` tries all ``candidates`` and ranks them, ``explain`` says it in a table, a paragraph or JSON,
``chosen`` is what ``auto`` asks, and ``command`` is ``startrail plan``.
"""

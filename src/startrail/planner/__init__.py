"""The planner: the best plan for a model on a cluster, with a predicted time and memory. No torch outside ``live``.

It may import ``schedule``, ``geometry`` and ``compile``; ``live`` also uses ``agreement``, ``transport`` and
``kernels`` to measure the cluster it runs on. Start with ``answer.plan``, which ``startrail plan`` prints, and follow
it to ``search.search``.

``units`` reads description files, in which numbers carry units. ``cluster`` and ``workload`` are what they describe,
``topology`` their nodes and ranks. ``pricing``, ``simulator`` and ``predict`` time one attention call,
with the speeds of ``kernels``; ``peers`` describes other libraries' engines. ``bounds`` gives lower bounds. ``step``
adds the rest of a training step and ``memory`` its memory. ``search`` ranks all ``candidates`` into ``rows``,
``sparse`` prices documents and windows, ``answer`` explains the result, ``operate`` works out what fits, and ``auto``
serves ``SequenceParallel("auto")``.
"""

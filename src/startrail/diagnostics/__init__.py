"""Answers to "is it right?": attention against float64, a user's training step against one process, the machine itself.

May import the public API and the packages below it, ``launch`` and ``integrations``. Start with ``exactness``.

- ``exactness``, ``cluster_check``: ``startrail check``, proven, on local ranks and under torchrun
- ``reference``, ``rounding``: dense float64 attention, and how much rounding error is allowed
- ``verify``: ``startrail verify``; ``setups``: what a user's function returns; ``observe``, ``compare``: what a step
  did, and how far it is off; ``faults``, ``masks``: the faults it can name
- ``doctor``: ``startrail doctor``
"""

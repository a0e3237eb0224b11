"""Messages between ranks. One interface, ``Transport``, and a class for each kind of backend: ``Gloo``, ``Nccl``.

Start reading at ``interface``, which says what a pass asks of a transport. Nothing outside this package asks which
backend runs. May import ``agreement``, ``schedule`` (programs and places), ``kernels.device`` and ``_compat``.

- ``interface``: what the engine asks for, and what that is for a single rank
- ``lanes``: what Gloo and Nccl share: a process group per lane, pending transfers, the errors of failed ones
- ``gloo``, ``nccl``: how messages are posted, calls compared while they run, and failures found
- ``opening``: which class for which device
- ``torch_collectives``: the same comparison for collectives of torch's own
- ``process_groups``: how groups are made, with which settings, and how they end
- ``counters``: bytes, messages and time
"""

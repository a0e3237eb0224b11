"""Messages between ranks. One interface, ``base.Transport``, and a class for each kind of backend: ``Gloo``, ``Nccl``.

Start reading at ``base``, which says what a pass asks of a transport. Nothing outside this package asks which backend
runs. May import ``agreement``, ``schedule`` (programs and places), ``kernels.device`` and ``_compat``.

- ``base``: the interface, and what it is for a single rank
- ``lanes``: what Gloo and Nccl share: a process group per lane, pending transfers, the errors of failed ones
- ``gloo``, ``nccl``: how messages are posted, calls compared while they run, and failures found
- ``process_groups``: how groups are made, with which settings, and how they end
- ``counters``: bytes, messages and time
"""

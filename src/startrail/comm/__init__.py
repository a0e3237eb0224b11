"""Communication between ranks: process groups, pending transfers, agreement about calls, timeouts and errors.

May import ``schedule`` (programs and places), ``kernels`` (the current device) and ``_compat`` (torch's private APIs).
Start reading at ``lanes``, which carry messages, and ``consensus``, which detects ranks that make different calls.

- ``process_groups``, ``lanes``, ``transfers``: groups and their settings, messages on them, waiting for messages
- ``consensus``, ``ledger``: comparing calls between ranks, and the records in the store that this needs
- ``agreement``: the same for torch's collectives
- ``watchdog``, ``waits``, ``timing``: the thread that checks long waits, what each rank waits for, all waiting times
- ``errors``, ``counters``: ``PeerError``; bytes, messages and time
- ``gather``, ``digest``, ``sanity``: texts of all ranks, digests of tensors, checks of a training loop's first steps
"""

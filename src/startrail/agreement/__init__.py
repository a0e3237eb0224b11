"""Agreement between ranks: that all make the same calls, what each waits for, and how all go on after an error.

Start reading at ``consensus``, which detects ranks that make different calls. May import ``_compat`` only.

- ``consensus``, ``ledger``: the calls of one ``SequenceParallel``, and their records in torch.distributed's store
- ``comparison``: comparing digests of calls without the store
- ``readiness``: waiting for kernels that compile
- ``waits``, ``watchdog``, ``timing``: what each rank waits for, the thread that checks long waits, all waiting times
- ``errors``: ``PeerError``; ``digest``, ``gather``: digests of tensors, texts of all ranks
"""

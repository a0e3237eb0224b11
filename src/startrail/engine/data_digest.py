"""Digests of what a batch's ranks shard: a rank that skips a batch, or gets another one, finds out at its next call
although numbers and shapes match."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import Tensor

from startrail.agreement.digest import fold, quick_digest

if TYPE_CHECKING:
    from startrail.engine.op_key import SequenceState


def is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


class DataDigest:
    """The digest of several tensors in order: ``host`` of those on CPUs, ``device`` of the others, which no host has
    read yet."""

    def __init__(self) -> None:
        self.count, self.host = 0, 0
        self.device: Tensor | None = None

    def add(self, x: Tensor) -> None:
        self.count += 1
        latest = quick_digest(x)
        if is_on_host(x):
            self.host = fold(self.host, int(latest))
        else:
            self.device = latest if self.device is None else fold(self.device.to(x.device, non_blocking=True), latest)


class DigestRecorder:
    """Decides which tensors count for a sequence, the same on all ranks.

    In the thread that makes the calls, which is the one that made this object, all do. If it reuses a sequence, what it
    shards after a forward call belongs to another batch. A loader's thread may run further ahead on some ranks than on
    others, so if it reuses a sequence, only the first tensor counts. All do if it makes a sequence for each batch,
    which is known from its second sequence on.
    """

    def __init__(self) -> None:
        self._thread, self._num_forwards = threading.get_ident(), 0
        self._loader = threading.local()  # has_sharded: this thread has, since it made its last sequence

    def count_forward(self) -> None:
        self._num_forwards += 1

    def maker(self) -> int | None:
        """The thread that makes a sequence just now, if it makes one for each batch."""
        maker = threading.get_ident() if getattr(self._loader, "has_sharded", False) else None
        self._loader.has_sharded = False
        return maker

    def record(self, sequence: SequenceState, x: Tensor) -> None:
        thread = threading.get_ident()
        self._loader.has_sharded = True
        if thread != self._thread:
            digest = sequence.loaded
            if digest.count and thread != sequence.maker:
                return
        else:
            if sequence.digested_at != self._num_forwards:
                sequence.own, sequence.digested_at = DataDigest(), self._num_forwards
            digest = sequence.own
        digest.add(x)
        sequence.update_key()

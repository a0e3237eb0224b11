"""How an op refers to a sequence, and to the data of its batch: a rank that skips a batch, or gets another one, finds
out at its next call although numbers and shapes match.

The op takes a tensor, because torch.compile would treat any other value as a constant and recompile for each batch. The
tensor holds the boundaries themselves, not an id to look them up by: a compiled backward pass keeps nothing but tensors
alive, and may run long after the ``Sequence`` is gone and many others were made.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from startrail._compat import mark_weakly_dynamic
from startrail.agreement.digest import fold, quick_digest
from startrail.compile.problem import Boundaries
from startrail.engine.batch import Batch

REMEMBERED = 1 << 15  # kinds of boundaries whose sequences are numbered


class OpKey(NamedTuple):
    """``number``: how many sequences with these boundaries this rank has made, which distinguishes batches that
    look alike. ``digest``: of the batch's data, 0 if none was taken. ``ticket``: the state that holds the digest of
    data on a device, or 0; it means nothing on other ranks.

    >>> key = OpKey(1, 0, 0, Boundaries((0, 5, 9), ((1, 3),)))
    >>> OpKey.from_tensor(key.to_tensor()) == key
    True
    """

    number: int
    digest: int
    ticket: int
    boundaries: Boundaries

    def to_tensor(self) -> Tensor:
        numbers = (self.number, self.digest, self.ticket, *self.boundaries.encode())
        return mark_weakly_dynamic(torch.tensor(numbers, device="cpu"), 0)  # batches differ in their documents

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> OpKey:
        number, digest, ticket, *boundaries = tensor.tolist()
        return cls(number, digest, ticket, Boundaries.decode(boundaries))


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


class SequenceState:
    """A sequence as its ``Session`` knows it. ``op_key`` is its key as the op takes it.

    ``loaded`` is the digest of what data loaders' threads have sharded. ``own`` is that of what the calling thread has
    sharded since its last forward call; ``digested_at`` counts the forward calls until then. ``maker`` is the thread
    that made this sequence, if it is known to be for one batch only.
    """

    def __init__(self, batch: Batch, number: int, ticket: int, maker: int | None) -> None:
        self.batch, self.ticket, self.maker = batch, ticket, maker
        self.digested_at = -1
        self.loaded, self.own = DataDigest(), DataDigest()
        self.op_key = OpKey(number, 0, 0, batch.boundaries).to_tensor()

    @property
    def device_digest(self) -> Tensor | None:
        """The digest of data on devices."""
        loaded, own = self.loaded.device, self.own.device
        if loaded is None or own is None:
            return own if loaded is None else loaded
        return fold(loaded.to(own.device, non_blocking=True), own)

    def update_key(self) -> None:
        """Put the digests into the key. Makes a new tensor: pending backward passes still hold the old one."""
        key = self.op_key.clone()
        key[1] = fold(self.loaded.host, self.own.host)
        key[2] = 0 if self.device_digest is None else self.ticket
        self.op_key = mark_weakly_dynamic(key, 0)


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


class SequenceNumbers:
    """Counts the sequences that this rank has made, those with equal boundaries apart: data loaders of other ranks may
    make them in another order. Only the latest kinds of boundaries are remembered.

    >>> numbers, long, short = SequenceNumbers(), Boundaries((0, 9)), Boundaries((0, 5))
    >>> numbers.next(long), numbers.next(short), numbers.next(short)
    (1, 1, 2)
    >>> numbers.restart()                                  # after an error, the first that is used counts as number 1
    >>> numbers.relative(short, 2), numbers.relative(long, 1), numbers.relative(short, 3)
    (1, 1, 2)
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._first: dict[int, int] | None = None  # None: since this was made

    def next(self, boundaries: Boundaries) -> int:
        number = self._made.pop(hash(boundaries), 0) + 1
        return _remember(self._made, hash(boundaries), number)

    def relative(self, boundaries: Boundaries, number: int) -> int:
        """The number since the last restart of a sequence that is used now."""
        if self._first is None:
            return number
        first = self._first.pop(hash(boundaries), number)
        return number + 1 - _remember(self._first, hash(boundaries), first)

    def restart(self) -> None:
        self._first = {}


def _remember(numbers: dict[int, int], key: int, number: int) -> int:
    """Make ``key`` the latest one. Forgets the oldest."""
    numbers[key] = number
    if len(numbers) > REMEMBERED:
        del numbers[next(iter(numbers))]
    return number

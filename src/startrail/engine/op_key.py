"""How an op refers to a sequence, and to the data of its batch: a rank that skips a batch, or gets another one, finds
out at its next call although numbers and shapes match.

The op takes a tensor, because torch.compile would treat any other value as a constant and recompile for each batch. The
tensor holds the boundaries themselves, not an id to look them up by: a compiled backward pass keeps nothing but tensors
alive, and may run long after the ``Sequence`` is gone and many others were made.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakSet

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
            self.device = _folded(self.device, latest)


class SequenceState:
    """A sequence as its ``Session`` knows it. ``op_key`` is its key as the op takes it.

    ``loaded`` is the digest of what data loaders' threads have sharded. ``own`` is that of what the calling thread has
    sharded since its last forward call; ``digested_at`` counts the forward calls until then. ``maker`` is the thread
    that made this sequence, if it is known to be for one batch only. ``parent`` is the sequence whose tokens these are,
    with other documents: what it has sharded counts here as well. The reverse does not hold, since each of several
    batches can cut one parent in its own way.
    """

    def __init__(
        self, batch: Batch, number: int, ticket: int, maker: int | None, parent: SequenceState | None = None
    ) -> None:
        self.batch, self.ticket, self.maker, self._parent = batch, ticket, maker, parent
        self.digested_at = -1
        self.loaded, self.own = DataDigest(), DataDigest()
        self._children: WeakSet[SequenceState] = WeakSet()
        self.op_key = OpKey(number, 0, 0, batch.boundaries).to_tensor()
        if parent is not None:
            parent._children.add(self)
            self._write_digests()

    @property
    def host_digest(self) -> int:
        """The digest of data on CPUs; 0 if there is none. A sequence that has sharded nothing itself has its parent's:
        both belong to one batch."""
        sharded = fold(self.loaded.host, self.own.host)
        if self._parent is None:
            return sharded
        return fold(self._parent.host_digest, sharded) if sharded else self._parent.host_digest

    @property
    def device_digest(self) -> Tensor | None:
        """The digest of data on devices."""
        of_parent = None if self._parent is None else self._parent.device_digest
        return _folded(_folded(of_parent, self.loaded.device), self.own.device)

    def update_key(self) -> None:
        """Put the digests into the key, and into those of the sequences with the same tokens. Makes new tensors:
        pending backward passes still hold the old ones."""
        self.op_key = self.op_key.clone()
        self._write_digests()
        for child in self._children:
            child.update_key()

    def _write_digests(self) -> None:
        self.op_key[1] = self.host_digest
        self.op_key[2] = 0 if self.device_digest is None else self.ticket
        mark_weakly_dynamic(self.op_key, 0)


def _folded(so_far: Tensor | None, another: Tensor | None) -> Tensor | None:
    if so_far is None or another is None:
        return another if so_far is None else so_far
    return fold(so_far.to(another.device, non_blocking=True), another)


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

    def maker(self, is_packed: bool) -> int | None:
        """The thread that makes a sequence just now, if it makes one for each batch. One that ``is_packed`` has its
        batch's tokens on the same ranks as another."""
        has_sharded = getattr(self._loader, "has_sharded", False)
        self._loader.has_sharded = has_sharded and is_packed
        return threading.get_ident() if has_sharded else None

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

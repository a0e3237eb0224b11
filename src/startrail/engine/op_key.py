"""How the op refers to a sequence.

The op takes a tensor, because torch.compile would treat any other value as a constant and recompile for each batch. The
tensor holds the boundaries themselves, not an id to look them up by: a compiled backward pass keeps nothing but tensors
alive, and may run long after the ``Sequence`` is gone and many others were made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from startrail._compat import mark_weakly_dynamic
from startrail.agreement.digest import fold
from startrail.engine.batch import BatchGeometry, Boundaries
from startrail.engine.data_digest import DataDigest

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


class SequenceState:
    """A sequence as its ``Runtime`` knows it. ``op_key`` is its key as the op takes it.

    ``loaded`` is the digest of what loaders' threads have sharded, ``own`` of what the thread that makes the calls has
    sharded since its last forward call, of which there were ``digested_at``. ``maker`` is the thread that made this
    sequence for one batch only, if it is known to.
    """

    def __init__(self, geometry: BatchGeometry, number: int, ticket: int, maker: int | None) -> None:
        self.geometry, self.ticket, self.maker = geometry, ticket, maker
        self.digested_at = -1
        self.loaded, self.own = DataDigest(), DataDigest()
        self.op_key = OpKey(number, 0, 0, geometry.boundaries).to_tensor()

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

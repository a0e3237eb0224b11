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
from startrail.engine.batch import BatchGeometry, Boundaries


class OpKey(NamedTuple):
    """``number``: how many sequences with these boundaries this rank has made, which tells batches that look alike
    apart. ``digest``: of the batch's ids, 0 if none was taken.

    >>> key = OpKey(1, 0, Boundaries((0, 5, 9), ((1, 3),)))
    >>> OpKey.from_tensor(key.to_tensor()) == key
    True
    """

    number: int
    digest: int
    boundaries: Boundaries

    def to_tensor(self) -> Tensor:
        numbers = (self.number, self.digest, *self.boundaries.encode())
        return mark_weakly_dynamic(torch.tensor(numbers, device="cpu"), 0)  # batches differ in their documents

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> OpKey:
        number, digest, *boundaries = tensor.tolist()
        return cls(number, digest, Boundaries.decode(boundaries))


class SequenceState:
    """A sequence as its ``Runtime`` knows it. ``op_key`` is its key as the op takes it; ``digested_at`` counts the
    forward calls before its digest was last taken by the thread that makes the calls."""

    def __init__(self, geometry: BatchGeometry, number: int) -> None:
        self.geometry, self.digested_at = geometry, -1
        self.set_key(OpKey(number, 0, geometry.boundaries))

    def set_key(self, key: OpKey) -> None:
        """Makes a new tensor: pending backward passes still hold the old one."""
        self.key, self.op_key = key, key.to_tensor()

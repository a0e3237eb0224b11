"""Copies tokens between a bundle, which is one message, and the pieces at its sender that the tokens belong to.

>>> from startrail.schedule.values import Source
>>> bundle = BundleCopies(Bundle(((0, 1), (2, 2)), (Source(5, 0, 1), Source(5, 4, 2))), torch.device("cpu"))
>>> bundle.shards
(5,)
>>> tokens = torch.arange(6.0).view(1, 1, 6, 1)
>>> packed = torch.empty(1, 1, 3, 1)
>>> bundle.pack(5, tokens, packed)
>>> packed.flatten().tolist()
[0.0, 4.0, 5.0]
>>> bundle.add(5, packed, tokens)                # gradients come back and are added where the tokens came from
>>> tokens.flatten().tolist()
[0.0, 1.0, 2.0, 3.0, 8.0, 10.0]
"""

from __future__ import annotations

import torch
from torch import Tensor

from startrail.kernels.device import ints_on
from startrail.schedule.values import Bundle


class BundleCopies:
    """``shards`` are the pieces at the sender that hold the bundle's tokens."""

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        at, indices = 0, dict[int, tuple[list[int], list[int]]]()
        for shard, start, count in bundle.sources:
            inside, outside = indices.setdefault(shard, ([], []))
            inside += range(at, at + count)
            outside += range(start, start + count)
            at += count
        self.shards = tuple(indices)
        self._indices = {
            shard: (_slice_or_tensor(inside, device), _slice_or_tensor(outside, device))
            for shard, (inside, outside) in indices.items()
        }

    def pack(self, shard: int, tokens: Tensor, bundle: Tensor) -> None:
        """Copy the tokens of one piece (batch, heads, tokens, dim) into the bundle."""
        inside, outside = self._indices[shard]
        taken = tokens[:, :, outside] if isinstance(outside, slice) else tokens.index_select(2, outside)
        if isinstance(inside, slice):
            bundle[:, :, inside].copy_(taken)
        else:
            bundle.index_copy_(2, inside, taken.to(bundle.dtype))

    def add(self, shard: int, bundle: Tensor, tokens: Tensor) -> None:
        """Add the bundle to the tokens of one piece."""
        inside, outside = self._indices[shard]
        part = bundle[:, :, inside] if isinstance(inside, slice) else bundle.index_select(2, inside)
        if isinstance(outside, slice):
            tokens[:, :, outside].add_(part)
        else:
            tokens.index_add_(2, outside, part.to(tokens.dtype))


def _slice_or_tensor(indices: list[int], device: torch.device) -> slice | Tensor:
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices):  # they only grow
        return slice(first, last + 1)
    return ints_on(device, indices, torch.int64)

"""Digests of tensors, which let ranks compare data without sending it."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

SAMPLE = 65_536  # elements of a larger tensor that its digest covers
FEW = 1_024  # the same for a quick digest
LIMIT = 2**31 - 1  # of a quick digest: a prime, or numbers that share trailing zero bits would share digests

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
Number = TypeVar("Number", int, Tensor)


def digest(x: Tensor) -> Tensor:
    """A number that is equal for equal tensors and almost always differs for others. Large tensors are sampled.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    tensor(False)
    """
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)]
    if flat.is_floating_point() or flat.is_complex():
        flat = flat.contiguous().view(torch.uint8)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 4294967291
    return (flat.long() * weights).sum()


def quick_digest(x: Tensor) -> Tensor:
    """A digest below ``LIMIT`` of the bits of at most ``FEW`` elements, evenly spaced. It copies nothing else, whatever
    the strides, and stays on the tensor's device, so that no host waits for it.

    The spacing is odd: a power of two would meet the same column of a matrix again and again.

    >>> quick_digest(torch.tensor([1.0, 2.0])) == quick_digest(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif x.is_neg():
        x = x.resolve_neg()
    spacing = -(-x.numel() // FEW) | 1
    places = torch.arange(0, x.numel(), spacing, device=x.device)
    sample = x.view(_INTEGERS[x.element_size()]).take(places).long().remainder(LIMIT)
    return (sample * _weights(x.device)[: sample.numel()]).sum().remainder(LIMIT)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, FEW + 1, device=device) * 2654435761 % 4294967291


def fold(so_far: Number, another: Number) -> Number:
    """The digest of what has the digest ``so_far`` and of ``another`` after it; 0 stands for nothing so far."""
    return (so_far * 1_000_003 + another) % LIMIT

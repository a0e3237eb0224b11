"""Digests of tensors, by which ranks compare data without sending it."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 65_536  # elements that enter the digest of a larger tensor


def digest(x: Tensor) -> Tensor:
    """A number that equal tensors share and different ones hardly ever do. Large tensors are sampled.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    tensor(False)
    """
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)]
    if flat.is_floating_point() or flat.is_complex():
        flat = flat.contiguous().view(torch.uint8)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 4294967291
    return (flat.long() * weights).sum()

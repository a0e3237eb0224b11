"""Digests of tensors, which let ranks compare data without sending it."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 65_536  # elements of a larger tensor that its digest covers


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

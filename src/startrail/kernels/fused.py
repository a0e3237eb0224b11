"""Chooses the fused kernels of `triton_kernels` on GPUs with Triton, which comes with torch's CUDA builds. Elsewhere
torch's own operations do the same."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

MAX_MERGED = 4  # partial results that one launch merges


def fused_on(device: torch.device) -> ModuleType | None:
    """The fused kernels for tensors on ``device``, or None.

    >>> print(fused_on(torch.device("cpu")))
    None
    """
    return _triton_kernels() if device.type == "cuda" else None


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        return import_module("startrail.kernels.triton_kernels")
    except ImportError:  # no Triton here
        return None

"""What can be wrong with the arguments of one rank's attention call; whether ranks agree is `agree`'s business."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from startrail.wire import DTYPES

MAX_HEAD_DIM = 256


def describe(x: Tensor) -> str:
    """
    >>> describe(torch.zeros(1, 4, 16, 8))
    '(1, 4, 16, 8) float32 cpu'
    """
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device}"


def wrong_kind(
    q: Tensor, k: Tensor, v: Tensor, window: object, documents: object, length: object, scale: object
) -> str | None:
    """Why the op cannot even be called with these, or None; whether their values fit is checked behind it.

    >>> x = torch.zeros(1, 4, 16, 8)
    >>> wrong_kind(x, x, x, window=2.5, documents=None, length=None, scale=None)
    'window=2.5 must be a whole number of tokens'
    """
    if not q.device == k.device == v.device:
        return f"q, k, v must be on one device, got q {describe(q)}, k {describe(k)}, v {describe(v)}"
    for name, tokens in (("window", window), ("length", length)):
        if tokens is not None and not (isinstance(tokens, int | torch.SymInt) and -(2**62) < tokens < 2**62):
            return f"{name}={tokens!r} must be a whole number of tokens"
    if scale is not None and not (isinstance(scale, int | float) and scale > 0 and math.isfinite(scale)):
        return f"scale={scale!r} must be a number of more than 0"
    if documents is not None and not _is_a_list(documents):
        return f"documents must be whole numbers in one dimension, got {documents!r}"
    return None


def _is_a_list(documents: object) -> bool:
    try:
        return torch.as_tensor(documents).dim() > 0
    except (TypeError, ValueError, RuntimeError):
        return False


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``ValueError`` if no plan could attend these."""
    given = f"q {describe(q)}, k {describe(k)}, v {describe(v)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"need q (batch, heads, tokens, dim) and k, v of one shape, got {given}")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q, k, v must agree in batch, local tokens and head dim, got {given}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"no dimension may be empty, got {given}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        raise ValueError(f"q, k, v must share one dtype of {', '.join(map(str, DTYPES))}, got {given}")
    if q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"head dim {q.shape[3]} is more than {MAX_HEAD_DIM}, got {given}")

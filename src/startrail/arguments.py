"""What one attention call asks for (``Call``), and what can be wrong with it on one rank; whether ranks agree is
`agree`'s business."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from startrail.mask import Mask
from startrail.wire import DTYPES

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Call:
    """What a layer asks for beside q, k, v and its sequence. Its text form is what the op takes.

    >>> call = Call(causal=True, window=4)
    >>> str(call), Call.parse(str(call)) == call
    ('causal=True, window=4, scale=None', True)
    """

    causal: bool = False
    window: int | None = None
    scale: float | None = None

    def __str__(self) -> str:
        return f"causal={self.causal}, window={self.window}, scale={self.scale}"

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Call:
        causal, window, scale = (part.partition("=")[2] for part in text.split(", "))
        return Call(
            causal == "True", None if window == "None" else int(window), None if scale == "None" else float(scale)
        )

    def mask(self, documents: tuple[int, ...] | None) -> Mask:
        return Mask(self.causal, self.window, documents)

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


def describe(x: Tensor) -> str:
    """What ranks must agree on; each has a GPU of its own, so which one is no part of it.

    >>> describe(torch.zeros(1, 4, 16, 8))
    '(1, 4, 16, 8) float32 cpu'
    """
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device.type}"


def wrong_kind(
    q: object, k: object, v: object, causal: object, window: object, scale: object, others: tuple[object, ...] = ()
) -> str | None:
    """Why the op cannot even be called with these, or None; whether their values fit is checked behind it. ``others``
    are arguments behind v without a name.

    >>> x = torch.zeros(1, 4, 16, 8)
    >>> wrong_kind(x, x, x, causal=False, window=2.5, scale=None)
    'window=2.5 must be a whole number of tokens'
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}" + (
                ": torch.from_numpy makes one of it" if type(x).__module__ == "numpy" else ""
            )
    if others:
        kinds = ", ".join(type(other).__name__ for other in others)
        return (
            f"attention takes q, k, v, and everything else by name, but got {kinds} behind v: it takes no mask; say "
            "causal=True, window=..., and sequence(length, documents=...) for packed documents"
        )
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not q.device == k.device == v.device:
        return f"q, k, v must be on one device, got q on {q.device}, k on {k.device}, v on {v.device}"
    if not isinstance(causal, bool):
        return f"causal={causal!r} must be True or False"
    if window is not None and not is_whole(window):
        return f"window={window!r} must be a whole number of tokens"
    if scale is not None and not (isinstance(scale, int | float) and scale > 0 and math.isfinite(scale)):
        return f"scale={scale!r} must be a number of more than 0"
    return None


def is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and -(2**62) < number < 2**62


def documents_of(documents: object, length: int) -> tuple[int, ...]:
    """cu_seqlens as a tuple; ``ValueError`` if they are none of a sequence of ``length`` tokens.

    >>> documents_of(None, 5), documents_of(torch.tensor([0, 2, 5]), 5)
    ((0, 5), (0, 2, 5))
    """
    if documents is None:
        return (0, length)
    try:
        ends = torch.as_tensor(documents)
        whole = ends.dim() == 1 and not ends.is_floating_point() and not ends.is_complex() and ends.dtype != torch.bool
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"documents must be whole numbers in one dimension, got {documents!r}")
    mask = Mask(documents=tuple(ends.tolist()))
    mask.check_length(length)
    return mask.documents or (0, length)


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

"""What one attention call asks for (``AttentionCall``), and what can be wrong with it on one rank; whether ranks agree is
`agree`'s business."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from startrail.engine.wire import DTYPES
from startrail.geometry.mask import Mask, Segment

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks for beside q, k, v and its sequence. Its text form is what the op takes.

    >>> call = AttentionCall(causal=True, window=4)
    >>> str(call), AttentionCall.parse(str(call)) == call
    ('causal=True, window=4, scale=None', True)
    """

    causal: bool = False
    window: int | None = None
    scale: float | None = None
    chunk: int | None = None
    steps: tuple[Segment, ...] = ()  # a staircase of slices
    largest: bool = False  # whether the largest logit of each head is wanted
    softcap: float | None = None

    def __str__(self) -> str:
        text = f"causal={self.causal}, window={self.window}, scale={self.scale}"
        if self.chunk is not None:
            text += f", chunk={self.chunk}"
        if self.steps:
            text += ", steps=" + " ".join(":".join(map(str, step)) for step in self.steps)
        if self.softcap is not None:
            text += f", softcap={self.softcap}"
        return text + (", largest=True" if self.largest else "")

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> AttentionCall:
        said = dict(part.split("=") for part in text.split(", "))
        window, scale, chunk, softcap = said["window"], said["scale"], said.get("chunk"), said.get("softcap")
        steps = (map(int, step.split(":")) for step in said.get("steps", "").split())
        return AttentionCall(
            said["causal"] == "True",
            None if window == "None" else int(window),
            None if scale == "None" else float(scale),
            None if chunk is None else int(chunk),
            tuple(Segment(*step) for step in steps),
            "largest" in said,
            None if softcap is None else float(softcap),
        )

    def mask(self, documents: tuple[int, ...] | None, blocks: tuple[tuple[int, int], ...] = ()) -> Mask:
        return Mask(self.causal, self.window, documents, self.chunk, blocks, self.steps)

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


def describe_tensor(x: Tensor) -> str:
    """What ranks must agree on; each has a GPU of its own, so which one is no part of it.

    >>> describe_tensor(torch.zeros(1, 4, 16, 8))
    '(1, 4, 16, 8) float32 cpu'
    """
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device.type}"


# What scaled_dot_product_attention and others call it, and what to write instead.
ELSEWHERE = {
    "attn_mask": "say causal=True, window=..., chunk=... or mask=startrail.Mask...; documents belong to the sequence",
    "is_causal": "write causal=",
    "enable_gqa": "leave it out, k and v may always have fewer heads",
    "dropout_p": "leave it out, there is no dropout",
    "sliding_window": "write window=",
    "softmax_scale": "write scale=",
}


def type_problem(
    q: object,
    k: object,
    v: object,
    causal: object,
    window: object,
    scale: object,
    others: tuple[object, ...] = (),
    unknown: Iterable[str] = (),
) -> str | None:
    """Why the op cannot even be called with these, or None; whether their values fit is checked behind it. ``others``
    are arguments behind v without a name, ``unknown`` the names of those that it does not have.

    >>> x = torch.zeros(1, 4, 16, 8)
    >>> type_problem(x, x, x, causal=False, window=2.5, scale=None)
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
    for name in unknown:
        hint = ELSEWHERE.get(name, "there is none such here")
        return f"attention has no argument {name}: {hint}"
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not q.device == k.device == v.device:
        return f"q, k, v must be on one device, got q on {q.device}, k on {k.device}, v on {v.device}"
    if not isinstance(causal, bool):
        return f"causal={causal!r} must be True or False"
    if window is not None and not is_int(window):
        return f"window={window!r} must be a whole number of tokens"
    if scale is not None and not _is_positive(scale):
        return f"scale={scale!r} must be a number of more than 0"
    return None


def option_problem(q: Tensor, chunk: object, sinks: object, softcap: object, mask: object) -> str | None:
    """The same for what not every model needs."""
    if chunk is not None and not is_int(chunk):
        return f"chunk={chunk!r} must be a whole number of tokens"
    if softcap is not None and not _is_positive(softcap):
        return f"softcap={softcap!r} must be a number of more than 0; None bends no logits"
    if sinks is not None and not isinstance(sinks, Tensor):
        return f"sinks must be a tensor with a number for each head, got {type(sinks).__name__}"
    if isinstance(sinks, Tensor) and (
        sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device
    ):
        return f"sinks must be a number for each of the {q.shape[1]} query heads on {q.device}, got {describe_tensor(sinks)}"
    if mask is not None and not isinstance(mask, Mask):
        return f"mask must be a startrail.Mask, got {type(mask).__name__}"
    if isinstance(mask, Mask) and (mask.documents is not None or mask.blocks):
        return "documents and blocks belong to the sequence: sp.sequence(length, documents=..., blocks=...)"
    return None


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0 and math.isfinite(number)


def is_int(number: object) -> bool:
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


def blocks_of(blocks: object, length: int) -> tuple[tuple[int, int], ...]:
    """Runs of tokens that see each other, as pairs (start, stop); ``ValueError`` if they are none of a sequence.

    >>> blocks_of([(0, 2), (3, 5)], 5)
    ((0, 2), (3, 5))
    """
    if blocks is None:
        return ()
    try:
        pairs = tuple((int(start), int(stop)) for start, stop in torch.as_tensor(blocks).reshape(-1, 2).tolist())
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"blocks must be pairs (start, stop) of whole numbers, got {blocks!r}") from None
    Mask(blocks=pairs).check_length(length)
    return pairs


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``ValueError`` if no plan could attend these."""
    given = f"q {describe_tensor(q)}, k {describe_tensor(k)}, v {describe_tensor(v)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"need q (batch, heads, tokens, dim) and k, v of one shape, got {given}")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q, k, v must agree in batch, local tokens and head dim, got {given}")
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise ValueError(f"no dimension may be empty, got {given}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        raise ValueError(f"q, k, v must share one dtype of {', '.join(map(str, DTYPES))}, got {given}")
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"head dim {max(q.shape[3], v.shape[3])} is more than {MAX_HEAD_DIM}, got {given}")

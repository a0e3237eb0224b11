"""What a layer asks of attention, apart from its sequence: checks of its arguments, and their text and shapes as the op
takes them. `agreement.consensus` checks whether all ranks agree on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from startrail._compat import dtype_name
from startrail.compile.attention import Attention
from startrail.compile.latents import LatentAttention
from startrail.compile.problem import Boundaries
from startrail.engine.tensors import check_dense
from startrail.geometry.layout import weights_of
from startrail.geometry.mask import Mask, Segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of inputs
MAX_HEAD_DIM = 256
FLAGS = ("max_logits", "sinks", "gradients")


@dataclass(frozen=True)
class AttentionCall:
    """``mask`` has no documents or blocks: those belong to the sequence. ``max_logits`` asks for the largest logit of
    each head. ``sinks`` are merged by each rank afterwards, but all ranks must have them. ``gradients``: a backward
    pass follows, in which all ranks must take part; the forward pass is the same without. The op takes a call as text,
    which round-trips:

    >>> call = AttentionCall(Mask(causal=True, window=4))
    >>> str(call), AttentionCall.parse(str(call)) == call
    ('causal=True, window=4, scale=None', True)
    """

    mask: Mask
    scale: float | None = None
    softcap: float | None = None
    max_logits: bool = False
    sinks: bool = False
    gradients: bool = field(default=False, compare=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.scale, self.softcap, self.max_logits, self.sinks))

    def __hash__(self) -> int:
        """Computed once: it is needed for every call of a layer."""
        return self._hash

    def __str__(self) -> str:
        mask = self.mask
        text = f"causal={mask.causal}, window={mask.window}, scale={self.scale}"
        if mask.chunk is not None:
            text += f", chunk={mask.chunk}"
        if mask.steps:
            text += ", steps=" + " ".join(":".join(map(str, step)) for step in mask.steps)
        if self.softcap is not None:
            text += f", softcap={self.softcap}"
        return text + "".join(f", {name}=True" for name in FLAGS if getattr(self, name))

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> AttentionCall:
        options = dict(part.split("=") for part in text.split(", "))
        given = {name: value for name, value in options.items() if value != "None"}
        window, chunk = (int(given[name]) if name in given else None for name in ("window", "chunk"))
        scale, softcap = (float(given[name]) if name in given else None for name in ("scale", "softcap"))
        steps = tuple(Segment(*map(int, step.split(":"))) for step in options.get("steps", "").split())
        mask = Mask(options["causal"] == "True", window, chunk=chunk, steps=steps)
        flags = (name in options for name in FLAGS)
        return AttentionCall(mask, scale, softcap, *flags)

    def without_gradients(self) -> AttentionCall:
        return replace(self, gradients=False)

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


def read_call(q: object, k: object, v: object, **options: object) -> AttentionCall:
    """The call that a layer's arguments describe. Raises ``ValueError`` if the op cannot take them; `Shapes.check`
    and `Mask.check_length` look at shapes and lengths later.

    >>> x = torch.zeros(1, 4, 16, 8)
    >>> read_call(x, x, x, window=2.5)
    Traceback (most recent call last):
    ValueError: window=2.5 must be a whole number of tokens
    """
    return _read_call({"q": q, "k": k, "v": v}, **options)


def read_latent_call(
    q: object, latent: object, k_rope: object, w_k: object, w_v: object, **options: object
) -> AttentionCall:
    """The same for keys and values that are expanded from latents."""
    return _read_call({"q": q, "latent": latent, "k_rope": k_rope, "w_k": w_k, "w_v": w_v}, **options)


def _read_call(
    named: Mapping[str, object], *,
    causal: object = False, window: object = None, chunk: object = None, mask: object = None,
    scale: object = None, sinks: object = None, softcap: object = None, max_logits: object = False,
) -> AttentionCall:  # fmt: skip
    tensors = []
    for name, x in named.items():
        if not isinstance(x, Tensor):
            hint = ": convert it with torch.from_numpy" if type(x).__module__ == "numpy" else ""
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}{hint}")
        check_dense(x, name)
        tensors.append(x)
    if len({x.device for x in tensors}) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in zip(named, tensors, strict=True))
        raise ValueError(f"{', '.join(named)} must be on one device, got {places}")
    if sinks is not None:
        _check_sinks(sinks, tensors[0])
    mask = read_mask(causal, window, chunk, mask)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    scale, softcap = _positive("scale", scale), _positive("softcap", softcap)
    return AttentionCall(mask, scale, softcap, bool(max_logits), sinks is not None, gradients)


def read_mask(causal: object = False, window: object = None, chunk: object = None, mask: object = None) -> Mask:
    """The mask that a layer's arguments describe, without documents and blocks."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r} must be True or False")
    for name, tokens in (("window", window), ("chunk", chunk)):
        if tokens is not None and not is_int(tokens):
            raise ValueError(f"{name}={tokens!r} must be a whole number of tokens")
    if mask is None:
        return Mask(causal, window, chunk=chunk)  # type: ignore[arg-type]
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a startrail.Mask, got {type(mask).__name__}")
    if mask.documents is not None or mask.blocks:
        raise ValueError("documents and blocks belong to the sequence: sp.sequence(length, documents=..., blocks=...)")
    if causal or window is not None or chunk is not None:
        raise ValueError("pass either mask= or causal/window/chunk, not both")
    return mask


def _check_sinks(sinks: object, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks must be a tensor with one number per head, got {type(sinks).__name__}")
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"sinks must hold one number for each of the {q.shape[1]} query heads on {q.device}, got "
            f"{describe_tensor(sinks)}"
        )


def _positive(name: str, number: object) -> float | None:
    if number is None:
        return None
    if isinstance(number, int | float) and not isinstance(number, bool) and number > 0 and math.isfinite(number):
        return float(number)
    raise ValueError(f"{name}={number!r} must be None or a finite number greater than 0")


def is_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and -(2**62) < number < 2**62


def read_boundaries(
    length: int, documents: object, blocks: object, placement: tuple[int, ...] = (), shares: tuple[int, ...] = ()
) -> Boundaries:
    """The boundaries of a sequence of ``length`` tokens. Raises ``ValueError`` if the documents are not its cu_seqlens,
    or join those of ``placement``, or if the blocks are not runs of its tokens.

    >>> read_boundaries(5, None, [(0, 2), (3, 5)]), read_boundaries(5, torch.tensor([0, 2, 5]), None).documents
    (Boundaries(documents=(0, 5), blocks=((0, 2), (3, 5)), placement=(), shares=()), (0, 2, 5))
    """
    mask = Mask(documents=_read_documents(documents, length), blocks=_read_blocks(blocks))
    mask.check_length(length)
    assert mask.documents is not None
    if joined := sorted(set(placement) - set(mask.documents)):
        raise ValueError(f"documents must keep the boundaries that the sequence was made with: {joined[0]} is missing")
    return Boundaries(mask.documents, mask.blocks, placement if placement != mask.documents else (), shares)


def read_shares(shares: Sequence[float] | None, world: int) -> tuple[int, ...]:
    """The shares of all ranks as whole numbers; none if they are equal.

    >>> read_shares((1, 1), 2), len(read_shares((1, 0.5), 2))
    ((), 2)
    """
    weights = weights_of(shares, world)
    return weights if len(set(weights)) > 1 else ()


def _read_documents(documents: object, length: int) -> tuple[int, ...]:
    if documents is None:
        return (0, length)
    try:
        ends = torch.as_tensor(documents)
        whole = ends.dim() == 1 and not ends.is_floating_point() and not ends.is_complex() and ends.dtype != torch.bool
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"documents must be whole numbers in one dimension, got {documents!r}")
    return tuple(ends.tolist())


def _read_blocks(blocks: object) -> tuple[tuple[int, int], ...]:
    if blocks is None:
        return ()
    try:
        return tuple((int(start), int(stop)) for start, stop in torch.as_tensor(blocks).reshape(-1, 2).tolist())
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"blocks must be pairs (start, stop) of whole numbers, got {blocks!r}") from None


def describe_tensor(x: Tensor) -> str:
    """The properties on which ranks must agree. The index of the GPU is not one of them.

    >>> describe_tensor(torch.zeros(1, 4, 16, 8))
    '(1, 4, 16, 8) float32 cpu'
    """
    layout = "" if x.layout is torch.strided else f" {dtype_name(x.layout)}"
    return describe_shape(x.shape, x.dtype, x.device) + layout


def describe_shape(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{tuple(shape)} {dtype_name(dtype)} {device.type}"


def _describe_shapes(
    shapes: Mapping[str, Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> str:  # fmt: skip
    each = zip(shapes.items(), dtypes, strict=True)
    return ", ".join(f"{name} {describe_shape(shape, dtype, device)}" for (name, shape), dtype in each)


class _OfQueries:
    """What the shapes of all calls tell alike: those of q (batch, heads, tokens, head dim)."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def q(self) -> tuple[int, ...]: ...
        @property
        def dtypes(self) -> tuple[torch.dtype, ...]: ...
        @property
        def value_dim(self) -> int: ...
        def problem(self, boundaries: Boundaries, mask: Mask, wire: torch.dtype) -> Attention: ...

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def batch(self) -> int:
        return self.q[0]

    @property
    def heads(self) -> int:
        return self.q[1]

    @property
    def tokens(self) -> int:
        return self.q[2]

    @property
    def head_dim(self) -> int:
        return self.q[3]

    def whole(self, wire: torch.dtype) -> Attention:
        """A call in which all ranks share all tokens."""
        return self.problem(Boundaries((0, self.tokens)), Mask(), wire)

    def _check_dtype_and_widths(self) -> None:
        if len(set(self.dtypes)) > 1 or self.dtype not in DTYPES:
            raise ValueError(f"all must share one dtype of {', '.join(map(str, DTYPES))}, got {self}")
        if (widest := max(self.head_dim, self.value_dim)) > MAX_HEAD_DIM:
            raise ValueError(f"head dim {widest} is more than {MAX_HEAD_DIM}, got {self}")


class _Tensors(NamedTuple):
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


class Shapes(_Tensors, _OfQueries):
    """The shapes, dtypes and device of q (batch, heads, tokens, head dim), k and v, which can have fewer heads."""

    __slots__ = ()

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shapes:
        return cls(q.shape, k.shape, v.shape, (q.dtype, k.dtype, v.dtype), q.device)

    @property
    def kv_heads(self) -> int:
        return self.k[1]

    @property
    def value_dim(self) -> int:
        return self.v[3]

    @property
    def kind(self) -> object:
        """The same without the number of tokens and the index of the device."""
        return self.q[:2], self.q[3:], self.k[1:2], self.v[3:], self.dtypes, self.device.type

    def with_tokens(self, tokens: int) -> Shapes:
        q, k, v = ((*shape[:2], tokens, *shape[3:]) for shape in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """The tensors by the kind of their pieces."""
        return {"q": (q,), "kv": (k, v)}

    def problem(self, boundaries: Boundaries, mask: Mask, wire: torch.dtype) -> Attention:
        heads = self.heads, self.kv_heads, self.head_dim, self.value_dim
        return Attention(boundaries, self.batch, dtype_name(self.dtype), dtype_name(wire), mask, *heads)

    def __str__(self) -> str:
        return _describe_shapes(dict(zip("qkv", (self.q, self.k, self.v), strict=True)), self.dtypes, self.device)

    def check(self) -> None:
        """Raises ``ValueError`` if no plan can attend these."""
        q, k, v = self.q, self.k, self.v
        if not len(q) == len(k) == len(v) == 4 or k[:3] != v[:3]:
            raise ValueError(f"need q (batch, heads, tokens, dim) and k, v of the same shape, got {self}")
        if (q[0], *q[2:]) != (k[0], *k[2:]):
            raise ValueError(f"q, k, v must agree in batch, local tokens and head dim, got {self}")
        if 0 in (*q[:2], q[3], k[1], v[3]):  # a rank of a small share may hold no token
            raise ValueError(f"no dimension may be empty, got {self}")
        self._check_dtype_and_widths()


class _LatentTensors(NamedTuple):
    q: tuple[int, ...]
    latent: tuple[int, ...]
    k_rope: tuple[int, ...]
    w_k: tuple[int, ...]
    w_v: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


class LatentShapes(_LatentTensors, _OfQueries):
    """The shapes, dtypes and device of q (batch, heads, tokens, head dim), latent (batch, tokens, rank), k_rope (batch,
    tokens, rope dim), w_k (heads, key dim, rank) and w_v (heads, value dim, rank). A head is key dim + rope dim wide.
    """

    __slots__ = ()

    @classmethod
    def of(cls, q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor) -> LatentShapes:
        dtypes = tuple(x.dtype for x in (q, latent, k_rope, w_k, w_v))
        return cls(q.shape, latent.shape, k_rope.shape, w_k.shape, w_v.shape, dtypes, q.device)

    @property
    def value_dim(self) -> int:
        return self.w_v[1]

    @property
    def kind(self) -> object:
        """The same without the number of tokens and the index of the device."""
        widths = self.latent[2:], self.k_rope[2:], self.w_k, self.w_v
        return self.q[:2], self.q[3:], widths, self.dtypes, self.device.type

    def with_tokens(self, tokens: int) -> LatentShapes:
        q = (*self.q[:2], tokens, *self.q[3:])
        latent, k_rope = ((shape[0], tokens, *shape[2:]) for shape in (self.latent, self.k_rope))
        return self._replace(q=q, latent=latent, k_rope=k_rope)

    def inputs(self, q: Tensor, latent: Tensor, k_rope: Tensor, *weights: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """The tensors by the kind of their pieces; weights stay where they are."""
        return {"q": (q,), "kv": (torch.cat((latent, k_rope), 2).unsqueeze(1),)}

    @property
    def expanded(self) -> Shapes:
        """Those of q and of the expanded keys and values."""
        keys, values = ((*self.q[:3], width) for width in (self.head_dim, self.value_dim))
        return Shapes(self.q, keys, values, self.dtypes[:3], self.device)

    def problem(self, boundaries: Boundaries, mask: Mask, wire: torch.dtype) -> LatentAttention:
        widths = self.heads, 1, self.head_dim, self.value_dim, self.latent[2], self.k_rope[2]
        return LatentAttention(boundaries, self.batch, dtype_name(self.dtype), dtype_name(wire), mask, *widths)

    def __str__(self) -> str:
        return _describe_shapes(dict(zip(self._fields[:5], self[:5], strict=True)), self.dtypes, self.device)

    def check(self) -> None:
        """Raises ``ValueError`` if these do not belong together."""
        q, latent, k_rope, w_k, w_v = self[:5]
        if [*map(len, (q, latent, k_rope, w_k, w_v))] != [4, 3, 3, 3, 3]:
            raise ValueError(
                "need q (batch, heads, tokens, dim), latent (batch, tokens, rank), k_rope (batch, tokens, rope dim), "
                f"w_k (heads, key dim, rank) and w_v (heads, value dim, rank), got {self}"
            )
        if 0 in (*q[:2], q[3], latent[2], *w_k, *w_v):  # a rank of a small share may hold no token
            raise ValueError(f"no dimension may be empty, got {self}")
        if not (q[0], q[2]) == latent[:2] == k_rope[:2]:
            raise ValueError(f"q, latent, k_rope must agree in batch and local tokens, got {self}")
        if not q[1] == w_k[0] == w_v[0]:
            raise ValueError(f"q, w_k, w_v must agree in heads, got {self}")
        if not latent[2] == w_k[2] == w_v[2]:
            raise ValueError(f"latent, w_k, w_v must agree in rank, got {self}")
        if q[3] != w_k[1] + k_rope[2]:
            raise ValueError(f"head dim {q[3]} must be key dim {w_k[1]} + rope dim {k_rope[2]}, got {self}")
        self._check_dtype_and_widths()


CallShapes = Shapes | LatentShapes


def shapes_of(*tensors: Tensor) -> CallShapes:
    """Those of q, k, v (without v, values have the head dim of keys), or of q, latent, k_rope, w_k, w_v."""
    if len(tensors) == 5:
        return LatentShapes.of(*tensors)
    if len(tensors) not in (2, 3):
        raise ValueError(f"pass q, k, v, or q, latent, k_rope, w_k, w_v, not {len(tensors)} tensors")
    return Shapes.of(tensors[0], tensors[1], tensors[-1])


def check_tangents(what: str, *tensors: object) -> None:
    if not torch.compiler.is_compiling() and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise ValueError(f"{what} has no forward-mode derivative, but an argument is a dual tensor")

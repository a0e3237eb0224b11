"""Linear attention as recurrences S' = M S + B in plain torch: exact in float64, with gradients of states too. On CUDA
in half precision, the delta rules run by the kernels of fla if it is installed (`opaque.py`).

A layer's tokens become a `Recurrence`, which needs no state yet. Ranks exchange what their runs do to a state, then
each computes its outputs with the state that arrives:

>>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind()                # (batch, tokens, heads, dim)
>>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
>>> run = gated_delta_rule(q, k, v, g, beta, normalize=True)
>>> before = torch.randn(1, 1, 2, 8, 8)                            # (batch, runs, heads, key dim, value dim)
>>> out, after = run.run(before)
>>> torch.allclose(after, run.transition @ before + run.contribution, atol=1e-5)
True
>>> torch.allclose(out, run.outputs(before), atol=1e-5)
True

Several runs are given by their ``lengths``; each has its own state:

>>> runs = gated_delta_rule(q, k, v, g, beta, normalize=True, lengths=[60, 40])
>>> first, second = runs.contribution.unbind(1)
>>> torch.allclose(runs.transition[:, 1] @ first + second, run.contribution[:, 0], atol=1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from startrail.kernels.accumulate import accumulator
from startrail.kernels.opaque import AroundDeltaRule, fla_kernel, suit_kernels
from startrail.kernels.runs import Recurrence, RunChunks, carry, check_decay, chunks_of, lengths_of

NORM_EPS = 1e-6


class HeadRecurrence(Recurrence):
    """A state (key dim, value dim) per head. In each chunk, out = ``local`` + ``gain`` * ``reads`` S with the state S
    before it, and S' = ``moves`` S + ``adds``. Tensors are (chunks, batch, key heads, value heads of each key head,
    ...); the value heads of a key head may share ``reads``."""

    def __init__(
        self,
        chunks: RunChunks,
        moves: Tensor,
        adds: Tensor,
        reads: Tensor,
        local: Tensor,
        dtype: torch.dtype,
        gain: Tensor | None = None,
    ) -> None:
        self._chunks, self._moves, self._adds, self._reads, self._local = chunks, moves, adds, reads, local
        self._dtype, self._gain = dtype, gain
        self.matrix = moves.shape[-2:] != (1, 1)
        _, batch, *heads, rows, columns = adds.shape
        self.shape, self.dtype = (batch, chunks.runs, prod(heads), rows, columns), adds.dtype

    @property
    def moves(self) -> tuple[int, ...]:
        return tuple(self._moves.shape[-2:])

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before, after = self._from_zero if state is None else self._carry(self._sorted(state))
        return self._outputs(before), self._unsorted(after)

    @property
    def transition(self) -> Tensor:
        return self._unsorted(self._moves_from_start[1])

    @property
    def contribution(self) -> Tensor:
        return self._unsorted(self._from_zero[1])

    def outputs(self, state: Tensor) -> Tensor:
        moves, state = self._moves_from_start[0], self._chunks.of_chunks(self._sorted(state))
        moved = moves @ state if self.matrix else moves * state
        return self._outputs(self._from_zero[0] + moved)

    @cached_property
    def _from_zero(self) -> tuple[Tensor, Tensor]:
        """The state before each chunk and after each run, if that before each run is zero."""
        return self._carry(self._adds.new_zeros(self._chunks.runs, *self._adds.shape[1:]))

    @cached_property
    def _moves_from_start(self) -> tuple[Tensor, Tensor]:
        """The transition from the start of a run to each chunk, and to the run's end."""
        one = torch.eye(self._moves.shape[-1], dtype=self._moves.dtype, device=self._moves.device)
        one = one.expand(self._chunks.runs, *self._moves.shape[1:])
        return carry(self._moves, torch.zeros_like(self._moves), one, self._chunks.steps, self.matrix)

    def _carry(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return carry(self._moves, self._adds, state, self._chunks.steps, self.matrix)

    def _sorted(self, state: Tensor) -> Tensor:
        """(batch, runs, heads, ...) -> (runs, batch, key heads, value heads of each, ...)."""
        _, batch, *heads, rows, columns = self._adds.shape
        shape = batch, prod(heads), rows, columns
        return self._chunks.sort(state.to(self._adds.dtype), shape).unflatten(2, heads)

    def _unsorted(self, state: Tensor) -> Tensor:
        return self._chunks.unsort(state).flatten(2, 3)

    def _outputs(self, before: Tensor) -> Tensor:
        read = _matmul(self._reads, before)
        out = self._local + (read if self._gain is None else self._gain * read)
        return self._chunks.join(out.flatten(2, 3).transpose(2, 3)).to(self._dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    lengths: Sequence[int] | None = None,
    function: Callable[..., Any] | None = None,
) -> Recurrence:
    """GDN: S' = exp(g) S, then S = S' + beta k (v - k S')^T, and out = scale q S.

    q, k (batch, tokens, key heads, key dim), v (batch, tokens, value heads, value dim); each key head serves as many
    consecutive value heads. g <= 0 and beta (batch, tokens, value heads). ``normalize`` divides q and k by their norms.
    ``scale`` is 1 / sqrt(key dim) by default. ``function`` is a kernel with the arguments of fla's
    ``chunk_gated_delta_rule``: by default fla's own, on CUDA in half precision, if it is installed.
    """
    _check(q, k, v, g=g, beta=beta)
    if function is None and suit_kernels(q, k, v):
        function = fla_kernel("chunk_gated_delta_rule")
    return _delta_rule(q, k, v, g, beta, scale, normalize, lengths, function)


def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    lengths: Sequence[int] | None = None,
    function: Callable[..., Any] | None = None,
) -> Recurrence:
    """KDA: the gated delta rule with a decay for each row of the state: g is (batch, tokens, value heads, key dim).
    ``function`` is a kernel with the arguments of fla's ``chunk_kda``."""
    _check(q, k, v, beta=beta)
    if g.shape != (*v.shape[:3], k.shape[3]):
        raise ValueError(f"g has shape {tuple(g.shape)}, expected {(*v.shape[:3], k.shape[3])}, one per row of a state")
    check_decay("g", g)
    if function is None and suit_kernels(q, k, v):
        function = fla_kernel("chunk_kda")
    return _delta_rule(q, k, v, g, beta, scale, normalize, lengths, function)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    normalize: bool,
    lengths: Sequence[int] | None,
    function: Callable[..., Any] | None,
) -> Recurrence:
    """In a chunk, u_t = beta_t (v_t - what the state predicts for k_t) is what token t adds: S' = exp(g) S + k u^T.
    Every u depends on those before it, a triangular system, and on the state before the chunk:
    u = ``values`` - ``keys`` S."""
    lengths = lengths_of(lengths, v)
    if function is not None and v.shape[1]:
        options = dict(use_qk_l2norm_in_kernel=normalize) | ({} if scale is None else dict(scale=scale))
        return AroundDeltaRule(function, (q, k, v, g, beta), options, lengths)
    chunks, dtype = chunks_of(lengths, v.device), v.dtype
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    q, k, v, g, beta = _by_head(chunks, (q, k, v, g, beta.unsqueeze(-1)))
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    decay = g.double().cumsum(-2)
    since_start, to_end, whole = _factors(decay, k.dtype)
    products = _decayed_products if g.shape[-1] > 1 else _products
    of_keys, of_queries = products((k, q), k, decay)
    right = torch.cat((beta * v, beta * since_start * k), -1)
    solved = torch.linalg.solve_triangular(beta * of_keys, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    k_at_end = (k * to_end).mT
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return HeadRecurrence(
        chunks,
        moves=eye * whole.mT - k_at_end @ keys,
        adds=k_at_end @ values,
        reads=q * since_start - of_queries @ keys,
        local=of_queries @ values,
        dtype=dtype,
    )


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, lengths: Sequence[int] | None = None
) -> HeadRecurrence:
    """Linear attention with a decay: S' = exp(g) S + k v^T, and out = scale q S'. Shapes are those of
    `gated_delta_rule`; ``scale`` is 1 by default.

    Mamba-2 is q = C, k = B, v = dt x, g = dt A; its states are transposed. Lightning attention and RetNet have one g
    per head.
    """
    _check(q, k, v, g=g)
    chunks, dtype = chunks_of(lengths_of(lengths, v), v.device), v.dtype
    q, k, v, g = _by_head(chunks, (q, k, v, g.unsqueeze(-1)))
    if scale is not None:
        q = q * scale
    decay = g.double().cumsum(-2)
    since_start, to_end, whole = _factors(decay, k.dtype)
    (weights,) = _products((q,), k, decay)
    return HeadRecurrence(
        chunks,
        moves=whole,
        adds=_matmul(k.mT, v * to_end),
        reads=q,
        gain=since_start,
        local=weights @ v,
        dtype=dtype,
    )


def _factors(decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What each token keeps of the state before the chunk, what the end keeps of each token, and of that state.

    ``decay`` counts from the chunk's start and may be large, so differences are taken in float64.
    """
    end = decay[..., -1:, :]
    return decay.to(dtype).exp(), (end - decay).to(dtype).exp(), end.to(dtype).exp()


def _products(rows: Sequence[Tensor], k: Tensor, decay: Tensor) -> list[Tensor]:
    """For each of ``rows``, row_i k_j exp(decay_i - decay_j) of all tokens j <= i of a chunk; 0 elsewhere."""
    later = torch.ones(decay.shape[-2], decay.shape[-2], dtype=torch.bool, device=decay.device).triu(1)
    between = (decay - decay.mT).to(k.dtype).masked_fill(later, float("-inf")).exp()  # exp of others would overflow
    return [row @ k.mT * between for row in rows]


def _decayed_products(rows: Sequence[Tensor], k: Tensor, decay: Tensor) -> list[Tensor]:
    """The same with a ``decay`` for each dimension of k, which must be inside the product.

    exp(decay_i) exp(-decay_j) would overflow. Between two halves of a block both factors are at most 1 if decay counts
    from their border: exp(decay_i - border) exp(border - decay_j). So blocks are made of halves, from single tokens up
    to the chunk.
    """
    rows = [row.expand(*decay.shape[:-1], -1) for row in rows]
    k = k.expand_as(decay)
    blocks = [(row * k).sum(-1)[..., None, None] for row in rows]
    size = 1
    while size < decay.shape[-2]:
        first, second = slice(None, size), slice(size, None)
        decays = decay.unflatten(-2, (-1, 2 * size))
        border = decays[..., size - 1 : size, :]
        keys = k.unflatten(-2, (-1, 2 * size))[..., first, :] * (border - decays[..., first, :]).to(k.dtype).exp()
        since = (decays[..., second, :] - border).to(k.dtype).exp()
        for number, row in enumerate(rows):
            lower = (row.unflatten(-2, (-1, 2 * size))[..., second, :] * since) @ keys.mT
            upper = torch.zeros_like(lower)
            halves = blocks[number].unflatten(-3, (-1, 2))
            top, bottom = halves.unbind(-3)
            blocks[number] = torch.cat((torch.cat((top, upper), -1), torch.cat((lower, bottom), -1)), -2)
        size *= 2
    return [block.squeeze(-3) for block in blocks]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; all value heads of a key head may share a, which is then multiplied with them side by side."""
    if a.shape[3] == b.shape[3]:
        return a @ b
    side_by_side = b.transpose(3, 4).flatten(4)
    return (a.squeeze(3) @ side_by_side).unflatten(-1, (b.shape[3], -1)).transpose(3, 4)


def _by_head(chunks: RunChunks, tensors: Sequence[Tensor]) -> list[Tensor]:
    """q, k, v and others (batch, tokens, heads, dim) -> (chunks, batch, key heads, value heads of each, size, dim), at
    least in float32."""
    _, k, v, *_ = tensors
    dtype = accumulator(v.dtype)
    return [chunks.split(x.to(dtype)).transpose(2, 3).unflatten(2, (k.shape[2], -1)) for x in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor, **per_head: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.dim() != 4 or q.shape != k.shape or k.shape[:2] != v.shape[:2] or v.dim() != 4:
        raise ValueError(f"{shapes} are not (batch, tokens, heads, dim) with q and k alike")
    if v.shape[2] % k.shape[2]:
        raise ValueError(f"{v.shape[2]} value heads are not a multiple of {k.shape[2]} key heads: {shapes}")
    for name, x in per_head.items():
        if x.shape != v.shape[:3]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(v.shape[:3])}, one per value head")
    if "g" in per_head:
        check_decay("g", per_head["g"])

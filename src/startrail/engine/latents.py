"""Latent attention and its ops: the kernel that expands latents where they are used, and the two passes.

A block's keys are [latent W_k ; k_rope] and its values latent W_v, for the heads that this rank computes. Its gradients
dk and dv become that of the latent, which travels home, and those of W_k and W_v, which stay here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.compile.attention import AttentionPart
from startrail.compile.latents import HELD_EXPANSIONS, LatentSizes, ends_of_columns
from startrail.engine.arguments import AttentionCall, CallShapes, LatentShapes
from startrail.engine.attention import AttentionKernel, AttentionRequest, PreparedAttention, run_backward, run_forward
from startrail.engine.op import UNSAFE, fake_results, find_session, register_backward
from startrail.engine.runner import PreparedPart
from startrail.engine.session import Session
from startrail.engine.wire import Tensors
from startrail.kernels import Partial, Sums
from startrail.schedule.values import BACKWARD, FORWARD, Block, Pass


class Expansion(NamedTuple):
    """The keys and values of a latent."""

    latent: Tensor
    k: Tensor
    v: Tensor


class LatentKernel(AttentionKernel):
    """Attention of blocks whose keys and values are expanded from latents. ``gradients`` are those of ``weights`` (w_k,
    w_v), all heads."""

    def __init__(
        self, prepared: PreparedAttention, pass_: Pass, shapes: CallShapes, max_logits: bool, weights: Tensors
    ) -> None:  # fmt: skip
        super().__init__(prepared, pass_, shapes, max_logits)
        self.weights = weights
        self._prepared_weights: dict[tuple[int, int], Tensors] = {}  # by their heads
        self._expansions: list[Expansion] = []  # the latest
        self._ends: dict[int, frozenset[Block]] = {}  # by part
        self._by_key: dict[int, Sums] = {}  # of the piece that each part computes with
        self.gradients: Tensors = ()
        if pass_ is BACKWARD:
            self.gradients = tuple(torch.zeros(w.shape, dtype=self.acc, device=w.device) for w in weights)
            self.extra_results = self.gradients

    def for_rehearsal(self) -> LatentKernel:
        other = super().for_rehearsal()
        assert isinstance(other, LatentKernel)
        other.gradients, other._expansions, other._by_key = tuple(x.clone() for x in self.gradients), [], {}
        return other

    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        """Latents are new objects, by which expansions are found: a buffer's views are the same ones for the next piece
        in it."""
        if kind != "kv":
            return super().prepare(kind, tensors)
        return tuple(self.kernel.prepare(x).view_as(x) for x in tensors)

    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        *of_row, (latent,) = inputs
        heads = _sizes(part).heads_of(part.place.head, block.group)
        backward = part.program.pass_ is not FORWARD
        if self.tiles[part.number](block.row, block.column):
            keys = self._expand(latent, heads)
            if backward and part.number not in self._by_key:
                shapes = [(*keys.k.shape[:3], width) for width in (self.shapes.head_dim, self.shapes.value_dim)]
                self._by_key[part.number] = Sums(shapes, self.acc, self.shapes.device)
            made = [results[0], self._by_key[part.number]] if backward else results
            super().block(part, block, [*of_row, (keys.k, keys.v)], made)
        if part.number in self._by_key and block in self._ends_of(part):
            by_latent = results[1]
            assert isinstance(by_latent, Sums)
            dk, dv = (self.kernel.prepare(x) for x in self._by_key.pop(part.number).tensors())
            by_latent.sums[0].add(self._contract(latent, dk, dv, heads), donated=True)

    def _ends_of(self, part: PreparedPart) -> frozenset[Block]:
        if part.number not in self._ends:
            self._ends[part.number] = ends_of_columns(part.program)
        return self._ends[part.number]

    def _weights_of(self, heads: slice) -> Tensors:
        key = heads.start, heads.stop
        if key not in self._prepared_weights:
            self._prepared_weights[key] = tuple(self.kernel.prepare(w[heads]) for w in self.weights)
        return self._prepared_weights[key]

    def _expand(self, latent: Tensor, heads: slice) -> Expansion:
        """The keys and values of a latent (batch, 1, tokens, rank + rope dim); the latest ones are held."""
        for held in self._expansions:
            if held.latent is latent:
                return held
        del self._expansions[: len(self._expansions) + 1 - HELD_EXPANSIONS]
        w_k, w_v = self._weights_of(heads)
        rank, (batch, _, tokens, _) = w_k.shape[2], latent.shape
        compressed, k_rope = latent[:, 0, :, :rank], latent[..., rank:]
        by_token = latent.new_empty(batch, tokens, len(w_k), w_k.shape[1] + k_rope.shape[3])
        k = by_token.transpose(1, 2)  # in the order of kernels that take heads last
        k[..., : w_k.shape[1]] = (compressed @ w_k.flatten(0, 1).T).unflatten(2, w_k.shape[:2]).transpose(1, 2)
        k[..., w_k.shape[1] :] = k_rope
        v = (compressed @ w_v.flatten(0, 1).T).unflatten(2, w_v.shape[:2]).transpose(1, 2)
        made = Expansion(latent, *super().prepare("kv", (k, v)))
        self._expansions.append(made)
        return made

    def _contract(self, latent: Tensor, dk: Tensor, dv: Tensor, heads: slice) -> Tensor:
        """The gradient of a latent from those of its keys and values; adds to the weights' gradients."""
        weights = self._weights_of(heads)
        key_dim, rank = weights[0].shape[1:]
        compressed = latent[..., :rank].flatten(0, 2)
        total = latent.new_zeros(latent.shape, dtype=self.acc)
        total[:, 0, :, rank:] = dk[..., key_dim:].sum(1, dtype=self.acc)
        for gradient, weight, sums in zip((dk[..., :key_dim], dv), weights, self.gradients, strict=True):
            by_token = gradient.transpose(1, 2).flatten(2)  # (batch, tokens, heads x dim)
            total[:, 0, :, :rank] += by_token @ weight.flatten(0, 1)
            sums[heads] += (by_token.flatten(0, 1).T @ compressed).unflatten(0, weight.shape[:2])
        return total


def expand(latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor) -> Tensors:
    """The keys and values of all heads, by autograd's own products."""
    k, v = (F.linear(latent, w.flatten(0, 1)).unflatten(2, w.shape[:2]).transpose(1, 2) for w in (w_k, w_v))
    return torch.cat((k, k_rope.unsqueeze(1).expand(*k.shape[:3], -1)), 3), v


def _sizes(part: PreparedPart) -> LatentSizes:
    assert isinstance(part.part, AttentionPart)
    assert isinstance(part.part.sizes, LatentSizes)
    return part.part.sizes


def forward(
    session: Session, q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, op_key: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, the bytes kept for the backward pass, the call's number, and this rank's largest logits."""
    request = AttentionRequest(FORWARD, LatentShapes.of(q, latent, k_rope, w_k, w_v), call)
    return run_forward(session, request, op_key, (q, latent, k_rope), partial(LatentKernel, weights=(w_k, w_v)))


def backward(
    session: Session, dout: Tensor, inputs: list[Tensor], weights: list[Tensor], out: Tensor, lse: Tensor,
    kept: Tensor, number: Tensor, rope_dim: int, op_key: Tensor, call: AttentionCall, dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, latent, k_rope, w_k and w_v; those of the weights are this rank's share. ``inputs`` (q,
    latent, k_rope) are empty if ``kept`` holds them."""
    (batch, heads, tokens, _), (w_k, w_v) = out.shape, weights
    rank, key_dim = w_k.shape[2], w_k.shape[1]
    q, latent, k_rope = (batch, heads, tokens, key_dim + rope_dim), (batch, tokens, rank), (batch, tokens, rope_dim)
    shapes = LatentShapes(q, latent, k_rope, w_k.shape, w_v.shape, 5 * (out.dtype,), out.device)
    request, make_kernel = AttentionRequest(BACKWARD, shapes, call, number), partial(LatentKernel, weights=(w_k, w_v))
    given = dout, out, lse, kept, dlse
    (dq, together), kernel = run_backward(session, request, op_key, inputs, make_kernel, *given)
    d_latent, d_rope = together.squeeze(1).split((rank, rope_dim), 2)
    dw_k, dw_v = (x.to(w.dtype) for x, w in zip(kernel.gradients, weights, strict=True))
    d_latent, d_rope = (x.clone(memory_format=torch.contiguous_format) for x in (d_latent, d_rope))  # not aliases
    return dq, d_latent, d_rope, dw_k, dw_v


# --- the ops


@torch.library.custom_op("startrail::latent_attention", mutates_args=(), tags=UNSAFE)
def latent_attention(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What ``startrail::attention`` returns."""
    owner, parsed = find_session(session), AttentionCall.parse(call)
    return forward(owner, q, latent, k_rope, w_k, w_v, op_key, parsed)


@latent_attention.register_fake
def _(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = LatentShapes.of(q, latent, k_rope, w_k, w_v)
    shapes.check()
    return fake_results(q, shapes, session, call)


@torch.library.custom_op("startrail::latent_attention_backward", mutates_args=(), tags=UNSAFE)
def latent_attention_backward(
    dout: Tensor, inputs: list[Tensor], weights: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    rope_dim: int, op_key: Tensor, session: str, call: str, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all inputs. ``inputs`` (q, latent, k_rope) are empty if ``kept`` holds them."""
    owner, parsed = find_session(session), AttentionCall.parse(call)
    return backward(owner, dout, inputs, weights, out, lse, kept, number, rope_dim, op_key, parsed, dlse)


@latent_attention_backward.register_fake
def _(
    dout: Tensor, inputs: list[Tensor], weights: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    rope_dim: int, *context: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, heads, tokens, _), (w_k, w_v) = out.shape, weights
    return (
        out.new_empty(batch, heads, tokens, w_k.shape[1] + rope_dim),
        out.new_empty(batch, tokens, w_k.shape[2]),
        out.new_empty(batch, tokens, rope_dim),
        torch.empty_like(w_k, memory_format=torch.contiguous_format),
        torch.empty_like(w_v, memory_format=torch.contiguous_format),
    )


register_backward(latent_attention, latent_attention_backward, lambda *tensors: (tensors[2].shape[2],), num_weights=2)

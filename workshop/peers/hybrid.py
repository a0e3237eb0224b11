"""Contenders for the gated delta rule over a split sequence, and for a stack of three of them and one causal attention,
all on our kernels. Each entry of ``HYBRID_PEERS`` makes one on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail import SequenceParallel, gated_delta_rule
from startrail.geometry.layout import contiguous
from startrail.kernels.runs import carry

Layer = Callable[..., Tensor]  # of q, k, v (batch, tokens, heads, dim), g and beta (batch, tokens, heads)
RECURRENT = 3  # layers of a stack before its attention, as in Qwen3-Next and Kimi Linear


class HybridPeer(NamedTuple):
    """``shard`` returns this rank's part of a tensor (batch, tokens, ...), ``layer`` its part of the outputs."""

    shard: Callable[[Tensor], Tensor]
    layer: Layer
    attention: Layer  # causal, of q, k, v

    def stack(self, *inputs: Tensor) -> Tensor:
        return stack(self.layer, self.attention, *inputs)


def stack(layer: Layer, attention: Layer, *inputs: Tensor) -> Tensor:
    """The sum of all layers' outputs."""
    return torch.stack([*(layer(*inputs) for _ in range(RECURRENT)), attention(*inputs[:3])]).sum(0)


def delta_rule(*inputs: Tensor) -> Tensor:
    """One process."""
    return gated_delta_rule(*inputs, normalize=True).run()[0]


def attention(*qkv: Tensor) -> Tensor:
    """One process."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# --- all-to-all over heads, as Megatron does


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts: dimension ``given`` is split over ranks, ``taken`` is joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, taken: int) -> Tensor:
        ctx.given, ctx.taken, world = given, taken, dist.get_world_size()
        parts = torch.stack(x.chunk(world, given))
        come = torch.empty_like(parts)
        dist.all_to_all_single(come, parts)
        return torch.cat(come.unbind(), taken)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad, ctx.taken, ctx.given), None, None


def _heads_first(*inputs: Tensor) -> Tensor:
    """All tokens of this rank's heads: inputs travel as one tensor, outputs travel back."""
    rows = [x if x.dim() == 4 else x.unsqueeze(3) for x in inputs]
    widths = [x.shape[3] for x in rows]
    *qkv, g, beta = _Exchange.apply(torch.cat(rows, 3), 2, 1).split(widths, 3)
    return _Exchange.apply(delta_rule(*qkv, g.squeeze(3), beta.squeeze(3)), 1, 2)


def _attention_heads_first(*qkv: Tensor) -> Tensor:
    return _Exchange.apply(attention(*_Exchange.apply(torch.cat(qkv, 3), 2, 1).chunk(3, 3)), 1, 2)


# --- all-gather of states, as flash-linear-attention does


class _StateBefore(torch.autograd.Function):
    """The state before this rank's shard. Every rank gathers what all shards do to a state; in the backward pass, the
    gradients of the states before all shards."""

    @staticmethod
    def forward(ctx: Any, moves: Tensor, adds: Tensor) -> Tensor:
        rank, come = dist.get_rank(), _gathered(torch.cat((moves, adds), -1))
        ctx.moves, all_adds = come.split((moves.shape[-1], adds.shape[-1]), -1)
        before, _ = carry(ctx.moves, all_adds, torch.zeros_like(adds).unsqueeze(0), [1] * len(come), True)
        ctx.save_for_backward(before[rank])
        return before[rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rank, (before,) = dist.get_rank(), ctx.saved_tensors
        grads, after = _gathered(grad), torch.zeros_like(grad)
        for moves, of_before in zip(ctx.moves[rank + 1 :].flip(0), grads[rank + 1 :].flip(0), strict=True):
            after = moves.mT @ after + of_before
        return after @ before.mT, after


def _gathered(x: Tensor) -> Tensor:
    come = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather(list(come.unbind()), x.contiguous())
    return come


def _gathered_states(*inputs: Tensor) -> Tensor:
    run = gated_delta_rule(*inputs, normalize=True)
    return run.outputs(_StateBefore.apply(run.transition, run.contribution))


def _contiguous(layer: Layer) -> HybridPeer:
    def shard(x: Tensor) -> Tensor:
        ((start, count),) = contiguous(range(dist.get_world_size()), x.shape[1]).runs(dist.get_rank())
        return x[:, start : start + count].contiguous()

    return HybridPeer(shard, layer, _attention_heads_first)


# --- ours


def _ours(length: int, plan: str) -> HybridPeer:
    sequence = SequenceParallel(plan, windows=True).sequence(length)  # neighbouring tokens on one node, for any plan
    layer = partial(sequence.scan, gated_delta_rule, normalize=True)

    def attend(*qkv: Tensor) -> Tensor:
        return sequence.attention(*(x.transpose(1, 2) for x in qkv), causal=True).transpose(1, 2)

    return HybridPeer(partial(sequence.shard, dim=1), layer, attend)


HYBRID_PEERS: dict[str, Callable[[int, str], HybridPeer]] = {
    "heads all-to-all": lambda length, plan: _contiguous(_heads_first),
    "all-gather of states": lambda length, plan: _contiguous(_gathered_states),
    "startrail": _ours,
}

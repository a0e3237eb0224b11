"""Contenders for sparse masks. Each entry of ``SPARSE_PEERS`` makes, on one rank, a function that returns this rank's
part of a tensor (batch, heads, tokens, dim) and one that attends such parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail import SequenceParallel, ring
from startrail.bench.peers.contenders import deepspeed, local_part
from startrail.bench.peers.flash import llama3_flash_attn
from startrail.geometry.layout import Layout, contiguous, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.kernels import kernel_for

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Contender = tuple[Callable[[Tensor], Tensor], Attend]


@dataclass(frozen=True)
class SparseWork:
    """Causal attention over one packed sequence: one layer for each of ``windows`` (None: no window), whose outputs are
    added. ``documents`` are cu_seqlens, empty for a single document."""

    name: str
    length: int
    windows: tuple[int | None, ...]
    documents: tuple[int, ...] = ()

    def masks(self) -> list[Mask]:
        return [Mask(True, window, self.documents or None) for window in self.windows]


def whole_attention(work: SparseWork, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on one process, document by document, so that only visible blocks are computed."""
    ends = work.documents or (0, work.length)
    outs = []
    for start, stop in pairwise(ends):
        parts = [x[:, :, start:stop] for x in (q, k, v)]
        outs.append(_sum([_in_document(window, *parts) for window in work.windows]))
    return torch.cat(outs, 2)


def _in_document(window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    if window is None or window >= tokens:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    outs = []
    for start in range(0, tokens, window):  # a block of queries sees at most two blocks of keys
        first, stop = max(start - window + 1, 0), min(start + window, tokens)
        rows, keys = torch.arange(start, stop).unsqueeze(1), torch.arange(first, stop)
        visible = (keys <= rows) & (rows - keys < window)
        outs.append(
            F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], visible)
        )
    return torch.cat(outs, 2)


def _sum(outs: list[Tensor]) -> Tensor:
    return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)


def compute_dense(length: int, heads: int, head_dim: int) -> None:
    """This rank's share of a dense causal mask, forward and backward, without communication."""
    layout, rank = zigzag(range(dist.get_world_size()), length), dist.get_rank()
    visible = tiles_of(Mask(causal=True), layout.runs(rank), ((0, length),))
    kernel, scale = kernel_for(torch.device("cpu"), torch.float32, head_dim), head_dim**-0.5
    q, dout = torch.randn(2, 1, heads, layout.local, head_dim)
    k, v = torch.randn(2, 1, heads, length, head_dim)
    result = kernel.forward(q, k, v, visible, scale)
    kernel.backward(dout, q, k, v, result.out, result.lse.float(), visible, scale)


def _ring(work: SparseWork, plan: str, heads: int) -> Contender:
    """Textbook Ring Attention: all keys travel around, and only visible blocks are computed."""
    layout = zigzag(range(dist.get_world_size()), work.length)
    visible = [ring.visible_by_hop(layout, mask) for mask in work.masks()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sum([ring.RingAttention.apply(q, k, v, tiles, ring.pass_on) for tiles in visible])

    return partial(_part, layout), attend


def _part(layout: Layout, x: Tensor) -> Tensor:
    return local_part(x, layout, dist.get_rank())


class _AllGather(torch.autograd.Function):
    """All ranks' keys; the gradient of a rank's keys is the sum of all ranks' gradients for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        world = dist.get_world_size()
        sent = torch.stack(grad.chunk(world, 2))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return got.sum(0)


class _KernelAttention(torch.autograd.Function):
    """Attention of own queries to all keys, on the engine's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Any) -> Tensor:
        kernel, scale = kernel_for(q.device, q.dtype, q.shape[3]), q.shape[3] ** -0.5
        result = kernel.forward(q, k, v, visible, scale)
        ctx.save_for_backward(q, k, v, result.out, result.lse.float())
        ctx.visible, ctx.kernel, ctx.scale = visible, kernel, scale
        return result.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(dout.contiguous(), q, k, v, out, lse, ctx.visible, ctx.scale)
        return (*(grad.value for grad in grads), None)


def _gathered(work: SparseWork, plan: str, heads: int) -> Contender:
    """A plain all-gather of keys and values; contiguous shards, so that gathered keys are in order."""
    layout = contiguous(range(dist.get_world_size()), work.length)
    own = layout.runs(dist.get_rank())
    visible = [tiles_of(mask, own, ((0, work.length),)) for mask in work.masks()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers = ((_AllGather.apply(k), _AllGather.apply(v), tiles) for tiles in visible)
        return _sum([_KernelAttention.apply(q, keys, values, tiles) for keys, values, tiles in layers])

    return partial(_part, layout), attend


def _deepspeed(work: SparseWork, plan: str, heads: int) -> Contender:
    """DeepSpeed's DistributedAttention around attention that computes visible blocks only."""
    if heads % dist.get_world_size():
        raise ValueError(f"{heads} heads are not a multiple of {dist.get_world_size()} ranks")
    comm, distributed_attention = deepspeed()
    comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    layout = contiguous(range(dist.get_world_size()), work.length)

    def layer(window: int | None) -> Any:
        one = SparseWork(work.name, work.length, (window,), work.documents)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return whole_attention(one, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return distributed_attention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    layers = [layer(window) for window in work.windows]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        return _sum([each(*qkv, 0).transpose(1, 2) for each in layers])

    return partial(_part, layout), attend


def _llama3(work: SparseWork, plan: str, heads: int) -> Contender:
    """ring-flash-attn's all-gather for packed documents (``llama3_flash_attn_varlen_func``) on a substitute kernel."""
    layout, module = contiguous(range(dist.get_world_size()), work.length), llama3_flash_attn()
    ends = torch.tensor(work.documents or (0, work.length), dtype=torch.int32)
    cu_q, cu_k, max_q, max_k, keys = module.llama3_flash_attn_prepare_cu_seqlens(
        ends, True, dist.get_rank(), dist.get_world_size()
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        outs = []
        for window in work.windows:
            size = (-1, -1) if window is None else (window - 1, 0)
            outs.append(
                module.llama3_flash_attn_varlen_func(
                    *qkv, cu_q, cu_k, max_q, max_k, heads_k_stride=heads, local_k_slice=keys, causal=True,
                    window_size=size,
                )
            )  # fmt: skip
        return _sum(outs).transpose(0, 1).unsqueeze(0)

    return partial(_part, layout), attend


@cache
def _engine(plan: str, layout: str, sparse: bool, windows: bool) -> SequenceParallel:
    return SequenceParallel(plan, layout=layout, sparse=sparse, windows=windows)


def _ours(layout: str, sparse: bool, work: SparseWork, plan: str, heads: int) -> Contender:
    windows = sparse and any(work.windows)
    sequence = _engine(plan, layout, sparse, windows).sequence(work.length, work.documents or None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sum([sequence.attention(q, k, v, causal=True, window=window) for window in work.windows])

    return lambda x: sequence.shard(x, 2), attend


SPARSE_PEERS: dict[str, Callable[[SparseWork, str, int], Contender]] = {
    "ring": _ring,
    "all-gather": _gathered,
    "ring-flash-attn llama3": _llama3,
    "DeepSpeed Ulysses": _deepspeed,
    "best dense plan": partial(_ours, "zigzag", False),
    "startrail": partial(_ours, "zones", True),
}

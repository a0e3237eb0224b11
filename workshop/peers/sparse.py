"""Contenders for sparse masks. Each entry of ``SPARSE_PEERS`` makes one on each rank, or raises ``ValueError`` with the
reason why it cannot do the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from startrail import SequenceParallel, ring
from startrail._compat import gather_shards_autograd
from startrail.bench.yardstick import Attention as Attend
from startrail.bench.yardstick import visible_attention
from startrail.geometry.layout import Layout, contiguous, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.kernels import kernel_for
from workshop.peers.contenders import deepspeed, local_part
from workshop.peers.flash import varlen_flash_attn

Window = int | None  # of a layer; None: it sees everything before


class SparsePeer(NamedTuple):
    """``shard`` returns this rank's part of a tensor (batch, heads, tokens, dim), ``layer`` attention to such parts for
    layers with this window."""

    shard: Callable[[Tensor], Tensor]
    layer: Callable[[Window], Attend]
    note: str = ""  # what its users must do


@dataclass(frozen=True)
class SparseWork:
    """Causal attention over one packed sequence: one layer for each of ``windows``, whose outputs are added.
    ``documents`` are cu_seqlens, empty for a single document."""

    name: str
    length: int
    windows: tuple[Window, ...]
    documents: tuple[int, ...] = ()

    @property
    def kinds(self) -> Counter[Window]:
        """How many layers there are of each kind."""
        return Counter(self.windows)

    @property
    def ends(self) -> tuple[int, ...]:
        return self.documents or (0, self.length)

    def mask(self, window: Window) -> Mask:
        return Mask(True, window, self.documents or None)

    @property
    def visible_share(self) -> float:
        """Visible pairs of all layers over those of one dense causal layer."""
        pairs = 0
        for window, layers in self.kinds.items():
            seen = (self.mask(window).visible(query, self.length) for query in range(self.length))
            pairs += layers * sum(high - low for low, high in seen)
        return pairs / (self.length * (self.length + 1) / 2)


def stack(layers: Sequence[Attend], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum of all layers' outputs."""
    outs = [attend(q, k, v) for attend in layers]
    return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)


def compute_dense(length: int, heads: int, head_dim: int) -> None:
    """This rank's share of a dense causal mask, forward and backward, without communication."""
    layout, rank = zigzag(range(dist.get_world_size()), length), dist.get_rank()
    visible = tiles_of(Mask(causal=True), layout.runs(rank), ((0, length),))
    kernel, scale = kernel_for(torch.device("cpu"), torch.float32, head_dim), head_dim**-0.5
    q, dout = torch.randn(2, 1, heads, layout.largest, head_dim)
    k, v = torch.randn(2, 1, heads, length, head_dim)
    result = kernel.forward(q, k, v, visible, scale)
    kernel.backward(dout, q, k, v, result.out, result.lse.float(), visible, scale)


def _ring(work: SparseWork, plan: str, heads: int) -> SparsePeer:
    """Textbook Ring Attention: all keys travel around, and only visible blocks are computed."""
    layout = zigzag(range(dist.get_world_size()), work.length)

    def layer(window: Window) -> Attend:
        visible = ring.visible_by_hop(layout, work.mask(window))
        return lambda q, k, v: ring.RingAttention.apply(q, k, v, visible, ring.pass_on)

    return SparsePeer(partial(_part, layout), layer)


def _part(layout: Layout, x: Tensor) -> Tensor:
    return local_part(x, layout, dist.get_rank())


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


def _gather(x: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return gather_shards_autograd(x.contiguous(), 2, dist.group.WORLD)


def _gathered(work: SparseWork, plan: str, heads: int) -> SparsePeer:
    """A plain all-gather of keys and values; contiguous shards, so that gathered keys are in order."""
    layout = contiguous(range(dist.get_world_size()), work.length)
    own = layout.runs(dist.get_rank())

    def layer(window: Window) -> Attend:
        visible = tiles_of(work.mask(window), own, ((0, work.length),))
        return lambda q, *kv: _KernelAttention.apply(q, *(_gather(x) for x in kv), visible)

    return SparsePeer(partial(_part, layout), layer)


def _deepspeed(work: SparseWork, plan: str, heads: int) -> SparsePeer:
    """DeepSpeed's DistributedAttention around attention that computes visible blocks only."""
    if heads % dist.get_world_size():
        raise ValueError(f"{heads} heads are not a multiple of {dist.get_world_size()} ranks")
    comm, distributed_attention = deepspeed()
    comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    layout = contiguous(range(dist.get_world_size()), work.length)

    def layer(window: Window) -> Attend:
        def local(*qkv: Tensor) -> Tensor:
            return visible_attention(work.ends, window, *(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

        module = distributed_attention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda *qkv: module(*(x.transpose(1, 2).contiguous() for x in qkv), 0).transpose(1, 2)

    return SparsePeer(partial(_part, layout), layer)


def _llama3(work: SparseWork, plan: str, heads: int) -> SparsePeer:
    """ring-flash-attn's all-gather for packed documents (``llama3_flash_attn_varlen_func``) on a substitute kernel."""
    layout, module = contiguous(range(dist.get_world_size()), work.length), varlen_flash_attn("llama3_flash_attn")
    ends = torch.tensor(work.ends, dtype=torch.int32)
    cu_q, cu_k, max_q, max_k, keys = module.llama3_flash_attn_prepare_cu_seqlens(
        ends, True, dist.get_rank(), dist.get_world_size()
    )

    def layer(window: Window) -> Attend:
        size = (-1, -1) if window is None else (window - 1, 0)
        attend = partial(
            module.llama3_flash_attn_varlen_func, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q,
            max_seqlen_k=max_k, heads_k_stride=heads, local_k_slice=keys, causal=True, window_size=size,
        )  # fmt: skip
        return lambda *qkv: _tokens_first(attend, *qkv)

    return SparsePeer(partial(_part, layout), layer)


def _varlen_ring(work: SparseWork, plan: str, heads: int) -> SparsePeer:
    """ring-flash-attn's ring for packed documents (``zigzag_ring_flash_attn_varlen_func``) on a substitute kernel. It
    cuts each document into 2 x ranks chunks of equal size, so every document is padded to a multiple of that."""
    module, world, rank = varlen_flash_attn("zigzag_ring_flash_attn"), dist.get_world_size(), dist.get_rank()
    if any(work.windows):
        raise ValueError("has no windows")
    if not work.documents:
        raise ValueError("is for packed documents")
    lengths = [-(-(stop - start) // (2 * world)) * 2 * world for start, stop in pairwise(work.ends)]
    chosen: list[int] = []  # this rank's tokens; work.length is padding
    for (start, stop), padded in zip(pairwise(work.ends), lengths, strict=True):
        chunk = padded // (2 * world)
        for first in (rank * chunk, (2 * world - 1 - rank) * chunk):
            chosen += [at if at < stop else work.length for at in range(start + first, start + first + chunk)]
    index = torch.tensor(chosen)
    real = (index < work.length).view(1, 1, -1, 1)
    ends = torch.tensor((0, *accumulate(tokens // world for tokens in lengths)), dtype=torch.int32)

    def shard(x: Tensor) -> Tensor:
        return x.index_select(2, index.clamp(max=work.length - 1)) * real

    def layer(window: Window) -> Attend:
        attend = partial(
            module.zigzag_ring_flash_attn_varlen_func, cu_seqlens=ends, max_seqlen=max(lengths) // world, causal=True
        )
        return lambda *qkv: _tokens_first(attend, *qkv) * real

    note = f"documents padded to multiples of {2 * world}: {sum(lengths):,} tokens"
    return SparsePeer(shard, layer, note)


def _tokens_first(attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    """Call ``attend`` with tensors (tokens, heads, dim)."""
    return attend(*(x[0].transpose(0, 1).contiguous() for x in qkv)).transpose(0, 1).unsqueeze(0)


@cache
def _engine(plan: str, layout: str, sparse: bool, windows: bool) -> SequenceParallel:
    return SequenceParallel(plan, layout=layout, sparse=sparse, windows=windows)


def _ours(layout: str, sparse: bool, work: SparseWork, plan: str, heads: int) -> SparsePeer:
    windows = sparse and any(work.windows)
    sequence = _engine(plan, layout, sparse, windows).sequence(work.length, work.documents or None)
    return SparsePeer(
        lambda x: sequence.shard(x, 2), lambda window: partial(sequence.attention, causal=True, window=window)
    )


SPARSE_PEERS: dict[str, Callable[[SparseWork, str, int], SparsePeer]] = {
    "ring": _ring,
    "all-gather": _gathered,
    "ring-flash-attn varlen ring": _varlen_ring,
    "ring-flash-attn llama3": _llama3,
    "DeepSpeed Ulysses": _deepspeed,
    "best dense plan": partial(_ours, "zigzag", False),
    "startrail": partial(_ours, "zones", True),
}

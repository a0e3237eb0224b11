"""Plain Ring Attention on one page: read this first. The engine does the same with fewer bytes on slow links.

Every rank owns one shard: queries, keys and values of some tokens. Queries stay; keys and values move around a ring.
While a rank attends to the keys that it has, the next ones are in flight. On 3 ranks::

    hop   rank 0   rank 1   rank 2
    0     q0 kv0   q1 kv1   q2 kv2    meanwhile every rank sends its kv to the next
    1     q0 kv2   q1 kv0   q2 kv1    again
    2     q0 kv1   q1 kv2   q2 kv0    all pairs have met: nothing more to send

A hop sees only some of a query's keys. It gives a partial output and its lse, the logarithm of the sum of exp(score)
that normalises it. Partial outputs merge with weights exp(lse). Say a query meets a key with score log 1 and value 4,
and one hop later a key with score log 3 and value 8. The weights are 1/4 and 3/4, the output is 1 + 6 = 7:

>>> partial = Partial((1, 1, 1, 1), torch.float64, torch.device("cpu"))  # (batch, heads, rows, dim)
>>> for weight, value in ((1.0, 4.0), (3.0, 8.0)):
...     partial.merge(out=torch.full((1, 1, 1, 1), value), lse=torch.full((1, 1, 1), weight).log())
>>> round(partial.out.item(), 6), round(partial.lse.exp().item(), 6)
(7.0, 4.0)

In the backward pass keys and values move around once more. A block's gradients follow from the final out and lse of its
rows, so they simply add up: dq stays with the queries, while the sums of dk and dv follow their keys; one more hop
returns them to their owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Tile, tiles_of
from startrail.kernels import Partial, accumulator, kernel_for

PassOn = Callable[[Tensor], Callable[[], Tensor]]
Visible = Sequence[Sequence[Tile]]


def visible_by_hop(layout: Layout, mask: Mask) -> Visible:
    """The tiles that this rank's queries see at each hop. ``layout`` says which rank owns which tokens."""
    rank, world = dist.get_rank(), dist.get_world_size()
    owners = [(rank - hop) % world for hop in range(world)]
    return [tiles_of(mask, layout.runs(rank), layout.runs(owner)) for owner in owners]


def pass_on(x: Tensor) -> Callable[[], Tensor]:
    """Start sending ``x`` to the next rank. Returns a function that waits for the previous rank's tensor."""
    rank, world, incoming = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world)
    transfers = dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, x, (rank + 1) % world)])

    def arrive() -> Tensor:
        for transfer in transfers:
            transfer.wait()
        return incoming

    return arrive


def around_the_ring(kv: Tensor, visible: Visible, pass_on: PassOn) -> Iterator[tuple[Tensor, Tensor, Sequence[Tile]]]:
    """Keys, values and visible tiles, hop by hop. The next keys and values are sent while these are used."""
    for hop, tiles in enumerate(visible):
        following = pass_on(kv) if hop < len(visible) - 1 else None
        yield kv[0], kv[1], tiles
        kv = following() if following else kv


class RingAttention(torch.autograd.Function):
    """``RingAttention.apply(q, k, v, visible_by_hop(layout, mask), pass_on)``: this rank's queries attend to the
    whole sequence. Needs at least two ranks. Tensors are (batch, heads, own tokens, dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, pass_on: PassOn) -> Tensor:
        dtype, scale, kernel = q.dtype, q.shape[3] ** -0.5, kernel_for(q.device, q.dtype, q.shape[3])
        q, k, v = (kernel.prepare(x) for x in (q, k, v))
        partial = Partial(q.shape, accumulator(dtype), q.device)
        for keys, values, tiles in around_the_ring(torch.stack([k, v]), visible, pass_on):
            kernel.forward(q, keys, values, tiles, scale, partial)
        ctx.save_for_backward(q, k, v, kernel.prepare(partial.out), partial.lse.to(accumulator(dtype)))
        ctx.visible, ctx.pass_on, ctx.kernel, ctx.scale = visible, pass_on, kernel, scale
        return partial.out.to(dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout, dq, dkv = ctx.kernel.prepare(dout), torch.zeros_like(q, dtype=lse.dtype), None
        for keys, values, tiles in around_the_ring(torch.stack([k, v]), ctx.visible, ctx.pass_on):
            block = ctx.kernel.backward(dout, q, keys, values, out, lse, tiles, ctx.scale)
            dq += block[0].value
            sums = torch.stack([block[1].value, block[2].value])
            dkv = ctx.pass_on(sums if dkv is None else sums.add_(dkv()))
        assert dkv is not None
        dk, dv = dkv()
        return dq, dk, dv, None, None

"""Ring Attention as its paper and ring-flash-attn have it, written out plainly: the baseline of the claims."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.bench.peers import Attender, Results, own_device
from startrail.kernels import kernel_for
from startrail.mask import Mask, tiles_of


class TextbookRing(Attender):
    """Keys and values go to the next rank while the block at hand is computed; in the backward pass their gradients
    follow them round, so that every node's link carries one message a hop.

    It shares nothing with the engine but the kernel, the masks and the layout, and is here so that nobody need wonder
    whether our plans are compared with a weak ring of our own making.
    """

    def set_up(self) -> None:
        world = self.machine.world
        self.last = world - 1
        self.after, self.before = (self.place + 1) % world, (self.place - 1) % world
        self.kernel = kernel_for(own_device(), torch.float32, self.work.head_dim)
        self.scale, mine = self.work.head_dim**-0.5, self.layout.runs(self.place)
        columns = [(self.place - hop) % world for hop in range(world)]
        self.visible = [tiles_of(Mask(self.work.causal), mine, self.layout.runs(column)) for column in columns]
        self.waited = 0.0

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Send ``x`` to the next rank; the result waits for what the previous one sends."""
        incoming = torch.empty_like(x)
        ops = [dist.P2POp(dist.irecv, incoming, self.before), dist.P2POp(dist.isend, x, self.after)]
        works = dist.batch_isend_irecv(ops)

        def arrive() -> Tensor:
            start = time.perf_counter()
            for work in works:
                work.wait()
            self.waited += time.perf_counter() - start
            return incoming

        return arrive

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        kv, partial = torch.stack([k, v]), None
        for hop, visible in enumerate(self.visible):
            following = self.pass_on(kv) if hop < self.last else None
            partial = self.kernel.forward(q, kv[0], kv[1], visible, self.scale, partial)
            kv = following() if following else kv
        assert partial is not None
        return partial.out, partial.lse.to(q.dtype)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        kv, dq, gradient = torch.stack([k, v]), torch.zeros_like(q), None
        for hop, visible in enumerate(self.visible):
            following = self.pass_on(kv) if hop < self.last else None
            block = self.kernel.backward(dout, q, kv[0], kv[1], out, lse, visible, self.scale)
            dq += block[0].value
            dkv = torch.stack([block[1].value, block[2].value])
            gradient = self.pass_on(dkv if gradient is None else dkv.add_(gradient()))
            kv = following() if following else kv
        assert gradient is not None
        dk, dv = gradient()
        return dq, dk, dv

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        out, lse = self.forward(q, k, v)
        return (out, *self.backward(dout, q, k, v, out, lse))

    def waiting(self) -> float | None:
        seconds, self.waited = self.waited, 0.0
        return seconds


class RingAttention(torch.autograd.Function):
    """The same for a model: ``RingAttention.apply(ring, q, k, v)``."""

    @staticmethod
    def forward(ctx: Any, ring: TextbookRing, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (ring.kernel.prepare(x) for x in (q, k, v))
        out, lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        return (None, *ctx.ring.backward(ctx.ring.kernel.prepare(dout), q, k, v, out, lse))

"""The baseline of the claims: Ring Attention as its paper and ring-flash-attn have it (`startrail.ring`), timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from startrail import ring
from startrail.bench.peers.ours import Attender, Results, with_gradients


class TextbookRing(Attender):
    """Keys and values go to the next rank while the block at hand is computed; in the backward pass their gradients
    follow them round, so that every node's link carries one message a hop.

    It shares nothing with the engine but the kernel, the masks and the layout, and is here so that nobody need wonder
    whether our plans are compared with a weak ring of our own making.
    """

    def set_up(self) -> None:
        self.visible = ring.visible_by_hop(self.layout, self.work.causal)
        self.waited = 0.0

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        arrive = ring.pass_on(x)

        def timed() -> Tensor:
            start = time.perf_counter()
            incoming = arrive()
            self.waited += time.perf_counter() - start
            return incoming

        return timed

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.RingAttention.apply(q, k, v, self.visible, self.pass_on)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        return with_gradients(self.attention, q, k, v, dout)

    def waiting(self) -> float | None:
        seconds, self.waited = self.waited, 0.0
        return seconds

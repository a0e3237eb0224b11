"""The baseline of the claims: Ring Attention as in its paper and in ring-flash-attn (`startrail.ring`), timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from startrail import ring
from startrail.geometry.mask import Mask
from workshop.peers.contenders import AttentionRunner


class TextbookRing(AttentionRunner):
    """Sends keys and values to the next rank while the current block is computed; in the backward pass their gradients
    follow them around the ring.

    It shares only the kernel, the masks and the layout with the engine, so that our plans are not compared with a weak
    ring of our own.
    """

    def set_up(self) -> None:
        self.visible = ring.visible_by_hop(self.layout, Mask(self.work.causal))
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

    def waiting(self) -> float | None:
        seconds, self.waited = self.waited, 0.0
        return seconds

"""The head exchange (Ulysses): every rank has all heads of some tokens, and gets some heads of all tokens.

One step makes one ``Exchange`` for all its pieces: their parts for one head rank lie side by side and form one message.
The rank's own part is copied, not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from startrail.engine.buffers import Buffer, BufferPool
from startrail.engine.wire import Wire
from startrail.schedule.sizes import aligned
from startrail.schedule.values import Piece


@dataclass(frozen=True)
class Parts:
    """Bytes of several pieces, concatenated by head rank, and views of them by piece: tensors (head ranks, batch,
    heads, tokens, ...)."""

    buffer: Buffer
    of_rank: tuple[Tensor, ...]  # the bytes sent to each head rank, or received from it
    views: dict[Piece, tuple[Tensor, ...]]

    @property
    def dense(self) -> bool:
        return self.buffer.flat.numel() == len(self.of_rank) * self.of_rank[0].numel()

    @classmethod
    def make(cls, wire: Wire, pieces: Sequence[Piece], pool: BufferPool, device: torch.device) -> Parts:
        sizes = wire.sizes
        fields = [wire.fields(piece.kind, sizes.local) for piece in pieces]
        nbytes, ranks = sum(wire.part_bytes[piece.kind] for piece in pieces), sizes.plan.heads
        buffer = pool.get(ranks * aligned(nbytes), device)

        def cut(flat: Tensor) -> tuple[Tensor, ...]:
            rows = flat.view(ranks, -1)
            return *rows[:, :nbytes].unbind(0), *wire.cut(rows, [field for of_piece in fields for field in of_piece])

        made = buffer.views(("parts", *(piece.kind for piece in pieces), wire.format), cut)
        tensors = iter(made[ranks:])
        views = {piece: tuple(next(tensors) for _ in of_piece) for piece, of_piece in zip(pieces, fields, strict=True)}
        return cls(buffer, made[:ranks], views)


class Exchange:
    """``all_to_all``: the lane can exchange all parts in one call, including our own, if they are dense."""

    def __init__(
        self, wire: Wire, pieces: Sequence[Piece], pool: BufferPool, device: torch.device, head: int, all_to_all: bool
    ) -> None:
        self.wire, self.pool, self.head = wire, pool, head
        self.leaving = Parts.make(wire, pieces, pool, device)
        self.coming = Parts.make(wire, pieces, pool, device)
        self.open = set(pieces)  # not taken yet
        self.at_once = all_to_all and self.leaving.dense

    def send_inputs(self, piece: Piece, tensors: Sequence[Tensor]) -> None:
        """Pack our tokens (batch, heads, tokens, ...): each head rank gets the heads that it computes."""
        for target, x in zip(self.leaving.views[piece], tensors, strict=True):
            target.copy_(self.wire.shares(x, piece))
        self._keep_own(piece)

    def send_results(self, piece: Piece, tensors: Sequence[Tensor]) -> None:
        """Pack our heads: each head rank gets the results of its tokens."""
        for target, whole in zip(self.leaving.views[piece], tensors, strict=True):
            self.wire.split(whole, target)
        self._keep_own(piece)

    def _keep_own(self, piece: Piece) -> None:
        if self.at_once:
            return
        for target, own in zip(self.coming.views[piece], self.leaving.views[piece], strict=True):
            target[self.head] = own[self.head]

    def take_inputs(self, piece: Piece, whole: Sequence[Tensor]) -> None:
        """Wait for all parts, and unpack our heads of all tokens."""
        self.coming.buffer.arrive()
        for target, parts in zip(whole, self.coming.views[piece], strict=True):
            self.wire.join(target, parts)
        self._taken(piece)

    def take_results(self, piece: Piece, local: Sequence[Tensor]) -> None:
        """Wait for all parts, and unpack all heads of our tokens."""
        self.coming.buffer.arrive()
        for target, parts in zip(local, self.coming.views[piece], strict=True):
            self.wire.shares(target, piece).copy_(parts)
        self._taken(piece)

    def _taken(self, piece: Piece) -> None:
        self.open.discard(piece)
        if not self.open:
            self.pool.put(self.coming.buffer)

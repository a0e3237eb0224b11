"""The head exchange (Ulysses): every rank has all heads of some tokens, and gets some heads of all tokens.

One step makes one ``Exchange`` for all its pieces: their parts for one head rank lie side by side and form one message.
The rank's own part is copied, not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from startrail.engine.buffers import Buffer, BufferPool
from startrail.engine.wire import Wire
from startrail.kernels.rearrange import copy_parts, join_tokens, split_tokens
from startrail.schedule.sizes import aligned
from startrail.schedule.values import Piece

Tensors = Mapping[Piece, Sequence[Tensor]]


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
        self.wire, self.pieces, self.pool, self.head, self.device = wire, pieces, pool, head, device
        self.coming = Parts.make(wire, pieces, pool, device)
        self.open = set(pieces)  # not taken yet
        self.at_once = all_to_all and self.coming.dense
        self.inputs: Tensors = {}  # whole pieces, to be filled

    def pack(self, inputs: Tensors, results: Tensors) -> None:
        """Pack what leaves: of ``inputs``, our tokens, each head rank gets the heads that it computes; of ``results``,
        our heads, it gets its tokens."""
        self.leaving = Parts.make(self.wire, self.pieces, self.pool, self.device)
        leaving = self.leaving.views
        copy_parts(self._pairs(leaving, {p: [self.wire.shares(x, p) for x in xs] for p, xs in inputs.items()}))
        split_tokens(self._pairs(leaving, results), self.wire.chunks_on(self.device))
        if not self.at_once:
            self.coming.of_rank[self.head].copy_(self.leaving.of_rank[self.head])

    def take_inputs(self) -> None:
        """When the first input is needed: wait for all parts, and unpack our heads of all tokens."""
        inputs, self.inputs = self.inputs, {}
        if inputs:
            self.coming.buffer.arrive()
            join_tokens(self._pairs(inputs, self.coming.views), self.wire.chunks_on(self.device))
            self._taken(inputs)

    def take_results(self, local: Tensors) -> None:
        """Wait for all parts, and unpack all heads of our tokens."""
        self.coming.buffer.arrive()
        targets = {piece: [self.wire.shares(x, piece) for x in xs] for piece, xs in local.items()}
        copy_parts(self._pairs(targets, self.coming.views))
        self._taken(local)

    def _pairs(self, targets: Tensors, sources: Tensors) -> list[tuple[Tensor, Tensor]]:
        """Targets and sources of the pieces that both have."""
        both = (zip(xs, sources[piece], strict=True) for piece, xs in targets.items() if piece in sources)
        return [pair for of_piece in both for pair in of_piece]

    def _taken(self, pieces: Iterable[Piece]) -> None:
        self.open.difference_update(pieces)
        if not self.open:
            self.pool.put(self.coming.buffer)

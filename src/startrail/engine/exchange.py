"""The head exchange (Ulysses): every rank has all heads of some tokens, and gets some heads of all tokens.

One step makes one ``Exchange`` for all its pieces: their parts for one head rank lie side by side and form one message.
The rank's own part is copied, not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from startrail.engine.buffers import Buffer, StreamBuffers
from startrail.engine.wire import Tensors, Wire
from startrail.kernels.rearrange import copy_parts, join_tokens, split_tokens
from startrail.schedule.sizes import aligned
from startrail.schedule.values import Piece
from startrail.schedule.walk import Message

Numbered = Sequence[tuple[int, Tensors]]  # tensors of some pieces, with their places among all of an exchange


@dataclass(frozen=True)
class HeadParts:
    """Bytes of several pieces, concatenated by head rank, and views of them by piece: tensors (head ranks, batch,
    heads, tokens, ...)."""

    of_rank: tuple[Tensor, ...]  # the bytes sent to each head rank, or received from it
    views: tuple[tuple[Tensor, ...], ...]
    dense: bool  # there are no gaps between the parts

    @classmethod
    def cut(cls, flat: Tensor, wire: Wire, kinds: Sequence[str], nbytes: int) -> HeadParts:
        rows = flat.view(wire.sizes.plan.heads, -1)
        fields = [wire.sizes.fields(kind, wire.local) for kind in kinds]
        views = (cut.of(rows) for cut in wire.cuts([field for of_piece in fields for field in of_piece]))
        by_piece = tuple(tuple(next(views) for _ in of_piece) for of_piece in fields)
        return cls(rows[:, :nbytes].unbind(0), by_piece, rows.shape[1] == nbytes)


class Exchange:
    """``nbytes``: of the parts for one head rank. ``all_to_all``: the lane can exchange all parts in one call, with
    our own, if they are dense."""

    def __init__(
        self, wire: Wire, pieces: Sequence[Piece], nbytes: int, pool: StreamBuffers, head: int, all_to_all: bool
    ) -> None:
        self.wire, self.pool, self.head, self.device = wire, pool, head, pool.device
        self.kinds, self.pieces, self.nbytes = tuple(piece.kind for piece in pieces), pieces, nbytes
        self.coming_bytes, self.coming = self._parts()
        self.num_open = len(pieces)  # not taken yet
        self.at_once = all_to_all and self.coming.dense

    def _parts(self) -> tuple[Buffer, HeadParts]:
        buffer = self.pool.get(self.wire.sizes.plan.heads * aligned(self.nbytes))
        key = "parts", self.kinds, self.wire.format
        return buffer, buffer.views(key, lambda flat: HeadParts.cut(flat, self.wire, self.kinds, self.nbytes))

    def pack(self, inputs: Numbered, results: Numbered) -> None:
        """Pack what leaves: of ``inputs``, our tokens, each head rank gets the heads that it computes; of ``results``,
        our heads, it gets its tokens."""
        self.leaving_bytes, self.leaving = self._parts()
        views, chunks = self.leaving.views, self.wire.chunks_on(self.device)
        shares = [(at, self._shares(at, self.wire.encoded(self.kinds[at], tensors))) for at, tensors in inputs]
        copy_parts([pair for at, tensors in shares for pair in zip(views[at], tensors, strict=True)])
        encoded = [(at, self.wire.encoded(self.kinds[at], tensors)) for at, tensors in results]
        split_tokens([pair for at, tensors in encoded for pair in zip(views[at], tensors, strict=True)], chunks)
        if not self.at_once:
            self.coming.of_rank[self.head].copy_(self.leaving.of_rank[self.head])

    def sending(self, messages: Iterable[Message]) -> list[Tensor]:
        """The bytes of each message."""
        return [self.leaving.of_rank[message.head] for message in messages if message.head is not None]

    def receiving(self, messages: Iterable[Message]) -> list[Tensor]:
        return [self.coming.of_rank[message.head] for message in messages if message.head is not None]

    def take_inputs(self, whole: Numbered) -> None:
        """Wait for all parts, and join our heads of all tokens in the bytes of the ``whole`` pieces."""
        self.coming_bytes.arrive()
        views = self.coming.views
        pairs = [pair for at, tensors in whole for pair in zip(tensors, views[at], strict=True)]
        join_tokens(pairs, self.wire.chunks_on(self.device))
        self._taken(len(whole))

    def take_results(self, local: Numbered) -> None:
        """Wait for all parts, and unpack all heads of our tokens."""
        self.coming_bytes.arrive()
        pairs: list[tuple[Tensor, Tensor]] = []
        for at, tensors in local:
            came = self.wire.decoded(self.kinds[at], self.coming.views[at])
            pairs += zip(self._shares(at, tensors), came, strict=True)
        copy_parts(pairs)
        self._taken(len(local))

    def _shares(self, at: int, tensors: Tensors) -> list[Tensor]:
        return [self.wire.shares(x, self.pieces[at]) for x in tensors]

    def _taken(self, pieces: int) -> None:
        self.num_open -= pieces
        if not self.num_open:
            self.pool.put(self.coming_bytes)

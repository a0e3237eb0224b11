"""Tokens: what all layers share about one batch, worked out once: who owns which tokens, and who sees whom.

A *piece* is what the ranks of one shard hold together, so its runs are those of all its ranks; ``tiles`` are the
rectangles of a block of two pieces that are visible under a call's mask.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from startrail.engine.call import AttentionCall
from startrail.engine.wire import Wire
from startrail.geometry.bands import bands_of
from startrail.geometry.layout import Layout, Runs
from startrail.geometry.tiles import Costs, Tile, segments_of, tiles_of
from startrail.kernels import Kernel
from startrail.schedule.places import Place
from startrail.schedule.values import Piece


class PreparedCall(NamedTuple):
    """What a call was run with: ranks that make it agree on ``signature``, and on the rest of ``detail``."""

    signature: str
    detail: str
    wire: Wire
    kept: dict[Piece, slice]
    kernel: Kernel


def encode_boundaries(documents: tuple[int, ...], blocks: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The numbers by which a sequence is known: its documents, then the ends of its blocks, as numbers below zero.

    >>> encode_boundaries((0, 5, 9), ((1, 3),))
    (0, 5, 9, -2, -4)
    """
    return (*documents, *(-1 - end for block in blocks for end in block))


class BatchGeometry:
    """``documents`` are cu_seqlens, (0, length) where nothing is packed; ``blocks`` are runs of tokens that see each
    other. ``ready`` is what the calls on it so far were run with, by all that tells them apart."""

    def __init__(self, place: Place, layout: Layout, marks: tuple[int, ...]) -> None:
        self.place, self.layout, self.marks = place, layout, marks
        self.documents = tuple(mark for mark in marks if mark >= 0)
        ends = [-1 - mark for mark in marks if mark < 0]
        self.blocks = tuple(zip(ends[::2], ends[1::2], strict=True))
        self.ready: dict[object, PreparedCall] = {}
        self._runs: dict[int, Runs] = {}
        self._tiles: dict[tuple[object, ...], tuple[Tile, ...]] = {}

    @property
    def length(self) -> int:
        return self.layout.length

    def __str__(self) -> str:
        packed = f", documents {self.documents}" if len(self.documents) > 2 else ""
        return f"{self.length} tokens{packed}" + (f", blocks {self.blocks}" if self.blocks else "")

    def runs(self, shard: int) -> Runs:
        """The runs of real tokens of a piece."""
        if shard not in self._runs:
            self._runs[shard] = self.layout.runs(*self.place.shard_ranks(shard))
        return self._runs[shard]

    def tiles(self, call: AttentionCall, costs: Costs, row: int, column: int) -> tuple[Tile, ...]:
        key = (call.causal, call.window, call.chunk, call.steps, costs, row, column)
        if key not in self._tiles:
            mask = call.mask(self.documents if len(self.documents) > 2 else None, self.blocks)
            block = mask, self.runs(row), self.runs(column)
            self._tiles[key] = tuple(bands_of(segments_of(*block))) if costs.bands else tiles_of(*block, costs.call)
        return self._tiles[key]

    def spoil_hidden_rows(self, out: Tensor, lse: Tensor) -> None:
        """Every token sees itself, so a row without any weight had logits of -inf only: NaN, as softmax makes of them
        in one process. Only on the host, where looking costs nothing."""
        real = sum(count for _, count in self.layout.runs(self.place.rank))
        if lse.device.type == "cpu" and (hidden := lse[:, :, :real].isneginf()).any():
            out[:, :, :real].masked_fill_(hidden.unsqueeze(-1), float("nan"))

    def places(self) -> tuple[tuple[int, ...], ...]:
        """Where the chunks of each rank of our own piece stand in it."""
        return self.layout.places(self.place.shard_ranks(self.place.shard))

"""The geometry of one batch, shared by all its layers: which rank owns which tokens, and which keys each query sees.

A *piece* is what the ranks of one shard hold together. Its runs are the runs of all these ranks. A block's *tiles* are
the rectangles of a query piece and a key piece that a mask leaves visible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from startrail.engine.wire import Wire
from startrail.geometry.bands import bands_of
from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs, Tile, segments_of, tiles_of
from startrail.kernels import Kernel
from startrail.schedule.places import Place
from startrail.schedule.values import Piece


@dataclass(frozen=True)
class Boundaries:
    """``documents`` are the cu_seqlens of a sequence, (0, length) if it is not packed. ``blocks`` are runs
    (start, stop) of tokens that see each other.

    >>> print(Boundaries((0, 5, 9), ((1, 3),)))
    9 tokens, documents (0, 5, 9), blocks ((1, 3),)
    """

    documents: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        return self.documents[-1]

    def apply(self, mask: Mask) -> Mask:
        """``mask``, within these documents and with these blocks."""
        return replace(mask, documents=self.documents if len(self.documents) > 2 else None, blocks=self.blocks)

    def __str__(self) -> str:
        packed = f", documents {self.documents}" if len(self.documents) > 2 else ""
        return f"{self.length} tokens{packed}" + (f", blocks {self.blocks}" if self.blocks else "")


class BlockTiles:
    """The visible tiles of each block under one mask, computed on first use."""

    def __init__(self, place: Place, layout: Layout, mask: Mask, costs: Costs) -> None:
        self.place, self.layout, self.mask, self.costs = place, layout, mask, costs
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def __call__(self, row: int, column: int) -> tuple[Tile, ...]:
        tiles = self._tiles.get((row, column))
        if tiles is None:
            rows, keys = (self.layout.runs(*self.place.shard_ranks(shard)) for shard in (row, column))
            if self.costs.bands:
                tiles = tuple(bands_of(segments_of(self.mask, rows, keys)))
            else:
                tiles = tiles_of(self.mask, rows, keys, self.costs.call)
            self._tiles[row, column] = tiles
        return tiles


class PreparedCall(NamedTuple):
    """What a kind of call runs with. Its ranks agree on ``signature``, and on the rest of ``detail``. ``kept`` says
    where in the kept bytes each piece lies."""

    signature: str
    detail: str
    wire: Wire
    kept: dict[Piece, slice]
    kernel: Kernel
    tiles: BlockTiles
    scale: float


class BatchGeometry:
    """Boundaries and layout, and all that was derived from them: ``prepared`` calls and the tiles of masks."""

    def __init__(self, place: Place, layout: Layout, boundaries: Boundaries) -> None:
        self.place, self.layout, self.boundaries = place, layout, boundaries
        self.prepared: dict[object, PreparedCall] = {}
        self._tiles: dict[tuple[Mask, Costs], BlockTiles] = {}

    def tiles(self, mask: Mask, costs: Costs) -> BlockTiles:
        """The tiles of a call's ``mask``. Raises ``ValueError`` if it does not fit the sequence."""
        if (mask, costs) not in self._tiles:
            whole = self.boundaries.apply(mask)
            whole.check_length(self.layout.length)
            self._tiles[mask, costs] = BlockTiles(self.place, self.layout, whole, costs)
        return self._tiles[mask, costs]

    def poison_hidden_rows(self, out: Tensor, lse: Tensor) -> None:
        """Fill rows without any weight with NaN, as softmax does in one process. Every token sees itself, so all logits
        of such a row were -inf. Only on CPUs, where reading ``lse`` costs nothing."""
        real = sum(count for _, count in self.layout.runs(self.place.rank))
        if lse.device.type == "cpu" and (hidden := lse[:, :, :real].isneginf()).any():
            out[:, :, :real].masked_fill_(hidden.unsqueeze(-1), float("nan"))

    def chunk_places(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of our own piece, where its chunks stand in that piece."""
        return self.layout.places(self.place.shard_ranks(self.place.shard))

"""The geometry of one batch, shared by all its layers: which rank owns which tokens, and which keys each query sees.

A *piece* is what the ranks of one shard hold together. Its runs are the runs of all these ranks. A block's *tiles* are
the rectangles of a query piece and a key piece that a mask leaves visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.engine.part_run import PassPart
from startrail.geometry.bands import bands_of
from startrail.geometry.layout import Layout, Runs
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs, Tile, segments_of, tiles_of
from startrail.kernels import Kernel
from startrail.routing.route import Rule, ZoneRoute, route_of
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program
from startrail.schedule.sizes import Sizes


@dataclass(frozen=True)
class Boundaries:
    """``documents`` are the cu_seqlens of a sequence, (0, length) if it is not packed. ``blocks`` are runs
    (start, stop) of tokens that see each other. ``placement`` are the documents that the layout was made for, if they
    are others: these may be cut further, but not joined.

    >>> boundaries = Boundaries((0, 5, 9), ((1, 3),))
    >>> print(boundaries)
    9 tokens, documents (0, 5, 9), blocks ((1, 3),)
    >>> Boundaries.decode(boundaries.encode()) == boundaries
    True
    """

    documents: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    placement: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.documents[-1]

    def encode(self) -> tuple[int, ...]:
        """All of it as whole numbers."""
        sizes = len(self.documents), len(self.placement)
        return (*sizes, *self.documents, *self.placement, *(end for block in self.blocks for end in block))

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Boundaries:
        size, placed, *ends = numbers
        blocks = ends[size + placed :]
        pairs = tuple(zip(blocks[::2], blocks[1::2], strict=True))
        return cls(tuple(ends[:size]), pairs, tuple(ends[size : size + placed]))

    def apply(self, mask: Mask) -> Mask:
        """``mask``, within these documents and with these blocks."""
        return replace(mask, documents=self.documents if len(self.documents) > 2 else None, blocks=self.blocks)

    def __str__(self) -> str:
        packed = f", documents {self.documents}" if len(self.documents) > 2 else ""
        placed = f", placed by {self.placement}" if self.placement else ""
        return f"{self.length} tokens{packed}{placed}" + (f", blocks {self.blocks}" if self.blocks else "")


class BlockTiles:
    """The visible tiles of each block under one mask, computed on first use. ``runs_of`` gives the tokens of a shard or
    bundle, sorted by position."""

    def __init__(self, runs_of: Callable[[int], Runs], mask: Mask, costs: Costs) -> None:
        self.mask, self.costs = mask, costs
        self._runs_of = lru_cache(maxsize=None)(runs_of)
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def __call__(self, row: int, column: int) -> tuple[Tile, ...]:
        tiles = self._tiles.get((row, column))
        if tiles is None:
            rows, keys = self._runs_of(row), self._runs_of(column)
            if self.costs.bands:
                tiles = tuple(bands_of(segments_of(self.mask, rows, keys)))
            else:
                tiles = tiles_of(self.mask, rows, keys, self.costs.call)
            self._tiles[row, column] = tiles
        return tiles


class PreparedCall(NamedTuple):
    """What a kind of call runs with. Its ranks agree on ``detail``."""

    detail: str
    parts: tuple[PassPart, ...]
    order: list[tuple[int, int]]
    kernel: Kernel
    scale: float


class BatchGeometry:
    """Boundaries and layout, and all that was derived from them: ``prepared`` calls, routes and the tiles of masks."""

    def __init__(self, rank: int, layout: Layout, boundaries: Boundaries) -> None:
        self.rank, self.layout, self.boundaries = rank, layout, boundaries
        self.prepared: dict[object, PreparedCall] = {}
        self._routes: dict[tuple[Mask, Sizes], tuple[ZoneRoute, ...]] = {}
        self._tiles: dict[tuple[Mask, Costs, int, bool], BlockTiles] = {}

    def routes(self, plan: Plan, mask: Mask, sizes: Sizes, sparse: bool | Rule) -> tuple[ZoneRoute, ...]:
        """How a call with this ``mask`` is computed. Raises ``ValueError`` if it does not fit the sequence."""
        if (mask, sizes) not in self._routes:
            whole = self.boundaries.apply(mask)
            whole.check_length(self.layout.length)
            self._routes[mask, sizes] = route_of(plan, self.layout, self.rank, whole, sizes, sparse)
        return self._routes[mask, sizes]

    def tiles(self, mask: Mask, costs: Costs, route: ZoneRoute, program: Program) -> BlockTiles:
        """The tiles of one zone under a call's ``mask``."""
        key = mask, costs, route.zone.level, bool(route.fetches)
        if key not in self._tiles:
            zone, length, place, bundles = route.zone, self.layout.length, program.place, program.bundles

            def runs_of(shard: int) -> Runs:
                return bundles[shard].runs if shard in bundles else zone.runs_of(place.shard_ranks(shard), length)

            self._tiles[key] = BlockTiles(runs_of, self.boundaries.apply(mask), costs)
        return self._tiles[key]

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens; those of padding are beyond the sequence."""
        return positions_of(self.layout.table[self.rank])

    def token_order(self) -> Tensor:
        """For each token of the sequence, its index among the tokens of all ranks, rank by rank."""
        held = torch.cat([positions_of(runs) for runs in self.layout.table])
        return held.argsort(stable=True)[: self.layout.length]

    def roll_sources(self, shift: int) -> tuple[Tensor, Tensor]:
        """Where a token finds the value of the token ``shift`` before it. It is one of this rank's, or it lies near the
        edge of some run: at its beginning if the shift is negative, at its end otherwise. Returns which of its own
        tokens this rank offers, as many as every rank, and for each of its tokens the index of its source among its
        own and then those that all ranks offer."""
        amount, length, table = abs(shift), self.layout.length, self.layout.table
        offers = [
            positions_of([
                (start, min(amount, count)) if shift < 0 else (start + max(count - amount, 0), min(amount, count))
                for start, count in runs
            ])
            for runs in table
        ]  # fmt: skip
        most = max(map(len, offers))
        padded = torch.stack([F.pad(offer, (0, most - len(offer)), value=-1) for offer in offers])
        known = torch.cat((self.positions, padded.flatten()))
        values, order = known.sort(stable=True)
        wanted = (self.positions - shift).clamp(0, length - 1)
        sources = order[torch.searchsorted(values, wanted).clamp(max=len(values) - 1)]
        own, own_order = self.positions.sort(stable=True)
        offered = own_order[torch.searchsorted(own, padded[self.rank].clamp(min=0)).clamp(max=len(own) - 1)]
        return offered, sources

    def poison_hidden_rows(self, route: ZoneRoute, out: Tensor, lse: Tensor) -> None:
        """Fill rows without any weight with NaN, as softmax does in one process. Every token sees itself, so all logits
        of such a row were -inf. Only on CPUs, where reading ``lse`` costs nothing."""
        real = sum(count for _, count in route.zone.runs_of((route.member,), self.layout.length))
        if lse.device.type == "cpu" and (hidden := lse[:, :, :real].isneginf()).any():
            out[:, :, :real].masked_fill_(hidden.unsqueeze(-1), float("nan"))


def positions_of(runs: Sequence[tuple[int, int]]) -> Tensor:
    """All positions of some runs (first position, count).

    >>> positions_of([(3, 2), (7, 1)]).tolist()
    [3, 4, 7]
    """
    total = sum(count for _, count in runs)
    starts, counts = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    before = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - before, counts, output_size=total) + torch.arange(total, device="cpu")

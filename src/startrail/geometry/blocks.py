"""The visible tiles of blocks: a query shard with a key shard, or with a bundle of keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from startrail.geometry.bands import bands_of
from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs, Tile, segments_of, tiles_of


class BlockTiles:
    """The visible tiles of each block under one mask, computed on first use. ``runs_of`` gives the tokens of a shard or
    bundle, sorted by position."""

    def __init__(self, runs_of: Callable[[int], Runs], mask: Mask, costs: Costs) -> None:
        self.mask, self.costs = mask, costs
        self._runs_of = lru_cache(maxsize=None)(runs_of)
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def tokens_of(self, shard: int) -> int:
        return sum(count for _, count in self._runs_of(shard))

    def __call__(self, row: int, column: int) -> tuple[Tile, ...]:
        tiles = self._tiles.get((row, column))
        if tiles is None:
            rows, keys = self._runs_of(row), self._runs_of(column)
            tiles = ()
            # over disjoint pairs, so that their tiles simply follow each other; a shard may hold nothing but padding
            for staircase in self.mask.staircases if rows and keys else ():
                if self.costs.bands:
                    tiles += tuple(bands_of(segments_of(staircase, rows, keys)))
                else:
                    tiles += tiles_of(staircase, rows, keys, self.costs.call)
            self._tiles[row, column] = tiles
        return tiles

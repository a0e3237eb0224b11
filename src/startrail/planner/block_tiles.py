"""The tiles of blocks that the planner prices: those of compiled calls, cut for few shards where all are alike.

>>> from startrail.schedule.plan import Plan
>>> call, plan = Attention.of(8192, 1, 8, 8, 64, causal=True), Plan.parse("1x8")
>>> tiles = tiles_of_plan(call, call.sizes_on(plan, 8), 8, Costs())
>>> [tile[:5] for column in (0, 5, 7) for tile in tiles(5, column)]     # q0, q1, k0, k1, form
[(0, 1024, 0, 512, 'full'), (0, 1024, 0, 1024, 'causal'), (512, 1024, 0, 1024, 'full')]
"""

from __future__ import annotations

from functools import lru_cache

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.problem import Boundaries, Split
from startrail.geometry.blocks import BlockTiles
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs, Tile
from startrail.planner.peers import STRIPED, ZIGZAG
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes

MAX_SHARDS = 8  # of a zone, whose blocks are all cut into tiles


class MiddleTiles:
    """The tiles of blocks, all cut as those of the ``middle`` shard with itself, an earlier or a later one: zigzag
    shards of the same documents differ by a few tokens at most."""

    def __init__(self, tiles: BlockTiles, shards: int, middle: int) -> None:
        self.tiles, self.shards, self.middle = tiles, shards, middle
        self.mask = tiles.mask

    def tokens_of(self, column: int) -> int:
        return self.tiles.tokens_of(self.middle if column < self.shards else column)

    def __call__(self, row: int, column: int) -> tuple[Tile, ...]:
        if column < self.shards:  # not a bundle
            row, column = self.middle, self.middle + (column > row) - (column < row)
        return self.tiles(row, column)


class StripedTiles:
    """Of stripes, every row of a block sees one key more than the row before, whichever shards they are."""

    def __init__(self, mask: Mask, tokens: int) -> None:
        self.mask, self.tokens = mask, tokens

    def __call__(self, row: int, column: int) -> tuple[Tile, ...]:
        return (Tile(0, self.tokens, 0, self.tokens, "causal" if self.mask.causal else "full"),)

    def tokens_of(self, shard: int) -> int:
        return self.tokens


Tiles = BlockTiles | MiddleTiles | StripedTiles


def tiles_of_part(part: AttentionPart, costs: Costs) -> Tiles:
    """Of what a zone runs."""
    tiles, shards = part.tiles(costs), part.place.num_shards
    many = part.mask.window is None and shards > MAX_SHARDS
    return MiddleTiles(tiles, shards, shards // 2) if many else tiles


def tiles_of_plan(call: Attention, sizes: Sizes, world: int, costs: Costs, layout: str = ZIGZAG) -> Tiles:
    """Of the plan over all ranks, documents apart. Without a window, three shards have all kinds of blocks."""
    shards = world // sizes.plan.heads
    if layout == STRIPED:
        return StripedTiles(call.mask, sizes.tokens)
    few = shards if call.mask.window is not None else min(shards, 3)
    tiles = _tiles_on_ring(call.mask, few, sizes.tokens, costs, layout)
    return tiles if few == shards else MiddleTiles(tiles, shards, 1)


@lru_cache(maxsize=256)
def _tiles_on_ring(mask: Mask, shards: int, tokens: int, costs: Costs, layout: str) -> BlockTiles:
    """The tiles of one document on shards of so many tokens, whatever the plan that moves them."""
    problem = Attention(Boundaries((0, shards * tokens)), 1, mask=mask)
    split = Split(Plan.parse(f"1x{shards}"), shards, layout, sparse=False)
    of_ranks = split.layout_of(problem.boundaries)
    return problem.part(split, of_ranks, of_ranks.zones[0]).tiles(costs)

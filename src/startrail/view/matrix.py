"""The attention matrix as cells of tokens: which block computes each of them, and which rank that block.

>>> cells, owners = owners_of(Plan.parse("1x2"), 2, Mask(causal=True), length=8)     # zigzag: chunks 0, 1, 1, 0
>>> cells, [owners.get((3, column)) for column in range(4)]
(4, [0, 0, 0, 0])
>>> cells, owners = owners_of(Plan.parse("1x2"), 2, Mask(causal=True, documents=(0, 4, 8)), length=8)
>>> [[owners.get((row, column), ".") for column in range(8)] for row in (3, 7)]      # each rank has a document
[[1, 1, 1, 1, '.', '.', '.', '.'], ['.', '.', '.', '.', 0, 0, 0, 0]]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from startrail.compile.attention import AttentionPart
from startrail.compile.problem import Split
from startrail.geometry.layout import Layout, Runs
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import FORWARD
from startrail.view.text import problem_of

SPARSE_CELLS = 32  # along one side of a drawing


class Cell(NamedTuple):
    """The block of the pair of tokens in the middle of what a cell shows: ``row`` and ``column`` are a shard (or a
    bundle) of the zone. ``pairs`` are the visible ones, ``whole`` is True if that is all of them."""

    zone: int
    row: int
    column: int
    pairs: int
    whole: bool


def is_sparse(mask: Mask) -> bool:
    """True if zones and direct fetches may run instead of the plan."""
    return mask.window is not None or mask.documents is not None


def edges_of(layout: Layout, heads: int, mask: Mask, most: int) -> list[int]:
    """Where cells begin and end: the chunks that shards consist of, or at most ``most`` cells of as many tokens."""
    length, chunks = layout.length, 2 * layout.world // heads
    if not is_sparse(mask) and layout.world > 1 and chunks <= most and len(set(layout.counts)) == 1:
        tokens = layout.largest * heads // 2
        return [min(at * tokens, length) for at in range(chunks + 1)]
    cells = min(most, length)
    return [at * length // cells for at in range(cells + 1)]


def cells_of(
    layout: Layout, routes: Sequence[AttentionPart], mask: Mask, edges: Sequence[int]
) -> dict[tuple[int, int], Cell]:
    """The cells with visible pairs. ``routes``: of the layout's zones."""
    length, find = layout.length, _Blocks(layout, routes)
    found: dict[tuple[int, int], Cell] = {}
    spans = list(pairwise(edges))
    for q, (q0, q1) in enumerate(spans):
        if q0 == q1:
            continue
        (low, first_high), (last_low, high) = (mask.visible(query, length) for query in (q0, q1 - 1))
        for k, (k0, k1) in enumerate(spans):
            if k1 <= low or high <= k0 or k0 == k1:
                continue
            if last_low <= k0 and k1 <= first_high:
                block = find.block((q0 + q1 - 1) // 2, (k0 + k1 - 1) // 2)
                found[q, k] = Cell(*block, (q1 - q0) * (k1 - k0), True)
            elif tiles := tiles_of(mask, ((q0, q1 - q0),), ((k0, k1 - k0),)):
                tile = tiles[len(tiles) // 2]
                query = q0 + (tile.q0 + tile.q1 - 1) // 2
                first, last = mask.visible(query, length)
                block = find.block(query, (max(first, k0) + min(last, k1) - 1) // 2)
                found[q, k] = Cell(*block, sum(tile.area for tile in tiles), False)
    return found


class _Blocks:
    """Finds the block of a pair of tokens."""

    def __init__(self, layout: Layout, routes: Sequence[AttentionPart]) -> None:
        self.routes = routes
        self.owned = sorted(
            (start, number, member)
            for number, zone in enumerate(layout.zones)
            for member, runs in enumerate(zone.runs)
            for start, _ in runs
            if start < layout.length
        )
        self.starts = [start for start, _, _ in self.owned]
        self.fetched: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # by zone and member: runs and bundles
        for number, route in enumerate(routes):
            messages = route.demand.messages if route.demand is not None else {}
            for bundle, (edge, runs) in enumerate(messages.items(), route.zone.size):
                to = self.fetched.setdefault((number, edge.receiver), [])
                to += [(start, start + count, bundle) for start, count in runs]
        self.shards = [
            [route.chosen.place(route.zone.size, member).shard for member in range(route.zone.size)] for route in routes
        ]

    def block(self, query: int, key: int) -> tuple[int, int, int]:
        (_, zone, member), (_, _, other) = (self.owned[bisect_right(self.starts, at) - 1] for at in (query, key))
        if self.routes[zone].demand is None:
            return zone, self.shards[zone][member], self.shards[zone][other]
        if member == other:
            return zone, member, member
        return zone, member, next(bundle for start, stop, bundle in self.fetched[zone, member] if start <= key < stop)


class Sight:
    """Which blocks have visible pairs."""

    def __init__(self, mask: Mask, length: int) -> None:
        self.mask, self.length = mask, length
        self.known: dict[tuple[int, int, int], tuple[Runs, list[tuple[int, int]]]] = {}

    def sees(self, route: AttentionPart, row: int, column: int) -> bool:
        """True if some query of a block sees some key. Each query sees itself, so those of a run see one interval."""
        if route.demand is not None:
            return True  # whatever is fetched
        (_, intervals), (keys, _) = self.runs(route, row), self.runs(route, column)
        for low, high in intervals:
            at = bisect_left(keys, (high, 0))
            if at and sum(keys[at - 1]) > low:
                return True
        return False

    def runs(self, route: AttentionPart, shard: int) -> tuple[Runs, list[tuple[int, int]]]:
        """The tokens of a shard, and the keys that each run of them sees."""
        key = route.zone.level, route.zone.first, shard
        if key not in self.known:
            runs, see = route.runs_of(shard), self.mask.visible
            seen = [(see(at, self.length)[0], see(at + count - 1, self.length)[1]) for at, count in runs]
            self.known[key] = runs, seen
        return self.known[key]


@lru_cache(maxsize=64)
def _shard_owners(plan: Plan, world: int) -> dict[tuple[int, int], int]:
    """The shard whose ranks compute each block of the forward pass."""
    slots = plan.slots(world)
    owners: dict[tuple[int, int], int] = {}
    for shard in range(world // plan.heads):
        program = build_program(plan, world, slots.index(shard * plan.heads), FORWARD)
        owners |= {(block.row, block.column): shard for step in program.steps for block in step.blocks}
    return owners


def owners_of(
    plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...] = ()
) -> tuple[int, dict[tuple[int, int], int]]:
    """The number of cells along one side, and who computes each visible one: the shard; or with a window or documents,
    the rank, the first of those that share it by heads."""
    sparse = is_sparse(mask)
    problem, split = problem_of(plan, mask, length, shares), Split(plan, world, sparse=sparse)
    layout = split.layout_of(problem.boundaries)
    routes = [problem.part(split, layout, zone) for zone in layout.zones]
    edges = edges_of(layout, plan.heads, mask, SPARSE_CELLS if sparse or shares else 2 * world)
    found = {}
    for at, cell in cells_of(layout, routes, mask, edges).items():
        route = routes[cell.zone]
        inner, size, owner = route.chosen, route.zone.size, cell.row
        if route.demand is None:
            owner = _shard_owners(inner, size)[cell.row, cell.column]
            if sparse:
                owner = inner.slots(size).index(owner * inner.heads)
        found[at] = route.zone.first + owner if sparse else owner
    return len(edges) - 1, found

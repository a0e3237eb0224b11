"""Who computes each cell of the attention matrix, in the order of tokens.

>>> cells, owners = dense_cells(Plan.parse("1x2"), 2, Mask(causal=True), length=8)     # zigzag: chunks 0, 1, 1, 0
>>> cells, [owners.get((3, column)) for column in range(4)]
(4, [0, 0, 0, 0])
>>> cells, owners = sparse_cells(Plan.parse("1x2"), 2, Mask(causal=True, documents=(0, 4, 8)), length=8)
>>> [[owners.get((row, column), ".") for column in range(8)] for row in (3, 7)]        # each rank has a document
[[1, 1, 1, 1, '.', '.', '.', '.'], ['.', '.', '.', '.', 0, 0, 0, 0]]
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from startrail.compile.problem import Split
from startrail.geometry.layout import joined, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import FORWARD
from startrail.view.batch import problem_of

SPARSE_CELLS = 32
Owners = dict[tuple[int, int], int]


@lru_cache(maxsize=64)
def block_owners(plan: Plan, world: int) -> Owners:
    """The shard whose ranks compute each block of the forward pass."""
    slots = plan.slots(world)
    owners: Owners = {}
    for shard in range(world // plan.heads):
        program = build_program(plan, world, slots.index(shard * plan.heads), FORWARD)
        owners |= {(block.row, block.column): shard for step in program.steps for block in step.blocks}
    return owners


def dense_cells(plan: Plan, world: int, mask: Mask, length: int) -> tuple[int, Owners]:
    """The number of chunks, and for each pair of them that the mask shows, the shard whose ranks compute it."""
    shards = world // plan.heads
    layout, owners = zigzag(range(shards), length), block_owners(plan, world)
    runs = sorted((run, shard) for shard, own in enumerate(layout.table) for run in own)
    found: Owners = {}
    for q, (queries, row) in enumerate(runs):
        for k, (keys, column) in enumerate(runs):
            if tiles_of(mask, joined([queries], length), joined([keys], length)):
                found[q, k] = owners[row, column]
    return len(runs), found


def sparse_cells(plan: Plan, world: int, mask: Mask, length: int) -> tuple[int, Owners]:
    """With a window or documents, as zones and direct fetches run: for each cell of equally many tokens, the rank that
    computes one of its pairs; the first of the ranks that share it by heads."""
    problem, split = problem_of(plan, mask, length), Split(plan, world)
    layout = split.layout_of(problem.boundaries)
    parts = [problem.part(split, layout, zone) for zone in layout.zones]
    owned = sorted(
        (start, number, member)
        for number, zone in enumerate(layout.zones)
        for member, runs in enumerate(zone.runs)
        for start, _ in runs
        if start < length
    )
    starts = [start for start, _, _ in owned]
    cells = min(SPARSE_CELLS, length)
    edges = [at * length // cells for at in range(cells + 1)]
    found: Owners = {}
    for q in range(cells):
        for k in range(cells):
            queries, keys = ((edges[at], edges[at + 1] - edges[at]) for at in (q, k))
            if tiles := tiles_of(mask, (queries,), (keys,)):
                query = queries[0] + tiles[0].q1 - 1
                key = max(mask.visible(query, length)[0], keys[0])
                (_, zone, member), (_, _, other) = (owned[bisect_right(starts, at) - 1] for at in (query, key))
                part = parts[zone]
                if part.demand is None:
                    inner, size = part.chosen, part.zone.size
                    shards = [inner.place(size, each).shard for each in (member, other)]
                    shard = block_owners(inner, size)[shards[0], shards[1]]
                    member = inner.slots(size).index(shard * inner.heads)
                found[q, k] = part.zone.first + member
    return cells, found

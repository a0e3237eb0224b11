"""Tiles: cuts a block of a mask into a few rectangles.

Shards are sorted by position, so the keys of a shard that a query sees are one interval of *local* indices too. A block
(query shard x key shard) is therefore the area between two staircases. ``tiles_of`` cuts it into rectangles that
attention kernels compute without a mask: full, causal and anticausal. Only where these would be tiny (many short
documents, a narrow window) are several computed together under an explicit mask.

>>> mask = Mask(causal=True)
>>> def show(*shards): return [tile[:5] for tile in tiles_of(mask, *shards)]       # q0, q1, k0, k1, form
>>> show(((0, 2), (6, 2)), ((0, 2), (6, 2)))                # a zigzag shard with itself: one causal square
[(0, 4, 0, 4, 'causal')]
>>> show(((2, 2), (4, 2)), ((0, 2), (6, 2)))                # a later shard and an earlier one: all see its first half
[(0, 4, 0, 2, 'full')]
>>> show(((0, 2), (6, 2)), ((2, 2), (4, 2)))                # the reverse: the second half sees everything
[(2, 4, 0, 4, 'full')]
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask, Segment

SHORT = 128  # segments with fewer rows may share a masked tile
MASKED_ROWS = 256  # of one masked tile, at most


class Costs(NamedTuple):
    """How to cut blocks for a backend. ``call``: the overhead of a kernel call, in query-key pairs. ``bands``: True if
    a call can have a window and several documents, one after the other (see `bands`)."""

    call: int = 128 * 128
    bands: bool = False


class Tile(NamedTuple):
    """Query rows [q0, q1) x keys [k0, k1). Forms: full; causal (a square, key <= row); anticausal (key >= row); masked:
    ``bounds`` lists the segments, and every row sees a key; bands: as masked, but also expressed as rectangles of
    ``packs`` (rows, keys), one after the other, under one ``window`` (see `bands`)."""

    q0: int
    q1: int
    k0: int
    k1: int
    form: str
    bounds: tuple[Segment, ...] = ()
    window: tuple[int, int] = (-1, -1)
    packs: tuple[tuple[int, int], ...] = ()

    @property
    def area(self) -> int:
        """Visible query-key pairs."""
        rows = self.q1 - self.q0
        if self.form == "full":
            return rows * (self.k1 - self.k0)
        if self.bounds:
            return sum(s.rows * (s.high - s.low) + (s.dhigh - s.dlow) * s.rows * (s.rows - 1) // 2 for s in self.bounds)
        return rows * (rows + 1) // 2


def tiles_of(mask: Mask, queries: Runs, keys: Runs, call_cost: int = Costs().call) -> tuple[Tile, ...]:
    """Rectangles of local indices that cover exactly the visible pairs of two shards. Shards are given as runs."""
    return cover(segments_of(mask, queries, keys), call_cost)


def segments_of(mask: Mask, queries: Runs, keys: Runs) -> list[Segment]:
    """The keys that each query of a shard sees, as maximal linear segments. Rows that see nothing are left out. The
    segments of several staircases follow each other."""
    if not (queries and keys):
        return []
    return [segment for each in mask.staircases for segment in _segments_of_one(each, queries, keys)]


def _segments_of_one(mask: Mask, queries: Runs, keys: Runs) -> list[Segment]:
    end = max(keys[-1][0] + keys[-1][1], queries[-1][0] + queries[-1][1])
    if mask.documents is not None:
        end = max(end, mask.documents[-1])

    starts = [start for start, _ in keys]
    before = [0, *itertools.accumulate(count for _, count in keys)]
    edges = [edge for start, count in keys for edge in (start, start + count)]

    def index_of(position: int) -> int:  # number of keys before a position
        run = bisect_right(starts, position) - 1
        return before[run] + min(position - starts[run], keys[run][1]) if run >= 0 else 0

    def bounds_at(position: int) -> tuple[int, int]:
        low, high = mask.visible(position, end)
        return index_of(low), index_of(high)

    def edges_passed(start: int, stop: int) -> list[int]:  # by either end of what these queries see
        ends = zip(mask.visible(start, end), mask.visible(stop - 1, end), strict=True)
        return [edge for first, last in ends for edge in edges[bisect_left(edges, first) : bisect_right(edges, last)]]

    merged: list[Segment] = []
    offset = 0
    for first, count in queries:
        for start, stop in mask.rows_with_keys(first, first + count):
            if index_of(mask.visible(start, end)[0]) == index_of(mask.visible(stop - 1, end)[1]):
                continue  # no key of the shard lies between the ends of what these queries see
            points = sorted({start, stop} | mask.breakpoints(start, stop, edges_passed(start, stop), end))
            for p0, p1 in itertools.pairwise(points):
                low, high = bounds_at(p0)
                next_low, next_high = bounds_at(p0 + 1) if p1 - p0 > 1 else (low, high)
                row = offset + p0 - first
                segment = Segment(row, row + p1 - p0, low, next_low - low, high, next_high - high)
                if merged and (extended := merged[-1].extended(segment)):
                    merged[-1] = extended
                else:
                    merged.append(segment)
        offset += count
    return [kept for segment in merged if (kept := _drop_empty_rows(segment))]


def _drop_empty_rows(s: Segment) -> Segment | None:
    """Drop the rows at either end that see nothing (low = high)."""
    width, grows = s.high - s.low, s.dhigh - s.dlow
    if width <= 0:
        if grows <= 0:
            return None
        s = Segment(s.q0 + 1, s.q1, s.low + s.dlow, s.dlow, s.high + s.dhigh, s.dhigh)
        width = s.high - s.low
    if grows < 0:
        s = s._replace(q1=min(s.q1, s.q0 + width))
    return s if s.q1 > s.q0 else None


def cover(segments: list[Segment], call_cost: int = Costs().call) -> tuple[Tile, ...]:
    """Exact tiles for long segments. Adjacent short segments share a masked tile where that is cheaper."""
    tiles: list[Tile] = []
    short: list[Segment] = []

    def flush() -> None:
        exact = [tile for segment in short for tile in _exact_tiles(segment)]
        if exact:
            k0, k1 = min(tile.k0 for tile in exact), max(tile.k1 for tile in exact)
            shared = Tile(short[0].q0, short[-1].q1, k0, k1, "masked", tuple(short))
            separate_cost = sum((tile.q1 - tile.q0) * (tile.k1 - tile.k0) + call_cost for tile in exact)
            shared_cost = (shared.q1 - shared.q0) * (k1 - k0) * 3 // 2 + call_cost
            tiles.extend(exact if separate_cost <= shared_cost else [shared])
        short.clear()

    for segment in segments:
        for part in _short_parts(segment):
            if part.rows >= SHORT:
                flush()
                tiles.extend(_exact_tiles(part))
                continue
            if short and (short[-1].q1 != part.q0 or part.q1 - short[0].q0 > MASKED_ROWS):
                flush()
            short.append(part)
    flush()
    return tuple(tiles)


def _short_parts(s: Segment) -> list[Segment]:
    """Cuts bands of constant width w into parts of w-1 rows, the most that triangles fit; keeps other segments."""
    width = s.high - s.low
    if not (s.dlow and s.dhigh) or s.rows < width:
        return [s]
    step = width - 1 if width > SHORT else SHORT // 2
    return [
        Segment(q0, min(q0 + step, s.q1), s.low + q0 - s.q0, 1, s.high + q0 - s.q0, 1) for q0 in range(s.q0, s.q1, step)
    ]


def _exact_tiles(s: Segment) -> list[Tile]:
    """Full, causal and anticausal tiles that cover one segment."""
    rows = s.rows
    if s.dlow and s.dhigh and rows >= s.high - s.low:  # too narrow for triangles
        return [Tile(s.q0, s.q1, s.low, s.high + rows - 1, "masked", (s,))]
    full0, full1, tiles = s.low, s.high, []
    if s.dlow and rows > 1:
        tiles.append(Tile(s.q0, s.q1, s.low, s.low + rows, "anticausal"))
        full0 = s.low + rows
    if s.dhigh and rows > 1:
        tiles.append(Tile(s.q0, s.q1, s.high - 1, s.high - 1 + rows, "causal"))
        full1 = s.high - 1
    if full1 > full0:
        tiles.append(Tile(s.q0, s.q1, full0, full1, "full"))
    return tiles

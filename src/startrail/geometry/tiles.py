"""Tiles: the few rectangles into which a block of a mask falls.

Shards are sorted by position, so the keys of a shard that a query sees are one interval of *local* indices too. A block
(query shard x key shard) is therefore a band between two staircases, and ``tiles_of`` cuts it into rectangles that
attention kernels compute without a mask: full, causal and anticausal squares. Only where these would be tiny (many short
documents, a narrow window) are several computed together under an explicit mask.

>>> mask = Mask(causal=True)
>>> def show(*shards): return [tile[:5] for tile in tiles_of(mask, *shards)]       # rows from, to, keys from, to
>>> show(((0, 2), (6, 2)), ((0, 2), (6, 2)))                # a zigzag shard with itself: one causal square
[(0, 4, 0, 4, 'causal')]
>>> show(((2, 2), (4, 2)), ((0, 2), (6, 2)))                # a later shard with an earlier one: all see its first half
[(0, 4, 0, 2, 'full')]
>>> show(((0, 2), (6, 2)), ((2, 2), (4, 2)))                # and the reverse: the second half sees everything
[(2, 4, 0, 4, 'full')]
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask, Segment

# Pieces of under SHORT rows may be computed together.
SHORT = 128
MASKED_ROWS = 256


class Costs(NamedTuple):
    """What decides how a backend's blocks are cut. A ``call`` costs about as much as this many query-key pairs;
    ``bands``: whether a call may have a window of its own, and several documents one behind the other (`bands`)."""

    call: int = 128 * 128
    bands: bool = False


class Tile(NamedTuple):
    """Query rows [q0, q1) x keys [k0, k1). Forms: full; causal (a square, key <= row); anticausal (key >= row);
    masked: ``bounds`` are the segments, and every row sees something; bands: the same, and rectangles of ``packs``
    (rows, keys) one behind the other under one ``window`` say it too (see `bands`)."""

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
            return sum(
                (s.q1 - s.q0) * (s.high - s.low) + (s.dhigh - s.dlow) * (s.q1 - s.q0) * (s.q1 - s.q0 - 1) // 2
                for s in self.bounds
            )
        return rows * (rows + 1) // 2


def tiles_of(mask: Mask, queries: Runs, keys: Runs, call_cost: int = Costs().call) -> tuple[Tile, ...]:
    """The rectangles of local indices that cover exactly the visible pairs of two shards, given as runs."""
    return tuple(_cover(segments_of(mask, queries, keys), call_cost))


def segments_of(mask: Mask, queries: Runs, keys: Runs) -> list[Segment]:
    """What each row of a shard sees of another, as straight pieces; without the rows that see nothing."""
    return _segments(mask, queries, keys) if queries and keys else []


def _segments(mask: Mask, queries: Runs, keys: Runs) -> list[Segment]:
    """The two staircases as maximal straight pieces, without the rows that see nothing."""
    end = max(keys[-1][0] + keys[-1][1], queries[-1][0] + queries[-1][1])
    if mask.documents is not None:
        end = max(end, mask.documents[-1])

    def index_of(position: int) -> int:  # keys of the shard before a position
        return sum(min(max(position - start, 0), count) for start, count in keys)

    def bounds_at(position: int) -> tuple[int, int]:
        low, high = mask.visible(position, end)
        return index_of(low), index_of(high)

    edges = [edge for start, count in keys for edge in (start, start + count)]
    merged: list[Segment] = []
    offset = 0
    for start, count in queries:
        stop = start + count
        points = sorted({start, stop} | mask.bends(start, stop, edges, end))
        for p0, p1 in itertools.pairwise(points):
            low, high = bounds_at(p0)
            dlow, dhigh = (
                (x - y for x, y in zip(bounds_at(p0 + 1), (low, high), strict=True)) if p1 - p0 > 1 else (0, 0)
            )
            row = offset + p0 - start
            segment = Segment(row, row + p1 - p0, low, dlow, high, dhigh)
            if merged and (joined := _join(merged[-1], segment)):
                merged[-1] = joined
            else:
                merged.append(segment)
        offset += count
    return [kept for segment in merged if (kept := _without_blind_rows(segment))]


def _join(a: Segment, b: Segment) -> Segment | None:
    """One segment that continues the other in a straight line; a single row takes either slope."""
    rows, more = a.q1 - a.q0, b.q1 - b.q0
    dlow, dhigh = (a.dlow, a.dhigh) if rows > 1 else (b.low - a.low, b.high - a.high)
    if (dlow, dhigh) not in ((0, 0), (0, 1), (1, 0), (1, 1)):
        return None
    if (b.low, b.high) != (a.low + rows * dlow, a.high + rows * dhigh) or (
        more > 1 and (b.dlow, b.dhigh) != (dlow, dhigh)
    ):
        return None
    return Segment(a.q0, b.q1, a.low, dlow, a.high, dhigh)


def _without_blind_rows(s: Segment) -> Segment | None:
    """Cut the rows at either end whose interval is empty (low = high)."""
    width, grows = s.high - s.low, s.dhigh - s.dlow
    if width <= 0:
        if grows <= 0:
            return None
        s = Segment(s.q0 + 1, s.q1, s.low + s.dlow, s.dlow, s.high + s.dhigh, s.dhigh)
        width = s.high - s.low
    if grows < 0:
        s = s._replace(q1=min(s.q1, s.q0 + width))
    return s if s.q1 > s.q0 else None


def _cover(segments: list[Segment], call_cost: int) -> list[Tile]:
    """Exact tiles of long segments; neighbouring short ones share a masked tile where that is cheaper."""
    tiles: list[Tile] = []
    short: list[Segment] = []

    def flush() -> None:
        exact = [tile for segment in short for tile in _exact_tiles(segment)]
        if exact:
            k0, k1 = min(tile.k0 for tile in exact), max(tile.k1 for tile in exact)
            together = Tile(short[0].q0, short[-1].q1, k0, k1, "masked", tuple(short))
            apart = sum((tile.q1 - tile.q0) * (tile.k1 - tile.k0) + call_cost for tile in exact)
            joint = (together.q1 - together.q0) * (k1 - k0) * 3 // 2 + call_cost
            tiles.extend(exact if apart <= joint else [together])
        short.clear()

    for segment in segments:
        for part in _short_parts(segment):
            if part.q1 - part.q0 >= SHORT:
                flush()
                tiles.extend(_exact_tiles(part))
                continue
            if short and (short[-1].q1 != part.q0 or part.q1 - short[0].q0 > MASKED_ROWS):
                flush()
            short.append(part)
    flush()
    return tiles


def _short_parts(s: Segment) -> list[Segment]:
    """A band of constant width w cannot be cut into squares of more than w-1 rows; other segments stay whole."""
    width, rows = s.high - s.low, s.q1 - s.q0
    if not (s.dlow and s.dhigh) or rows < width:
        return [s]
    step = width - 1 if width > SHORT else SHORT // 2
    return [
        Segment(q0, min(q0 + step, s.q1), s.low + q0 - s.q0, 1, s.high + q0 - s.q0, 1) for q0 in range(s.q0, s.q1, step)
    ]


def _exact_tiles(s: Segment) -> list[Tile]:
    """Full, causal and anticausal tiles that cover one segment."""
    rows = s.q1 - s.q0
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

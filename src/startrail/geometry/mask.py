"""Mask: who sees whom, and the few rectangles into which a block of it falls.

Every mask we have gives a query at position p one interval of visible keys [low(p), high(p)), and both ends only grow
with p: a staircase. Shards are sorted by position, so the keys of a shard that a query sees are one interval of *local*
indices too. A block (query shard x key shard) is therefore a band between two staircases, and ``tiles_of`` cuts it into
rectangles that attention kernels compute without a mask: full, causal and anticausal squares. Only where the pieces
would be tiny (many short documents, a narrow window) several are computed together under an explicit mask.

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
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from startrail.geometry.layout import Runs

# Pieces of under SHORT rows may be computed together.
SHORT = 128
MASKED_ROWS = 256


class Costs(NamedTuple):
    """What decides how a backend's blocks are cut. A ``call`` costs about as much as this many query-key pairs;
    ``bands``: whether a call may have a window of its own, and several documents one behind the other (`bands`)."""

    call: int = 128 * 128
    bands: bool = False


class Segment(NamedTuple):
    """Rows [q0, q1) that see keys [low + t*dlow, high + t*dhigh), t = row - q0."""

    q0: int
    q1: int
    low: int
    dlow: int
    high: int
    dhigh: int


class Slice(NamedTuple):
    """Queries [q0, q1) see keys [k0, k1); ``causal``: the last query sees all of them, each one before it one fewer."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False


@dataclass(frozen=True)
class Mask:
    """Who sees whom. Full by default; what is given here restricts it, but for ``blocks``.

    ``window`` w: i-j < w when causal, |i-j| < w otherwise. ``chunk`` c: i and j lie in the same run of c tokens.
    ``documents``: cu_seqlens (0, .., N) of documents that do not see each other. ``blocks``: runs (start, stop) of
    tokens that see each other whatever window, chunk and causal say, in the order of their tokens: an image in a text,
    or the prefix of a prefix-LM. ``steps``: the staircase itself, straight piece by piece; see ``from_slices``.

    >>> Mask(causal=True, blocks=((0, 3),)).visible(1, end=8)       # a prefix of three: its tokens see all of it
    (0, 3)
    >>> Mask(causal=True, chunk=4).visible(6, end=8)
    (4, 7)
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None
    chunk: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    steps: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 (1 is the token itself alone)")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")
        if self.documents is not None:
            ends = self.documents
            if not all(isinstance(end, int) for end in ends):
                raise ValueError(f"documents must be whole numbers in one dimension, got {ends[:8]}")
            if len(ends) < 2 or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
                shown = ", ".join(map(str, ends[:8])) + (", ..." if len(ends) > 8 else "")
                raise ValueError(f"documents must be cu_seqlens: start at 0 and never fall; got ({shown})")
            object.__setattr__(self, "documents", tuple(sorted(set(ends))))  # drop empty documents
        before = 0
        for start, stop in self.blocks:
            if not before <= start < stop:
                raise ValueError(f"blocks must be runs (start, stop) in order, got ({start}, {stop}) after {before}")
            before = stop
        if self.blocks and self.steps:
            raise ValueError("blocks inside a mask of slices: make them slices too")

    @classmethod
    def from_slices(cls, slices: Iterable[Slice | tuple[int, ...]]) -> Mask:
        """The mask of all pairs that some slice (q0, q1, k0, k1) or (q0, q1, k0, k1, causal) covers.

        ``ValueError`` names the first query whose keys are not one interval, or whose interval begins or ends before
        that of an earlier query. Queries without a slice see nothing.

        >>> Mask.from_slices([(0, 2, 0, 2), (2, 6, 0, 6, True)]).steps      # a prefix of two, then causal
        (Segment(q0=0, q1=2, low=0, dlow=0, high=2, dhigh=0), Segment(q0=2, q1=6, low=0, dlow=0, high=3, dhigh=1))
        >>> Mask.from_slices([(0, 4, 0, 4), (2, 4, 6, 8)])
        Traceback (most recent call last):
        ValueError: query 2 sees keys [0, 4) and [6, 8), which are not one interval
        """
        return cls(steps=_stairs([Slice(*each) for each in slices]))

    def check_length(self, length: int) -> None:
        if self.documents is not None and self.documents[-1] != length:
            raise ValueError(f"documents end at {self.documents[-1]}, but the sequence has {length} tokens")
        if self.blocks and self.blocks[-1][1] > length:
            raise ValueError(f"blocks end at {self.blocks[-1][1]}, but the sequence has {length} tokens")
        if self.steps:
            end = max(self.steps[-1].q1, max(s.high + s.dhigh * (s.q1 - s.q0 - 1) for s in self.steps))
            if end > length:
                raise ValueError(f"the mask's slices end at {end}, but the sequence has {length} tokens")

    def visible(self, position: int, end: int) -> tuple[int, int]:
        """The interval of keys that the query at ``position`` sees in a sequence of ``end`` tokens."""
        low, high = self._on_stairs(position) if self.steps else (0, end)
        if self.window is not None:
            low, high = max(low, position - self.window + 1), min(high, position + self.window)
        if self.chunk is not None:
            start = position // self.chunk * self.chunk
            low, high = max(low, start), min(high, start + self.chunk)
        if self.causal:
            high = min(high, position + 1)
        if self.blocks:
            start, stop = self.blocks[max(bisect_right(self.blocks, position, key=lambda b: b[0]) - 1, 0)]
            if start <= position < stop:
                low, high = min(low, start), max(high, stop)
        if self.documents is not None:
            index = bisect_right(self.documents, position)
            low, high = max(low, self.documents[index - 1]), min(high, self.documents[index])
        return low, max(low, high)

    def _on_stairs(self, position: int) -> tuple[int, int]:
        index = bisect_right(self.steps, position, key=lambda s: s.q0) - 1
        s = self.steps[max(index, 0)]
        t = min(max(position - s.q0, 0), s.q1 - s.q0)
        low, high = s.low + t * s.dlow, s.high + t * s.dhigh
        return (low, high) if s.q0 <= position < s.q1 else (low, low)

    def bends(self, start: int, stop: int, edges: Iterable[int], end: int) -> set[int]:
        """Where, between two queries, an end of the interval may change its slope as seen by keys that begin or stop at
        ``edges``: where it meets one of them, or an end of a document, chunk or block."""
        window = self.window or 0
        anchors = {0, end, *edges}
        if self.documents is not None:
            first = max(bisect_left(self.documents, start - window) - 1, 0)
            anchors.update(self.documents[first : bisect_right(self.documents, stop + window) + 1])
        if self.chunk is not None:
            first = max((start - window) // self.chunk, 0)
            anchors.update(range(first * self.chunk, stop + window + self.chunk + 1, self.chunk))
        if self.blocks:
            first = max(bisect_left(self.blocks, (start - window, 0)) - 1, 0)
            for block in self.blocks[first : bisect_right(self.blocks, (stop + window, 0)) + 1]:
                anchors.update(block)
        first = max(bisect_right(self.steps, start, key=lambda s: s.q0) - 1, 0)
        steps = self.steps[first : bisect_right(self.steps, stop, key=lambda s: s.q0)]
        anchors.update(at for s in steps for at in (s.low, s.high))
        cuts = {anchor + shift for anchor in anchors for shift in (0, -1)}
        if self.window is not None:
            cuts |= {anchor + shift for anchor in anchors for shift in (window - 1, -window)}
        for s in steps:
            cuts |= {s.q0, s.q1}
            cuts |= {
                s.q0 + anchor - at for at, slope in ((s.low, s.dlow), (s.high, s.dhigh)) if slope for anchor in anchors
            }
        return {cut for cut in cuts if start < cut < stop}

    def __str__(self) -> str:
        parts = ["causal" if self.causal else f"{len(self.steps)} steps" if self.steps else "full"]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}")
        if self.documents is not None:
            parts.append(f"{len(self.documents) - 1} documents")
        if self.blocks:
            parts.append(f"{len(self.blocks)} blocks")
        return ", ".join(parts)


def _stairs(slices: list[Slice]) -> tuple[Segment, ...]:
    """The union of slices as straight pieces of one staircase."""
    for s in slices:
        if not (0 <= s.q0 < s.q1 and 0 <= s.k0 < s.k1 and (not s.causal or s.k1 - s.k0 >= s.q1 - s.q0)):
            raise ValueError(f"slice {tuple(s)} must be (q0, q1, k0, k1), not empty; a causal one has a key a query")
    cuts = sorted({edge for s in slices for edge in (s.q0, s.q1)})
    steps: list[Segment] = []
    for q0, q1 in itertools.pairwise(cuts):
        here = sorted((s for s in slices if s.q0 <= q0 and q1 <= s.q1), key=lambda s: s.k0)
        if not here:
            continue
        level = max((s.k1 for s in here if not s.causal), default=0)
        slope = max((s.k1 - s.q1 + 1 for s in here if s.causal), default=-1 - max(cuts))  # high is query + slope
        crossing = min(max(level - slope, q0), q1)  # from there on the causal ones reach further
        low = here[0].k0
        for start, stop, rises in ((q0, crossing, 0), (crossing, q1, 1)):
            if start == stop:
                continue
            for query in (start, stop - 1):  # holes are largest at one of the two: ends are straight in between
                _check_one_interval(here, query)
            steps.append(Segment(start, stop, low, 0, start + slope if rises else level, rises))
    for a, b in itertools.pairwise(steps):
        before = a.low, a.high + a.dhigh * (a.q1 - a.q0 - 1)
        if b.low < before[0] or b.high < before[1]:
            raise ValueError(
                f"query {b.q0} sees keys [{b.low}, {b.high}), but query {a.q1 - 1} sees [{before[0]}, {before[1]}): "
                "neither end may fall"
            )
    return tuple(steps)


def _check_one_interval(slices: list[Slice], query: int) -> None:
    end = slices[0].k0
    for s in slices:
        if s.k0 > end:
            raise ValueError(
                f"query {query} sees keys [{slices[0].k0}, {end}) and [{s.k0}, {s.k1}), which are not one interval"
            )
        end = max(end, s.k1 - (s.q1 - 1 - query) if s.causal else s.k1)


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

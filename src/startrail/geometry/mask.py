"""Mask: which keys each query sees.

Every mask gives the query at position p one interval of visible keys [low(p), high(p)), or none. From one such interval
to the next neither end ever decreases, so each end is a staircase. `tiles` cuts blocks of such a mask into rectangles
that attention kernels can compute.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """Rows [q0, q1) that see keys [low + t*dlow, high + t*dhigh), t = row - q0."""

    q0: int
    q1: int
    low: int
    dlow: int
    high: int
    dhigh: int

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def last_high(self) -> int:
        """The end of the last row's interval."""
        return self.high + self.dhigh * (self.rows - 1)


class Slice(NamedTuple):
    """Queries [q0, q1) see keys [k0, k1); ``causal``: the last query sees all of them, each earlier one one fewer."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees: all by default. Every field restricts that, except ``blocks``, which adds to it.

    ``window`` w: i-j < w when causal, |i-j| < w otherwise. ``chunk`` c: i and j lie in the same run of c tokens.
    ``documents``: cu_seqlens (0, .., N) of documents that do not see each other. ``blocks``: sorted runs (start, stop)
    of tokens that see each other regardless of window, chunk and causal, such as an image in a text or the prefix of a
    prefix-LM. ``steps``: the staircase itself, as linear segments; see ``from_slices``.

    >>> Mask(causal=True, blocks=((0, 3),)).visible(1, end=8)       # the tokens of a prefix of three see all of it
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
            raise ValueError(f"window={self.window} must be at least 1 (with 1, each token sees only itself)")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")
        if self.documents is not None:
            ends = self.documents
            if not all(isinstance(end, int) for end in ends):
                raise ValueError(f"documents must be whole numbers in one dimension, got {ends[:8]}")
            if len(ends) < 2 or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
                shown = ", ".join(map(str, ends[:8])) + (", ..." if len(ends) > 8 else "")
                raise ValueError(f"documents must be cu_seqlens: start at 0 and never decrease; got ({shown})")
            object.__setattr__(self, "documents", tuple(sorted(set(ends))))  # drop empty documents
        before = 0
        for start, stop in self.blocks:
            if not before <= start < stop:
                raise ValueError(f"blocks must be runs (start, stop) in order, got ({start}, {stop}) after {before}")
            before = stop
        if self.blocks and self.steps:
            raise ValueError("pass either blocks= or slices, not both: add each block to the slices")

    @classmethod
    def from_slices(cls, slices: Iterable[Slice | tuple[int, ...]]) -> Mask:
        """The mask of all pairs that some slice (q0, q1, k0, k1) or (q0, q1, k0, k1, causal) covers.

        Queries without a slice see nothing. Raises ``ValueError`` for the first query whose keys are not one interval,
        or whose interval starts or ends before that of an earlier query.

        >>> Mask.from_slices([(0, 2, 0, 2), (2, 6, 0, 6, True)]).steps      # a prefix of two, then causal
        (Segment(q0=0, q1=2, low=0, dlow=0, high=2, dhigh=0), Segment(q0=2, q1=6, low=0, dlow=0, high=3, dhigh=1))
        >>> Mask.from_slices([(0, 4, 0, 4), (2, 4, 6, 8)])
        Traceback (most recent call last):
        ValueError: query 2 sees keys [0, 4) and [6, 8), which are not one interval
        """
        return cls(steps=_steps_of([Slice(*each) for each in slices]))

    def check_length(self, length: int) -> None:
        if self.documents is not None and self.documents[-1] != length:
            raise ValueError(f"documents end at {self.documents[-1]}, but the sequence has {length} tokens")
        if self.blocks and self.blocks[-1][1] > length:
            raise ValueError(f"blocks end at {self.blocks[-1][1]}, but the sequence has {length} tokens")
        if self.steps:
            end = max(self.steps[-1].q1, *(s.last_high for s in self.steps))
            if end > length:
                raise ValueError(f"the mask's slices end at {end}, but the sequence has {length} tokens")

    def visible(self, position: int, end: int) -> tuple[int, int]:
        """The interval of keys that the query at ``position`` sees in a sequence of ``end`` tokens."""
        low, high = self._visible_in_steps(position) if self.steps else (0, end)
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

    def _visible_in_steps(self, position: int) -> tuple[int, int]:
        s = self.steps[max(bisect_right(self.steps, position, key=lambda s: s.q0) - 1, 0)]
        t = min(max(position - s.q0, 0), s.rows)
        low, high = s.low + t * s.dlow, s.high + t * s.dhigh
        return (low, high) if s.q0 <= position < s.q1 else (low, low)

    def rows_with_keys(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs (start, stop) of queries in [start, stop) that have an interval. Within each neither end decreases.

        >>> list(Mask.from_slices([(0, 2, 0, 2), (2, 3, 0, 4), (5, 9, 0, 6)]).rows_with_keys(1, 8))
        [(1, 3), (5, 8)]
        """
        if not self.steps:
            yield start, stop
            return
        first = max(bisect_right(self.steps, start, key=lambda s: s.q0) - 1, 0)
        at = until = start
        for s in self.steps[first : bisect_left(self.steps, stop, key=lambda s: s.q0)]:
            if s.q0 > until:
                if at < until:
                    yield at, until
                at = s.q0
            until = min(max(s.q1, at), stop)
        if at < until:
            yield at, until

    def breakpoints(self, start: int, stop: int, edges: Iterable[int], end: int) -> set[int]:
        """Queries in (start, stop) at which an end of the visible interval may change its slope: where it reaches one
        of ``edges`` (the ends of the runs of keys) or an end of a document, chunk or block."""
        window = min(self.window or 0, end + 1)  # a wider one reaches beyond the sequence from everywhere
        anchors = {0, end, *edges}
        if self.documents is not None:
            first = max(bisect_left(self.documents, start - window) - 1, 0)
            anchors.update(self.documents[first : bisect_right(self.documents, stop + window) + 1])
        if self.chunk is not None:
            first = max((start - window) // self.chunk, 0)
            anchors.update(range(first * self.chunk, min(stop + window, end) + self.chunk + 1, self.chunk))
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
        sizes = {"window": self.window, "chunk": self.chunk}
        parts += [f"{name} {size}" for name, size in sizes.items() if size is not None]
        if self.documents is not None:
            parts.append(f"{len(self.documents) - 1} documents")
        if self.blocks:
            parts.append(f"{len(self.blocks)} blocks")
        return ", ".join(parts)


def _steps_of(slices: list[Slice]) -> tuple[Segment, ...]:
    """The union of slices as linear segments of one staircase."""
    for s in slices:
        if not (0 <= s.q0 < s.q1 and 0 <= s.k0 < s.k1 and (not s.causal or s.k1 - s.k0 >= s.q1 - s.q0)):
            raise ValueError(f"slice {tuple(s)} must be (q0, q1, k0, k1), not empty; causal needs k1 - k0 >= q1 - q0")
    cuts = sorted({edge for s in slices for edge in (s.q0, s.q1)})
    steps: list[Segment] = []
    for q0, q1 in itertools.pairwise(cuts):
        here = sorted((s for s in slices if s.q0 <= q0 and q1 <= s.q1), key=lambda s: s.k0)
        if not here:
            continue
        level = max((s.k1 for s in here if not s.causal), default=0)
        slope = max((s.k1 - s.q1 + 1 for s in here if s.causal), default=-1 - max(cuts))  # high is query + slope
        crossing = min(max(level - slope, q0), q1)  # from here on causal slices reach further
        low = here[0].k0
        for start, stop, rises in ((q0, crossing, 0), (crossing, q1, 1)):
            if start == stop:
                continue
            for query in (start, stop - 1):  # ends are linear in between, so gaps are widest here
                _check_one_interval(here, query)
            steps.append(Segment(start, stop, low, 0, start + slope if rises else level, rises))
    for a, b in itertools.pairwise(steps):
        if b.low < a.low or b.high < a.last_high:
            raise ValueError(
                f"query {b.q0} sees keys [{b.low}, {b.high}), but query {a.q1 - 1} sees [{a.low}, {a.last_high}): "
                "neither end may decrease"
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

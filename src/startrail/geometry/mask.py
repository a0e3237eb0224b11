"""Mask: which keys each query sees.

Every mask gives the query at position p one interval of visible keys [low(p), high(p)), or none. From one such interval
to the next neither end ever decreases, so each end is a staircase. `tiles` cuts blocks of such a mask into rectangles
that attention kernels can compute. Any other set of pairs, given as slices, is the sum of a few such masks:
``Mask.staircases``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

MAX_STAIRCASES = 64  # of one mask, which are computed one after the other


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
    def last_low(self) -> int:
        """The start of the last row's interval."""
        return self.low + self.dlow * (self.rows - 1)

    @property
    def last_high(self) -> int:
        """The end of the last row's interval."""
        return self.high + self.dhigh * (self.rows - 1)

    def continues(self, before: Segment) -> bool:
        """True if a staircase with the rows of ``before`` can go on with these."""
        return before.q1 <= self.q0 and before.last_low <= self.low and before.last_high <= self.high

    def extended(self, b: Segment) -> Segment | None:
        """Both as one segment if ``b`` continues this one on the same line, else None. A single row fits either
        slope."""
        dlow, dhigh = (self.dlow, self.dhigh) if self.rows > 1 else (b.low - self.low, b.high - self.high)
        if self.q1 != b.q0 or not {dlow, dhigh} <= {0, 1} or (b.rows > 1 and (b.dlow, b.dhigh) != (dlow, dhigh)):
            return None
        if (b.low, b.high) != (self.low + self.rows * dlow, self.high + self.rows * dhigh):
            return None
        return Segment(self.q0, b.q1, self.low, dlow, self.high, dhigh)


class Slice(NamedTuple):
    """Queries [q0, q1) see keys [k0, k1). ``causal``: the last query sees them up to the end, each earlier one one key
    fewer. ``inverse``: the first query sees them from the start, each later one one key fewer. With both, all queries
    see a window of the same width."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    inverse: bool = False


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees: all by default. Every field restricts that, except ``blocks``, which adds to it.

    ``window`` w: i-j < w when causal, |i-j| < w otherwise. ``chunk`` c: i and j lie in the same run of c tokens.
    ``documents``: cu_seqlens (0, .., N) of documents that do not see each other. ``blocks``: sorted runs (start, stop)
    of tokens that see each other regardless of window, chunk and causal, such as an image in a text or the prefix of a
    prefix-LM. ``steps``: the staircase itself, as linear segments, or several of them one after the other; see
    ``from_slices``.

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
        """The mask of all pairs that some slice (q0, q1, k0, k1, causal=False, inverse=False) covers.

        Queries without a slice see nothing. Raises ``ValueError`` if that takes more than ``MAX_STAIRCASES``
        staircases.

        >>> Mask.from_slices([(0, 2, 0, 2), (2, 6, 0, 6, True)]).steps      # a prefix of two, then causal
        (Segment(q0=0, q1=2, low=0, dlow=0, high=2, dhigh=0), Segment(q0=2, q1=6, low=0, dlow=0, high=3, dhigh=1))
        >>> sinks, window = (0, 9, 0, 2), [(0, 3, 0, 3, True), (3, 9, 1, 9, True, True)]
        >>> for each in Mask.from_slices([sinks, *window]).staircases: print(each.visible(8, end=9))
        (6, 9)
        (0, 2)
        """
        return cls(steps=_steps_of([Slice(*each) for each in slices]))

    @classmethod
    def tree(cls, parents: Sequence[int], lengths: Sequence[int]) -> Mask:
        """Causal attention in a prefix tree: every token sees those before it in its node, and all of its node's
        ancestors. ``parents`` are the numbers of the nodes' parents, -1 for a root. Nodes follow each other depth
        first: each comes after its parent and the whole subtrees of its earlier siblings.

        >>> mask = Mask.tree(parents=[-1, 0, 0], lengths=[3, 2, 2])     # a prompt of three tokens and two answers
        >>> [each.visible(6, end=7) for each in mask.staircases]        # the last token sees the prompt and its answer
        [(5, 7), (0, 3)]
        """
        nodes = _tree_nodes(parents, lengths)
        own = [(node.start, node.stop, node.start, node.stop, True) for node in nodes]
        below = [(node.stop, node.until, node.start, node.stop) for node in nodes if node.until > node.stop]
        return cls.from_slices([*own, *below])

    @staticmethod
    def tree_positions(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The position of each token of a prefix tree, for rotary embeddings: how many tokens come before it on the way
        from its root. Arguments are those of ``tree``.

        >>> Mask.tree_positions(parents=[-1, 0, 0], lengths=[3, 2, 2])
        [0, 1, 2, 3, 4, 3, 4]
        """
        return [node.depth + i for node in _tree_nodes(parents, lengths) for i in range(node.stop - node.start)]

    @property
    def hides_rows(self) -> bool:
        """True if some queries may see nothing; else each sees itself."""
        return bool(self.steps)

    @property
    def staircases(self) -> tuple[Mask, ...]:
        """Masks of one staircase each that show every pair of this one exactly once."""
        return self._several or (self,)

    @cached_property
    def _several(self) -> tuple[Mask, ...]:
        """The staircases if there are several, else nothing."""
        ends = [i for i, (a, b) in enumerate(itertools.pairwise(self.steps), start=1) if not b.continues(a)]
        runs = itertools.pairwise([0, *ends, len(self.steps)]) if ends else ()
        return tuple(replace(self, steps=self.steps[start:stop]) for start, stop in runs)

    def check_length(self, length: int) -> None:
        if self.documents is not None and self.documents[-1] != length:
            raise ValueError(f"documents end at {self.documents[-1]}, but the sequence has {length} tokens")
        if self.blocks and self.blocks[-1][1] > length:
            raise ValueError(f"blocks end at {self.blocks[-1][1]}, but the sequence has {length} tokens")
        if self.steps:
            end = max(max(s.q1, s.last_high) for s in self.steps)
            if end > length:
                raise ValueError(f"the mask's slices end at {end}, but the sequence has {length} tokens")

    def visible(self, position: int, end: int) -> tuple[int, int]:
        """The interval of keys that the query at ``position`` sees in a sequence of ``end`` tokens. Only for a mask of
        one staircase."""
        if self._several:
            raise ValueError(f"{self}: a query may see several runs of keys; ask each of its staircases")
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
        if not self.hides_rows:
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
        passed = sorted(anchors) if steps else []
        for s in steps:
            cuts |= {s.q0, s.q1}
            for at, last in ((s.low, s.last_low), (s.high, s.last_high)):
                if at < last:
                    cuts |= {s.q0 + edge - at for edge in passed[bisect_left(passed, at) : bisect_right(passed, last)]}
        return {cut for cut in cuts if start < cut < stop}

    def __str__(self) -> str:
        stairs = f" in {len(self._several)} staircases" if self._several else ""
        parts = ["causal" if self.causal else f"{len(self.steps)} steps{stairs}" if self.steps else "full"]
        sizes = {"window": self.window, "chunk": self.chunk}
        parts += [f"{name} {size}" for name, size in sizes.items() if size is not None]
        if self.documents is not None:
            parts.append(f"{len(self.documents) - 1} documents")
        if self.blocks:
            parts.append(f"{len(self.blocks)} blocks")
        return ", ".join(parts)


class _Node(NamedTuple):
    """The tokens [start, stop) of a tree's node. Those of its descendants follow, up to ``until``. ``depth`` tokens are
    above it."""

    start: int
    stop: int
    until: int
    depth: int


def _tree_nodes(parents: Sequence[int], lengths: Sequence[int]) -> list[_Node]:
    if len(parents) != len(lengths) or not parents:
        raise ValueError(f"a tree needs one parent and one length per node, got {len(parents)} and {len(lengths)}")
    nodes: list[_Node] = []
    path: list[int] = []  # from the root to the last node
    start = 0
    for number, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if length < 1:
            raise ValueError(f"node {number} of the tree has {length} tokens; it needs at least 1")
        if parent != -1 and parent not in path:
            raise ValueError(
                f"node {number} of the tree comes after node {number - 1}, but its parent {parent} is neither that "
                "node nor one above it: order nodes depth first, with -1 as the parent of roots"
            )
        while path and path[-1] != parent:
            closed = path.pop()
            nodes[closed] = nodes[closed]._replace(until=start)
        above = nodes[parent] if path else None
        depth = above.depth + above.stop - above.start if above else 0
        nodes.append(_Node(start, start + length, 0, depth))
        path.append(number)
        start += length
    for number in path:
        nodes[number] = nodes[number]._replace(until=start)
    return nodes


def _steps_of(slices: list[Slice]) -> tuple[Segment, ...]:
    """The union of slices as staircases over disjoint pairs, one after the other.

    Rows are taken in bands in which the runs of visible keys keep their order. Each run goes on with the staircase
    whose interval is the last that it may follow, or begins a new one.
    """
    if not slices:
        raise ValueError("a mask needs at least one slice")
    waiting = sorted(map(_segment_of, slices), reverse=True)
    stairs: list[list[Segment]] = []
    here: list[Segment] = []  # the slices of a band
    for q0, q1 in itertools.pairwise(sorted({edge for s in waiting for edge in (s.q0, s.q1)})):
        here = [s for s in here if s.q1 > q0]
        while waiting and waiting[-1].q0 == q0:
            here.append(waiting.pop())
        for start, stop in itertools.pairwise(_crossings(here, q0, q1)):
            for seen in _union(here, start, stop):
                _add_to_staircase(stairs, seen)
    return tuple(s for stair in stairs for s in stair)


def _segment_of(s: Slice) -> Segment:
    """The queries of a slice that see something."""
    rows, keys = s.q1 - s.q0, s.k1 - s.k0
    if not (0 <= s.q0 < s.q1 and 0 <= s.k0 < s.k1 and (keys >= rows or not (s.causal and s.inverse))):
        raise ValueError(
            f"slice {tuple(s)} must be (q0, q1, k0, k1), not empty; causal and inverse together need k1 - k0 >= q1 - q0"
        )
    if s.causal and not s.inverse:
        rows = min(rows, keys)  # the last ones
    q0 = s.q1 - rows
    q1 = min(s.q1, q0 + keys) if s.inverse else s.q1
    return Segment(q0, q1, s.k0, int(s.inverse), s.k1 - (rows - 1 if s.causal else 0), int(s.causal))


def _crossings(segments: list[Segment], q0: int, q1: int) -> list[int]:
    """The rows of [q0, q1) from which the ends of some intervals are in another order, with q0 and q1."""
    ends = {(end, slope, s.q0) for s in segments for end, slope in ((s.low, s.dlow), (s.high, s.dhigh))}
    level = {end for end, slope, _ in ends if not slope}
    rising = {end - row for end, slope, row in ends if slope}
    rows = {end - offset + shift for end in level for offset in rising for shift in (0, 1)}
    return sorted({q0, q1} | {row for row in rows if q0 < row < q1})


def _union(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """The runs of keys that rows [start, stop) see, in order. No ends cross in these rows."""
    intervals = sorted(
        (s.low + s.dlow * (start - s.q0), s.dlow, s.high + s.dhigh * (start - s.q0), s.dhigh) for s in segments
    )
    runs: list[Segment] = []
    for low, dlow, high, dhigh in intervals:
        if not runs or low > runs[-1].high:
            runs.append(Segment(start, stop, low, dlow, high, dhigh))
        elif high > runs[-1].high:
            runs[-1] = runs[-1]._replace(high=high, dhigh=dhigh)
    return runs


def _add_to_staircase(stairs: list[list[Segment]], seen: Segment) -> None:
    fitting = [stair for stair in stairs if seen.continues(stair[-1])]
    if fitting:
        stair = max(fitting, key=lambda stair: (stair[-1].last_high, stair[-1].last_low))
        if joined := stair[-1].extended(seen):
            stair[-1] = joined
        else:
            stair.append(seen)
        return
    if len(stairs) == MAX_STAIRCASES:
        raise ValueError(
            f"these slices need more than {MAX_STAIRCASES} staircases, which is the limit: query {seen.q0} begins "
            f"number {MAX_STAIRCASES + 1}. Within a staircase, neither end of the visible keys ever decreases from one "
            "query to the next; use fewer or wider slices"
        )
    stairs.append([seen])

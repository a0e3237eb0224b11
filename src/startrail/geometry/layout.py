"""Layout: which tokens of the sequence every rank owns. A table of chunks; nobody else computes who owns a token.

The sequence is padded to a whole number of chunks. ``zigzag`` cuts 2P chunks and gives the rank at slot i the chunks i
and 2P-1-i, so that under a causal mask every rank has the same work in every block; ``contiguous`` cuts P chunks. A
rank's slot is its place in the order of tokens (``Plan.slots``): ranks that share a piece by heads stand side by side
in it, so that their tokens together are as few runs as those of one rank.

>>> layout = zigzag(slots=(0, 1), length=7)
>>> layout.chunks, layout.chunk, layout.local
(((0, 3), (1, 2)), 2, 4)
>>> layout.runs(0)            # rank 0 owns 0, 1 and 6 (7 would be padding); a run is (first position, count)
((0, 2), (6, 1))
>>> layout.runs(0, 1)         # both together
((0, 7),)
>>> layout.order()            # the positions in the order in which the ranks hold them, padding included
[0, 1, 6, 7, 2, 3, 4, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """``chunks[rank]`` are the numbers of a rank's chunks of ``chunk`` tokens, in the order in which it holds them."""

    length: int
    chunk: int
    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.length < 1 or not self.chunks:
            raise ValueError(f"layout needs length >= 1 and a rank, got {self.length} on {len(self.chunks)} ranks")

    @property
    def world(self) -> int:
        return len(self.chunks)

    @property
    def local(self) -> int:
        """Tokens that every rank holds, padding included."""
        return self.chunk * len(self.chunks[0])

    def runs(self, *ranks: int) -> Runs:
        """Runs of real tokens, by position, that these ranks hold together; neighbouring chunks are one run."""
        runs: list[tuple[int, int]] = []
        for chunk in sorted(chunk for rank in ranks for chunk in self.chunks[rank]):
            start, count = self.run(chunk)
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            elif count:
                runs.append((start, count))
        return tuple(runs)

    def run(self, chunk: int) -> tuple[int, int]:
        """First position and number of real tokens of a chunk; an empty one starts at the end."""
        start = min(chunk * self.chunk, self.length)
        return start, min(self.chunk, self.length - start)

    def places(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Where the chunks of each of these ranks stand among all of theirs, by position.

        >>> zigzag(range(4), length=8).places([0, 1])         # they hold 0, 7 and 1, 6: sorted 0 1 6 7
        ((0, 3), (1, 2))
        """
        chunks = [self.chunks[rank] for rank in ranks]
        order = {chunk: place for place, chunk in enumerate(sorted(c for own in chunks for c in own))}
        return tuple(tuple(order[chunk] for chunk in own) for own in chunks)

    def order(self) -> list[int]:
        """Position of every token of the padded sequence, rank after rank."""
        return [chunk * self.chunk + i for rank in self.chunks for chunk in rank for i in range(self.chunk)]

    def positions(self, rank: int) -> list[int]:
        """Global positions of a rank's tokens; padding repeats the last position, so that a table of ``length``
        entries always suffices."""
        last = self.length - 1
        return [min(chunk * self.chunk + i, last) for chunk in self.chunks[rank] for i in range(self.chunk)]


def zigzag(slots: Sequence[int], length: int) -> Layout:
    """Chunks i and 2P-1-i for slot i. On one rank it is the sequence itself: nothing to balance, so nothing to pad."""
    world = len(slots)
    if world == 1:
        return contiguous(slots, length)
    return Layout(length, -(-length // (2 * world)), tuple((slot, 2 * world - 1 - slot) for slot in slots))


def contiguous(slots: Sequence[int], length: int) -> Layout:
    return Layout(length, -(-length // max(len(slots), 1)), tuple((slot,) for slot in slots))


LAYOUTS: dict[str, Callable[[Sequence[int], int], Layout]] = {"zigzag": zigzag, "contiguous": contiguous}


def check_layout(name: str) -> None:
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUTS)}")

"""Layout: which tokens of the sequence each rank owns, as a table of chunks. No other module computes ownership.

The sequence is padded to a whole number of chunks. ``zigzag`` cuts 2P chunks and gives slot i the chunks i and 2P-1-i,
so that under a causal mask all ranks have equal work in every block; ``contiguous`` cuts P chunks. A rank's slot is its
position in token order (``Plan.slots``). Ranks that split a shard by heads have adjacent slots, so that their tokens
together form as few runs as those of one rank.

>>> layout = zigzag(slots=(0, 1), length=7)
>>> layout.chunks, layout.chunk, layout.local
(((0, 3), (1, 2)), 2, 4)
>>> layout.runs(0)            # rank 0 owns 0, 1 and 6 (7 is padding); a run is (first position, count)
((0, 2), (6, 1))
>>> layout.runs(0, 1)         # both ranks together
((0, 7),)
>>> layout.order()            # positions in the order in which the ranks hold them, with padding
[0, 1, 6, 7, 2, 3, 4, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """``chunks[rank]`` lists the chunks that a rank holds, in its local order; each has ``chunk`` tokens."""

    length: int
    chunk: int
    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.length < 1 or not self.chunks:
            raise ValueError(
                f"layout needs length >= 1 and at least one rank, got {self.length} on {len(self.chunks)} ranks"
            )

    @property
    def world(self) -> int:
        return len(self.chunks)

    @property
    def local(self) -> int:
        """Tokens per rank, including padding."""
        return self.chunk * len(self.chunks[0])

    def runs(self, *ranks: int) -> Runs:
        """Runs of real tokens that these ranks hold together, by position; adjacent chunks merge into one run."""
        runs: list[tuple[int, int]] = []
        for chunk in sorted(chunk for rank in ranks for chunk in self.chunks[rank]):
            start, count = self.run(chunk)
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            elif count:
                runs.append((start, count))
        return tuple(runs)

    def run(self, chunk: int) -> tuple[int, int]:
        """First position and number of real tokens of a chunk. A chunk of padding starts at ``length``."""
        start = min(chunk * self.chunk, self.length)
        return start, min(self.chunk, self.length - start)

    def places(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each of these ranks, the index of its chunks among the sorted chunks of all of them.

        >>> zigzag(range(4), length=8).places([0, 1])         # they hold 0, 7 and 1, 6; sorted: 0 1 6 7
        ((0, 3), (1, 2))
        """
        chunks = [self.chunks[rank] for rank in ranks]
        order = {chunk: place for place, chunk in enumerate(sorted(c for own in chunks for c in own))}
        return tuple(tuple(order[chunk] for chunk in own) for own in chunks)

    def order(self) -> list[int]:
        """Position of every token of the padded sequence, rank by rank."""
        return [chunk * self.chunk + i for rank in self.chunks for chunk in rank for i in range(self.chunk)]

    def positions(self, rank: int) -> list[int]:
        """Global positions of a rank's tokens. Padding repeats the last position, which stays valid as an index."""
        last = self.length - 1
        return [min(chunk * self.chunk + i, last) for chunk in self.chunks[rank] for i in range(self.chunk)]


def zigzag(slots: Sequence[int], length: int) -> Layout:
    """Chunks i and 2P-1-i for slot i. One rank has nothing to balance, so its sequence is not padded."""
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

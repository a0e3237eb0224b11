"""Layout: which tokens of the sequence each rank owns, as a table of runs. No other module computes ownership.

A run is (first position, count). A rank's runs all lie in *zones*: groups of ranks that share tokens. ``zigzag`` and
``contiguous`` make one zone of all ranks; `zones` makes several, so that short documents stay on few ranks. Within a
zone a rank's tokens are sorted by position and padded to the same number on every rank; positions beyond the sequence
are padding. A rank holds the tokens of its zones one zone after the other, the largest zone first.

``zigzag`` cuts 2P chunks and gives slot i the chunks i and 2P-1-i, so that under a causal mask all ranks have equal
work in every block; ``contiguous`` cuts P chunks. A rank's slot is its position in token order (``Plan.slots``). Ranks
that split a shard by heads have adjacent slots, so that their tokens together form as few runs as those of one rank.

>>> layout = zigzag(slots=(0, 1), length=7)
>>> layout.table, layout.local
((((0, 2), (6, 2)), ((2, 2), (4, 2))), 4)
>>> layout.runs(0)            # rank 0 owns 0, 1 and 6; 7 is padding
((0, 2), (6, 1))
>>> layout.runs(0, 1)         # both ranks together
((0, 7),)
>>> layout.positions(0)       # padding repeats the last position, which stays valid as an index
[0, 1, 6, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Zone:
    """Tokens that the ranks ``first``, ``first + 1``, ... share, and that no other rank sees. ``runs`` lists those of
    each rank, padding included. ``level`` is the number of the plan's levels that lie outside."""

    level: int
    first: int
    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        return len(self.runs)

    @cached_property
    def tokens(self) -> int:
        """Tokens per rank, padding included."""
        return sum(count for _, count in self.runs[0])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank, padding included."""
        return tuple(sum(count for _, count in runs) for runs in self.runs)

    def runs_of(self, members: Iterable[int], length: int) -> Runs:
        """Runs of real tokens that these members hold together, sorted by position; adjacent runs are merged."""
        return joined((run for member in members for run in self.runs[member]), length)

    def places(self, members: Sequence[int]) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """How to sort the tokens of several members by position: the size of the largest chunks that all their runs
        consist of, and for each member the index of its chunks among the sorted chunks of all of them.

        >>> zigzag(range(4), length=16).zones[0].places([0, 1])     # they hold 0, 1, 14, 15 and 2, 3, 12, 13
        (2, ((0, 3), (1, 2)))
        """
        chunk = gcd(*(count for member in members for _, count in self.runs[member]))
        chunks = [
            [at for start, count in self.runs[member] for at in range(start, start + count, chunk)]
            for member in members
        ]
        owned = sorted((at, index, i) for index, own in enumerate(chunks) for i, at in enumerate(own))
        places = [[0] * len(own) for own in chunks]
        for place, (_, index, i) in enumerate(owned):
            places[index][i] = place
        return chunk, tuple(map(tuple, places))


@dataclass(frozen=True)
class Layout:
    """``zones`` of one sequence of ``length`` tokens, the largest first. All ranks have equally many tokens."""

    length: int
    zones: tuple[Zone, ...]

    def __post_init__(self) -> None:
        if self.length < 1 or not self.zones or not self.zones[0].runs:
            ranks = self.zones[0].size if self.zones else 0
            raise ValueError(f"layout needs length >= 1 and at least one rank, got {self.length} on {ranks} ranks")

    @cached_property
    def world(self) -> int:
        return max(zone.first + zone.size for zone in self.zones)

    @cached_property
    def table(self) -> tuple[Runs, ...]:
        """The runs of every rank in the order in which it holds them, padding included."""
        table: list[list[tuple[int, int]]] = [[] for _ in range(self.world)]
        for zone in self.zones:
            for rank, runs in enumerate(zone.runs, zone.first):
                table[rank] += runs
        return tuple(map(tuple, table))

    @cached_property
    def local(self) -> int:
        """Tokens per rank, padding included."""
        return sum(count for _, count in self.table[0])

    def zones_of(self, rank: int) -> Iterator[tuple[Zone, int]]:
        """The zones of a rank, each with the local index at which its tokens begin."""
        start = 0
        for zone in self.zones:
            if zone.first <= rank < zone.first + zone.size:
                yield zone, start
                start += zone.tokens

    def runs(self, *ranks: int) -> Runs:
        """Runs of real tokens that these ranks hold together, sorted by position; adjacent runs are merged."""
        return joined((run for rank in ranks for run in self.table[rank]), self.length)

    def positions(self, rank: int) -> list[int]:
        """Global positions of a rank's tokens. Padding repeats the last position, which stays valid as an index."""
        last = self.length - 1
        return [min(at, last) for start, count in self.table[rank] for at in range(start, start + count)]


def joined(runs: Iterable[tuple[int, int]], length: int) -> Runs:
    """The part of ``runs`` before ``length``, sorted; adjacent runs are merged."""
    merged: list[tuple[int, int]] = []
    for start, count in sorted(runs):
        count = min(count, length - start)
        if count <= 0:
            continue
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((start, count))
    return tuple(merged)


def zigzag(slots: Sequence[int], length: int) -> Layout:
    """Chunks i and 2P-1-i for slot i. One rank has nothing to balance, so its sequence is not padded."""
    world = len(slots)
    if world == 1:
        return contiguous(slots, length)
    chunk = -(-length // max(2 * world, 1))
    pairs = ((slot * chunk, (2 * world - 1 - slot) * chunk) for slot in slots)
    return Layout(length, (Zone(0, 0, tuple(((first, chunk), (second, chunk)) for first, second in pairs)),))


def contiguous(slots: Sequence[int], length: int) -> Layout:
    chunk = -(-length // max(len(slots), 1))
    return Layout(length, (Zone(0, 0, tuple(((slot * chunk, chunk),) for slot in slots)),))


LAYOUTS: dict[str, Callable[[Sequence[int], int], Layout]] = {"zigzag": zigzag, "contiguous": contiguous}

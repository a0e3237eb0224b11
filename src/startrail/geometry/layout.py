"""Layout: which tokens of the sequence each rank owns, as a table of runs. No other module computes ownership.

A run is (first position, count). A rank's runs all lie in *zones*: groups of ranks that share tokens. ``zigzag`` and
``contiguous`` make one zone of all ranks; `zones` makes several, so that short documents stay on few ranks. Within a
zone a rank's tokens are sorted by position. A rank holds the tokens of its zones one zone after the other, the largest
zone first. Positions beyond the sequence are padding.

``zigzag`` cuts 2P chunks and gives slot i the chunks i and 2P-1-i, so that under a causal mask all ranks have equal
work in every block; ``contiguous`` cuts P chunks. A rank's slot is its position in token order (``Plan.slots``). Ranks
that split a shard by heads have adjacent slots, so that their tokens together form as few runs as those of one rank.

All ranks hold equally many tokens, for which some are padded, unless ``shares`` says otherwise: one positive number per
rank. Tokens are then cut in proportion. A rank whose share is less than a token may hold none.

>>> layout = zigzag(slots=(0, 1), length=7)
>>> layout.table, layout.counts
((((0, 2), (6, 2)), ((2, 2), (4, 2))), (4, 4))
>>> layout.runs(0)            # rank 0 owns 0, 1 and 6; 7 is padding
((0, 2), (6, 1))
>>> layout.runs(0, 1)         # both ranks together
((0, 7),)
>>> layout.positions(0)       # padding repeats the last position, which stays valid as an index
[0, 1, 6, 6]
>>> zigzag((0, 1), 9, shares=(2, 1)).table
(((0, 3), (6, 3)), ((3, 2), (5, 1)))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, isfinite

Runs = tuple[tuple[int, int], ...]

FULL_SHARE = 1 << 40  # the weight of the largest share, if shares differ


@dataclass(frozen=True)
class Zone:
    """Tokens that the ranks ``first``, ``first + 1``, ... share, and that no other rank sees. ``runs`` lists those of
    each rank, padding included. ``level`` is the number of the plan's levels that lie outside. ``fills``: every
    document is cut over all ranks of the zone; otherwise over some of them each, and a rank may hold none."""

    level: int
    first: int
    runs: tuple[Runs, ...]
    fills: bool = True

    @property
    def size(self) -> int:
        return len(self.runs)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each member, padding included."""
        return tuple(sum(count for _, count in runs) for runs in self.runs)

    @property
    def largest(self) -> int:
        """The most tokens that a member holds."""
        return max(self.counts)

    def runs_of(self, members: Iterable[int], length: int) -> Runs:
        """Runs of real tokens that these members hold together, sorted by position; adjacent runs are merged."""
        return joined((run for member in members for run in self.runs[member]), length)

    def places(self, members: Sequence[int]) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """How to sort the tokens of several members by position: the size of the largest chunks that all their runs
        consist of, and for each member the index of its chunks among the sorted chunks of all of them.

        >>> zigzag(range(4), length=16).zones[0].places([0, 1])     # they hold 0, 1, 14, 15 and 2, 3, 12, 13
        (2, ((0, 3), (1, 2)))
        """
        chunk = gcd(*(count for member in members for _, count in self.runs[member])) or 1
        places: list[list[int]] = [[] for _ in members]
        runs = sorted(
            (start, index, count) for index, member in enumerate(members) for start, count in self.runs[member]
        )
        place = 0
        for _, index, count in runs:
            places[index] += range(place, place + count // chunk)
            place += count // chunk
        return chunk, tuple(map(tuple, places))


@dataclass(frozen=True)
class Layout:
    """``zones`` of one sequence of ``length`` tokens, the largest first. Every rank is in at least one."""

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
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank, padding included."""
        return tuple(sum(count for _, count in runs) for runs in self.table)

    @property
    def largest(self) -> int:
        """The most tokens that a rank holds."""
        return max(self.counts)

    def zones_of(self, rank: int) -> Iterator[tuple[Zone, int]]:
        """The zones of a rank, each with the local index at which its tokens begin."""
        start = 0
        for zone in self.zones:
            if zone.first <= rank < zone.first + zone.size:
                yield zone, start
                start += zone.counts[rank - zone.first]

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


def cut_at_documents(runs: Iterable[tuple[int, int]], documents: Sequence[int]) -> Runs:
    """Runs of one document each (``documents`` are cu_seqlens), in the order of ``runs``; what lies beyond the sequence
    is cut off. Adjacent runs of a document are one.

    >>> cut_at_documents([(2, 2), (4, 5), (20, 3)], documents=(0, 3, 7, 8))
    ((2, 1), (3, 4), (7, 1), (8, 1), (20, 3))
    """
    cut: list[tuple[int, int]] = []
    for start, count in runs:
        stop = start + count
        while start < stop:
            number = bisect_right(documents, start)
            end = min(stop, documents[number]) if number < len(documents) else stop
            if cut and sum(cut[-1]) == start != documents[number - 1]:
                cut[-1] = cut[-1][0], end - cut[-1][0]
            else:
                cut.append((start, end - start))
            start = end
    return tuple(cut)


def weights_of(shares: Sequence[float] | None, world: int) -> tuple[int, ...]:
    """The shares of ``world`` ranks as whole numbers, so that all machines cut alike; all 1 if the shares are equal.

    >>> weights_of((0.5, 0.5), world=2), weights_of((1, 0.5), world=2) == (FULL_SHARE, FULL_SHARE // 2)
    ((1, 1), True)
    """
    if shares is None:
        return (1,) * world
    try:
        numbers = [float(share) for share in shares]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"shares must be numbers, one per rank; got {shares!r}") from None
    if len(numbers) != world:
        raise ValueError(f"got {len(numbers)} shares for {world} ranks: pass one positive number per rank")
    for rank, number in enumerate(numbers):
        if not (isfinite(number) and number > 0):
            raise ValueError(f"the share of rank {rank} is {number}, which is not a positive finite number")
    most = max(numbers)
    if min(numbers) == most:
        return (1,) * world
    return tuple(max(1, round(number / most * FULL_SHARE)) for number in numbers)


def zigzag_runs(
    documents: Iterable[tuple[int, int]], weights: Sequence[int]
) -> list[list[tuple[int, int]]]:  # fmt: skip
    """Cut each document (first position, count) over all slots: chunks i and 2S-1-i for slot i, in proportion to its
    weight. A token that cannot be divided goes to the slot that is owed most so far.

    >>> zigzag_runs([(0, 5), (5, 2)], weights=(1, 1, 2))
    [[(0, 1), (5, 1)], [(1, 1)], [(2, 2), (4, 1), (6, 1)]]
    """
    total, size = sum(weights), len(weights)
    runs: list[list[tuple[int, int]]] = [[] for _ in weights]
    held, dealt = [0] * size, 0
    for start, count in documents:
        sizes = [count * weight // total for weight in weights]
        dealt += count
        held = [before + more for before, more in zip(held, sizes, strict=True)]
        owed = [dealt * weight - total * own for weight, own in zip(weights, held, strict=True)]
        most_owed = sorted(range(size), key=lambda slot: -owed[slot])
        for slot in most_owed[: count - sum(sizes)]:
            sizes[slot] += 1
            held[slot] += 1
        chunks = [(slot, (sizes[slot] + 1) // 2) for slot in range(size)]
        chunks += [(slot, sizes[slot] // 2) for slot in reversed(range(size))]
        for slot, tokens in chunks:
            if tokens:
                runs[slot].append((start, tokens))
                start += tokens
    return runs


def zigzag(slots: Sequence[int], length: int, shares: Sequence[float] | None = None) -> Layout:
    """Chunks i and 2P-1-i for slot i. One rank has nothing to balance, so its sequence is not padded."""
    world, weights = len(slots), weights_of(shares, len(slots))
    if world == 1:
        return contiguous(slots, length)
    if len(set(weights)) > 1:
        by_slot = zigzag_runs([(0, length)], in_slot_order(weights, slots))
        return Layout(length, (Zone(0, 0, tuple(tuple(by_slot[slot]) for slot in slots)),))
    chunk = -(-length // max(2 * world, 1))
    pairs = ((slot * chunk, (2 * world - 1 - slot) * chunk) for slot in slots)
    return Layout(length, (Zone(0, 0, tuple(((first, chunk), (second, chunk)) for first, second in pairs)),))


def contiguous(slots: Sequence[int], length: int, shares: Sequence[float] | None = None) -> Layout:
    """One chunk per rank, in the order of slots."""
    weights = weights_of(shares, len(slots))
    if len(set(weights)) > 1:
        ends = [0, *(length * weight // sum(weights) for weight in accumulate(in_slot_order(weights, slots)))]
        runs = [((start, stop - start),) if start < stop else () for start, stop in pairwise(ends)]
        return Layout(length, (Zone(0, 0, tuple(runs[slot] for slot in slots)),))
    chunk = -(-length // max(len(slots), 1))
    return Layout(length, (Zone(0, 0, tuple(((slot * chunk, chunk),) for slot in slots)),))


def in_slot_order(weights: Sequence[int], slots: Sequence[int]) -> list[int]:
    """The weight of each slot, given the weight and the slot of each rank."""
    return [weight for _, weight in sorted(zip(slots, weights, strict=True))]


LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}

"""The coordinates of a rank: its digit at every level, its shard and its heads.

Ranks are numbered outermost level first. A level either splits *heads* or is part of the family's grid of shards. Ranks
that differ only in heads digits hold one *shard* together (after the exchange over heads), however far apart they are.
Ranks that differ only in the other digits compute the same *heads* of different shards.

>>> place = Place(rank=5, sizes=(2, 2, 2), by_heads=(True, False, True))      # for example u2/1x2/u2
>>> place.digits, place.head, place.shard
((1, 0, 1), 3, 0)
>>> place.rank_of(shard=1), place.head_rank(0)
(7, 0)
>>> [(place.lane_to(peer), peer) for peer in (0, 1, 4)]     # the outermost level at which they differ
[(0, 0), (0, 1), (2, 4)]
>>> place.lane_ranks(0), place.lane_ranks(1), place.lane_ranks(2)
((0, 1, 4, 5), (5, 7), (4, 5))

Tokens are ordered by (shard, head), not by rank: ranks that share a shard own adjacent chunks (``slot``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod


@dataclass(frozen=True)
class Place:
    """``sizes``: ranks at every level, outermost first; ``by_heads``: True for the levels that split heads."""

    rank: int
    sizes: tuple[int, ...]
    by_heads: tuple[bool, ...]

    @cached_property
    def digits(self) -> tuple[int, ...]:
        return to_digits(self.rank, self.sizes)

    @property
    def world(self) -> int:
        return prod(self.sizes)

    @cached_property
    def num_heads(self) -> int:
        """The number of ranks that the heads of a shard are split over."""
        return prod(self._heads[1])

    @cached_property
    def num_shards(self) -> int:
        return prod(self._shards[1])

    @cached_property
    def head(self) -> int:
        return from_digits(*self._heads)

    @cached_property
    def shard(self) -> int:
        return from_digits(*self._shards)

    @property
    def slot(self) -> int:
        """The position of this rank's chunk in the order of tokens."""
        return self.shard * self.num_heads + self.head

    @cached_property
    def shard_lanes(self) -> tuple[int, ...]:
        """The lanes of the shard levels, outermost first."""
        return tuple(lane for lane, heads in enumerate(self.by_heads) if not heads)

    @cached_property
    def head_lanes(self) -> tuple[int, ...]:
        return tuple(lane for lane, heads in enumerate(self.by_heads) if heads)

    @cached_property
    def all_to_all_lane(self) -> int | None:
        """The lane on which only the ranks of one shard exchange heads; None if they use several lanes."""
        lanes = [lane for lane in self.head_lanes if self.sizes[lane] > 1]
        return lanes[0] if len(lanes) == 1 else None

    def rank_of(self, shard: int) -> int:
        """The rank that holds ``shard`` for the same heads as this one."""
        if self.num_heads == 1:
            return shard
        return self._combine(self._heads[0], to_digits(shard, self._shards[1]))

    def head_rank(self, head: int) -> int:
        """The rank that computes heads number ``head`` of the same shard."""
        return self._combine(to_digits(head, self._heads[1]), self._shards[0])

    def shard_ranks(self, shard: int) -> tuple[int, ...]:
        """All ranks that hold ``shard`` together, by head."""
        digits = to_digits(shard, self._shards[1])
        return tuple(self._combine(to_digits(head, self._heads[1]), digits) for head in range(self.num_heads))

    def lane_to(self, peer: int) -> int:
        """The lane to a rank: the outermost level at which the two ranks differ."""
        pairs = zip(self.digits, to_digits(peer, self.sizes), strict=True)
        return next(lane for lane, (own, other) in enumerate(pairs) if own != other)

    def inner_ranks(self, level: int) -> tuple[int, ...]:
        """The ranks that differ from this one only at ``level`` and further in, this one included."""
        size = prod(self.sizes[level:])
        first = self.rank // size * size
        return tuple(range(first, first + size))

    def lane_ranks(self, lane: int) -> tuple[int, ...]:
        """The ranks that communicate over a lane, this one included, in order. A heads lane also connects ranks that
        differ at heads levels further in."""
        free = {lane} if not self.by_heads[lane] else {inner for inner in self.head_lanes if inner >= lane}
        choices = (range(size) if at in free else (self.digits[at],) for at, size in enumerate(self.sizes))
        return tuple(from_digits(digits, self.sizes) for digits in product(*choices))

    @cached_property
    def _heads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Digits and sizes of the heads levels."""
        return tuple(self.digits[lane] for lane in self.head_lanes), tuple(self.sizes[lane] for lane in self.head_lanes)

    @cached_property
    def _shards(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lanes = self.shard_lanes
        return tuple(self.digits[lane] for lane in lanes), tuple(self.sizes[lane] for lane in lanes)

    def _combine(self, head_digits: Sequence[int], shard_digits: Sequence[int]) -> int:
        of_heads, of_shards = iter(head_digits), iter(shard_digits)
        return from_digits([next(of_heads if heads else of_shards) for heads in self.by_heads], self.sizes)


def to_digits(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """
    >>> to_digits(5, (2, 3))
    (1, 2)
    """
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(reversed(digits))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``number`` as an ordered product of ``count`` factors above 1."""
    if count == 0:
        yield from [()] if number == 1 else []
        return
    for first in divisors(number)[1:]:
        yield from ((first, *rest) for rest in factorizations(number // first, count - 1))


def from_digits(digits: Iterable[int], sizes: Iterable[int]) -> int:
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit % size
    return number

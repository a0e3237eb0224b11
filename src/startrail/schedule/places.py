"""Where a rank stands: the only place where ranks are taken apart and put together.

Ranks are numbered outermost level first. A level either splits *heads* or belongs to the schedule's own grid of shards.
Ranks that differ in their heads digits only hold one *shard* together (after the exchange over heads), however far
apart they are; ranks that differ in the other digits only compute the same *heads* of different shards.

>>> place = Place(rank=5, sizes=(2, 2, 2), by_heads=(True, False, True))      # such as u2/1x2/u2
>>> place.digits, place.head, place.shard
((1, 0, 1), 3, 0)
>>> place.rank_of(shard=1), place.head_rank(0)
(7, 0)
>>> [(place.lane_to(peer), peer) for peer in (0, 1, 4)]     # the outermost level at which they differ
[(0, 0), (0, 1), (2, 4)]
>>> place.lane_ranks(0), place.lane_ranks(1), place.lane_ranks(2)
((0, 1, 4, 5), (5, 7), (4, 5))

Tokens follow (shard, head), not the rank: ranks that share a piece own neighbouring chunks (``slot``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod


@dataclass(frozen=True)
class Place:
    """``sizes``: ranks at every level, outermost first; ``by_heads``: which of these levels split heads."""

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
        """Ranks that a shard's heads are split over."""
        return prod(self._of(self.sizes, True))

    @cached_property
    def num_shards(self) -> int:
        return prod(self._of(self.sizes, False))

    @cached_property
    def head(self) -> int:
        return from_digits(self._of(self.digits, True), self._of(self.sizes, True))

    @cached_property
    def shard(self) -> int:
        return from_digits(self._of(self.digits, False), self._of(self.sizes, False))

    @property
    def slot(self) -> int:
        """Where this rank stands in the order of tokens."""
        return self.shard * self.num_heads + self.head

    @cached_property
    def shard_lanes(self) -> tuple[int, ...]:
        """The lanes of the schedule's own levels, outermost first."""
        return tuple(lane for lane, heads in enumerate(self.by_heads) if not heads)

    @cached_property
    def head_lanes(self) -> tuple[int, ...]:
        return tuple(lane for lane, heads in enumerate(self.by_heads) if heads)

    @cached_property
    def all_to_all_lane(self) -> int | None:
        """The lane on which the ranks of a shard, and no others, exchange heads; None if they use several lanes."""
        lanes = [lane for lane in self.head_lanes if self.sizes[lane] > 1]
        return lanes[0] if len(lanes) == 1 else None

    def rank_of(self, shard: int) -> int:
        """The rank that holds ``shard`` for the same heads as this one."""
        return self._combine(self._of(self.digits, True), to_digits(shard, self._of(self.sizes, False)))

    def head_rank(self, head: int) -> int:
        """The rank that computes heads number ``head`` of the same shard."""
        return self._combine(to_digits(head, self._of(self.sizes, True)), self._of(self.digits, False))

    def shard_ranks(self, shard: int) -> tuple[int, ...]:
        """All ranks that hold ``shard`` together, by head."""
        digits, sizes = to_digits(shard, self._of(self.sizes, False)), self._of(self.sizes, True)
        return tuple(self._combine(to_digits(head, sizes), digits) for head in range(self.num_heads))

    def lane_to(self, peer: int) -> int:
        """The lane to a rank: that of the outermost level at which we differ."""
        theirs = to_digits(peer, self.sizes)
        return next(lane for lane, pair in enumerate(zip(self.digits, theirs, strict=True)) if pair[0] != pair[1])

    def lane_ranks(self, lane: int) -> tuple[int, ...]:
        """The ranks that talk to each other over a lane, itself included, in order. A heads lane is also used between
        ranks that differ at heads levels further in."""
        free = {lane} if not self.by_heads[lane] else {inner for inner in self.head_lanes if inner >= lane}
        choices = (range(size) if at in free else (self.digits[at],) for at, size in enumerate(self.sizes))
        return tuple(from_digits(digits, self.sizes) for digits in product(*choices))

    def _combine(self, heads: Sequence[int], shards: Sequence[int]) -> int:
        by_heads, others = iter(heads), iter(shards)
        return from_digits([next(by_heads if heads else others) for heads in self.by_heads], self.sizes)

    def _of(self, values: Sequence[int], heads: bool) -> tuple[int, ...]:
        return tuple(value for value, at_heads in zip(values, self.by_heads, strict=True) if at_heads == heads)


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


def from_digits(digits: Iterable[int], sizes: Iterable[int]) -> int:
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit % size
    return number

"""Items in a row that is cut into parts of equally many tokens and equal work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from startrail.geometry.pieces import Group, Item

GOOD = 1.02  # work that is less than 2 % of what is even away from what a part should get is near enough
NEAR = 0.01  # of the row: a cut that is not this near to where it should be exchanges the items there
EXCHANGED = 16  # items before it that may be exchanged


def _slope(item: Item) -> tuple[float, float]:
    """The work of the first token of the row, and how it changes with every other: less, since it is the last of a
    document. Of several documents, the mean."""
    return (item.before + item.tokens + 0.5, -0.5) if item.is_one else (item.work / item.tokens, 0.0)


class Line:
    """Items cut into parts of exactly as many tokens as each has room for, and of equal work.

    The items lie in a row, the longest first, each with its end in front: what is in front has most work per token.
    Every part takes some tokens from the front and the rest from the back, so that its work is right as well. One
    document alone is so cut in zigzag order; of many, few are cut.
    """

    def __init__(self, items: Sequence[Item], group: Group) -> None:
        self.items = sorted(items, key=lambda item: (-item.before - item.tokens, item.start))
        self.group = group
        self.ends = list(accumulate((item.tokens for item in self.items), initial=0))
        self.works = list(accumulate((item.work for item in self.items), initial=0))
        self.slopes = [*map(_slope, self.items), (0.0, 0.0)]
        self.front, self.back = 0, self.ends[-1]

    def work_until(self, at: int) -> float:
        """The work of the first ``at`` tokens of the row."""
        number = bisect_right(self.ends, at) - 1
        inside = at - self.ends[number]
        slope, change = self.slopes[number]
        return self.works[number] + inside * (slope + inside * change)

    def cut(self) -> list[list[Item]]:
        """All parts."""
        rooms, weights = self.group.rooms, self.group.weights
        parts, total, room_left = [], sum(weights), sum(rooms)
        for room, weight in zip(rooms[:-1], weights, strict=False):
            work = self.work_until(self.back) - self.work_until(self.front)
            share = min(max(room / room_left, 0.0), 1.0) if room_left > 0 else weight / total
            tokens = round((self.back - self.front) * share)
            parts.append(self.take(tokens, work * weight / total, (GOOD - 1) * self.group.even * weight))
            total, room_left = total - weight, room_left - room
        return [*parts, self.rest()]

    def take(self, tokens: int, work: float, good: float) -> list[Item]:
        """The next part, whose work is ``good`` if it differs by no more."""
        front, back = self.front, self.back
        done, left = self.work_until(front), self.work_until(back)
        low, high = 0, min(tokens, back - front)
        while low + tokens // 128 < high:  # the fewest tokens in front with enough work, or nearly
            middle = (low + high) // 2
            if self.work_until(front + middle) - done + left - self.work_until(back - tokens + middle) < work:
                low = middle + 1
            else:
                high = middle
        keep = back - front - tokens  # tokens between the cuts
        self._fit(front + low + keep)
        best, least = (front, back), inf
        for shift in (0, 1, -1, 2, -2):  # further away if no cut is good
            for at, end in self._cuts(front + low + shift * self.group.floor, keep):
                padding = self.group.padding * abs(end - at - keep)
                if at > end or padding >= least:
                    continue
                own = self.work_until(at) - done + left - self.work_until(end)
                if (found := abs(own - work) + padding) < least:
                    best, least = (at, end), found
            if least <= good:
                break
        self.front, self.back = best
        return self._between(front, best[0]) + self._between(best[1], back)

    def _fit(self, at: int) -> None:
        """If the row cannot be cut close to ``at``, exchange the item behind it for one whose length fits better."""
        number = bisect_right(self.ends, at) - 1
        last = bisect_left(self.ends, self.back) - 1
        near = min(abs(cut - at) for cut in self._near(at))
        if number >= last or near < (self.back - at) * NEAR:
            return
        first = max(bisect_left(self.ends, self.front), number - EXCHANGED)
        wanted = self.items[number + 1].tokens + self.ends[number + 1] - at
        inner = min(range(first, number + 1), key=lambda i: abs(self.items[i].tokens - wanted), default=number)
        if (number + 1 == last and self.ends[last + 1] != self.back) or self.ends[inner] < self.front:
            return
        items, slopes, behind = self.items, self.slopes, number + 1
        items[inner], items[behind] = items[behind], items[inner]
        slopes[inner], slopes[behind] = slopes[behind], slopes[inner]
        for index in range(inner, number + 1):
            self.ends[index + 1] = self.ends[index] + items[index].tokens
            self.works[index + 1] = self.works[index] + items[index].work

    def rest(self) -> list[Item]:
        return self._between(self.front, self.back)

    def _cuts(self, wanted: int, keep: int) -> Iterator[tuple[int, int]]:
        """Where to cut in front and at the back, so that no piece is too short: close to ``wanted``, and about ``keep``
        tokens apart."""
        for at in self._near(wanted):
            for back in self._near(at + keep):
                yield at, back
        for back in self._near(wanted + keep):
            for at in self._near(back - keep):
                yield at, back

    def _near(self, at: int) -> list[int]:
        """Cuts next to ``at`` that make no piece too short."""
        at = min(max(at, self.front), self.back)
        number = bisect_right(self.ends, at) - 1
        if number == len(self.items):
            return [at]
        first, last = max(self.ends[number], self.front), min(self.ends[number + 1], self.back)
        floor = self.group.floor
        is_one = self.slopes[number][1] < 0
        if not is_one or last - first < 2 * floor:
            return [first, last]
        return [first, min(max(at, first + floor), last - floor), last]

    def _between(self, first: int, last: int) -> list[Item]:
        """The items from one place of the row to another, cut if necessary."""
        if first >= last:
            return []
        number, stop = bisect_right(self.ends, first) - 1, bisect_left(self.ends, last)
        found = self.items[number:stop]
        if last < self.ends[stop]:  # the end of an item lies in front
            _, found[-1] = found[-1].split(self.ends[stop] - last, self.group.name)
        if self.ends[number] < first:
            found[0], _ = found[0].split(found[0].tokens - (first - self.ends[number]), self.group.name)
        return found

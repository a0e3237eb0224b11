"""Where the documents of a packed sequence go: one search for the least predicted time of a batch.

A document is cut over as few ranks as balance demands. At each level of the machine, from the outside in, the documents
of a group of ranks are divided among its parts: nodes, then the ranks of a node. Most stay whole (`division`). A few
are cut between two parts so that all have equally many tokens: the first x tokens go to another part, whose keys the
rest then fetches once, which costs x tokens. If a part has too much work, the *end* of a document moves instead, which
costs all keys before it. A document that is too long for both is *spread*: cut over all ranks of the group, in zigzag
order. Inside a node, where transfers are cheap, documents are laid in a row that is cut into parts (`line`). In the end
a rank's share of a document is one or two runs, none of them shorter than a floor.

All of this is compared by time (`pieces`): that of the busiest part's visible pairs, and of the transfers to and from
the busiest part, as far as they are not hidden behind the pairs. `LinkCost` says what a token costs at a level. The
search is deterministic, so all ranks find the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from startrail.geometry.division import Division
from startrail.geometry.line import Line
from startrail.geometry.pieces import Group, Item, time_of

GOOD = 1.02  # a division that takes this many times what is even is good; after n others, GOOD ** (1 + n) times
FAIR = 1.1  # the same for the ranks of a node when all has been tried
SMALL = 8  # parts of a group, for that; with more parts, n counts more
FEW = 64  # documents per node: of more, each node gets a mixture without a search
ROW = 2000  # documents that are laid in a row to divide them among nodes, at most
ALIKE = 1.05  # a row gives each node documents of one length, which are harder to balance inside
CHANGES = 1400  # tried to improve a division of one document; of ten a tenth, since the first division is good
CHANGED = 3  # divisions that are improved so
STUCK = 60  # changes that did not help, after which it begins anew


class Divided(NamedTuple):
    """The predicted time, what each part of a group gets, and how many of the items with most work are spread.
    ``next``: the time and number if another number were spread."""

    time: float
    parts: list[list[Item]]
    spread: int
    next: tuple[float, int] | None = None


def divide(items: Sequence[Item], group: Group) -> Divided:
    """Divide items, most work first, among the parts of a group: with none of them spread, the first, the first two
    and so on, whichever takes the least time."""
    parts, able = len(group.weights), 0
    best, worse, attempts = None, 0, []
    times: dict[int, float] = {}
    work = sum(item.work for item in items)
    left = 1.02 * work  # of what is not spread, and some more
    while able < len(items) and _can_spread(items[able], left, group):
        left -= items[able].work
        able += 1
    few, number = len(items) <= FEW * parts, 0
    while not few and number < able and items[number].work * parts > work:  # too much for a part
        number += 1
    while number <= able:
        attempt = Attempt(items, number, group)
        if group.ranks == 1:
            found = attempt.line()
        else:
            found = attempt.fill()
            attempts.append((found, attempt))
            if len(items) <= ROW and (other := attempt.line()).time * ALIKE < found.time:
                found = other._replace(time=other.time * ALIKE)
        times[number] = found.time
        if best is None or found.time < best.time:
            best, worse = found, -1
        worse += 1
        if best.time <= GOOD ** (1 + worse * max(1, parts // SMALL)) * group.even:
            break
        number = max(min(number + (1 if few else max(1, number // 2)), able), number + 1)
    assert best is not None
    if group.ranks == 1 and best.time > FAIR * group.even:
        best = Attempt(items, best.spread, group).improved(best)
    attempts.sort(key=lambda each: each[0].time)
    for _, attempt in attempts[:CHANGED] if few else ():
        found = attempt.climb(CHANGES // CHANGED // max(len(items), 1))
        times[found.spread] = min(times[found.spread], found.time)
        best = min(best, found, key=_time)
    others = [(time, number) for number, time in times.items() if number != best.spread]
    return best._replace(next=min(others, default=None))


def _time(found: Divided) -> float:
    return found.time


def _can_spread(item: Item, work: float, group: Group) -> bool:
    """No piece would be too short, unless the item has more than a part's share of ``work``."""
    parts = len(group.weights)
    if not item.is_one:
        return False
    return (group.ranks > 1 and item.work * parts > work) or item.tokens >= 2 * group.floor * group.ranks * parts


class Attempt:
    """Divisions of items, the first ``number`` of which are spread."""

    def __init__(self, items: Sequence[Item], number: int, group: Group) -> None:
        self.spread, self.rest, self.group = items[:number], items[number:], group.after(items[:number])
        self._owners: list[int] = []

    def _divided(self, parts: list[list[Item]]) -> Divided:
        return Divided(time_of(parts, self.spread, self.group), parts, len(self.spread))

    def line(self) -> Divided:
        return self._divided(Line(self.rest, self.group).cut())

    def improved(self, found: Divided) -> Divided:
        """Move what was not spread between two parts, or swap it, where that helps."""
        division = Division.of(found.parts, self.group)
        division.improve(FAIR)
        return min(found, self._divided(division.parts), key=_time)

    def fill(self) -> Divided:
        division = Division(self.rest, self.group)
        if len(self.rest) <= FEW * len(self.group.weights):
            self._owners = division.owners(self.rest)
        return self._divided(division.cut())

    def _with(self, owners: Sequence[int]) -> Divided:
        return self._divided(Division(self.rest, self.group, owners).cut())

    def climb(self, changes: int) -> Divided:
        """The best division that is found by moving or swapping items at random, beginning with that of ``fill``."""
        chance, owners = Random(0), self._owners
        best = self._with(owners)
        current: Divided | None = best
        number, size, stuck = len(owners), len(self.group.weights), 0
        for _ in range(changes if number > 1 else 0):
            changed, first, second = list(owners), int(chance.random() * number), int(chance.random() * number)
            if stuck == STUCK:
                changed, stuck, current = [int(chance.random() * size) for _ in owners], 0, None
            elif chance.random() < 0.5:
                changed[first] = int(chance.random() * size)
            else:
                changed[first], changed[second] = changed[second], changed[first]
            found = self._with(changed)
            if current is None or found.time <= current.time:
                stuck = stuck + 1 if current is not None and found.time == current.time else 0
                owners, current = changed, found
                best = min(best, found, key=_time)
            else:
                stuck += 1
        return best

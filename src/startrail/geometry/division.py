"""Documents divided among the parts of a group, most of them whole."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isqrt
from operator import add, truediv

from startrail.geometry.pieces import Group, Item

HEAVY = 0.01  # documents with less than this share of the work together are placed by their tokens
COMPARED = 600  # moves and swaps of documents from one part that are compared, about
LOOKED_AT = 8  # parts that may take a document
MOVES = 16  # of them, at most
STEP = 0.0005  # what a move must gain, as a share of what could be gained
NOTHING = Item(0, 0, 0)


class Division:
    """Items divided among the parts of a group so that few are cut."""

    def __init__(self, items: Sequence[Item], group: Group, owners: Sequence[int] = ()) -> None:
        """``owners``: the part of each item to begin with, if known."""
        self.group = group
        self.parts: list[list[Item]] = [[] for _ in group.weights]
        self.work, self.tokens = [0.0] * len(self.parts), [0] * len(self.parts)
        self.moved = [0.0] * len(self.parts)  # tokens whose keys go to or from a part because of its work
        if owners:
            for item, part in zip(items, owners, strict=True):
                self._add(part, item)
        else:
            self._fill(items)
            self.improve()

    @classmethod
    def of(cls, parts: Sequence[Sequence[Item]], group: Group) -> Division:
        """That into these parts."""
        owners = [number for number, part in enumerate(parts) for _ in part]
        return cls([item for part in parts for item in part], group, owners)

    def owners(self, items: Sequence[Item]) -> list[int]:
        """The part of each item; before any is cut."""
        where = {item: part for part, inside in enumerate(self.parts) for item in inside}
        return [where[item] for item in items]

    def cut(self) -> list[list[Item]]:
        """Cut items so that no part has too much work or too many tokens."""
        self._relieve()
        self._even_out()
        return self.parts

    def _fill(self, items: Sequence[Item]) -> None:
        """Each document to the part with the least work that has room, the lightest by tokens."""
        group, weights = self.group, self.group.weights
        heavy, light, limit = len(items), 0, HEAVY * sum(item.work for item in items)
        while heavy and light + items[heavy - 1].work <= limit:
            heavy -= 1
            light += items[heavy].work
        load, free = [0.0] * len(self.parts), [room + group.floor for room in group.rooms]
        least = [(0.0, part) for part in range(len(self.parts))]
        for item in items[:heavy]:
            full: list[tuple[float, int]] = []
            while least and len(full) < LOOKED_AT:
                work, part = heapq.heappop(least)
                if work != load[part]:  # it has got more since
                    continue
                if item.tokens <= free[part]:
                    break
                full.append((work, part))
            else:
                part = max(range(len(free)), key=free.__getitem__)
            self._add(part, item)
            free[part] -= item.tokens
            load[part] += item.work / weights[part]
            for entry in (*full, (load[part], part)):
                heapq.heappush(least, entry)
        excess = map(truediv, self._excess(), weights)
        fullest = [(more, part) for part, more in enumerate(excess)]
        heapq.heapify(fullest)
        for item in items[heavy:]:
            more, part = fullest[0]
            self._add(part, item)
            heapq.heapreplace(fullest, (more + item.tokens / weights[part], part))

    def _add(self, part: int, item: Item) -> None:
        self.parts[part].append(item)
        self.work[part] += item.work
        self.tokens[part] += item.tokens

    def _remove(self, part: int, item: Item) -> None:
        self.parts[part].remove(item)
        self.work[part] -= item.work
        self.tokens[part] -= item.tokens

    def _excess(self) -> list[float]:
        return self.group.excess(self.tokens)

    def _cost(self) -> float:
        """The predicted time, if what is above the slack moves."""
        excess = self._excess()
        leaving = [max(more, 0.0) for more in excess]
        most = max(map(add, leaving, self.moved))
        busiest, fullest = (max(map(truediv, each, self.group.weights)) for each in (self.work, excess))
        return self._time(busiest, most, 2 * sum(leaving) + sum(self.moved), fullest)

    def _time(self, busiest: float, most: float, crossing: float, excess: float) -> float:
        """No more tokens are left over than a piece must have."""
        left = min(excess, self.group.floor / self.group.ranks)
        return self.group.time(busiest, most, crossing / len(self.parts), left)

    def improve(self, good: float = 1 + 1e-9) -> None:
        """Move documents between two parts, or swap two, as long as that helps, until the time is ``good`` times what
        it is if nothing has to be cut."""
        enough = good * self.group.time(0.0, 0.0, 0.0, 0.0)
        for _ in range(MOVES):
            cost = self._cost()
            if cost <= enough or (move := self._best_move(cost - STEP * (cost - enough))) is None:
                return
            giver, taker, item, back = move
            self._remove(giver, item)
            self._add(taker, item)
            if back is not NOTHING:
                self._remove(taker, back)
                self._add(giver, back)

    def _best_move(self, below: float) -> tuple[int, int, Item, Item] | None:
        """From the part with the most work, or the fullest; with a cost ``below`` this one."""
        parts, weights = range(len(self.parts)), self.group.weights
        excess, ratio = self._excess(), list(map(truediv, self.work, weights))
        by_work, by_excess = (sorted(parts, key=key) for key in (ratio.__getitem__, excess.__getitem__))
        total, best, found = sum(max(more, 0.0) for more in excess), below, None
        limit = self.group.work_in(best)
        takers = dict.fromkeys((*by_work[:LOOKED_AT], *by_excess[:LOOKED_AT]))
        number = isqrt(COMPARED // len(takers))
        movable = {part: _spaced(self.parts[part], number) for part in {*takers, by_work[-1], by_excess[-1]}}
        pairs = ((giver, taker) for giver in dict.fromkeys((by_work[-1], by_excess[-1])) for taker in takers)
        for giver, taker in pairs:
            if taker == giver:
                continue
            other_work = max((ratio[p] for p in by_work[-3:] if p not in (giver, taker)), default=0.0)
            other = max((excess[p] for p in by_excess[-3:] if p not in (giver, taker)), default=0.0)
            rest = total - max(excess[giver], 0.0) - max(excess[taker], 0.0)
            ours, theirs = weights[giver], weights[taker]
            for item in movable[giver]:
                for back in (NOTHING, *movable[taker]):
                    work, tokens = item.work - back.work, item.tokens - back.tokens
                    busiest = max(other_work, ratio[giver] - work / ours, ratio[taker] + work / theirs)
                    if busiest >= limit:
                        continue
                    first, second = excess[giver] - tokens, excess[taker] + tokens
                    most, crossing = max(other, first, second, 0.0), rest + max(first, 0.0) + max(second, 0.0)
                    cost = self._time(busiest, most, 2 * crossing, most / max(ours, theirs))
                    if cost < best:
                        best, limit, found = cost, self.group.work_in(cost), (giver, taker, item, back)
        return found

    def _relieve(self) -> None:
        """Move the ends of documents from the part with the most work to that with the least, as long as that helps."""
        weights, floor = self.group.weights, self.group.floor
        goal = sum(self.work) / sum(weights)
        for _ in self.parts:
            ratio, cost = list(map(truediv, self.work, weights)), self._cost()
            giver, taker = (pick(range(len(ratio)), key=ratio.__getitem__) for pick in (max, min))
            item = max(self.parts[giver], default=NOTHING, key=lambda item: item.tokens * item.is_one)
            if not item.is_one or item.before + item.tokens > self.group.most:
                return
            mean = (self.work[giver] + self.work[taker]) / (weights[giver] + weights[taker])
            surplus = max(self.work[giver] - max(mean, goal) * weights[giver], 0.0)
            end = item.before + item.tokens
            keep = isqrt(max(end * end - round(2 * surplus), 0)) - item.before
            if not floor <= keep <= item.tokens - floor:
                return
            before = self.parts[giver][:], self.parts[taker][:], self.work[:], self.tokens[:], self.moved[:]
            head, tail = item.split(keep, self.group.name)
            self._remove(giver, item)
            self._add(giver, head)
            self._add(taker, tail)
            for part in (giver, taker):
                self.moved[part] += item.before + keep
            if self._cost() >= cost:
                self.parts[giver], self.parts[taker], self.work, self.tokens, self.moved = before
                return

    def _even_out(self) -> None:
        """Move the beginnings of documents from parts with too many tokens to those with too few."""
        parts, floor, limit = range(len(self.parts)), self.group.floor, self.group.most
        for _ in range(2 * len(self.parts)):
            excess = list(map(round, self._excess()))
            giver, taker = (pick(parts, key=excess.__getitem__) for pick in (max, min))
            if excess[giver] <= 0 or -excess[taker] < floor:
                return
            able = [i for i in self.parts[giver] if i.tokens >= 2 * floor and i.is_one]
            able = [i for i in able if i.before + i.tokens <= limit] or able
            if not able:
                return
            amount = max(min(excess[giver], -excess[taker], max(item.tokens for item in able) - floor), floor)
            item = min((i for i in able if i.tokens >= amount + floor), key=lambda item: (item.before, item.tokens))
            head, tail = item.split(amount, self.group.name)
            self._remove(giver, item)
            self._add(giver, tail)
            self._add(taker, head)


def _spaced(items: list[Item], number: int) -> list[Item]:
    """So many of these, of all sizes."""
    return items if len(items) <= number else sorted(items)[:: -(-len(items) // number)]

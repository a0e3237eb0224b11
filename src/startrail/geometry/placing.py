"""Where the documents of a packed sequence go: one search for the least predicted time of a batch.

A document is cut over as few ranks as balance demands. At each level of the machine, from the outside in, the documents
of a group of ranks are divided among its parts: nodes, then the ranks of a node. Most stay whole. A few are cut between
two parts so that all have equally many tokens: the first x tokens go to another part, whose keys the rest then fetches
once, which costs x tokens. If a part has too much work, the *end* of a document moves instead, which costs all keys
before it. A document that is too long for both is *spread*: cut over all ranks of the group, in zigzag order. In the
end a rank's share of a document is one or two runs, none of them shorter than a floor.

All of this is compared by time: that of the busiest part's visible pairs, and of the transfers to and from the busiest
part, as far as they are not hidden behind the pairs. Both are counted in the time of one pair. `LinkCost` says what a
token costs at a level. The search is deterministic, so all ranks find the same placement.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf, isqrt
from operator import mul, sub
from random import Random
from typing import NamedTuple

UNHIDDEN = 0.1  # the share of transfers that no computing hides: the first to arrive and the last to leave
SLACK = 0.008  # more tokens than the mean that a node may have
PADDING = 4.0  # 1 % of padding costs as much as 4 % more work
EVEN, EVEN_FEW = (
    1.04,
    1.1,
)  # the work of a node over the mean that needs no remedy, and if it has less than two documents
UNEVEN = 3.0  # what is above weighs so much more, since every layer waits for it
GOOD = 1.02  # a division that takes this many times the mean work is not improved
SHORT = 128  # short documents are placed together, up to this part of a rank's tokens
FLOOR = 512  # tokens: no piece of a longer document is shorter, if a rank has at least 16 times as many
HELD = 8  # a document is cut between parts only if it has at most this many times a rank's tokens: its keys are held
FEW = 64  # documents per node: of more, each node gets a mixture without a search
ROW = 2000  # documents that are laid in a row to divide them among nodes, at most
ALIKE = 1.05  # a row gives each node documents of one length, which are harder to balance inside
HEAVY = 0.01  # documents with less than this share of the work together are placed by their tokens
MOVABLE = 24  # documents that are moved or swapped to improve a division
LOOKED_AT = 8  # parts that may take a document
MOVES = 16  # of them, at most
CHANGES = 1400  # tried to improve a division of one document; of ten a tenth, since the first division is good
CHANGED = 3  # divisions that are improved so
STUCK = 60  # changes that did not help, after which it begins anew
TRIES = 4  # documents that are spread, tried one after the other


class LinkCost(NamedTuple):
    """What transfers cost at a level of the machine, in the time of one visible pair on one rank. ``fetch``: to bring
    the keys and values of a token into one part of a group, in both passes, with their gradients back. ``spread``: to
    cut a document over all ranks of the group by the plan, per token of the document, as a share of ``fetch``."""

    fetch: float = 1000.0
    spread: float = 0.75


class Item(NamedTuple):
    """A document, a piece of one that begins after ``before`` of its tokens, or several short documents in a row.
    ``cut``: the group of ranks (depth, first) that holds the rest of the document."""

    work: int  # visible pairs under a causal mask
    tokens: int
    start: int
    before: int = 0
    cut: tuple[int, int] | None = None

    @property
    def is_one(self) -> bool:
        """False if these are several documents."""
        return self.work == pairs_of(self.before, self.tokens)

    def split(self, tokens: int, group: tuple[int, int]) -> tuple[Item, Item]:
        """The first ``tokens`` and the rest."""
        cut, rest, before = self.cut or group, self.tokens - tokens, self.before + tokens
        head = Item(pairs_of(self.before, tokens), tokens, self.start, self.before, cut)
        return head, Item(pairs_of(before, rest), rest, self.start + tokens, before, cut)


def pairs_of(before: int, tokens: int) -> int:
    """
    >>> pairs_of(0, 3), pairs_of(3, 2)
    (6, 9)
    """
    return tokens * before + tokens * (tokens + 1) // 2


def items_of(documents: Sequence[int], short: int) -> list[Item]:
    """Documents in order. Those in a row that have at most ``short`` tokens together are one: a million short documents
    take no longer to place than a few thousand.

    >>> [tuple(each)[:3] for each in items_of((0, 2, 4, 9, 11), short=4)]       # work, tokens and start
    [(6, 4, 0), (15, 5, 4), (3, 2, 9)]
    """
    lengths = list(map(sub, documents[1:], documents))
    squares = [0, *accumulate(map(mul, lengths, lengths))]
    items = []
    first, number = 0, len(lengths)
    while first < number:
        stop = first + 1
        if stop < number and documents[stop + 1] - documents[first] <= short:
            stop = bisect_right(documents, documents[first] + short) - 1
        start, tokens = documents[first], documents[stop] - documents[first]
        items.append(Item((squares[stop] - squares[first] + tokens) // 2, tokens, start))
        first = stop
    return items


NOTHING = Item(0, 0, 0)


class Rules(NamedTuple):
    """What a division is bound by: what transfers cost, the shortest piece, the longest document that may be cut
    between parts, the group of ranks (depth, first), the ranks of each part, and the work of a part over the mean that
    is even enough."""

    link: LinkCost
    floor: int
    most: int
    group: tuple[int, int]
    ranks: int
    even: float


class Division:
    """Items divided among the parts of a group so that few are cut."""

    def __init__(
        self, items: Sequence[Item], rooms: Sequence[float], weights: Sequence[float], rules: Rules, share: float,
        owners: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """``rooms``: the tokens that each part should get, ``share``: those of spread items per rank. ``owners``: the
        part of each item, to begin with."""
        self.rooms, self.weights, self.rules = rooms, weights, rules
        self.shared_link = rules.link.fetch * rules.link.spread * share * sum(weights)
        self.parts: list[list[Item]] = [[] for _ in weights]
        self.work, self.tokens = [0.0] * len(weights), [0] * len(weights)
        self.moved = [0.0] * len(weights)  # tokens whose keys go to or from a part because of its work
        self.mean = sum(item.work for item in items) / sum(weights)
        self.slack = SLACK * sum(rooms) / sum(weights) if rules.ranks > 1 else 0.0
        self.short = rules.floor / rules.ranks
        self.padding = PADDING * self.mean * sum(weights) / max(sum(rooms), 1)  # of a token of a rank
        if owners:
            for item, part in zip(items, owners, strict=True):
                self.add(part, item)
        else:
            self._fill(items)
            self.improve()
        self.owners: list[int] = []
        if len(items) <= FEW * len(weights):
            where = {item: part for part, inside in enumerate(self.parts) for item in inside}
            self.owners = [where[item] for item in items]
        self.relieve()
        self.even_out()

    def _fill(self, items: Sequence[Item]) -> None:
        """Each document to the part with the least work that has room, the lightest by tokens."""
        heavy, light, limit = len(items), 0, HEAVY * sum(item.work for item in items)
        while heavy and light + items[heavy - 1].work <= limit:
            heavy -= 1
            light += items[heavy].work
        least = [(self.work[part] / self.weights[part], part) for part in range(len(self.parts))]
        heapq.heapify(least)
        for item in items[:heavy]:
            full: list[tuple[float, int]] = []
            while len(full) < LOOKED_AT and least and not self._has_room(least[0][1], item):
                full.append(heapq.heappop(least))
            if len(full) < LOOKED_AT and least:
                part = least[0][1]
                heapq.heappop(least)
            else:
                least += full
                part = max(least, key=lambda entry: self.rooms[entry[1]] - self.tokens[entry[1]])[1]
                full, least = [], [entry for entry in least if entry[1] != part]
                heapq.heapify(least)
            self.add(part, item)
            for entry in (*full, (self.work[part] / self.weights[part], part)):
                heapq.heappush(least, entry)
        fullest = [((self.tokens[p] - self.rooms[p]) / self.weights[p], p) for p in range(len(self.parts))]
        heapq.heapify(fullest)
        for item in items[heavy:]:
            excess, part = fullest[0]
            self.add(part, item)
            heapq.heapreplace(fullest, (excess + item.tokens / self.weights[part], part))

    def _has_room(self, part: int, item: Item) -> bool:
        return self.tokens[part] + item.tokens <= self.rooms[part] + self.rules.floor

    def add(self, part: int, item: Item) -> None:
        self.parts[part].append(item)
        self.work[part] += item.work
        self.tokens[part] += item.tokens

    def remove(self, part: int, item: Item) -> None:
        self.parts[part].remove(item)
        self.work[part] -= item.work
        self.tokens[part] -= item.tokens

    def cost(self) -> float:
        """The predicted time, if tokens are evened out."""
        excess = [tokens - room for tokens, room in zip(self.tokens, self.rooms, strict=True)]
        crossing = [abs(more) + moved for more, moved in zip(excess, self.moved, strict=True)]
        most = max(map(_ratio, excess, self.weights))
        return self._time(
            max(map(_ratio, self.work, self.weights)), max(crossing), sum(crossing), min(most - self.slack, self.short)
        )

    def _time(self, work: float, crossing: float, crossings: float, excess: float) -> float:
        link = self.rules.link.fetch * crossing + self.shared_link
        even = self.rules.even * self.mean
        time = max(even + UNEVEN * max(work - even, 0), link)
        if excess > 0:
            time += self.padding * excess
        return time + UNHIDDEN * (link + self.rules.link.fetch * crossings / len(self.weights))

    def improve(self) -> None:
        """Move documents between two parts, or swap two, as long as that helps."""
        for _ in range(MOVES):
            if self.cost() <= GOOD * self.rules.even * self.mean or (best := self._best_move()) is None:
                return
            giver, taker, item, back = best
            self.remove(giver, item)
            self.add(taker, item)
            if back is not None:
                self.remove(taker, back)
                self.add(giver, back)

    def _best_move(self) -> tuple[int, int, Item, Item | None] | None:
        parts, weights, slack, short = range(len(self.parts)), self.weights, self.slack, self.short
        excess = [tokens - room for tokens, room in zip(self.tokens, self.rooms, strict=True)]
        ratio = list(map(_ratio, self.work, weights))
        by_work, by_excess = (sorted(parts, key=key) for key in (ratio.__getitem__, excess.__getitem__))
        total, best, found = sum(map(abs, excess)), self.cost() * (1 - 1e-9), None
        number = max(1, MOVABLE // len(parts))
        movable = [heapq.nlargest(number, part) if len(part) > number else part for part in self.parts]
        for giver in dict.fromkeys((by_work[-1], by_excess[-1])):
            for taker in dict.fromkeys((*by_work[:LOOKED_AT], *by_excess[:LOOKED_AT])):
                if taker == giver:
                    continue
                other_work = max((ratio[p] for p in by_work[-3:] if p not in (giver, taker)), default=0.0)
                ends = [excess[p] for p in (*by_excess[:3], *by_excess[-3:]) if p not in (giver, taker)]
                low, high = min(ends, default=0.0), max(ends, default=0.0)
                other, rest = max(high, -low), total - abs(excess[giver]) - abs(excess[taker])
                ours, theirs = weights[giver], weights[taker]
                for item in movable[giver]:
                    for back in (NOTHING, *movable[taker]):
                        tokens = item.tokens - back.tokens
                        work = item.work - back.work
                        busiest = max(other_work, ratio[giver] - work / ours, ratio[taker] + work / theirs)
                        if busiest >= best:
                            continue
                        first, second = excess[giver] - tokens, excess[taker] + tokens
                        crossing, crossings = max(other, abs(first), abs(second)), rest + abs(first) + abs(second)
                        cost = self._time(
                            busiest,
                            crossing,
                            crossings,
                            min(max(high / ours, first / ours, second / theirs) - slack, short),
                        )
                        if cost < best:
                            best, found = cost, (giver, taker, item, back if back.tokens else None)
        return found

    def relieve(self) -> None:
        """Move the ends of documents from the part with the most work to that with the least, as long as that helps."""
        for _ in self.parts:
            ratio, before = list(map(_ratio, self.work, self.weights)), self.cost()
            giver, taker = (pick(range(len(ratio)), key=ratio.__getitem__) for pick in (max, min))
            item = max(self.parts[giver], default=None, key=lambda item: item.tokens * item.is_one)
            if item is None or not item.is_one or item.before + item.tokens > self.rules.most:
                return
            mean = (self.work[giver] + self.work[taker]) / (self.weights[giver] + self.weights[taker])
            goal = sum(self.work) / sum(self.weights)
            surplus = max(self.work[giver] - max(mean, goal) * self.weights[giver], 0.0)
            end = item.before + item.tokens
            keep = isqrt(max(end * end - round(2 * surplus), 0)) - item.before
            if not self.rules.floor <= keep <= item.tokens - self.rules.floor:
                return
            head, tail = item.split(keep, self.rules.group)
            self.remove(giver, item)
            self.add(giver, head)
            self.add(taker, tail)
            for part in (giver, taker):
                self.moved[part] += item.before + keep
            if self.cost() >= before:
                self.remove(giver, head)
                self.remove(taker, tail)
                self.add(giver, item)
                for part in (giver, taker):
                    self.moved[part] -= item.before + keep
                return

    def even_out(self) -> None:
        """Move the beginnings of documents from parts with too many tokens to those with too few."""
        parts = range(len(self.parts))
        if all(
            tokens - room <= self.slack * w
            for tokens, room, w in zip(self.tokens, self.rooms, self.weights, strict=True)
        ):
            return
        for _ in range(2 * len(self.parts)):
            excess = [round(tokens - room) for tokens, room in zip(self.tokens, self.rooms, strict=True)]
            giver, taker = (pick(parts, key=excess.__getitem__) for pick in (max, min))
            amount = min(excess[giver], -excess[taker])
            if amount < self.rules.floor:
                return
            able = [i for i in self.parts[giver] if i.tokens >= 2 * self.rules.floor and i.is_one]
            able = [i for i in able if i.before + i.tokens <= self.rules.most] or able
            if not able:
                return
            amount = min(amount, max(item.tokens for item in able) - self.rules.floor)
            item = min(
                (i for i in able if i.tokens >= amount + self.rules.floor), key=lambda item: (item.before, item.tokens)
            )
            head, tail = item.split(amount, self.rules.group)
            self.remove(giver, item)
            self.add(giver, tail)
            self.add(taker, head)


def _ratio(work: float, weight: float) -> float:
    return work / weight


class Divided(NamedTuple):
    """The predicted time, what each part of a group gets, and how many of the items with most work are spread.
    ``next``: the time and number if another number were spread."""

    time: float
    parts: list[list[Item]]
    spread: int
    next: tuple[float, int] | None = None


def divide(items: Sequence[Item], rooms: Sequence[int], weights: Sequence[float], rules: Rules) -> Divided:
    """Divide items, most work first, among the parts of a group: with none of them spread, the first, the first two
    and so on, whichever takes the least time."""
    best, worse, attempts = None, 0, []
    times: dict[int, float] = {}
    work, able = sum(item.work for item in items), 0
    left = 1.02 * work  # of what is not spread, and some more
    while able < len(items) and _can_spread(items[able], left, rules, len(weights)):
        left -= items[able].work
        able += 1
    few, number = len(items) <= FEW * len(weights), 0
    while not few and number < able and items[number].work * len(weights) > work:  # too much for a part
        number += 1
    while number <= able:
        attempt = Attempt(items, number, rooms, weights, rules)
        if rules.ranks == 1:
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
        if worse == TRIES or best.time <= GOOD * rules.even * work / sum(weights):
            break
        number += 1 if few else max(1, number // 2)
    assert best is not None
    attempts.sort(key=lambda each: each[0].time)
    for _, attempt in attempts[:CHANGED] if few else ():
        found = attempt.climb(CHANGES // CHANGED // max(len(items), 1))
        times[found.spread] = min(times[found.spread], found.time)
        best = min(best, found, key=_time)
    others = [(time, number) for number, time in times.items() if number != best.spread]
    return best._replace(next=min(others, default=None))


def _time(found: Divided) -> float:
    return found.time


class Attempt:
    """A division of items, the first ``number`` of which are spread."""

    def __init__(
        self, items: Sequence[Item], number: int, rooms: Sequence[int], weights: Sequence[float], rules: Rules
    ) -> None:
        self.spread, self.rest, self.weights, self.rules = items[:number], items[number:], weights, rules
        self.share = sum(item.tokens for item in self.spread) / sum(weights)
        self.rooms = [room - self.share * weight for room, weight in zip(rooms, weights, strict=True)]
        self.owners: list[int] = []

    def parts(self, parts: list[list[Item]]) -> Divided:
        return Divided(time_of(parts, self.spread, self.rooms, self.weights, self.rules), parts, len(self.spread))

    def line(self) -> Divided:
        return self.parts(Line(self.rest, self.rules).cut(self.rooms, self.weights))

    def fill(self, owners: Sequence[int] = ()) -> Divided:
        division = Division(self.rest, self.rooms, self.weights, self.rules, self.share, owners)
        self.owners = division.owners
        return self.parts(division.parts)

    def climb(self, changes: int) -> Divided:
        """The best division that is found by moving or swapping items at random, beginning with that of ``fill``."""
        chance, owners = Random(0), self.owners
        best = self.fill(owners)
        current: Divided | None = best
        number, size, stuck = len(owners), len(self.weights), 0
        for _ in range(changes if number > 1 else 0):
            changed, first, second = list(owners), int(chance.random() * number), int(chance.random() * number)
            if stuck == STUCK:
                changed, stuck, current = [int(chance.random() * size) for _ in owners], 0, None
            elif chance.random() < 0.5:
                changed[first] = int(chance.random() * size)
            else:
                changed[first], changed[second] = changed[second], changed[first]
            found = self.fill(changed)
            if current is None or found.time <= current.time:
                stuck = stuck + 1 if current is not None and found.time == current.time else 0
                owners, current = changed, found
                best = min(best, found, key=_time)
            else:
                stuck += 1
        return best


def _can_spread(item: Item, work: float, rules: Rules, parts: int) -> bool:
    """No piece would be too short, unless the item has more than a part's share of ``work``."""
    if not item.is_one:
        return False
    return (rules.ranks > 1 and item.work * parts > work) or item.tokens >= 2 * rules.floor * rules.ranks * parts


def time_of(
    parts: Sequence[Sequence[Item]],
    spread: Sequence[Item],
    rooms: Sequence[float],
    weights: Sequence[float],
    rules: Rules,
) -> float:
    """The predicted time of a batch. ``rooms`` are those that spread items leave."""
    total, shared = sum(weights), sum(item.tokens for item in spread)
    excess = [sum(item.tokens for item in part) - room for part, room in zip(parts, rooms, strict=True)]
    work = [sum(item.work for item in part) for part in parts]
    spread_work = sum(item.work for item in spread)
    mean = (sum(work) + spread_work) / total
    left = [shared * weight / total - more for weight, more in zip(weights, excess, strict=True)]
    if rules.ranks == 1 and absorbs(spread, left, rules.floor):
        work = [own - round(spread_work / shared * more) for own, more in zip(work, excess, strict=True)]
        excess = [0.0] * len(parts)
    busiest = max(map(_ratio, work, weights)) + spread_work / total
    padding = max(*map(_ratio, excess, weights), 0.0) * total / max(sum(rooms) + shared, 1)
    padding = max(padding - SLACK, 0.0) if rules.ranks > 1 else padding
    crossing, held = _crossing(parts, rules)
    if held > rules.most:
        return inf
    fetch, even = rules.link.fetch, rules.even * mean
    link, links = (
        fetch * (tokens + rules.link.spread * shared) for tokens in (max(crossing), sum(crossing) / len(parts))
    )
    transfers = UNHIDDEN * (link + links) / 2
    return max(even + UNEVEN * max(busiest - even, 0.0), link) + transfers + PADDING * mean * padding


def absorbs(spread: Sequence[Item], rooms: Sequence[float], floor: int) -> bool:
    """True if items can be cut over ranks as unequally as these have room, so that none is padded, and no piece is too
    short."""
    least = min(rooms)
    return bool(spread) and least > 0 and min(i.tokens for i in spread) * least / sum(rooms) >= 2 * floor


def _crossing(parts: Sequence[Sequence[Item]], rules: Rules) -> tuple[list[float], int]:
    """The tokens whose keys each part fetches or is asked for, whichever are more; and the most that a rank holds."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for number, part in enumerate(parts):
        for item in part:
            if item.cut is not None:
                pieces.setdefault(item.start - item.before, []).append((item.before, item.tokens, number))
    fetched, asked, held = [0.0] * len(parts), [0.0] * len(parts), 0
    for of_document in pieces.values():
        if len(of_document) > 1:
            ends = {number: before + tokens for before, tokens, number in sorted(of_document)}
            held = max(held, *ends.values())
            for taker, end in ends.items():
                for before, tokens, owner in of_document:
                    if owner != taker and before < end:
                        fetched[taker] += tokens
                        asked[owner] += tokens
    if rules.ranks == 1:  # an owner is asked by several ranks
        return fetched, held
    return list(map(max, fetched, asked)), held


class Line:
    """Items cut into parts of exactly as many tokens as each has room for, and of equal work.

    The items lie in a row, the longest first, each with its end in front: what is in front has most work per token.
    Every part takes some tokens from the front and the rest from the back, so that its work is right as well. One
    document alone is so cut in zigzag order; of many, few are cut.
    """

    def __init__(self, items: Sequence[Item], rules: Rules) -> None:
        self.items = sorted(items, key=lambda item: (-item.before - item.tokens, item.start))
        self.rules = rules
        self.ends = list(accumulate((item.tokens for item in self.items), initial=0))
        self.works = list(accumulate((item.work for item in self.items), initial=0))
        self.front, self.back = 0, self.ends[-1]

    def work_until(self, at: int) -> float:
        """The work of the first ``at`` tokens of the row."""
        number = bisect_right(self.ends, at) - 1
        if number == len(self.items) or not (inside := at - self.ends[number]):
            return self.works[number]
        item = self.items[number]
        if not item.is_one:
            return self.works[number] + item.work * inside / item.tokens
        return self.works[number] + pairs_of(item.before + item.tokens - inside, inside)

    def cut(self, rooms: Sequence[float], weights: Sequence[float]) -> list[list[Item]]:
        """All parts."""
        parts, total, room_left = [], sum(weights), sum(rooms)
        for room, weight in zip(rooms[:-1], weights, strict=False):
            work = self.work_until(self.back) - self.work_until(self.front)
            share = min(max(room / room_left, 0.0), 1.0) if room_left > 0 else weight / total
            parts.append(self.take(round((self.back - self.front) * share), work * weight / total))
            total, room_left = total - weight, room_left - room
        return [*parts, self.rest()]

    def take(self, tokens: int, work: float) -> list[Item]:
        """The next part."""
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
        error = work / max(tokens, 1) * PADDING
        best, least = (front, back), inf
        for shift in (0, 1, -1, 2, -2):  # further away if no cut is good
            for at, end in self._cuts(front + low + shift * self.rules.floor, keep):
                own = self.work_until(at) - done + left - self.work_until(end)
                found = abs(own - work) + error * abs(end - at - keep)
                if at <= end and found < least:
                    best, least = (at, end), found
            if least <= (GOOD - 1) * work:
                break
        self.front, self.back = best
        return self._between(front, best[0]) + self._between(best[1], back)

    def _fit(self, at: int) -> None:
        """If the row cannot be cut close to ``at``, exchange the item behind it for one whose length fits better."""
        number = bisect_right(self.ends, at) - 1
        last = bisect_left(self.ends, self.back) - 1
        near = min(abs(cut - at) for cut in self._near(at))
        if number >= last or near < (self.back - at) * (GOOD - 1) / 2:
            return
        first = max(bisect_left(self.ends, self.front), number - MOVES)
        wanted = self.items[number + 1].tokens + self.ends[number + 1] - at
        inner = min(range(first, number + 1), key=lambda i: abs(self.items[i].tokens - wanted), default=number)
        if (number + 1 == last and self.ends[last + 1] != self.back) or self.ends[inner] < self.front:
            return
        items = self.items
        items[inner], items[number + 1] = items[number + 1], items[inner]
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
        floor = self.rules.floor
        if not self.items[number].is_one or last - first < 2 * floor:
            return [first, last]
        return [first, min(max(at, first + floor), last - floor), last]

    def _between(self, first: int, last: int) -> list[Item]:
        """The items from one place of the row to another, cut if necessary."""
        found = []
        number = bisect_right(self.ends, first) - 1
        while first < last:
            item, end = self.items[number], min(self.ends[number + 1], last)
            if end - first < item.tokens:
                _, item = item.split(item.tokens - (end - self.ends[number]), self.rules.group)
                item, _ = item.split(end - first, self.rules.group)
            found.append(item)
            first, number = end, number + 1
        return found

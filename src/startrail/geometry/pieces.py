"""What is placed on ranks (documents and pieces of them), and what a placement costs.

Everything is counted in the time of one visible pair on one rank. `placing` compares placements by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import mul, sub, truediv
from typing import NamedTuple

UNHIDDEN = 0.1  # the share of transfers that no computing hides: the first to arrive and the last to leave
UNEVEN = 3.0  # work above what is even enough weighs so much more, since every layer waits for it


class LinkCost(NamedTuple):
    """What transfers cost at a level of the machine, in the time of one visible pair on one rank. ``fetch``: to bring
    the keys and values of a token into one part of a group, in both passes, with their gradients back. ``spread``: to
    cut a document over all ranks of the group by the plan, per token of the document, as a share of ``fetch``.
    ``near``: like ``fetch``, into one of a few neighbouring ranks from the others."""

    fetch: float = 1000.0
    spread: float = 0.75
    near: float = 250.0


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


class Group(NamedTuple):
    """A group of ranks, whose parts (nodes, or the ranks of a node) get items, and what binds and prices this. Work and
    tokens per rank are those of a rank with weight 1, the mean."""

    rooms: Sequence[float]  # tokens that each part should get
    weights: Sequence[float]  # the share of each part, in ranks
    name: tuple[int, int]  # depth, first rank
    ranks: int  # of each part
    link: LinkCost
    floor: int  # tokens: no piece of a longer document should be shorter
    most: float  # tokens of a document that is cut between parts, at most: some ranks hold all its keys
    even: float  # work per rank that is even enough
    padding: float  # the cost of a token of padding on each rank
    slack: float = 0.0  # tokens per rank above the mean that need no remedy
    placed: float = 0.0  # work per rank of what is on all these ranks already
    spread: int = 0  # tokens, of that, that the group's links carry

    def after(self, items: Sequence[Item]) -> Group:
        """The group when these items are spread over all its ranks."""
        total, tokens = sum(self.weights), sum(item.tokens for item in items)
        rooms = [room - tokens * weight / total for room, weight in zip(self.rooms, self.weights, strict=True)]
        placed = self.placed + sum(item.work for item in items) / total
        return self._replace(rooms=rooms, placed=placed, spread=tokens)

    def time(self, busiest: float, most: float, mean: float, excess: float) -> float:
        """The predicted time. ``busiest``: the work per rank of what the busiest part gets; ``most`` and ``mean``: the
        tokens whose keys go to or from the busiest part, and a part on average; ``excess``: the tokens per rank of the
        fullest part above its room and the slack."""
        fetch, shared = self.link.fetch, self.link.spread * self.spread
        link, above = fetch * (most + shared), max(self.placed + busiest - self.even, 0.0)
        time = max(self.even + UNEVEN * above, link) + UNHIDDEN * (link + fetch * (mean + shared)) / 2
        return time + self.padding * excess if excess > 0 else time

    def work_in(self, time: float) -> float:
        """The most work per rank of the busiest part with which this time is possible."""
        return (time - self.even) / UNEVEN + self.even - self.placed

    def excess(self, tokens: Sequence[float]) -> list[float]:
        """The tokens of each part above its room and the slack; negative if it has room for more."""
        return [t - r - self.slack * w for t, r, w in zip(tokens, self.rooms, self.weights, strict=True)]


def time_of(parts: Sequence[Sequence[Item]], spread: Sequence[Item], group: Group) -> float:
    """The predicted time of a division, if ``group`` is what it is after these items were spread."""
    weights, number = group.weights, len(parts)
    work = [float(sum(item.work for item in part)) for part in parts]
    excess = group.excess([sum(item.tokens for item in part) for part in parts])
    if group.ranks == 1:
        left = [group.spread * w / sum(weights) - more for w, more in zip(weights, excess, strict=True)]
        if absorbs(spread, left, group.floor):
            density = sum(item.work for item in spread) / group.spread
            work = [own - density * more for own, more in zip(work, excess, strict=True)]
            excess = [0.0] * number
    crossing, held = _crossing(parts, group.ranks == 1)
    if held > group.most:
        return inf
    busiest, padding = (max(map(truediv, each, weights)) for each in (work, excess))
    return group.time(busiest, max(crossing), sum(crossing) / number, padding)


def absorbs(spread: Sequence[Item], rooms: Sequence[float], floor: int) -> bool:
    """True if items can be cut over ranks as unequally as these have room, so that none is padded, and no piece is too
    short."""
    least = min(rooms)
    return bool(spread) and least > 0 and min(i.tokens for i in spread) * least / sum(rooms) >= 2 * floor


def _crossing(parts: Sequence[Sequence[Item]], of_ranks: bool) -> tuple[list[float], int]:
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
    if of_ranks:  # an owner is asked by several ranks
        return fetched, held
    return list(map(max, fetched, asked)), held

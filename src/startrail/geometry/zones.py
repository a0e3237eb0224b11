"""Zones: each packed document lives at the innermost level of the machine that can hold it.

A document that fits a rank stays on a rank, one that fits a node is cut over the ranks of one node, and only what is
too long for a node is cut over all of them. A cut document is cut separately, in zigzag order, so that the ranks of its
zone share its work evenly. Ranks get equally many tokens (the rest is padding) and nearly equal work: a document that
would put a rank more than ``TOKEN_SLACK`` or ``WORK_SLACK`` above the mean is cut over a larger zone instead. With
``shares``, ranks get tokens and work in proportion to them.

Here two nodes of two ranks hold documents of 8, 3, 2, 2 and 1 tokens. The longest is cut over all four ranks, the next
over the two of one node, and the others stay whole:

>>> layout = zoned([ZoneLevel(0, (0, 1, 2, 3)), ZoneLevel(1, (0, 1)), ZoneLevel(2, (0,))], (0, 8, 11, 13, 15, 16))
>>> for rank in range(4): print(layout.table[rank])
((0, 1), (7, 1), (8, 1), (10, 1))
((1, 1), (6, 1), (9, 1), (15, 1))
((2, 1), (5, 1), (13, 2))
((3, 1), (4, 1), (11, 2))
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul, sub
from typing import NamedTuple

from startrail.geometry.layout import (
    LAYOUTS,
    Layout,
    Zone,
    contiguous,
    in_slot_order,
    weights_of,
    zigzag,
    zigzag_runs,
)

TOKEN_SLACK = 0.014  # how far a rank may exceed the mean
WORK_SLACK = 0.045
ROUNDING = 256  # the tokens per rank are rounded up to a multiple of this part of them, so that shapes repeat

MAX_SWAPS = 20_000  # pairs of documents tried to relieve a part

LAYOUT_NAMES = ("zones", *LAYOUTS)


class ZoneLevel(NamedTuple):
    """The zones at one level of the machine: ``level`` of the plan's levels lie outside, and ``slots`` are the
    positions of its ranks in the order of tokens."""

    level: int
    slots: tuple[int, ...]

    def in_rank_order(self) -> ZoneLevel:
        """The same ranks with neighbouring tokens on neighbouring ranks, and so mostly on one node."""
        return ZoneLevel(self.level, tuple(range(len(self.slots))))


class PackedDocument(NamedTuple):
    """A document, or several short ones in a row. ``work``: the square of its tokens, or the sum of their squares."""

    work: int
    tokens: int
    start: int


def check_layout(name: str) -> None:
    if name not in LAYOUT_NAMES:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUT_NAMES)}")


def make_layout(
    name: str, levels: Sequence[ZoneLevel], documents: Sequence[int], shares: Sequence[float] | None = None
) -> Layout:
    """The layout called ``name`` of a sequence with these documents (cu_seqlens). ``shares``: one positive number per
    rank, by default the same for all; tokens and work are divided in proportion."""
    if name == "zones" and len(documents) > 2:
        return zoned(levels, documents, shares)
    return LAYOUTS["zigzag" if name == "zones" else name](levels[0].slots, documents[-1], shares)


def zoned(levels: Sequence[ZoneLevel], documents: Sequence[int], shares: Sequence[float] | None = None) -> Layout:
    """The zones of packed documents. ``levels`` begins with all ranks and ends with single ranks."""
    length, world = documents[-1], len(levels[0].slots)
    if len(documents) <= 2:
        return zigzag(levels[0].slots, length, shares)
    if world == 1:
        return contiguous(levels[0].slots, length, shares)
    weights = weights_of(shares, world)
    zones, groups = _cut_at_every_level(levels, documents, weights)
    held = [sum(document.tokens for document in inside) for inside in groups]
    for zone in zones:
        for rank, tokens in enumerate(zone.counts, zone.first):
            held[rank] += tokens
    equal = len(set(weights)) == 1
    counts = [_rounded_up(max(held) if equal else tokens) for tokens in held]
    for rank, inside in enumerate(groups):
        runs = [(document.start, document.tokens) for document in sorted(inside, key=lambda document: document.start)]
        padding = [(length, counts[rank] - held[rank])] if counts[rank] > held[rank] else []
        if runs or padding or not held[rank]:
            zones.append(Zone(levels[-1].level, rank, ((*runs, *padding),)))
    return Layout(length, tuple(zones))


def _rounded_up(tokens: int) -> int:
    unit = tokens // ROUNDING or 1
    return -(-tokens // unit) * unit


def _cut_at_every_level(
    levels: Sequence[ZoneLevel], documents: Sequence[int], weights: Sequence[int]
) -> tuple[list[Zone], list[list[PackedDocument]]]:
    """The zones of documents that are cut, and the whole documents of each rank."""
    length, world, total = documents[-1], len(weights), sum(weights)
    whole = sorted(_packed(documents, length // world // ROUNDING), reverse=True)
    zones: list[Zone] = []
    groups = [whole]  # the documents inside of each zone of a level
    tokens, work = length / total, sum(document.work for document in whole) / total  # per unit of weight
    shared = [(0.0, 0.0)] * world  # the same of what was cut, for each rank
    for depth, ((level, slots), inner) in enumerate(pairwise(levels), start=1):
        parts: list[list[PackedDocument]] = []
        size = len(inner.slots)
        for first, inside in zip(range(0, world, len(slots)), groups, strict=True):
            members = weights[first : first + len(slots)]
            inner_weights = [sum(members[at : at + size]) for at in range(0, len(slots), size)]
            trials = []
            for slack in dict.fromkeys((depth / (len(levels) - 1), 1.0)):  # the rest is left to the levels inside
                max_tokens = tokens * (1 + slack * TOKEN_SLACK) - shared[first][0]
                max_work = work * (1 + slack * WORK_SLACK) - shared[first][1]
                trials.append(_divide(inside, [_Bin(w, w * max_tokens, w * max_work) for w in inner_weights]))
            cut, held = min(trials, key=lambda trial: sum(document.tokens for document in trial[0]))
            if cut:
                cut.sort(key=lambda document: document.start)
                zones.append(_cut(level, first, slots, cut, members, length))
                more_tokens, more_work = (sum(d.tokens for d in cut), sum(d.work for d in cut))
                for rank in range(first, first + len(slots)):
                    held_tokens, held_work = shared[rank]
                    shared[rank] = held_tokens + more_tokens / sum(members), held_work + more_work / sum(members)
            parts += held
        groups = parts
    return zones, groups


def _packed(documents: Sequence[int], short: int) -> list[PackedDocument]:
    """Documents in order. Those in a row that have at most ``short`` tokens together are one: a million short documents
    take no longer to place than a few thousand.

    >>> [tuple(each) for each in _packed((0, 2, 4, 9, 11), short=4)]       # work, tokens and start
    [(8, 4, 0), (25, 5, 4), (4, 2, 9)]
    """
    lengths = list(map(sub, documents[1:], documents))
    squares = [0, *accumulate(map(mul, lengths, lengths))]
    packed = []
    first, number = 0, len(lengths)
    while first < number:
        stop = first + 1
        if stop < number and documents[stop + 1] - documents[first] <= short:
            stop = bisect_right(documents, documents[first] + short) - 1
        start = documents[first]
        packed.append(PackedDocument(squares[stop] - squares[first], documents[stop] - start, start))
        first = stop
    return packed


def _divide(
    documents: list[PackedDocument], parts: list[_Bin]
) -> tuple[list[PackedDocument], list[list[PackedDocument]]]:
    """Divide documents, largest first, into ``parts`` of tokens and work in proportion to their weights. Returns those
    to be cut instead, and those of each part.

    First each document goes to the part with the least work, until the rest has next to no work; that rest evens out
    the tokens. A document that fits no part is cut. It adds the same to every part, which leaves less for the whole
    documents of each; a part that has too much then swaps a document, or gives up the smallest one that helps.
    """
    work = sum(document.work for document in documents)
    total, cut = sum(part.weight for part in parts), []

    def cut_over_all(document: PackedDocument) -> None:
        cut.append(document)
        for part in parts:
            part.max_tokens -= document.tokens * part.weight / total
            part.max_work -= document.work * part.weight / total

    heavy, rest = len(documents), 0
    while heavy and rest + documents[heavy - 1].work <= WORK_SLACK * work / 4:
        heavy -= 1
        rest += documents[heavy].work
    least = [(0.0, index) for index in range(len(parts))]
    for document in documents[:heavy]:
        full = []
        while least and not parts[least[0][1]].has_room(document):
            full.append(heapq.heappop(least))
        if least:
            part = parts[least[0][1]]
            part.add(document)
            heapq.heapreplace(least, (part.work / part.weight, least[0][1]))
        else:
            cut_over_all(document)
        for entry in full:
            heapq.heappush(least, entry)
    by_tokens = [(part.tokens / part.weight, index) for index, part in enumerate(parts)]
    heapq.heapify(by_tokens)
    for document in documents[heavy:]:
        index = by_tokens[0][1]
        parts[index].add(document)
        heapq.heapreplace(by_tokens, (parts[index].tokens / parts[index].weight, index))
    while too_full := [part for part in parts if part.documents and not part.has_room()]:
        part = max(too_full, key=lambda part: (part.work / part.weight, part.tokens / part.weight))
        if _swap(part, parts):
            continue
        excess = max(part.tokens - part.max_tokens, (max(part.work - part.max_work, 0)) ** 0.5)
        at = next((i for i in reversed(range(len(part.documents))) if part.documents[i].tokens >= excess), 0)
        cut_over_all(part.remove(at))
    return cut, [part.documents for part in parts]


def _swap(part: _Bin, parts: list[_Bin]) -> bool:
    """Make a part that has too much small enough by moving a document to another, for a smaller one or for none.
    Returns False if no such pair is found, or there are too many to try."""
    if len(part.documents) * sum(len(other.documents) for other in parts) > MAX_SWAPS:
        return False
    for index, document in enumerate(part.documents):
        tokens, work = part.tokens - document.tokens, part.work - document.work
        for other in parts:
            if other is part:
                continue
            for place, back in enumerate([PackedDocument(0, 0, 0), *other.documents]):
                more_tokens, more_work = document.tokens - back.tokens, document.work - back.work
                if (
                    0 < more_tokens <= other.max_tokens - other.tokens
                    and more_work <= other.max_work - other.work
                    and tokens + back.tokens <= part.max_tokens
                    and work + back.work <= part.max_work
                ):
                    if place:
                        part.add(other.remove(place - 1))
                    other.add(part.remove(index))
                    for changed in (part, other):
                        changed.documents.sort(reverse=True)
                    return True
    return False


class _Bin:
    """Whole documents of one part of a zone, largest first, and how many tokens and how much work they may have."""

    def __init__(self, weight: int, max_tokens: float, max_work: float) -> None:
        self.weight, self.max_tokens, self.max_work = weight, max_tokens, max_work
        self.documents: list[PackedDocument] = []
        self.tokens = self.work = 0

    def has_room(self, more: PackedDocument | None = None) -> bool:
        if more is None:
            return self.tokens <= self.max_tokens and self.work <= self.max_work
        return self.tokens + more.tokens <= self.max_tokens and self.work + more.work <= self.max_work

    def add(self, document: PackedDocument) -> None:
        self.documents.append(document)
        self.tokens += document.tokens
        self.work += document.work

    def remove(self, index: int) -> PackedDocument:
        document = self.documents.pop(index)
        self.tokens -= document.tokens
        self.work -= document.work
        return document


def _cut(
    level: int,
    first: int,
    slots: Sequence[int],
    documents: Sequence[PackedDocument],
    weights: Sequence[int],
    length: int,
) -> Zone:
    """Cut each document over all ranks of a zone. If all have the same weight, they get equally many tokens in the end,
    or one more, for which the others are padded."""
    by_slot = zigzag_runs(((each.start, each.tokens) for each in documents), in_slot_order(weights, slots))
    if len(set(weights)) == 1:
        held = [sum(count for _, count in runs) for runs in by_slot]
        for runs, tokens in zip(by_slot, held, strict=True):
            if tokens < max(held):
                runs.append((length, max(held) - tokens))
    return Zone(level, first, tuple(tuple(by_slot[slot]) for slot in slots))

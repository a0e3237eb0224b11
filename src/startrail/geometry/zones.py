"""Zones: each packed document lives at the innermost level of the machine that can hold it.

A document that fits a rank stays on a rank, one that fits a node is cut over the ranks of one node, and only what is
too long for a node is cut over all of them. A cut document is cut separately, in zigzag order, so that the ranks of its
zone share its work evenly. Ranks get equally many tokens (the rest is padding) and nearly equal work: a document that
would put a rank more than ``TOKEN_SLACK`` or ``WORK_SLACK`` above the mean is cut over a larger zone instead.

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
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from startrail.geometry.layout import LAYOUTS, Layout, Runs, Zone, contiguous, zigzag

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
    tokens: int
    start: int


def check_layout(name: str) -> None:
    if name not in LAYOUT_NAMES:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUT_NAMES)}")


def make_layout(name: str, levels: Sequence[ZoneLevel], documents: Sequence[int]) -> Layout:
    """The layout called ``name`` of a sequence with these documents (cu_seqlens)."""
    if name == "zones" and len(documents) > 2:
        return zoned(levels, documents)
    return LAYOUTS["zigzag" if name == "zones" else name](levels[0].slots, documents[-1])


def zoned(levels: Sequence[ZoneLevel], documents: Sequence[int]) -> Layout:
    """The zones of packed documents. ``levels`` begins with all ranks and ends with single ranks."""
    length, world = documents[-1], len(levels[0].slots)
    if len(documents) <= 2:
        return zigzag(levels[0].slots, length)
    if world == 1:
        return contiguous(levels[0].slots, length)
    whole = sorted((PackedDocument(stop - start, start) for start, stop in pairwise(documents)), reverse=True)
    zones: list[Zone] = []
    held = [0] * world  # tokens per rank so far
    groups = [(0, whole)]  # the first rank of each zone of a level, and the documents inside
    tokens, work = length / world, sum(document.tokens**2 for document in whole) / world
    shared = [(0.0, 0.0)] * world  # tokens and work of what was cut
    for depth, ((level, slots), inner) in enumerate(pairwise(levels), start=1):
        parts: list[tuple[int, list[PackedDocument]]] = []
        for first, inside in groups:
            size, trials = len(inner.slots), []
            for slack in dict.fromkeys((depth / (len(levels) - 1), 1.0)):  # the rest is left to the levels inside
                max_tokens = size * (tokens * (1 + slack * TOKEN_SLACK) - shared[first][0])
                max_work = size * (work * (1 + slack * WORK_SLACK) - shared[first][1])
                trials.append(_divide(inside, len(slots) // size, max_tokens, max_work))
            cut, shares = min(trials, key=lambda trial: sum(document.tokens for document in trial[0]))
            if cut:
                zones.append(_cut(level, first, slots, sorted(cut, key=lambda document: document.start), length))
                more = [sum(d.tokens**power for d in cut) / len(slots) for power in (1, 2)]
                for rank in range(first, first + len(slots)):
                    held[rank] += zones[-1].tokens
                    shared[rank] = shared[rank][0] + more[0], shared[rank][1] + more[1]
            parts += [(first + index * len(inner.slots), share) for index, share in enumerate(shares)]
        groups = parts
    total = [held[rank] + sum(document.tokens for document in inside) for rank, inside in groups]
    unit = max(total) // ROUNDING or 1
    local = -(-max(total) // unit) * unit
    for rank, inside in groups:
        runs = [(document.start, document.tokens) for document in sorted(inside, key=lambda document: document.start)]
        padding = [(length, local - total[rank])] if local > total[rank] else []
        if runs or padding:
            zones.append(Zone(levels[-1].level, rank, ((*runs, *padding),)))
    return Layout(length, tuple(zones))


def _divide(
    documents: list[PackedDocument], parts: int, max_tokens: float, max_work: float
) -> tuple[list[PackedDocument], list[list[PackedDocument]]]:
    """Divide documents, largest first, into ``parts`` of nearly equal tokens and work, and those to be cut instead.

    First each document goes to the part with the least work, until the rest has next to no work; that rest evens out
    the tokens. A document that fits no part is cut. It adds the same to every part, which leaves less for the whole
    documents of each; a part that has too much then swaps a document, or gives up the smallest one that helps.
    """
    work = sum(d.tokens**2 for d in documents) / parts
    limits = _Limits(max_tokens, max_work, parts)
    bins = [_Part() for _ in range(parts)]
    heavy, rest = len(documents), 0
    while heavy and rest + documents[heavy - 1].tokens ** 2 <= WORK_SLACK * work * parts / 4:
        heavy -= 1
        rest += documents[heavy].tokens ** 2
    least = [(0, index) for index in range(parts)]
    for document in documents[:heavy]:
        full = []
        while least and not limits.allow(bins[least[0][1]], document):
            full.append(heapq.heappop(least))
        if least:
            part = bins[least[0][1]]
            part.add(document)
            heapq.heapreplace(least, (part.work, least[0][1]))
        else:
            limits.cut(document)
        for entry in full:
            heapq.heappush(least, entry)
    by_tokens = [(part.tokens, index) for index, part in enumerate(bins)]
    heapq.heapify(by_tokens)
    for document in documents[heavy:]:
        index = by_tokens[0][1]
        bins[index].add(document)
        heapq.heapreplace(by_tokens, (bins[index].tokens, index))
    while too_full := [part for part in bins if part.documents and not limits.allow(part)]:
        part = max(too_full, key=lambda part: (part.work / work, part.tokens))
        if _swap(part, bins, limits):
            continue
        excess = max(part.tokens - limits.tokens, (max(part.work - limits.work, 0)) ** 0.5)
        at = next((i for i in reversed(range(len(part.documents))) if part.documents[i].tokens >= excess), 0)
        limits.cut(part.remove(at))
    return limits.documents, [part.documents for part in bins]


def _swap(part: _Part, parts: list[_Part], limits: _Limits) -> bool:
    """Make a part that has too much small enough by moving a document to another, for a smaller one or for none.
    Returns False if no such pair is found, or there are too many to try."""
    if len(part.documents) * sum(len(other.documents) for other in parts) > MAX_SWAPS:
        return False
    for index, document in enumerate(part.documents):
        tokens, work = part.tokens - document.tokens, part.work - document.tokens**2
        for other in parts:
            if other is part:
                continue
            for place, back in enumerate([PackedDocument(0, 0), *other.documents]):
                more, square = document.tokens - back.tokens, document.tokens**2 - back.tokens**2
                if (
                    0 < more <= limits.tokens - other.tokens
                    and square <= limits.work - other.work
                    and tokens + back.tokens <= limits.tokens
                    and work + back.tokens**2 <= limits.work
                ):
                    if place:
                        part.add(other.remove(place - 1))
                    other.add(part.remove(index))
                    for changed in (part, other):
                        changed.documents.sort(reverse=True)
                    return True
    return False


class _Part:
    """Whole documents of one part of a zone, largest first."""

    def __init__(self) -> None:
        self.documents: list[PackedDocument] = []
        self.tokens = self.work = 0

    def add(self, document: PackedDocument) -> None:
        self.documents.append(document)
        self.tokens += document.tokens
        self.work += document.tokens**2

    def remove(self, index: int) -> PackedDocument:
        document = self.documents.pop(index)
        self.tokens -= document.tokens
        self.work -= document.tokens**2
        return document


class _Limits:
    """How many tokens and how much work the whole documents of a part may have, given the ``documents`` cut so far."""

    def __init__(self, tokens: float, work: float, parts: int) -> None:
        self.tokens, self.work, self.parts = tokens, work, parts
        self.documents: list[PackedDocument] = []

    def allow(self, part: _Part, more: PackedDocument | None = None) -> bool:
        count = more.tokens if more else 0
        return part.tokens + count <= self.tokens and part.work + count**2 <= self.work

    def cut(self, document: PackedDocument) -> None:
        self.documents.append(document)
        self.tokens -= document.tokens / self.parts
        self.work -= document.tokens**2 / self.parts


def _cut(level: int, first: int, slots: Sequence[int], documents: Sequence[PackedDocument], length: int) -> Zone:
    """Cut each document over all ranks of a zone: chunks i and 2S-1-i for slot i. Chunks of a document differ by one
    token at most; the longer ones are dealt out in turn, so that all ranks get equally many tokens in the end, or one
    more, for which the others are padded."""
    size = len(slots)
    runs: list[list[tuple[int, int]]] = [[] for _ in slots]  # by slot
    turn = 0  # the slot that gets the next longer chunk
    for count, start in documents:
        base, longer = divmod(count, 2 * size)
        each, more = divmod(longer, size)
        sizes = [base] * (2 * size)
        for slot in range(size):
            extra = each + ((slot - turn) % size < more)
            sizes[slot] += extra > 0
            sizes[2 * size - 1 - slot] += extra > 1
        turn = (turn + more) % size
        at = start
        for chunk, tokens in enumerate(sizes):
            if tokens:
                runs[min(chunk, 2 * size - 1 - chunk)].append((at, tokens))
                at += tokens
    held = [sum(count for _, count in of_slot) for of_slot in runs]
    longest = max(held)
    padded: list[Runs] = [
        tuple(of_slot) + (((length, longest - tokens),) if tokens < longest else ())
        for of_slot, tokens in zip(runs, held, strict=True)
    ]
    return Zone(level, first, tuple(padded[slot] for slot in slots))

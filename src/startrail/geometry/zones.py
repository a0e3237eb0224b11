"""Zones: groups of ranks that share tokens, so that each packed document lives on as few ranks as balance demands.

`placing` decides where documents go. A document that is whole on a rank is in a zone of that rank. One that is spread
over all ranks of a level of the plan is in a zone that runs the plan. Those that are cut over some of a level's ranks
together form another zone (``Zone.fills`` is False), whose ranks fetch the keys that they see. All ranks get equally
many tokens (the rest is padding) and nearly equal work or, with ``shares``, tokens and work in proportion to them.

Here two nodes of two ranks hold documents of 9,000, 5,000, 1,000 and 1,000 tokens. The longest has the most work per
token, so its beginning and its end are on the second node:

>>> levels = [ZoneLevel(0, (0, 1, 2, 3)), ZoneLevel(1, (0, 1)), ZoneLevel(2, (0,))]
>>> layout = zoned(levels, (0, 9000, 14000, 15000, 16000))
>>> for rank in range(4): print(layout.runs(rank))
((1146, 1516), (5694, 1516), (15000, 1000))
((2662, 3032), (14000, 1000))
((0, 1146), (7511, 2822))
((7210, 301), (10333, 3667))
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
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
from startrail.geometry.pieces import Group, Item, LinkCost, absorbs, items_of
from startrail.geometry.placing import Divided, divide

SLACK = 0.008  # more tokens than the mean that a node may have
PADDING = 4.0  # 1 % of padding costs as much as 4 % more work
EVEN = 1.04  # the work of a node over the mean that needs no remedy
EVEN_FEW = 1.1  # the same with fewer than two documents per node
SHORT = 128  # short documents are placed together, up to this part of a rank's tokens
FLOOR = 512  # tokens: no piece of a longer document is shorter, if a rank has at least 16 times as many
HELD = 10  # a document is cut between parts only if it has at most this many times a rank's tokens: its keys are held
ROUNDING = 256  # the tokens per rank are rounded up to a multiple of this part of them, so that shapes repeat

NEIGHBOURS = 8  # ranks of a level that are placed together, if it has more

LAYOUT_NAMES = ("zones", *LAYOUTS)


class ZoneLevel(NamedTuple):
    """The zones at one level of the machine: ``level`` of the plan's levels lie outside, and ``slots`` are the
    positions of its ranks in the order of tokens."""

    level: int
    slots: tuple[int, ...]
    link: LinkCost = LinkCost()

    def in_rank_order(self) -> ZoneLevel:
        """The same ranks with neighbouring tokens on neighbouring ranks, and so mostly on one node."""
        return self._replace(slots=tuple(range(len(self.slots))))


def check_layout(name: str) -> None:
    if name not in LAYOUT_NAMES:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUT_NAMES)}")


def make_layout(
    name: str, levels: Sequence[ZoneLevel], documents: Sequence[int], shares: Sequence[float] | None = None,
    shortest_piece: int | None = None,
) -> Layout:  # fmt: skip
    """The layout called ``name`` of a sequence with these documents (cu_seqlens). ``shares``: one positive number per
    rank, by default the same for all; tokens and work are divided in proportion. ``shortest_piece``: no piece of a
    longer document should have fewer tokens; by default FLOOR, or a 16th of a rank's tokens if that is less."""
    if name == "zones" and len(documents) > 2:
        return zoned(levels, documents, shares, shortest_piece)
    return LAYOUTS["zigzag" if name == "zones" else name](levels[0].slots, documents[-1], shares)


def zoned(
    levels: Sequence[ZoneLevel], documents: Sequence[int], shares: Sequence[float] | None = None,
    shortest_piece: int | None = None,
) -> Layout:  # fmt: skip
    """The zones of packed documents. ``levels`` begins with all ranks and ends with single ranks."""
    length, world = documents[-1], len(levels[0].slots)
    if len(documents) <= 2:
        return zigzag(levels[0].slots, length, shares)
    if world == 1:
        return contiguous(levels[0].slots, length, shares)
    return _Placing(levels, documents, weights_of(shares, world), shortest_piece).layout()


def predicted(
    levels: Sequence[ZoneLevel], documents: Sequence[int], shares: Sequence[float] | None = None,
    shortest_piece: int | None = None,
) -> str:  # fmt: skip
    """What the placement costs at the outermost level, and the next best."""
    world = len(levels[0].slots)
    if len(documents) <= 2 or world == 1:
        return ""
    placing = _Placing(levels, documents, weights_of(shares, world), shortest_piece)
    found = placing.outermost
    options = [(found.time, found.spread), *([found.next] if found.next else [])]
    times = [f"{time / placing.mean:.2f} x with {number or 'none'} of them" for time, number in options]
    return f"spread over all ranks: {'; next best '.join(times)}, predicted time over that of even work"


class _Placing:
    """The runs of every zone and rank, filled level by level."""

    outermost: Divided
    mean: float

    def __init__(
        self, levels: Sequence[ZoneLevel], documents: Sequence[int], weights: Sequence[int], shortest_piece: int | None
    ) -> None:
        self.levels, self.weights, self.length = levels, weights, documents[-1]
        world, total = len(weights), sum(weights)
        self.equal = len(set(weights)) == 1
        self.scaled = [weight * world / total for weight in weights]
        self.per_rank = self.length / world
        self.floor = shortest_piece or min(FLOOR, max(self.length // world // 16, 1))
        ends = [self.length * weight // total for weight in accumulate(weights, initial=0)]
        self.rooms = [stop - start for start, stop in pairwise(ends)]  # tokens that each rank may still get
        self.zones: dict[tuple[int, bool, int], list[list[tuple[int, int]]]] = {}
        self.whole: list[list[tuple[int, int]]] = [[] for _ in weights]
        items = sorted(items_of(documents, self.length // world // SHORT), reverse=True)
        self.mean = sum(item.work for item in items) / world  # work per rank
        self._place(0, 0, items)

    def _place(self, depth: int, first: int, items: Sequence[Item], size: int = 0, placed: float = 0.0) -> None:
        """Place items on the ranks of a group, or on ``size`` neighbours that are some of its ranks. ``placed``: the
        work per rank of what was spread over them and others before."""
        whole, inner = len(self.levels[depth].slots), len(self.levels[depth + 1].slots)
        group, link, size = (depth, first - first % whole), self.levels[depth].link, size or whole
        if inner == 1 and size > NEIGHBOURS and size % NEIGHBOURS == 0:
            inner = NEIGHBOURS
        ranks, parts = range(first, first + size), range(first, first + size, inner)
        weights = [sum(self.scaled[part : part + inner]) for part in parts]
        rooms = [sum(self.rooms[part : part + inner]) for part in parts]
        even = 1.0 if inner == 1 else EVEN if len(items) >= 2 * len(parts) else EVEN_FEW
        own = placed + sum(item.work for item in items) / sum(weights)
        link = link if size == whole else LinkCost(link.near, (size - 1) / size)
        found = divide(items, Group(
            rooms, weights, group, inner, link, self.floor, HELD * self.per_rank, even * max(own, self.mean),
            PADDING * self.mean / self.per_rank, SLACK * self.per_rank if inner > 1 else 0.0, placed,
        ))  # fmt: skip
        if size == len(self.weights):
            self.outermost = found
        spread = items[: found.spread]
        if inner > 1:
            self._spread(spread, ranks, group)
            placed += sum(item.work for item in spread) / sum(weights)
            below = depth if inner > len(self.levels[depth + 1].slots) else depth + 1
            for part, inside in zip(parts, found.parts, strict=True):
                self._place(below, part, sorted(inside, reverse=True), inner if below == depth else 0, placed)
            return
        for rank, inside in zip(ranks, found.parts, strict=True):
            for item in inside:
                self._hold(rank, item)
        self._spread(spread, ranks, group, uneven=True)

    def _spread(self, items: Sequence[Item], ranks: range, group: tuple[int, int], uneven: bool = False) -> None:
        """Cut items over all these ranks. ``uneven``: as much on each as it has room for."""
        rooms = [self.rooms[rank] for rank in ranks]
        uneven = uneven and absorbs(items, rooms, self.floor)
        weights = rooms if uneven else [self.weights[rank] for rank in ranks]
        fills = len(ranks) == len(self.levels[group[0]].slots)
        for zone in dict.fromkeys(item.cut for item in items):
            of_zone = [item for item in items if item.cut == zone]
            self._cut(of_zone, ranks, zone or group, fills and zone is None, weights)

    def _cut(
        self, items: Sequence[Item], ranks: range, group: tuple[int, int], fills: bool, weights: Sequence[int]
    ) -> None:
        """Cut each item over these ranks, which belong to the zone of a group."""
        ordered = sorted((item.start, item.tokens) for item in items)
        slots = self.levels[group[0]].slots if fills else range(len(ranks))
        by_slot = zigzag_runs(ordered, in_slot_order(weights, slots))
        for rank, slot in zip(ranks, slots, strict=True):
            for run in by_slot[slot]:
                self._add(rank, run, group, fills)

    def _hold(self, rank: int, item: Item) -> None:
        """Place an item on a single rank."""
        run = item.start, item.tokens
        if item.cut is not None:
            self._add(rank, run, item.cut, False)
            return
        self.whole[rank].append(run)
        self.rooms[rank] -= item.tokens

    def _add(self, rank: int, run: tuple[int, int], group: tuple[int, int], fills: bool) -> None:
        depth, first = group
        key = depth, not fills, first
        if key not in self.zones:
            self.zones[key] = [[] for _ in self.levels[depth].slots]
        self.zones[key][rank - first].append(run)
        self.rooms[rank] -= run[1]

    def layout(self) -> Layout:
        """All ranks are padded to equally many tokens, unless they have shares."""
        zones = []
        for (depth, partly, first), members in sorted(self.zones.items()):
            of_members = tuple(tuple(sorted(of_rank)) for of_rank in members)
            zones.append(Zone(self.levels[depth].level, first, of_members, not partly))
        held = [sum(count for _, count in runs) for runs in self.whole]
        for zone in zones:
            for rank, tokens in enumerate(zone.counts, zone.first):
                held[rank] += tokens
        counts = [_rounded_up(max(held) if self.equal else tokens) for tokens in held]
        for rank, runs in enumerate(self.whole):
            padding = [(self.length, counts[rank] - held[rank])] if counts[rank] > held[rank] else []
            if runs or padding or not held[rank]:
                zones.append(Zone(self.levels[-1].level, rank, ((*sorted(runs), *padding),)))
        return Layout(self.length, tuple(zones))


def _rounded_up(tokens: int) -> int:
    unit = tokens // ROUNDING or 1
    return -(-tokens // unit) * unit

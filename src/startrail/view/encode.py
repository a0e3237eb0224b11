"""Programs as compact JSON for the page: the events of every rank's walk, stored once where ranks differ only in place.

In most plans every rank runs the same program from its own place: adding its position to the shards and peers in
rank 0's program gives its own (`Shift`). Such a program is stored once. Other programs (the paper's placement differs
from rank to rank) are stored rank by rank. Which of the two holds is found out by comparing, not assumed.

>>> program = encode(Plan.parse("1x4"), 4)["forward"]
>>> len(program["templates"]), program["of"]                       # one template, shifted to every rank
(1, None)
>>> len(encode(Plan.parse("star2"), 4)["forward"]["templates"])    # one per rank
4

An event is a list of numbers that starts with its type; a piece is one number, ``(group * shards + shard) * 6 + kind``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from startrail.schedule.families.nested import Rings
from startrail.schedule.parts import num_first_steps
from startrail.schedule.places import Place, to_digits
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, traffic_at
from startrail.schedule.values import KINDS, PASSES, Pass, Piece
from startrail.schedule.walk import Await, Combine, Compute, Event, Post, Prepare, walk_of

AWAIT, POST, PREPARE, COMPUTE, COMBINE = range(5)
SEND, PACKS, OVER_HEADS = 1, 2, 4  # bits of a message's flags

Encoded = list[Any]


def encode(plan: Plan, world: int, keep_own: bool = False) -> dict[str, Any]:
    """Everything the page knows about a plan: its levels, its programs, and the closed form of its traffic. ``inside``
    names the plans of its zones, which `inner_plans` lists: the number of levels outside, the name and the ranks."""
    place = plan.place(world, 0)
    encoded: dict[str, Any] = {
        "plan": str(plan),
        "world": world,
        "sizes": place.sizes,
        "by_heads": place.by_heads,
        "levels": [_level(level) for level in plan.levels],
        "groups": plan.groups,
        "sums": plan.running_sums,
        "inside": [(level, name_of(inner, keeps), ranks) for level, inner, ranks, keeps in inner_plans(plan, world)],
    }
    for pass_ in PASSES:
        programs = _encode_pass(plan, world, pass_, keep_own)
        ranks = 1 if programs["of"] is None else world  # ranks with the same program send the same bytes
        encoded[str(pass_)] = programs | {"closed": _closed_forms(plan, world, pass_, ranks)}
    return encoded


def inner_plans(plan: Plan, world: int) -> list[tuple[int, Plan, int, bool]]:
    """The plans of the zones inside all ranks: levels outside, plan, ranks, and whether the zone keeps its own inputs
    for the backward pass, as the whole plan does."""
    return [
        (level, plan.inside(level), len(slots), plan.keeps_exchanged) for level, slots in plan.zone_levels(world)[1:]
    ]


def name_of(plan: Plan, keep_own: bool = False) -> str:
    """The plan's name among those of a world."""
    return f"{plan} kept" if keep_own and not plan.keeps_exchanged else str(plan)


def _level(level: object) -> list[int]:
    """``[team, ring]``, or the one number in the text form of other levels."""
    if isinstance(level, Rings):
        return [level.team, level.ring]
    return [int(str(level).lstrip("ustar"))]


def _encode_pass(plan: Plan, world: int, pass_: Pass, keep_own: bool) -> dict[str, Any]:
    """Templates, the template of every rank, and the steps that begin each (``schedule.parts``)."""
    programs = [build_program(plan, world, 0, pass_, keep_own=keep_own)]
    of = None
    if not is_shifted(plan, world, pass_, encode_program(programs[0]), keep_own=keep_own):
        programs = [build_program(plan, world, rank, pass_, keep_own=keep_own) for rank in range(world)]
        of = list(range(world))
    return {"templates": list(map(encode_program, programs)), "of": of, "begun": list(map(num_first_steps, programs))}


def is_shifted(
    plan: Plan, world: int, pass_: Pass, template: Encoded, ranks: Iterable[int] = (), keep_own: bool = False
) -> bool:
    """True if ``ranks`` run rank 0's program from their own places. By default three ranks, which tell the families
    that exist apart; a test compares all ranks."""
    ranks = ranks or {1 % world, (world // 2 + 1) % world, world - 1}
    programs = {rank: build_program(plan, world, rank, pass_, keep_own=keep_own) for rank in ranks}
    return all(Shift(plan, world, rank).walk(template) == encode_program(own) for rank, own in programs.items())


def encode_program(program: Program) -> Encoded:
    """One rank's events, step by step."""
    shards = program.place.num_shards
    return [[_event(event, shards) for event in step.events] for step in walk_of(program).steps]


def _event(event: Event, shards: int) -> Encoded:
    def number(piece: Piece) -> int:
        return (piece.group * shards + piece.shard) * len(KINDS) + KINDS.index(piece.kind)

    if isinstance(event, Await):
        return [AWAIT, number(event.piece), event.messages, int(event.in_parts)]
    if isinstance(event, Post):
        messages = []
        for message in event.messages:
            heads = message.head is not None
            flags = SEND * message.send + PACKS * message.packs + OVER_HEADS * heads
            messages.append([flags, message.lane, message.peer, -1 if heads else number(message.pieces[0])])
        return [POST, messages, [number(piece) for piece in event.exchanged]]
    if isinstance(event, Prepare):
        return [PREPARE, number(event.piece)]
    if isinstance(event, Compute):
        return [COMPUTE, *event.block]
    assert isinstance(event, Combine)
    return [COMBINE, number(event.piece), event.message]


class Shift:
    """Moves rank 0's events to another rank. The page's script does the same (``shifted`` in programs.js), and a test
    compares every plan on offer with the builder, rank by rank."""

    def __init__(self, plan: Plan, world: int, rank: int) -> None:
        self.zero, self.place = plan.place(world, 0), plan.place(world, rank)
        self.shards, self.heads = self.zero.num_shards, self.zero.num_heads
        self.grid = [
            (level.team, level.ring) if isinstance(level, Rings) else (1, size)
            for level, size, heads in zip(plan.levels, self.zero.sizes, self.zero.by_heads, strict=True)
            if not heads
        ]
        self.shard, self.rank = cache(self._shard), cache(self._rank)

    def _shard(self, shard: int) -> int:
        """Adds this rank's position in its team and in its ring, level by level."""
        sizes = [team * ring for team, ring in self.grid]
        moved = 0
        for (team, ring), here, own in zip(
            self.grid, to_digits(shard, sizes), to_digits(self.place.shard, sizes), strict=True
        ):
            position = (here // team + own // team) % ring * team + (here % team + own % team) % team
            moved = moved * team * ring + position
        return moved

    def _rank(self, rank: int) -> int:
        place = Place(rank, self.zero.sizes, self.zero.by_heads)
        return self.place.shard_ranks(self.shard(place.shard))[(place.head + self.place.head) % self.heads]

    def piece(self, number: int) -> int:
        whole, kind = divmod(number, len(KINDS))
        group, shard = divmod(whole, self.shards)
        return (group * self.shards + self.shard(shard)) * len(KINDS) + kind

    def walk(self, template: Encoded) -> Encoded:
        return [[self.event(event) for event in step] for step in template]

    def event(self, event: Encoded) -> Encoded:
        kind, first, *rest = event
        if kind == POST:
            messages = [
                [flags, lane, self.rank(peer), piece if piece < 0 else self.piece(piece)]
                for flags, lane, peer, piece in first
            ]
            return [kind, messages, [self.piece(piece) for piece in rest[0]]]
        if kind == COMPUTE:
            return [kind, self.shard(first), self.shard(rest[0]), rest[1]]
        return [kind, self.piece(first), *rest]


def _closed_forms(plan: Plan, world: int, pass_: Pass, ranks: int) -> dict[str, Any]:
    """What a rank sends over each level, as multiples of a whole piece of every kind. The closed form is linear in the
    sizes of pieces, so its value for one kind alone is that kind's coefficient."""
    units = [{kind: float(kind == unit) for kind in KINDS} for unit in KINDS]
    of: list[int] = []
    distinct: list[list[list[float]]] = []
    for rank in range(ranks):
        columns = [traffic_at(plan, plan.place(world, rank), pass_, unit) for unit in units]
        lanes = [list(lane) for lane in zip(*columns, strict=True)]
        if lanes not in distinct:
            distinct.append(lanes)
        of.append(distinct.index(lanes))
    return {"lanes": distinct, "of": of if len(distinct) > 1 else None}

"""How many bytes a rank sends over each lane: counted from a program, and by closed form.

Sizes are those of a whole piece (a shard of one group), so a count is exact for any head ratio, dtype and wire format.

>>> sizes = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)                     # MHA, in shards
>>> closed_form(Plan.parse("1x16"), 16, 0, "forward", sizes)              # Ring Attention: 15 hops of K and V
(30.0, 0.0)
>>> closed_form(Plan.parse("2x2/u8"), 32, 0, "forward", sizes)            # 2 + 2, and the all-to-all
(4.0, 3.5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from startrail.plan import Plan
from startrail.schedule.nested import nested_flow
from startrail.schedule.places import Place
from startrail.schedule.star import Star
from startrail.schedule.values import Program

Sizes = Mapping[str, float]


@dataclass(frozen=True)
class Count:
    """What a program sends over one lane."""

    size: float
    hops: int


def lane_names(place: Place) -> list[str]:
    return [f"level {lane}" for lane in range(place.heads_lane)] + ["heads"]


def count_sends(program: Program, sizes: Sizes) -> tuple[Count, ...]:
    """By lane: what the program sends, and in how many transfers. A part on the heads lane is 1/U of a piece."""
    place = program.place
    totals = [[0.0, 0] for _ in range(place.heads_lane + 1)]
    for step in program.steps:
        for post in step.posts:
            if post.send:
                size = sizes[post.piece.kind]
                totals[post.lane][0] += size / place.plan.heads if post.lane == place.heads_lane else size
                totals[post.lane][1] += 1
    return tuple(Count(size, int(hops)) for size, hops in totals)


def closed_form(plan: Plan, world: int, rank: int, direction: str, sizes: Sizes) -> tuple[float, ...]:
    """What a rank must send over each lane, the heads lane last, without building its program."""
    place = Place.of(plan, world, rank)

    def total(kinds: tuple[str, ...]) -> float:
        return sum(sizes[kind] for kind in kinds)

    if plan.star:
        lanes = [_star_form(place, direction, total)]
    else:
        flow = nested_flow(direction, plan.backward, plan.keep)
        lanes = []
        for index, level in enumerate(plan.levels):
            outer_team = prod(outer.team for outer in plan.levels[:index])
            outer_ring = prod(outer.ring for outer in plan.levels[:index])
            lanes.append(
                (level.team - 1) * outer_team * total(flow.team_in + flow.team_out)
                + (level.ring - 1) * outer_ring * total(flow.ring_in + flow.ring_out)
            )
    exchanged = ("q", "kv", "out") if direction == "forward" else ("do", "dq", "dkv")
    lanes.append((plan.heads - 1) / plan.heads * total(exchanged))
    return tuple(float(lane * plan.groups) for lane in lanes)


def _star_form(place: Place, direction: str, total) -> float:  # type: ignore[no-untyped-def]
    star, plan = Star(place), place.plan
    team, hops = plan.star, star.hops - 1
    moved = star.placed_to != place.rank
    if direction == "forward":
        return (team - 1) * total(("q", "kv", "out")) + team * moved * total(("kv",)) + team * hops * total(("kv",))
    gathered = {"none": ("q", "do", "kv"), "queries": ("do", "kv"), "all": ("do",)}[plan.keep]
    placed = ("dkv",) if plan.keep == "all" else ("kv", "dkv")
    return (
        (team - 1) * total((*gathered, "dq", "dkv"))
        + team * moved * total(placed)
        + team * hops * total(("q", "do", "dq"))
    )

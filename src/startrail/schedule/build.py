"""From a plan to the program of one rank, computed from the rank's place alone."""

from __future__ import annotations

from functools import lru_cache

from startrail.plan import Plan
from startrail.schedule.nested import nested_flow, nested_kept, nested_steps
from startrail.schedule.places import Place
from startrail.schedule.star import star_kept, star_steps
from startrail.schedule.timeline import with_heads_and_groups
from startrail.schedule.values import Piece, Program

DIRECTIONS = ("forward", "backward")


@lru_cache(maxsize=256)
def build_program(plan: Plan, world: int, rank: int, direction: str) -> Program:
    """What ``rank`` does in one pass.

    >>> program = build_program(Plan.parse("2x2"), 4, 0, "forward")
    >>> for step in program.steps: print(step)
    post q1<1@0 q0>1@0 kv2<2@0 kv0>2@0 | 0x0
    1x0
    1x2
    post out0<1@0 out1>1@0 | 0x2
    merge out0<1
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r} is not one of {', '.join(DIRECTIONS)}")
    place = Place.of(plan, world, rank)
    groups, kept = [], []
    for group in range(plan.groups):
        if plan.star:
            groups.append(star_steps(place, direction, plan.keep, group))
            kept += star_kept(place, plan.keep, group)
        else:
            groups.append(nested_steps(place, nested_flow(direction, plan.backward, plan.keep), group))
            kept += nested_kept(place, plan.keep, group)

    def own(*kinds: str) -> list[Piece]:
        return [Piece(kind, place.shard, group) for group in range(plan.groups) for kind in kinds]

    if plan.heads > 1:  # what the Ulysses exchange brought is kept too: the backward pass exchanges only gradients
        kept = own("q", "kv") + kept
    enters: tuple[str, ...]
    results: tuple[str, ...]
    if direction == "forward":
        enters, results = ("q", "kv"), ("out",)
        given, keeps = own("q", "kv"), kept
    else:
        enters, results = ("do",), ("dq", "dkv")
        given, keeps = own("do") + (kept if plan.heads > 1 else own("q", "kv") + kept), []
    steps = with_heads_and_groups(place, groups, enters if plan.heads > 1 else (), results if plan.heads > 1 else ())
    return Program(plan, place, direction, steps, tuple(given), tuple(keeps), results)

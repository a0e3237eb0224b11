"""Choosing a plan where nothing is known but the shape of the machine: the fewest bytes over the nodes' links, then
inside the nodes. What is known or can be measured of a cluster goes to ``planning`` instead."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from startrail.planner.topology import Machine
from startrail.schedule.families.base import Heads, Level
from startrail.schedule.families.nested import NESTED
from startrail.schedule.plan import Plan, plans_for
from startrail.schedule.program import closed_form
from startrail.schedule.sizes import key_copies
from startrail.schedule.values import PASSES

LEVELS = 2  # of the plan over nodes, and as many inside them
MOST_HEADS = 2**16


@lru_cache(maxsize=256)
def auto_plan(machine: Machine, q_heads: int, kv_heads: int) -> tuple[Plan, str]:
    """The plan with the fewest bytes on ``machine``, and a line that says why.

    Compared are all plans whose levels follow the machine's (up to two over the nodes, two inside them, heads anywhere,
    both backward forms) and that keep nothing. ``keep`` buys bytes with memory in every layer, which is not known here:
    on 8 nodes of 2 with 64:8 heads ``1x8/u2,keep=all`` would send 3.5 shards over the nodes, the plan chosen 3.9. No
    plan of up to three levels that keeps nothing sends less, followed the machine's levels or not
    (tests/unit/test_planner.py tries them all).

    >>> plan, why = auto_plan(Machine(4, 8), 32, 32)
    >>> str(plan)
    'u4/u8'
    >>> why
    'auto chose u4/u8: 6.0 over the nodes, 1.8 inside the nodes, in shards a rank (forward + backward; 32:32 heads)'
    """
    check_heads(q_heads, kv_heads)
    costs = {
        plan: bytes_by_level(plan, machine, q_heads, kv_heads)
        for plan in _fewest_over_nodes(machine, q_heads, kv_heads)
    }
    best = min(costs, key=lambda plan: (_rounded(costs[plan]), len(plan.levels), _heads_last(plan), str(plan)))
    places = zip(costs[best], ("over the nodes", "inside the nodes"), strict=True)
    where = ", ".join(f"{amount:.1f} {place}" for amount, place in places if amount)
    text = f"{where}, in shards a rank" if where else "no traffic"
    return best, f"auto chose {best}: {text} (forward + backward; {q_heads}:{kv_heads} heads)"


def check_heads(q_heads: object, kv_heads: object) -> None:
    for value in (q_heads, kv_heads):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_HEADS:
            limits = f"of at least 1 and at most {MOST_HEADS}"
            raise ValueError(f"heads={q_heads!r}, kv_heads={kv_heads!r} must be whole numbers {limits}")
    if q_heads % kv_heads:  # type: ignore[operator]
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads")


def _fewest_over_nodes(machine: Machine, q_heads: int, kv_heads: int) -> list[Plan]:
    """Of all plans whose levels follow the machine's, some over the nodes, some inside them, heads anywhere: those with
    the fewest bytes over the nodes. These depend on the levels inside by their number of heads only."""
    inside: dict[int, list[tuple[Level, ...]]] = {}
    for levels in _levels(machine.ranks_per_node):
        inside.setdefault(prod(level.size for level in levels if isinstance(level, Heads)), []).append(levels)
    costs: dict[tuple[tuple[Level, ...], int, str], float] = {}
    for outer in _levels(machine.nodes):
        for heads, choices in inside.items():
            for plan in _plans(outer, choices[0], q_heads):
                cost, _ = _rounded(bytes_by_level(plan, machine, q_heads, kv_heads))
                costs[outer, heads, plan.backward] = cost
    least = min(costs.values())
    return [
        plan
        for (outer, heads, backward), cost in costs.items()
        if cost == least
        for inner in inside[heads]
        for plan in _plans(outer, inner, q_heads)
        if plan.backward == backward
    ]


def _plans(outer: tuple[Level, ...], inner: tuple[Level, ...], q_heads: int) -> list[Plan]:
    """The plan of these levels with each backward form, if the heads can be split so."""
    plan = Plan((*outer, *inner) or (Heads(1),))
    if q_heads % plan.heads:
        return []
    return [replace(plan, backward=form) for form in (NESTED.backwards if plan.shard_levels else NESTED.backwards[:1])]


def _levels(size: int) -> list[tuple[Level, ...]]:
    plans = (plan for plan in plans_for(size, LEVELS) if plan.family is NESTED)
    return [plan.levels for plan in plans] if size > 1 else [()]


def _rounded(costs: tuple[float, float]) -> tuple[float, float]:
    """So that the order of additions does not decide between equals."""
    return round(costs[0], 6), round(costs[1], 6)


def _heads_last(plan: Plan) -> tuple[bool, ...]:
    """Of equals, the one with heads further out."""
    return tuple(not isinstance(level, Heads) for level in plan.levels)


def bytes_by_level(plan: Plan, machine: Machine, q_heads: int, kv_heads: int) -> tuple[float, float]:
    """Shards that a rank sends over the nodes' links and inside its node; a shard is its tokens by the query width.

    >>> bytes_by_level(Plan.parse("2x2/u8"), Machine(4, 8), 8, 8)
    (11.0, 7.0)
    """
    kv = 2 * kv_heads * key_copies(q_heads, kv_heads, plan.heads) / q_heads
    sizes = {"q": 1.0, "do": 1.0, "out": 1.0, "dq": 1.0, "kv": kv, "dkv": kv}
    over_nodes = inside = 0.0
    for pass_ in PASSES:
        for level, amount in enumerate(closed_form(plan, machine.world, 0, pass_, sizes)):
            if prod(plan.sizes(machine.world)[: level + 1]) <= machine.nodes:
                over_nodes += amount
            else:
                inside += amount
    return over_nodes, inside

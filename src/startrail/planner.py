"""Choosing a plan. For now one rule: the fewest bytes over the outermost level, then over the next."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from startrail.cluster import Machine
from startrail.plan import Level, Plan, divisors
from startrail.schedule import closed_form


@lru_cache(maxsize=256)
def auto_plan(machine: Machine, q_heads: int, kv_heads: int) -> tuple[Plan, str]:
    """The plan for all ranks of ``machine``, and a line that says why.

    >>> plan, why = auto_plan(Machine(4, 8), 32, 32)
    >>> str(plan)
    '2x2/u8'
    >>> why
    'auto chose 2x2/u8: 11.0 over the nodes, 7.0 by heads, in shards a rank (forward + backward; 32:32 heads)'
    """
    nodes, inside = machine.nodes, machine.ranks_per_node
    best: tuple[tuple[float, float, float], str, Plan] | None = None
    for heads in divisors(inside):
        if q_heads % heads:
            continue
        for outer in divisors(nodes):
            for inner in divisors(inside // heads):
                levels = (Level(outer, nodes // outer), Level(inner, inside // heads // inner))
                plan = Plan(tuple(level for level in levels if level.size > 1), heads=heads)
                for backward in ("keys", "queries") if plan.levels else ("keys",):
                    candidate = replace(plan, backward=backward)
                    cost = _cost(candidate, machine, q_heads, kv_heads)
                    if best is None or (cost, str(candidate)) < best[:2]:
                        best = cost, str(candidate), candidate
    assert best is not None
    cost, _, plan = best
    names = ("over the nodes", "inside them", "by heads")
    where = [f"{amount:.1f} {name}" for amount, name in zip(cost, names, strict=True) if amount]
    text = f"{', '.join(where)}, in shards a rank" if where else "no traffic"
    return plan, f"auto chose {plan}: {text} (forward + backward; {q_heads}:{kv_heads} heads)"


def _cost(plan: Plan, machine: Machine, q_heads: int, kv_heads: int) -> tuple[float, float, float]:
    """Shards over the nodes' links, inside a node, and by heads; a shard is one rank's tokens by the query width."""
    copies = next(c for c in divisors(q_heads // kv_heads) if kv_heads * c % plan.heads == 0)
    kv = 2 * kv_heads * copies / q_heads
    sizes = {"q": 1.0, "do": 1.0, "out": 1.0, "dq": 1.0, "kv": kv, "dkv": kv}
    passes = [closed_form(plan, machine.world, 0, direction, sizes) for direction in ("forward", "backward")]
    lanes = [sum(lane) for lane in zip(*passes, strict=True)]
    *levels, by_heads = lanes
    if machine.nodes > 1:
        return levels[0], sum(levels[1:]), by_heads
    return 0.0, sum(levels), by_heads

"""Which plans there are on a cluster: those whose levels follow its own, with all options, and the well-known ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from startrail.planner.cluster import ClusterSpec
from startrail.planner.workload import Model
from startrail.schedule.families.base import Heads, Level
from startrail.schedule.plan import Plan, plans_for, variants_of

LEVELS = 2  # of the plan, at each level of the cluster
GROUPS = (1, 2, 4)
LARGE = 1024  # ranks: where there are more, programs are long and fewer plans are played
STARS = (2, 4, 8)


@lru_cache(maxsize=64)
def levels_for(size: int) -> tuple[tuple[Level, ...], ...]:
    """Every way to use one level of the cluster. Two levels of rings, or two of heads, over the same links are left
    out: they send the same bytes in as many messages as one level of their product.

    >>> [str(Plan(levels)) for levels in levels_for(4)]
    ['1x4', '2x2', '4x1', 'star2', 'u4', 'u2/1x2', '1x2/u2', 'u2/2x1', '2x1/u2']
    """
    if size == 1:
        return ((),)
    return tuple(plan.levels for plan in plans_for(size, LEVELS) if len({*map(type, plan.levels)}) == len(plan.levels))


def plans_on(cluster: ClusterSpec, heads: int) -> Iterator[Plan | str]:
    """Every plan whose levels follow the cluster's, with default options; or why levels cannot be used together."""
    for chosen in product(*(levels_for(level.size) for level in cluster.levels)):
        levels = tuple(level for part in chosen for level in part) or (Heads(1),)
        split = prod(level.size for level in levels if isinstance(level, Heads))
        if heads % split:
            yield f"{heads} query heads cannot be split so"
            continue
        if len({type(level) for level in levels if not isinstance(level, Heads)}) > 1:
            continue  # the paper's schedule stands alone
        try:
            yield Plan(levels)
        except ValueError:  # two levels of the paper's
            continue


def least_traffic(plan: Plan) -> list[Plan]:
    """The variants that no other sends less than: all kept, or queries travelling."""
    if not plan.shard_levels:
        return [plan]
    forms = [replace(plan, backward=form) for form in plan.family.backwards if form != "keys"]
    return [replace(plan, keep="all"), *forms]


def options_of(plan: Plan, keep: bool = True) -> Iterator[Plan]:
    """``plan`` with every option that changes what it does; without ``keep``, those that keep nothing."""
    keeps = plan.family.useful_keeps(plan) if keep else ("none",)
    for variant in variants_of(plan):
        if variant.keep in keeps:
            yield from (replace(variant, groups=groups) for groups in GROUPS)


class Known(NamedTuple):
    """A plan that people ask for by name, and why there is none such here (else ``""``)."""

    role: str
    plan: str
    why_not: str = ""


def well_known(cluster: ClusterSpec, model: Model) -> Iterator[Known]:
    """Ring Attention, Ulysses, the paper's schedule, USP and the double ring."""
    world, inside = cluster.world, cluster.spans[0]
    outside, heads = world // inside, gcd(inside, model.kv_heads)
    yield Known("ring", f"1x{world}")
    yield Known("Ulysses", f"u{world}")
    fitting = [team for team in STARS if world % team**2 == 0]
    played = fitting[-1:] if world > LARGE else fitting  # in large worlds the best of them
    yield from (Known(f"star{team}", f"star{team}") for team in played)
    for team in STARS[:2]:
        if team not in fitting:
            yield Known(f"star{team}", f"star{team}", f"{team}² = {team**2} does not divide {world} ranks")
    why_not = ""
    if outside == 1 or inside == 1:
        levels = ", ".join(f"{level.size} {level.name}s" for level in cluster.levels)
        why_not = f"it is for two levels of several members each, and here are {levels}"
    yield Known("double ring", f"1x{outside}/1x{inside}", why_not)
    if heads == 1 and not why_not:
        why_not = f"{model.kv_heads} key/value heads cannot be split inside a {cluster.levels[0].name} of {inside}"
    rings = f"/1x{inside // heads}" if heads < inside else ""
    yield Known("USP", f"1x{outside}{rings}/u{heads}", why_not)

"""Candidate plans for a cluster: all whose levels follow the cluster's, with every option, and the well-known ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from startrail.planner.cluster import ClusterSpec
from startrail.planner.units import count_text
from startrail.schedule.families import FAMILIES
from startrail.schedule.families.base import Heads, Level
from startrail.schedule.plan import Plan, plans_for, variants_of

PLAN_LEVELS = 2  # at each level of the cluster
GROUPS = (1, 2, 4)
MORE_CHANNELS = (16, 24)
LARGE_WORLD = 1024  # ranks: above it, programs are long and fewer plans are simulated
RING = "ring"  # the role of Ring Attention


@lru_cache(maxsize=64)
def levels_for(size: int) -> tuple[tuple[Level, ...], ...]:
    """Every way to use one level of the cluster, without two levels of rings or two of heads over the same links: they
    send the same bytes in as many messages as one level of their product.

    >>> [str(Plan(levels)) for levels in levels_for(4)]
    ['1x4', '2x2', '4x1', 'star2', 'u4', 'u2/1x2', '1x2/u2', 'u2/2x1', '2x1/u2']
    """
    if size == 1:
        return ((),)
    return tuple(
        plan.levels for plan in plans_for(size, PLAN_LEVELS) if len({*map(type, plan.levels)}) == len(plan.levels)
    )


def plans_on(cluster: ClusterSpec, heads: int) -> Iterator[Plan | str]:
    """Every plan whose levels follow the cluster's, with default options, or the reason why levels do not combine."""
    for chosen in product(*(levels_for(level.size) for level in cluster.levels)):
        levels = tuple(level for part in chosen for level in part) or (Heads(1),)
        if heads % prod(level.size for level in levels if isinstance(level, Heads)):
            yield f"their heads do not divide the {heads} query heads"
            continue
        if len({type(level) for level in levels if not isinstance(level, Heads)}) > 1:
            continue  # the paper's schedule stands alone
        try:
            yield Plan(levels)
        except ValueError:  # two levels of the paper's
            continue


def heads_outermost(plan: Plan, cluster: ClusterSpec) -> bool:
    """True if ``plan`` splits heads over all members of the outermost of several levels."""
    outer, first = cluster.levels[0].size, plan.levels[0]
    return 1 < outer < cluster.world and isinstance(first, Heads) and first.size % outer == 0


def least_traffic(plan: Plan) -> list[Plan]:
    """The variants that send the least: with everything kept, or with queries travelling in the backward pass."""
    if not plan.shard_levels:
        return [plan]
    forms = [replace(plan, backward=form) for form in plan.family.backwards if form != "keys"]
    return [replace(plan, keep="all"), *forms]


def options_of(plan: Plan, keep: bool = True) -> Iterator[Plan]:
    """``plan`` with every option that makes a difference; without ``keep``, only those that keep nothing."""
    keeps = plan.family.useful_keeps(plan) if keep else ("none",)
    for variant in variants_of(plan):
        if variant.keep in keeps:
            yield from (replace(variant, groups=groups) for groups in GROUPS)


def with_more_channels(plan: Plan, cluster: ClusterSpec) -> Iterator[Plan]:
    """``plan`` with more channels for transfers under compute, at levels whose links the usual number cannot fill.

    >>> from startrail.planner.cluster import find_cluster
    >>> [str(each) for each in with_more_channels(Plan.parse("1x8/1x8"), find_cluster("h100-8x8"))]
    ['1x8/1x8,channels=8/16', '1x8/1x8,channels=8/24']
    """
    sizes = plan.sizes(cluster.world)
    furthest = [(size - 1) * prod(sizes[at + 1 :]) for at, size in enumerate(sizes)]
    limited = [
        at for at in plan.hidden_levels
        if (crossed := cluster.crossed(0, furthest[at])) and all(cluster.levels[each].under_compute for each in crossed)
    ]  # fmt: skip
    for number in MORE_CHANNELS if limited else ():
        channels = (number if at in limited else plan.channels_at(at) for at in range(len(sizes)))
        yield replace(plan, channels=tuple(channels))


class WellKnown(NamedTuple):
    """A plan that people ask for by name, and the reason why it cannot be used here (else ``""``). ``memory``: the
    bytes per device that it needs, if they are the reason."""

    role: str
    plan: str
    reason: str = ""
    memory: float = 0.0


def well_known(cluster: ClusterSpec, kv_heads: int) -> Iterator[WellKnown]:
    """Ring Attention, Ulysses, the paper's schedule, USP and the double ring."""
    world, inside = cluster.world, cluster.spans[0]
    outside, heads = world // inside, gcd(inside, kv_heads)
    yield WellKnown(RING, f"1x{world}")
    yield WellKnown("Ulysses", f"u{world}")
    for family in FAMILIES:
        yield from (WellKnown(str(level), str(level), reason) for level, reason in family.known_levels(world))
    reason = ""
    if outside == 1 or inside == 1:
        levels = ", ".join(count_text(level.size, level.label) for level in cluster.levels)
        reason = f"it needs two levels of several members each, and a group has {levels}"
    yield WellKnown("double ring", f"1x{outside}/1x{inside}", reason)
    if heads == 1 and not reason:
        reason = f"{kv_heads} key/value heads cannot be split inside a {cluster.levels[0].label} of {inside}"
    rings = f"/1x{inside // heads}" if heads < inside else ""
    yield WellKnown("USP", f"1x{outside}{rings}/u{heads}", reason)

"""``direct``: each rank fetches just the keys that its queries see, straight from their owners, and returns their
gradients. For windows, chunks and other narrow masks, and for short documents.

The rank computes its own block during these transfers (`demand` has this example):

>>> owned, needed = [((4 * rank, 4),) for rank in range(4)], [(), ((2, 2),), ((2, 2), (6, 2)), ((10, 2),)]
>>> from startrail.schedule.values import FORWARD
>>> for step in direct_steps(Demand.of(owned, needed, sizes=(2, 2)), 2, FORWARD): print(step)
post kv5<0@2 kv6<1@2 kv7>3@3 | 2x2
2x5 2x6
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from startrail.schedule.demand import NARROW, Demand, fetch_steps, return_steps
from startrail.schedule.families.base import ByKind, Family, Level
from startrail.schedule.places import Place
from startrail.schedule.values import Bundle, Pass, Step

if TYPE_CHECKING:
    from startrail.schedule.plan import Plan


@dataclass(frozen=True)
class DirectLevel(Level):
    """All ranks exchange keys and values directly."""

    def __str__(self) -> str:
        return "direct"

    def describe(self) -> str:
        return "each rank fetches the keys that its queries see"


class DirectFamily(Family):
    level, form = DirectLevel, "direct"
    backwards = ("keys",)
    open_ended = True
    by_demand = by_rank = True

    def read(self, text: str) -> DirectLevel | None:
        return DirectLevel() if text == "direct" else None

    def sizes(self, plan: Plan, shards: int) -> tuple[int, ...] | None:
        return (shards,) if shards >= 1 else None

    def unit(self, plan: Plan) -> int:
        return 1

    def equation(self, plan: Plan, world: int) -> str:
        return f"world size {world} is not at least 1"

    def grids(self, shards: int, levels: int) -> Iterator[tuple[Level, ...]]:
        yield from ()  # a choice for masks, not for machines

    def check(self, plan: Plan) -> None:
        if len(plan.levels) > 1:
            raise ValueError(f"plan {plan}: direct cannot be combined with other levels")
        if plan.keep != "none" or plan.groups > 1:
            raise ValueError(f"plan {plan}: direct has no options")

    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        return ()

    def place(self, plan: Plan, world: int, rank: int, demand: Demand | None) -> Place:
        """Its lanes come after those of the plan's levels: each connects all ranks of a subtree."""
        levels = (demand or Demand.all_of(world)).sizes
        return Place(rank, (1,) * len(levels) + levels, (False,) * 2 * len(levels))

    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int, demand: Demand | None) -> list[Step]:
        return direct_steps(demand or Demand.all_of(place.world), place.rank, pass_)

    def bundles(self, plan: Plan, place: Place, demand: Demand | None) -> dict[int, Bundle]:
        return dict((demand or Demand.all_of(place.world)).bundles(place.rank).values())

    def keepable(self, plan: Plan, place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind, demand: Demand | None) -> list[float]:
        demand = demand or Demand.all_of(place.world)
        sent, got = (demand.tokens_by_level(**{end: place.rank}) for end in ("sender", "receiver"))
        returned = 0 if pass_.is_forward else sizes["dkv"]
        by_level = [a * sizes["kv"] + b * returned for a, b in zip(sent, got, strict=True)]
        return [0.0] * len(by_level) + by_level

    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        columns = dict.fromkeys(("kv", "dkv", "dkv<"), NARROW)
        return {"out": 1, **columns} if pass_.is_forward else {"dq": 1, **columns, "dkv": NARROW + 1}

    def team(self, plan: Plan) -> int:
        return 1

    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        return ("none",)

    def hop_width(self, plan: Plan) -> int | None:
        return None


DIRECT = DirectFamily()


def direct_steps(demand: Demand, rank: int, pass_: Pass) -> list[Step]:
    """The steps of a rank. Keys are fetched again in the backward pass."""
    return fetch_steps(demand, rank, "kv") + ([] if pass_.is_forward else return_steps(demand, rank, "dkv"))

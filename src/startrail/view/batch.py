"""A batch as text: which programs its zones run, and each of them as a grid.

>>> from startrail.schedule.values import FORWARD
>>> print(show_batch(Plan.parse("1x4"), 4, Mask(causal=True, window=3), 32, FORWARD, [0, 1], columns=80))
32 tokens in 1 document on 4 ranks: 8 per rank, 0.0 % padding, busiest rank 1.00 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
8 (100 %)              4      direct   0.147 MB; 1x4 would send 1.573 MB
1x4 or direct: by bytes, outermost level first
<BLANKLINE>
direct forward, the zone of ranks 0 to 3
step  rank 0       rank 1
   0  send kv4>1   send kv5>0 kv6>2
      compute 0x0  compute 1x1
   1  hold kv5     hold kv4 kv7
      compute 0x5  compute 1x4 1x7
kv4: rank 0 to 1, 2 tokens
kv5: rank 1 to 0, 2 tokens
kv6: rank 1 to 2, 2 tokens
kv7: rank 2 to 1, 2 tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.geometry.zones import ZoneLevel, make_layout
from startrail.routing.explain import explain
from startrail.routing.route import Rule, ZoneRoute, route_of
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import Pass
from startrail.view.text import Seen, columns_that_fit, grid

ASSUMED_HEADS, ASSUMED_HEAD_DIM = 32, 128  # MHA in bfloat16, for the bytes
MAX_BUNDLES = 12  # listed


def show_batch(
    plan: Plan, world: int, mask: Mask, length: int, pass_: Pass, ranks: Sequence[int], columns: int,
    sparse: bool | Rule = True,
) -> str:  # fmt: skip
    """What the first of ``ranks`` runs for a batch, and the programs of its zones on those ranks that share them.
    ``sparse`` is the rule that chooses between the plan and ``direct``."""
    layout, sizes = batch_of(plan, world, mask, length)
    parts = [explain(plan, layout, ranks[0], mask, sizes, sparse)]
    for number, route in enumerate(route_of(plan, layout, ranks[0], mask, sizes, sparse)):
        if route.zone.size > 1:
            zone = range(route.zone.first, route.zone.first + route.zone.size)
            inside = [rank for rank in ranks if rank in zone]
            routes = [route_of(plan, layout, rank, mask, sizes, sparse)[number] for rank in inside]
            parts.append(_zone_text(routes, inside, pass_, columns, mask, length))
    return "\n\n".join(parts)


def batch_of(plan: Plan, world: int, mask: Mask, length: int) -> tuple[Layout, Sizes]:
    """The layout of a batch, and the sizes of a call on it."""
    documents = mask.documents or (0, length)
    layout = make_layout("zones", [ZoneLevel(*level) for level in plan.zone_levels(world)], documents)
    heads = ASSUMED_HEADS if ASSUMED_HEADS % (plan.heads * plan.groups) == 0 else plan.heads * plan.groups
    return layout, Sizes(plan, layout.largest, 1, heads, heads, ASSUMED_HEAD_DIM, itemsize=2)


def _zone_text(routes: list[ZoneRoute], ranks: list[int], pass_: Pass, columns: int, mask: Mask, length: int) -> str:
    zone, seen = routes[0].zone, _seen(routes[0], mask, length)
    programs = [route.program(pass_) for route in routes]
    shown = columns_that_fit(programs, ranks, columns, seen)
    last = zone.first + zone.size - 1
    lines = [f"{routes[0].chosen} {pass_}, the zone of ranks {zone.first} to {last}"]
    lines += grid(programs[:shown], ranks[:shown], seen)
    if (fetches := routes[0].fetches) is not None:
        members = {rank - zone.first for rank in ranks[:shown]}
        listed = [
            f"kv{number}: rank {zone.first + edge.sender} to {zone.first + edge.receiver}, "
            f"{sum(count for _, count in runs)} tokens"
            for number, (edge, runs) in enumerate(fetches.messages.items(), zone.size)
            if {edge.sender, edge.receiver} & members
        ]
        lines += listed[:MAX_BUNDLES] + [f"... and {len(listed) - MAX_BUNDLES} more"] * (len(listed) > MAX_BUNDLES)
    return "\n".join(lines)


def _seen(route: ZoneRoute, mask: Mask, length: int) -> Seen:
    """Which blocks of a zone have visible pairs. Whatever is fetched directly is seen."""
    if route.fetches is not None:
        return lambda row, column: True
    place = route.chosen.place(route.zone.size, 0)
    runs = [route.zone.runs_of(place.shard_ranks(shard), length) for shard in range(place.num_shards)]
    return lambda row, column: bool(tiles_of(mask, runs[row], runs[column]))

"""Says which programs a call runs on one rank, and why.

>>> from startrail.geometry.zones import ZoneLevel, make_layout
>>> plan, documents = Plan.parse("1x2/1x2"), (0, 40, 48, 56, 60, 64, 68, 72)
>>> layout = make_layout("zones", [ZoneLevel(*level) for level in plan.zone_levels(4)], documents)
>>> sizes = Sizes(plan, layout.largest, batch=1, q_heads=4, kv_heads=4, head_dim=8)
>>> print(explain(plan, layout, 0, Mask(causal=True, documents=documents), sizes))
72 tokens in 7 documents on 4 ranks: 18 per rank, 0.0 % padding, busiest rank 1.03 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
10 (56 %)              4      1x2/1x2  0.008 MB, 0.015 MB
8 (44 %)               1      alone    nothing
>>> print(explain(plan, layout, 0, Mask(causal=True, window=2, documents=documents), sizes))
72 tokens in 7 documents on 4 ranks: 18 per rank, 0.0 % padding, busiest rank 1.03 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
10 (56 %)              4      direct   0.000 MB, 0.001 MB; 1x2/1x2 would send 0.008 MB, 0.015 MB
8 (44 %)               1      alone    nothing
1x2/1x2 or direct: by bytes, outermost level first
"""

from __future__ import annotations

from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.routing.route import ByLevel, Rule, ZoneRoute, route_of
from startrail.routing.work import work_by_rank
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes


def explain(plan: Plan, layout: Layout, rank: int, mask: Mask, sizes: Sizes, sparse: bool | Rule = True) -> str:
    """A table of this rank's zones. ``mask`` includes documents; ``sizes`` are the plan's for the whole batch."""
    documents, world = mask.documents or (0, layout.length), layout.world
    work = work_by_rank(layout, documents)
    number = len(documents) - 1
    padding = sum(layout.counts) / layout.length - 1
    least, most = min(layout.counts), layout.largest
    per_rank = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    lines = [
        f"{layout.length:,} tokens in {number:,} document{'s' if number > 1 else ''} on {world} "
        f"rank{'s' if world > 1 else ''}: {per_rank} per rank, {100 * padding:.1f} % padding, busiest rank "
        f"{max(work) * world / sum(work):.2f} x the mean work if causal",
        f"{f'tokens of rank {rank}':22s} ranks  runs     sent per rank by level, forward + backward",
    ]
    routes = route_of(plan, layout, rank, mask, sizes, sparse)
    for route in routes:
        tokens = route.zone.counts[route.member]
        share = f"{tokens:,} ({100 * tokens / max(layout.counts[rank], 1):.0f} %)"
        lines.append(f"{share:22s} {route.zone.size:<6d} {_program(route):8s} {_sent(route)}")
    rules = {str(sparse) if route.by_rule else "by bytes, outermost level first" for route in routes if _chosen(route)}
    lines += [f"{plan} or direct: {rule}" for rule in sorted(rules)]
    return "\n".join(lines)


def _chosen(route: ZoneRoute) -> bool:
    """True if there were two ways."""
    return bool(route.plan_bytes) and route.direct_bytes is not None


def _program(route: ZoneRoute) -> str:
    return "alone" if route.zone.size == 1 else str(route.chosen)


def _sent(route: ZoneRoute) -> str:
    if route.zone.size == 1:
        return "nothing"
    sent = [("direct", route.direct_bytes), (str(route.plan), route.plan_bytes or None)]
    own, other = sent if route.fetches is not None else sent[::-1]
    assert own[1] is not None
    text = _megabytes(route, own[1])
    return text if other[1] is None else f"{text}; {other[0]} would send {_megabytes(route, other[1])}"


def _megabytes(route: ZoneRoute, sent: ByLevel) -> str:
    return ", ".join(f"{level / route.zone.size / 1e6:.3f} MB" for level in sent)

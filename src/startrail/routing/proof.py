"""Proves the programs of one batch: every visible pair of tokens is computed exactly once, no token is sent that no
query sees, nothing deadlocks, every gradient reaches its owner, and the bytes equal the closed form.

>>> from startrail.geometry.layout import zigzag
>>> plan = Plan.parse("1x2/1x2")
>>> prove_batch(plan, zigzag(plan.slots(4), 100), Mask(causal=True, window=5))
['direct']
"""

from __future__ import annotations

from startrail.geometry.layout import Layout, Runs
from startrail.geometry.mask import Mask
from startrail.routing.route import ZoneRoute, route_of
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program
from startrail.schedule.proof import Contents, ScheduleError, prove_parts
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import FORWARD, PASSES, Pass, Piece


def prove_batch(plan: Plan, layout: Layout, mask: Mask, sparse: bool = True) -> list[str]:
    """Raise ``ScheduleError`` unless both passes of a call pass every check. Returns the plans of rank 0's zones."""
    heads = 2 * plan.heads * plan.groups
    sizes = Sizes(plan, layout.largest, batch=1, q_heads=heads, kv_heads=heads, head_dim=3)
    routes = [route_of(plan, layout, rank, mask, sizes, sparse) for rank in range(layout.world)]
    for rank, of_rank in enumerate(routes):
        for route in of_rank:
            _check_tokens(rank, route, layout.length, mask)
    for pass_ in PASSES:
        programs = [[route.program(pass_) for route in of_rank] for of_rank in routes]
        results = prove_parts(programs)
        for rank, of_rank in enumerate(routes):
            for route, program, found in zip(of_rank, programs[rank], results[rank], strict=True):
                _check_bytes(route, program, pass_)
                if route.fetches is not None and pass_ is not FORWARD:
                    _check_gradients(rank, route, found, layout.length, mask)
    return [str(route.chosen) for route in routes[0]]


def _check_tokens(rank: int, route: ZoneRoute, length: int, mask: Mask) -> None:
    """The rank's queries see keys of their zone only, and of what they fetch directly each key once."""
    own = _tokens(route.zone.runs_of((route.member,), length))
    seen = _seen(mask, own, length)
    inside = _tokens(route.zone.runs_of(range(route.zone.size), length))
    if outside := seen - set(inside):
        raise ScheduleError(f"rank {rank} sees keys outside of its zone: {sorted(outside)[:8]}")
    if route.fetches is None:
        return
    fetched = [
        t for edge, runs in route.fetches.messages.items() if edge.receiver == route.member for t in _tokens(runs)
    ]
    if len(set(fetched)) != len(fetched) or set(fetched) & set(own):
        raise ScheduleError(f"rank {rank} fetches a key twice, or one of its own: {sorted(fetched)[:8]} ...")
    if wrong := set(fetched) ^ (seen - set(own)):
        raise ScheduleError(f"rank {rank} fetches a key that it does not see, or misses one: {sorted(wrong)[:8]}")


def _check_gradients(rank: int, route: ZoneRoute, found: dict[Piece, Contents], length: int, mask: Mask) -> None:
    """Every own key got the gradients of all members that see it."""
    own = _tokens(route.zone.runs_of((route.member,), length))
    expected = dict.fromkeys(range(len(own)), 0)
    places = {key: index for index, key in enumerate(own)}
    for member in range(route.zone.size):
        if member != route.member:
            queries = _tokens(route.zone.runs_of((member,), length))
            for key in _seen(mask, queries, length) & places.keys():
                expected[places[key]] |= 1 << member
    contents = found[Piece("dkv", route.member, 0)]
    returned = {index: contents.get(index, 0) for index in expected}
    if contents.get(None) != 1 << route.member or returned != expected:
        wrong = [own[index] for index in expected if returned[index] != expected[index]]
        raise ScheduleError(f"rank {rank}: the gradients of keys {wrong[:8]} are incomplete")


def _check_bytes(route: ZoneRoute, program: Program, pass_: Pass) -> None:
    promised, levels = route.traffic(pass_), len(route.traffic(pass_))
    sent = [0.0] * levels
    for post, size in program.sends(route.sizes.by_kind, route.sizes.tokens):
        sent[post.lane % levels] += size
    if any(abs(a - b) > 1e-6 for a, b in zip(sent, promised, strict=True)):
        raise ScheduleError(f"{program}: sends {sent} by level, but the closed form is {promised}")


def _seen(mask: Mask, queries: list[int], length: int) -> set[int]:
    return {key for each in mask.staircases for query in queries for key in range(*each.visible(query, length))}


def _tokens(runs: Runs) -> list[int]:
    return [token for start, count in runs for token in range(start, start + count)]

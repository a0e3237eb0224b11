"""No plan beats its bound, and the candidates left out of the search would not help."""

from math import prod

import pytest

from startrail.planner.bounds import Bounds
from startrail.planner.candidates import options_of, plans_on
from startrail.planner.predict import predict
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan, plans_for
from startrail.schedule.program import closed_form
from startrail.schedule.values import PASSES
from tests.planner.shapes import CALL, PEERS, SMALL, altered


@pytest.mark.parametrize(
    "cluster, window", [(SMALL, None), (SMALL, 1000), (PEERS, None), (PEERS.faster(1, 0.02), None)], ids=str
)
def test_no_plan_beats_its_bound(cluster, window):
    call = altered(CALL, window=window)
    bounds = Bounds(cluster, call)
    checked = seen = 0
    for plan in plans_on(cluster, call.heads):
        if isinstance(plan, str):
            continue
        for variant in options_of(plan):
            seen += 1
            if seen % 17:
                continue
            try:
                forward, backward = bounds.of_plan(variant)
            except ValueError:
                continue
            simulated = predict(cluster, variant, call)
            assert forward.seconds <= simulated.forward.seconds * (1 + 1e-9), variant
            assert backward.seconds <= simulated.backward.seconds * (1 + 1e-9), variant
            checked += 1
    assert checked > 25


def test_two_levels_over_the_same_links_send_the_bytes_of_one_level_of_their_product():
    """So the search need not try them."""
    shards = {"q": 1.0, "kv": 2.0, "out": 1.0, "do": 1.0, "dq": 1.0, "dkv": 2.0}
    pairs = [plan for plan in plans_for(12, 2) if len(plan.levels) == 2 and len({*map(type, plan.levels)}) == 1]
    assert len(pairs) > 20
    for plan in pairs:
        heads = isinstance(plan.levels[0], Heads)
        names = ("size",) if heads else ("team", "ring")
        sizes = [prod(getattr(level, name) for level in plan.levels) for name in names]
        one = Plan.parse(f"u{sizes[0]}" if heads else "x".join(map(str, sizes)))
        for pass_ in PASSES:
            sent, sent_by_one = (sum(closed_form(some, 12, 0, pass_, shards)) for some in (plan, one))
            assert sent == pytest.approx(sent_by_one), plan

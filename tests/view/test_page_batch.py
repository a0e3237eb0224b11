"""Windows and documents: recorded zones, choices, bytes and times are those of the compiled call and the planner."""

import random

import pytest

from startrail.geometry.distributions import document_lengths
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.sparse.predict import SparseCall
from startrail.planner.topology import Machine
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.schedule.walk import Compute, walk_of
from startrail.view.page import offered
from startrail.view.recording import COMPUTE, record
from tests.view.test_page import check_times, question


def masks_of(length, seed):
    """A narrow and a wide window, and documents of several distributions."""
    random.seed(seed)
    yield random.choice([1, 2, 100, 700]), None
    yield length // random.choice([3, 9, 40]), None
    for name in ("pretraining", "agents"):
        yield None, document_lengths(name, length, seed, scale=length / 2**18)
    few = [random.randrange(1, length // 2) for _ in range(2)]
    yield None, [*few, length - sum(few)]


CASES = [
    ("a100-4x8", "2x4", None, 8192), ("lab", "2x2", None, 2000),
    ("h100-8x8", "4x4", ("u4/1x4", "1x4/u4", "star4"), 9001), ("boxes-10gbe", "4x8", ("u4/1x8",), 30000),
]  # fmt: skip


@pytest.mark.parametrize("name, shape, texts, length", CASES)
def test_batches_are_those_of_the_engine(name, shape, texts, length):
    assert fit_cluster(find_cluster(name), Machine.parse(shape))
    chosen = set()
    for seed, plan in enumerate(map(Plan.parse, texts or offered(Machine.parse(shape)))):
        masks = list(masks_of(length, seed))
        for window, documents in masks if texts else [masks[seed % len(masks)], masks[(seed + 2) % len(masks)]]:
            ends = tuple(sum(documents[:at]) for at in range(len(documents) + 1)) if documents else ()
            spec, call = question(name, shape, length, window=window, documents=ends)
            found = record(spec, plan, call)
            check_times(found, spec, plan, call)
            chosen |= check_routes(found, SparseCall(spec, plan, call))
    assert "direct" in chosen and len(chosen) > 2, chosen


def check_routes(found, sparse):
    case, chosen = (str(sparse.plan), str(sparse.call.visible)), set()
    for zone, (route, _) in zip(found["zones"], sparse.zones, strict=True):
        assert (zone["first"], zone["size"], zone["runs"]) == (route.zone.first, route.zone.size, str(route.chosen)), (
            case
        )
        sent = route.demand_bytes if route.demand else route.plan_bytes
        assert (zone["sent"], zone["plan_sent"]) == (sent, route.plan_bytes if route.demand else None), case
        chosen.add(zone["runs"])
    for pass_ in PASSES:
        own = found[str(pass_)]
        for rank, rows in enumerate(own["bytes"][row] for row in own["bytes_of"]):
            routes = [route for route, _ in sparse.routes[rank]]
            for part, route in enumerate(routes):
                expected = [sent for sent in route.traffic(pass_) if sent]
                of_part = [row for row in rows if row[0] == part]
                assert [row[3] for row in of_part if row[3]] == expected, (case, rank)
                assert [row[4] for row in of_part if row[4]] == expected, (case, rank)
    return chosen


@pytest.mark.parametrize(
    "plan, more", [("1x8", {"window": 2000}), ("2x2/u2", {"window": 3000}), ("1x8", {"documents": (0, 30, 8192)})]
)
def test_blocks_that_the_mask_hides_are_marked(plan, more):
    spec, call = question("a100-4x8", "2x4", 8192, **more)
    sparse, found = SparseCall(spec, Plan.parse(plan), call), record(spec, Plan.parse(plan), call)["forward"]
    hidden = 0
    for rank, routes in enumerate(sparse.routes):
        programs = [route.program(PASSES[0]) for route, _ in routes]
        expected = [
            not prices.tiles(event.block.row, event.block.column)
            for part, at in run_order(programs)
            for event in walk_of(programs[part]).steps[at].events
            if isinstance(event, Compute)
            for prices in [routes[part][1]]
        ]
        steps = [found["steps"][step] for step in found["programs"][found["of"][rank]]]
        shown = [len(event) > 4 for _, events in steps for event in events if event[0] == COMPUTE]
        assert shown == expected, rank
        hidden += sum(shown)
    assert (hidden > 0) == (plan == "1x8" and "window" in more)

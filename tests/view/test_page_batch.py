"""Windows and documents on the page: the zones, routes, programs, bytes and times are those of Python, step by step."""

import random

import pytest

from startrail.geometry.distributions import document_lengths
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import AttentionShape
from startrail.planner.sparse.predict import SparseCall, predict_sparse
from startrail.planner.topology import Machine
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.view.encode import encode_program
from startrail.view.page import offered, page_dtype
from tests.view.browser import open_page, state

SCRIPT = """
    Object.assign(startrail.state, arguments[0]);
    startrail.apply();
    const view = startrail.views[0], batch = view.batch, levels = view.schedule.sizes.map((_, level) => level);
    const sum = (rows) => levels.map((level) => rows.filter(({lane}) => lane === level));
    const total = (rows, name) => sum(rows).map((of) => of.reduce((all, row) => all + row[name], 0));
    return {
      problem: document.getElementById('problem').textContent,
      zones: batch.zones.map(({level, first, runs}) => [level, first, runs]),
      ranks: Object.fromEntries(arguments[1].map((rank) => [rank, {
        chosen: batch.ofRank[rank].map(({chosen}) => chosen),
        passes: ['forward', 'backward'].map((pass) => ({
          events: batch.ofRank[rank].map((route) => route.events(pass, rank - route.zone.first)),
          order: batch.order(pass, rank),
          closed: total(view.traffic(pass, rank), 'closed'),
          counted: total(view.traffic(pass, rank), 'counted'),
        })),
      }])),
      planBytes: batch.routes.map(({planBytes}) => planBytes),
      directBytes: batch.routes.map(({directBytes}) => directBytes),
      times: ['forward', 'backward'].map((pass) => {
        const one = startrail.simulated(view.schedule, pass);
        return [one.seconds, one.waiting, ...one.sent, ...one.busy];
      }),
    };
"""


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
def test_batches_are_those_of_the_engine(browser, page, name, shape, texts, length):
    machine = Machine.parse(shape)
    cluster = fit_cluster(find_cluster(name), machine)
    plans = [Plan.parse(text) for text in texts] if texts else offered(machine)
    fragment = dict(cluster=name, nodes=machine.nodes, ranks=machine.ranks_per_node, plan=f"1x{machine.world}")
    open_page(browser, page, state(**fragment, versus="", heads=32, kv=8, dim=64, length=length))
    chosen = set()
    for seed, plan in enumerate(plans):
        masks = list(masks_of(length, seed))
        for window, documents in masks if texts else [masks[seed % len(masks)], masks[(seed + 2) % len(masks)]]:
            settings = {"plan": str(plan), "mask": "documents" if documents else "window", "window": str(window or 1)}
            settings["documents"] = ",".join(map(str, documents or []))
            ranks = sorted({0, machine.world // 2 + 1, machine.world - 1})
            found = browser.execute_script(SCRIPT, settings, ranks)
            assert found["problem"] == "", settings
            chosen |= check_batch(found, cluster, plan, length, window, documents, ranks)
    assert "direct" in chosen and len(chosen) > 2, chosen


def check_batch(found, cluster, plan, length, window, documents, ranks):
    ends = tuple(sum(documents[:at]) for at in range(len(documents) + 1)) if documents else ()
    call = AttentionShape(length, 1, 32, 8, 64, True, page_dtype(cluster), documents=ends, window=window)
    sparse, case = SparseCall(cluster, plan, call), (str(plan), window, documents)
    layout, chosen = sparse.layout, set()
    assert found["zones"] == [[z.level, z.first, [list(map(list, runs)) for runs in z.runs]] for z in layout.zones], (
        case
    )
    assert found["planBytes"] == [list(route.plan_bytes) for route, _ in sparse.zones], case
    assert found["directBytes"] == [route.direct_bytes and list(route.direct_bytes) for route, _ in sparse.zones], case
    for rank in ranks:
        routes = [route for route, _ in sparse.routes[rank]]
        of_rank = found["ranks"][str(rank)]
        chosen |= {str(route.chosen) for route in routes}
        assert of_rank["chosen"] == [str(route.chosen) for route in routes], case
        for pass_, one in zip(PASSES, of_rank["passes"], strict=True):
            programs = [route.program(pass_) for route in routes]
            assert one["events"] == list(map(encode_program, programs)), (case, rank, str(pass_))
            assert one["order"] == list(map(list, run_order(programs))), (case, rank, str(pass_))
            sent = [sum(level) for level in zip(*(route.traffic(pass_) for route in routes), strict=True)]
            assert one["closed"] == pytest.approx(sent) and one["counted"] == pytest.approx(sent), (case, rank)
    predicted = predict_sparse(cluster, plan, call)
    for one, times in zip((predicted.forward, predicted.backward), found["times"], strict=True):
        expected = [one.seconds, one.waiting, *one.sent, *one.busy]
        assert times == pytest.approx(expected, rel=1e-9, abs=1e-9 * one.seconds), case
    return chosen

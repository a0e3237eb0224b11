"""The page in a real browser: what it draws is what the builders made and what the planner predicts."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from startrail.compile.attention import Attention
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import trace_prediction
from startrail.planner.sparse.predict import SparseCall, predict_call
from startrail.planner.topology import Machine
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form
from startrail.schedule.values import KINDS, PASSES
from startrail.schedule.walk import Combine, Compute, Finish, Post, Prepare, walk_of
from startrail.view.page import html_page, offered, read_settings, scene
from startrail.view.recording import record
from tests.helpers import FULL
from tests.view.browser import TEXT, open_page, state
from tests.view.conftest import SCENES


def test_the_page_is_small_and_self_contained(page):
    text = page.read_text("utf-8")
    assert len(text.encode()) < 1_000_000
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text
    assert "connect-src" not in text


def question(cluster, shape, length, dim=64, heads=32, kv=8, causal=True, window=None, documents=()):
    """A cluster and a call on it."""
    spec = fit_cluster(find_cluster(cluster), Machine.parse(shape))
    dtype = "bfloat16" if "bfloat16" in spec.device.rates else next(iter(spec.device.rates))
    return spec, Attention.of(length, 1, heads, kv, dim, causal, dtype, window, documents)


# with head dims between, below and above those that kernels have speeds for
TIMED = [
    ("a100-4x8", "4x8", "1x32", 96), ("a100-4x8", "4x8", "star2", 64), ("a100-4x8", "4x8", "u4/2x4", 16),
    ("a100-4x8", "4x8", "2x2/u8", 128), ("boxes-10gbe", "2x8", "2x1/4x2", 64), ("lab", "4x4", "star4", 64),
    ("lab", "4x4", "u4/1x4", 64), ("mi300x", "2x8", "4x4", 64), ("b200", "2x8", "u16", 96),
    ("h100-8x8", "128x8", "1x1024", 256), ("h100-8x8", "128x8", "32x32", 80), ("a100-cloud", "128x8", "2x64/u8", 64),
]  # fmt: skip


@pytest.mark.parametrize("cluster, shape, plan, dim", TIMED)
def test_recorded_times_and_bytes_are_the_planners(cluster, shape, plan, dim):
    """Windows and documents: see test_page_batch."""
    for causal in (True, False):
        spec, call = question(cluster, shape, 512 * Machine.parse(shape).world, dim, causal=causal)
        if causal and call.length > 2**18 and not FULL:
            continue  # the other mask takes as long
        found = record(spec, Plan.parse(plan), call)
        check_times(found, spec, Plan.parse(plan), call)


def check_times(found, spec, plan, call):
    if call.is_sparse or spec.world > 64:
        expected = predict_call(spec, plan, call)
    else:
        expected = trace_prediction(spec, plan, call, lambda rank: lambda *event: None)
    for pass_, one in zip(PASSES, (expected.forward, expected.backward), strict=True):
        own = found[str(pass_)]
        assert [own["seconds"], own["waiting"], *own["sent"], *own["busy"]] == pytest.approx(
            [one.seconds, one.waiting, *one.sent, *one.busy], rel=1e-9, abs=1e-9 * one.seconds
        ), pass_
        longest = max(sum(spans) for spans in own["spans"])
        assert longest == 1_000_000 and all(ticks >= 0 for spans in own["spans"] for ticks in spans)


def test_totals_equal_the_closed_form_for_every_plan_and_mask():
    """What the programs send, the recorded formula and the closed form are one number. Masks and passes take turns."""
    checked = 0
    for shape in ("2x4", "4x4"):
        for at, plan in enumerate(map(Plan.parse, offered(Machine.parse(shape)))):
            more = ({}, {"window": 300}, {"documents": (0, 5000, 8000, 8192)}, {"causal": False})[at % 4]
            spec, call = question("a100-4x8", shape, 8192, heads=16, **more)
            recorded, pass_ = record(spec, plan, call), PASSES[at // 4 % 2]
            own = recorded[str(pass_)]
            for rank, rows in enumerate(own["bytes"][row] for row in own["bytes_of"]):
                for _, _, terms, closed, counted in rows:
                    assert counted == closed == round(sum(times * nbytes for _, times, _, nbytes in terms)), (
                        plan,
                        rank,
                    )
                if not recorded["sparse"]:
                    expected = closed_form(plan, spec.world, rank, pass_, call.sizes_on(plan, spec.world).by_kind)
                    assert [row[3] for row in rows if row[3]] == [each for each in expected if each]
            checked += 1
    assert checked >= 30


MATRICES = [{}, {"causal": False}, {"window": 700}, {"documents": (0, 5000, 5100, 5111, 8192)}]


@pytest.mark.parametrize("more", MATRICES, ids=str)
@pytest.mark.parametrize("plan", ["1x8", "2x2/u2", "star2", "u2/1x4"])
def test_cells_have_all_visible_pairs_and_a_rank_that_computes_them(plan, more):
    spec, call = question("a100-4x8", "2x4", 8192, **more)
    plan = Plan.parse("star2" if plan == "star2" else plan)
    matrix = record(spec, plan, call)["matrix"]
    edges, partial = matrix["edges"], {(q, k): pairs for q, k, pairs in matrix["partial"]}
    sizes = [stop - start for start, stop in pairwise(edges)]
    cells = [(q, k) for q, row in enumerate(matrix["rows"]) for k, block in enumerate(row) if block]
    assert sum(partial.get((q, k), sizes[q] * sizes[k]) for q, k in cells) == call.pairs


EVENTS = """
    const [example, plan, pass, rank] = arguments, scene = startrail.scenes[example], done = arguments[4];
    startrail.scene = scene;
    startrail.recording(plan).then((recording) => {
      const name = ({text, id}) => text, shard = (id) => id - recording.zoneOf(id).base;
      const text = (event) => event.type === POST
        ? event.messages.map((m) => `${m.send ? 'send' : 'get'} ${m.pieces.map(name)} ${m.peer} ${m.level}`).join(';')
        : event.type === COMPUTE ? `${shard(event.row)}x${shard(event.column)}.${event.group}`
        : event.type === FINISH ? 'finish' : event.type === COMBINE ? `merge ${name(event.piece)}`
        : event.type === PREPARE ? `prepare ${name(event.piece)}` : `wait ${name(event.piece)}`;
      const {steps, spans} = recording.program(pass, rank);
      done({steps: steps.map((step) => step.map(text)), spans: spans.map((e) => [text(e), e.start, e.end]),
            zones: recording.zonesOf(rank).map(({first, size, runs}) => [first, size, runs])});
    });
"""


def named(route, sparse):
    """How the page calls a piece of a route, and the level of a lane."""
    zone, place = route.zone, route.place
    senders = [edge.sender for edge in route.demand.messages] if route.demand else []

    def name(piece):
        shard = piece.shard
        if sparse and route.demand:
            shard = zone.first + (shard if shard < zone.size else senders[shard - zone.size])
        elif sparse:
            shard = zone.first + place.shard_ranks(shard)[0]
        return f"{piece.kind}{shard}" + (f".{piece.group}" if piece.group else "")

    return name


def text_of(event, name, levels):
    if isinstance(event, Post):
        return ";".join(
            f"{'send' if m.send else 'get'} {','.join(map(name, m.pieces))} {m.peer} {m.lane % levels}"
            for m in event.messages
        )
    if isinstance(event, Compute):
        return f"{event.block.row}x{event.block.column}.{event.block.group}"
    kind = "merge" if isinstance(event, Combine) else "prepare" if isinstance(event, Prepare) else "wait"
    return f"{kind} {name(event.piece)}"


def test_events_and_times_on_the_page_are_those_of_programs_and_simulator(browser, page):
    """Event by event, for every recorded plan, also with windows and documents."""
    open_page(browser, page)
    checked = defaultdict(int)
    for example, texts in enumerate(SCENES):
        asked = read_settings(texts)
        sparse = asked.call.is_sparse
        for plan in browser.execute_script("return Object.keys(startrail.scenes[arguments[0]].plans)", example):
            played = SparseCall(asked.cluster, Plan.parse(plan), asked.call, sparse)
            world = asked.machine.world
            for rank in range(world) if FULL else {0, world // 2 + 1, world - 1}:
                for pass_ in PASSES:
                    found = browser.execute_async_script(EVENTS, example, plan, str(pass_), rank)
                    routes = [route for route, _ in played.routes[rank]]
                    walks = [(named(route, sparse), walk_of(route.program(pass_))) for route in routes]
                    assert found["zones"] == [[r.zone.first, r.zone.size, str(r.chosen)] for r in routes]
                    levels, order = len(played.plan.levels), run_order([route.program(pass_) for route in routes])
                    steps = [
                        [text_of(event, name, levels) for event in walk.steps[at].events]
                        for (name, walk), at in ((walks[part], at) for part, at in order)
                    ]
                    assert found["steps"] == steps, (texts, plan, rank, pass_)
                    checked[plan] += sum(map(len, steps))
    assert len(checked) > 15 and min(checked.values()) > 4


@pytest.mark.parametrize("plan", ["1x8", "u2/1x4", "star2"])
def test_the_timeline_has_the_simulated_times(browser, page, plan):
    """As the simulator tells them to a trace, event by event; and the page says the totals in words."""
    example = 1
    open_page(browser, page, state(example=example, plan=plan, versus=""))
    asked = read_settings(SCENES[example])
    told = defaultdict(list)

    def hook(rank):
        return lambda program, step, event, start, end: told[rank, str(program.pass_)].append((event, start, end))

    predicted = trace_prediction(asked.cluster, Plan.parse(plan), asked.call, hook)
    for pass_, one, begin in (
        ("forward", predicted.forward, 0),
        ("backward", predicted.backward, predicted.forward.seconds),
    ):
        for rank in (0, 5):
            spans = browser.execute_async_script(EVENTS, example, plan, pass_, rank)["spans"]
            events = [
                (start - begin, end - begin) for event, start, end in told[rank, pass_] if not isinstance(event, Finish)
            ]
            shown = [(start, end) for text, start, end in spans if text != "finish"]
            assert len(shown) == len(events)
            for found, expected in zip(shown, events, strict=True):
                assert found == pytest.approx(expected, abs=1.6e-6 * one.seconds), (rank, pass_)
    said = browser.execute_script("return startrail.views[0].summary.textContent")
    seconds = "const [a, b] = arguments; return [secondsText(a), secondsText(b)]"
    both, forward = browser.execute_script(seconds, predicted.seconds, predicted.forward.seconds)
    assert f"{both} predicted for forward and backward" in said and f"forward pass takes {forward}" in said
    waits = 100 * (predicted.forward.waiting + predicted.backward.waiting) / predicted.seconds
    assert f"ranks wait {waits:.0f} %" in said
    label = browser.execute_script("return document.querySelector('canvas.timeline').getAttribute('aria-label')")
    assert f"Timeline of {plan}: {forward}" in label


@pytest.mark.parametrize("text", ["2x3/u2,keep=all,groups=2", "2x3/u2,exchange=twice"])
def test_a_plan_that_is_not_on_offer_is_shown(browser, tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(html_page([scene({"nodes": "3", "ranks": "4", "plan": text, "versus": "1x12"})]), "utf-8")
    open_page(browser, path)
    assert browser.execute_script(TEXT, "problem") == ""
    assert [view.text for view in browser.find_elements("css selector", "#views h2")] == [text, "1x12"]
    script = """
        startrail.change({});
        const rows = [...startrail.views[0].table.querySelectorAll('tbody tr')];
        return rows.map(({children}) => [children[3].textContent, children[4].textContent]);
    """
    rows = browser.execute_script(script)
    assert len(rows) == 2 and all(formula == counted for formula, counted in rows), rows


def test_every_machine_has_ring_and_ulysses():
    for nodes in (1, 2, 4, 8):
        for ranks in (2, 3, 8):
            plans = offered(machine := Machine(nodes, ranks))
            assert f"1x{machine.world}" in plans and f"u{machine.world}" in plans
            assert len(plans) == len(set(plans))


def test_recordings_are_plain_json():
    spec, call = question("lab", "2x2", 512)
    found = record(spec, Plan.parse("1x4"), call)
    again = json.loads(json.dumps(found, default=list))
    assert again["forward"]["steps"] and len(KINDS) == 6

"""The page in a real browser: what it draws is what the builders made and what the planner predicts."""

import json
import zlib

import pytest

from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import AttentionShape, predict
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program, closed_form
from startrail.schedule.values import PASSES
from startrail.view.encode import encode_program
from startrail.view.page import DEFAULTS, LARGE, html_page, machines, offered, page_data, page_dtype
from tests.helpers import FULL
from tests.view.browser import TEXT, open_page, state


def test_the_page_is_small_and_self_contained(page):
    text = page.read_text("utf-8")
    assert len(text.encode()) < 1_000_000
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text


def checksum(events):
    return zlib.crc32(json.dumps(events, separators=(",", ":")).encode())


def test_programs_on_the_page_are_those_of_the_builders(browser, page):
    """Every plan on offer, event by event. Worlds above 4 compare some ranks, and all of them in the full suite."""
    open_page(browser, page)
    crc = """
        const table = Array.from({length: 256}, (_, n) => {
          for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
          return n;
        });
        const crc = (text) => {
          let c = -1;
          for (let i = 0; i < text.length; i++) c = table[(c ^ text.charCodeAt(i)) & 255] ^ (c >>> 8);
          return (c ^ -1) >>> 0;
        };
        const events = ([plan, world, pass, rank]) => startrail.schedule(plan, world).events(pass, rank);
        return arguments[0].map((one) => crc(JSON.stringify(events(one))));
    """
    cases = []
    for world, plans in page_data(DEFAULTS)["plans"].items():
        ranks = range(world) if world <= 4 or (FULL and world <= 64) else (1, world - 1)
        cases += [(plan, world, pass_, rank) for plan in plans for pass_ in PASSES for rank in ranks]
    assert len(cases) > 700
    found = browser.execute_script(crc, [(plan, world, str(pass_), rank) for plan, world, pass_, rank in cases])
    for (plan, world, pass_, rank), checked in zip(cases, found, strict=True):
        text, _, kept = plan.partition(" ")  # "1x8 kept": a zone that keeps its own inputs
        program = build_program(Plan.parse(text), world, rank, pass_, keep_own=bool(kept))
        assert checked == checksum(encode_program(program)), (plan, world, pass_, rank)


# with head dims between, below and above those that kernels have speeds for
TIMED = [
    ("a100-4x8", "4x8", "1x32", 96), ("a100-4x8", "4x8", "star2", 64), ("a100-4x8", "4x8", "u4/2x4", 16),
    ("a100-4x8", "4x8", "2x2/u8", 128), ("boxes-10gbe", "2x8", "2x1/4x2", 64), ("lab", "4x4", "star4", 64),
    ("lab", "4x4", "u4/1x4", 64), ("mi300x", "2x8", "4x4", 64), ("b200", "2x8", "u16", 96),
    ("h100-8x8", "128x8", "1x1024", 256), ("h100-8x8", "128x8", "32x32", 80), ("a100-cloud", "128x8", "2x64/u8", 64),
]  # fmt: skip


@pytest.mark.parametrize("cluster, shape, plan, dim", TIMED)
def test_predicted_times_are_the_planners(browser, page, cluster, shape, plan, dim):
    """Windows and documents: see test_page_batch."""
    machine, spec = Machine.parse(shape), fit_cluster(find_cluster(cluster), Machine.parse(shape))
    length = 512 * machine.world
    script = """
        return ['forward', 'backward'].map((pass) => {
          const one = startrail.simulated(startrail.views[0].schedule, pass);
          return [one.seconds, one.waiting, ...one.sent, ...one.busy];
        });
    """
    for mask in ("causal", "full"):
        fragment = state(
            cluster=cluster, nodes=machine.nodes, ranks=machine.ranks_per_node, plan=plan, versus="", heads=32, kv=8,
            dim=dim, length=length, mask=mask,
        )  # fmt: skip
        open_page(browser, page, fragment)
        assert browser.execute_script(TEXT, "problem") == ""
        call = AttentionShape(length, 1, 32, 8, dim, mask == "causal", page_dtype(spec))
        expected = predict(spec, Plan.parse(plan), call, all_ranks=spec.world <= 64)
        for found, one in zip(browser.execute_script(script), (expected.forward, expected.backward), strict=True):
            assert found == pytest.approx(
                [one.seconds, one.waiting, *one.sent, *one.busy], rel=1e-9, abs=1e-9 * one.seconds
            ), mask


def test_totals_equal_the_closed_form_for_every_plan_and_mask(browser, page):
    """What the programs send, the formula on the page and Python's closed form are one number. Masks and passes take
    turns. With a window or documents, that is the sum over the rank's zones, which test_page_batch compares."""
    script = """
        const view = startrail.views[0], pass = view.pass, found = view.traffic(pass, view.rank);
        const formula = found.map(({terms}) => terms.reduce((total, {value, bytes}) => total + value * bytes, 0));
        const rows = [...view.table.querySelectorAll('tbody tr')];
        const same = rows.map(({children}) => children[3].textContent === children[4].textContent);
        const of = (kind) => [kind, view.running.prices.sizes[kind]];
        const sizes = view.batch ? null : Object.fromEntries(KINDS.map(of));
        return [found.map(({counted}) => counted), found.map(({closed}) => closed), formula, sizes, same];
    """
    checked = 0
    for shape in ("2x4", "4x4"):
        machine = Machine.parse(shape)
        open_page(
            browser, page, state(nodes=machine.nodes, ranks=machine.ranks_per_node, versus="", length=8192, heads=16)
        )
        browser.execute_script("startrail.state.documents = '5000,3000,192'")
        for at, plan in enumerate(offered(machine)):
            mask, pass_ = ("causal", "window", "documents", "full")[at % 4], PASSES[at // 4 % 2]
            browser.execute_script(
                "Object.assign(startrail.state, arguments[0]); startrail.apply()",
                {"plan": str(plan), "mask": mask, "pass": str(pass_)},
            )
            assert browser.execute_script(TEXT, "problem") == ""
            counted, closed, formula, sizes, same = browser.execute_script(script)
            assert counted == pytest.approx(closed) and formula == pytest.approx(closed), (plan, mask)
            if sizes is not None:
                assert closed == pytest.approx(list(closed_form(plan, machine.world, 0, pass_, sizes))), (plan, mask)
            assert all(same) and len(same) == len(closed) > 0
            checked += 1
    assert checked >= 30


@pytest.mark.parametrize("text", ["2x3/u2,keep=all,groups=2", "2x3/u2,exchange=twice"])
def test_a_plan_that_is_not_on_offer_is_added(browser, tmp_path, text):
    path = tmp_path / "page.html"
    plan = Plan.parse(text)
    path.write_text(html_page({"nodes": "3", "ranks": "4", "plan": str(plan), "versus": "1x12"}, plan), "utf-8")
    open_page(browser, path)
    assert browser.execute_script(TEXT, "problem") == ""
    assert [view.text for view in browser.find_elements("css selector", "#views h2")] == [str(plan), "1x12"]
    script = """
        Object.assign(startrail.state, {pass: 'backward'});
        startrail.apply();
        const rows = [...startrail.views[0].table.querySelectorAll('tbody tr')];
        return rows.map(({children}) => [children[3].textContent, children[4].textContent]);
    """
    rows = browser.execute_script(script)
    assert len(rows) == 2 and all(formula == counted for formula, counted in rows), rows


def test_every_machine_on_offer_has_ring_and_ulysses():
    for machine in machines():
        plans = [str(plan) for plan in offered(machine)]
        assert f"1x{machine.world}" in plans and len(plans) == len(set(plans))
        assert machine == LARGE or f"u{machine.world}" in plans

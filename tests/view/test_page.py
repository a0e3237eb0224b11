"""The page in a real browser: what it draws is what the builders made and what the planner predicts."""

import json
import zlib
from functools import cache

import pytest

from startrail.geometry.layout import zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import segments_of, tiles_of
from startrail.planner import predict as predictions
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import AttentionShape, predict
from startrail.planner.pricing import Prices
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form
from startrail.schedule.values import PASSES
from startrail.view.encode import encode_walk
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
        assert checked == checksum(encode_walk(Plan.parse(plan), world, rank, pass_)), (plan, world, pass_, rank)


class VisiblePrices(Prices):
    """Prices each block by its visible pairs, and by the rows and keys that they lie in, as the page does for windows
    and documents."""

    mask: Mask

    def block(self, pass_, row, column, shards, new_row=False, new_key=False):
        pairs, rows, keys = self.seen(row, column, shards)
        if not pairs:
            return 0.0
        kernel = self.kernel(pass_, pairs, rows, row == column)
        return kernel + self.accumulate(pass_, rows, keys, new_row, new_key)

    @cache  # noqa: B019 (the instance lives as long as one test)
    def seen(self, row, column, shards):
        layout = zigzag(range(shards), self.sizes.tokens * shards)
        runs = layout.runs(row), layout.runs(column)
        segments = segments_of(self.mask, *runs)
        keys = {key for s in segments for key in range(s.low, s.high + s.dhigh * (s.rows - 1))}
        return sum(tile.area for tile in tiles_of(self.mask, *runs)), sum(s.rows for s in segments), len(keys)


# with head dims between, below and above those that kernels have speeds for
TIMED = [
    ("a100-4x8", "4x8", "1x32", 96), ("a100-4x8", "4x8", "star2", 64), ("a100-4x8", "4x8", "u4/2x4", 16),
    ("a100-4x8", "4x8", "2x2/u8", 128), ("boxes-10gbe", "2x8", "2x1/4x2", 64), ("lab", "4x4", "star4", 64),
    ("lab", "4x4", "u4/1x4", 64), ("mi300x", "2x8", "4x4", 64), ("b200", "2x8", "u16", 96),
    ("h100-8x8", "128x8", "1x1024", 256), ("h100-8x8", "128x8", "32x32", 80), ("a100-cloud", "128x8", "2x64/u8", 64),
]  # fmt: skip


def expected_times(cluster, plan, length, dim, name, mask):
    call = AttentionShape(length, 1, 32, 8, dim, name != "full", page_dtype(cluster))
    if name in ("causal", "full"):
        found = predict(cluster, plan, call, all_ranks=cluster.world <= 64)
        return [[one.seconds, one.waiting, *one.sent, *one.busy] for one in (found.forward, found.backward)]
    prices = VisiblePrices(cluster, call.sizes(plan, cluster.world), True, None, call.dtype)
    prices.mask = mask
    simulated = [predictions._simulate_all_ranks(cluster, prices, pass_, None) for pass_ in PASSES]
    return [[one.seconds, one.waiting, *one.sent, *one.busy] for one in simulated]


@pytest.mark.parametrize("cluster, shape, plan, dim", TIMED)
def test_predicted_times_are_the_planners(browser, page, cluster, shape, plan, dim):
    machine, spec = Machine.parse(shape), fit_cluster(find_cluster(cluster), Machine.parse(shape))
    length = 512 * machine.world
    documents = [length // 2, length // 8, length // 4 + 100, length // 8 - 100]
    ends = tuple(sum(documents[:at]) for at in range(5))
    masks = {
        "causal": Mask(True), "full": Mask(), "window": Mask(True, 1000), "documents": Mask(True, documents=ends),
    }  # fmt: skip
    script = """
        const view = startrail.views[0];
        return ['forward', 'backward'].map((pass) => {
          const one = startrail.simulated(view.schedule, view.prices, pass);
          return [one.seconds, one.waiting, ...one.sent, ...one.busy];
        });
    """
    for name, mask in masks.items():
        if machine == LARGE and name not in ("causal", "full"):
            continue
        fragment = state(
            cluster=cluster, nodes=machine.nodes, ranks=machine.ranks_per_node, plan=plan, versus="", heads=32, kv=8,
            dim=dim, length=length, mask=name, window=1000, documents=",".join(map(str, documents)),
        )  # fmt: skip
        open_page(browser, page, fragment)
        assert browser.execute_script(TEXT, "problem") == ""
        found = browser.execute_script(script)
        expected = expected_times(spec, Plan.parse(plan), length, dim, name, mask)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9 * other[0]), name


def test_totals_equal_the_closed_form_for_every_plan_and_mask(browser, page):
    """What the programs send, the formula on the page and Python's closed form are one number. Masks and passes take
    turns, since none of the three depends on the mask."""
    script = """
        const view = startrail.views[0], pass = view.pass, rank = view.rank;
        const formula = view.schedule.sizes.map((_, lane) => view.terms(pass, lane).reduce(
          (total, {value, kinds}) => total + value * kinds.reduce((sum, kind) => sum + view.prices.sizes[kind], 0), 0));
        const rows = [...view.table.querySelectorAll('tbody tr')];
        const same = rows.map(({children}) => children[3].textContent === children[4].textContent);
        const sizes = Object.fromEntries(KINDS.map((kind) => [kind, view.prices.sizes[kind]]));
        return [view.counted(pass, rank), view.closedForm(pass, rank), formula, sizes, same];
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
            expected = pytest.approx(list(closed_form(plan, machine.world, 0, pass_, sizes)))
            assert counted == expected and closed == expected and formula == expected, (plan, mask)
            assert all(same)
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

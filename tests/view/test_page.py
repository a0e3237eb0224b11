"""The page in a real browser: what it draws is what the builders made and what the planner predicts."""

import json
import zlib

import pytest

from startrail.geometry.layout import zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
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
from tests.view.browser import errors, open_page, start_browser, wait_for

TEXT = "return document.getElementById(arguments[0]).textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_page({}), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    started = start_browser()
    yield started
    started.quit()
    started.profile.cleanup()


def state(**parts):
    return "&".join(f"{name}={value}" for name, value in parts.items())


def click(browser, name):
    browser.find_element("id", name).click()


def choose(browser, name, value):
    script = (
        "const field = document.querySelector(`[name=${arguments[0]}]`); field.value = arguments[1];"
        "field.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    browser.execute_script(script, name, str(value))


def test_the_page_is_small_and_self_contained(page):
    text = page.read_text("utf-8")
    assert len(text.encode()) < 1_000_000
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text


def checksum(events):
    return zlib.crc32(json.dumps(events, separators=(",", ":")).encode())


def test_programs_on_the_page_are_those_of_the_builders(browser, page):
    """Every plan on offer, event by event. Worlds above 8 compare some ranks, and all of them in the full suite."""
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
        ranks = range(world) if world <= 8 or (FULL and world <= 64) else (1, world - 1)
        cases += [(plan, world, pass_, rank) for plan in plans for pass_ in PASSES for rank in ranks]
    assert len(cases) > 1000
    found = browser.execute_script(crc, [(plan, world, str(pass_), rank) for plan, world, pass_, rank in cases])
    for (plan, world, pass_, rank), checked in zip(cases, found, strict=True):
        assert checked == checksum(encode_walk(Plan.parse(plan), world, rank, pass_)), (plan, world, pass_, rank)


class VisiblePrices(Prices):
    """Prices each block by its visible pairs, as the page does for windows and documents."""

    mask: Mask

    def block(self, pass_, row, column, shards):
        layout = zigzag(range(shards), self.sizes.tokens * shards)
        area = sum(tile.area for tile in tiles_of(self.mask, layout.runs(row), layout.runs(column)))
        return self.kernel(pass_, area) if area else 0.0


TIMED = [
    ("a100-4x8", "4x8", "1x32"), ("a100-4x8", "4x8", "star2"), ("a100-4x8", "4x8", "u4/2x4"),
    ("a100-4x8", "4x8", "2x2/u8"), ("boxes-10gbe", "2x8", "2x1/4x2"), ("lab", "4x4", "star4"),
    ("lab", "4x4", "u4/1x4"), ("mi300x", "2x8", "4x4"), ("h100-8x8", "128x8", "1x1024"),
    ("h100-8x8", "128x8", "2x64/u8"),
]  # fmt: skip


def expected_times(cluster, plan, length, name, mask):
    call = AttentionShape(length, 1, 32, 8, 64, name != "full", page_dtype(cluster))
    if name in ("causal", "full"):
        found = predict(cluster, plan, call, all_ranks=cluster.world <= 64)
        return [[one.seconds, one.waiting, *one.sent] for one in (found.forward, found.backward)]
    prices = VisiblePrices(cluster, call.sizes(plan, cluster.world), True, None, call.dtype)
    prices.mask = mask
    simulated = [predictions._simulate_all_ranks(cluster, prices, pass_, None) for pass_ in PASSES]
    return [[one.seconds, one.waiting, *one.sent] for one in simulated]


@pytest.mark.parametrize("cluster, shape, plan", TIMED)
def test_predicted_times_are_the_planners(browser, page, cluster, shape, plan):
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
          return [one.seconds, one.waiting, ...one.sent];
        });
    """
    for name, mask in masks.items():
        if machine == LARGE and name not in ("causal", "full"):
            continue
        fragment = state(
            cluster=cluster, nodes=machine.nodes, ranks=machine.ranks_per_node, plan=plan, versus="", heads=32, kv=8,
            dim=64, length=length, mask=name, window=1000, documents=",".join(map(str, documents)),
        )  # fmt: skip
        open_page(browser, page, fragment)
        assert browser.execute_script(TEXT, "problem") == ""
        found = browser.execute_script(script)
        for one, other in zip(found, expected_times(spec, Plan.parse(plan), length, name, mask), strict=True):
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
        return [view.counted(pass, rank), view.closedForm(pass, rank), formula, view.prices.sizes, same];
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


def test_choosing_stepping_playing_and_comparing(browser, page):
    open_page(browser, page)
    browser.get_log("performance")
    choose(browser, "nodes", 2)
    choose(browser, "ranks", 4)
    choose(browser, "plan", "2x1/1x4")
    choose(browser, "versus", "1x8")
    titles = [title.text for title in browser.find_elements("css selector", "#views h2")]
    assert titles == ["2x1/1x4", "1x8"]
    said = browser.execute_script(TEXT, "comparison")
    assert "takes" in said and "between nodes instead of" in said
    click(browser, "ahead")
    click(browser, "ahead")
    click(browser, "back")
    assert browser.execute_script("return startrail.step") == 1
    assert "step 1 of" in browser.execute_script(TEXT, "where")
    wait_for(browser, "location.hash.includes('step=1')")
    click(browser, "play")
    wait_for(browser, "startrail.step >= 3")
    click(browser, "play")
    stopped = browser.execute_script("return startrail.step")
    assert browser.execute_script("return startrail.playing") is False
    browser.execute_script(
        "const s = document.getElementById('scrub'); s.value = 5; s.dispatchEvent(new Event('input'))"
    )
    assert browser.execute_script("return startrail.step") == 5 != stopped
    assert errors(browser) == []


def test_a_click_on_a_cell_says_who_when_and_over_which_links(browser, page):
    open_page(browser, page, state(nodes=2, ranks=4, plan="1x8", versus="", length=8192))
    canvas = browser.find_element("css selector", "canvas.matrix")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    from selenium.webdriver import ActionChains

    side = canvas.size["height"]
    unit = (side - 18) / 16  # 16 chunks and the edge with the labels
    x, y = 18 + 2.5 * unit - canvas.size["width"] / 2, 18 + 6.5 * unit - side / 2  # chunk 6 sees chunk 2
    ActionChains(browser).move_to_element_with_offset(canvas, x, y).click().perform()
    said = browser.execute_script("return document.querySelector('.details').textContent")
    assert "Queries 3072 to 3583 (shard 6), keys 1024 to 1535 (shard 2)" in said
    assert "Rank 6 computes it in step 4, from" in said
    assert "rank 3 to rank 4 between nodes, level 0" in said and "rank 5 to rank 6 within the node" in said
    assert "cell=6-2" in browser.execute_script("return startrail.link()")
    browser.execute_script("startrail.change({cell: '2-6'})")
    assert "nothing is computed" in browser.execute_script("return document.querySelector('.details').textContent")


def test_a_link_restores_the_view_and_can_be_copied_as_command_and_python(browser, page):
    parts = dict(
        nodes=2, ranks=2, plan="u2/1x2", versus="star2", mask="window", window=300, heads=8, kv=2, dim=64, length=4096,
        step=2, rank=3, cell="3-2", cluster="h100-8x8", outer=3,
    )  # fmt: skip
    parts["pass"] = "backward"
    open_page(browser, page, state(**parts))
    now = browser.execute_script("return startrail.state")
    assert {name: now[name] for name in parts} == {name: str(value) for name, value in parts.items()}
    assert browser.execute_script("return startrail.cluster.levels[0].bandwidth") == 3e9
    url = browser.execute_script("return startrail.link()")
    picture = browser.execute_script("return document.querySelector('canvas.timeline').toDataURL()")
    browser.get("about:blank")
    browser.get(url)
    wait_for(browser, "window.startrail")
    assert browser.execute_script("return document.querySelector('canvas.timeline').toDataURL()") == picture
    command = browser.execute_script("return startrail.command()")
    assert command == (
        "startrail show u2/1x2 --nodes 2 --ranks 4 --heads 8 --kv-heads 2 --head-dim 64 --length 4096 "
        "--cluster h100-8x8 --window 300 --direction backward --html page.html"
    )
    code = browser.execute_script("return startrail.python()")
    compile(code, "copied", "exec")
    assert 'SequenceParallel("u2/1x2")' in code and "causal=True, window=300" in code
    click(browser, "copy-link")
    wait_for(browser, "document.getElementById('copied').textContent")
    assert browser.execute_script("return startrail.copied") == url


@pytest.mark.parametrize(
    "fragment, said",
    [
        (state(nodes=2, ranks=2, plan="u4", heads=6, kv=6), "that 4 divides, and there are 6. These fit: 1x4, 2x2"),
        (state(nodes=2, ranks=2, plan="3x3"), "plans for 2 nodes of 2 ranks on this page. These fit: 1x4"),
        (state(nodes=3), "3 nodes are not on this page; it has 1, 2, 4, 8, 128"),
        (state(heads=12, kv=5), "12 query heads are not a multiple of 5 KV heads; 1, 2, 3, 4, 6, 12 would fit"),
        (state(length=4096, mask="documents", documents="1000,2000"), "sum to 3000, but the sequence has 4096"),
        (state(length="ten"), "length = ten is not a whole number"),
        (state(rank=99), "Rank 99 is not one of 0 to 31"),
        (state(colour="red"), "unknown setting colour"),
        (state(outer=-1), "A link of -1 GB/s does not work"),
        (state(cluster="mine"), "Cluster mine is not on this page"),
    ],
)  # fmt: skip
def test_bad_input_is_explained_with_what_would_fit(browser, page, fragment, said):
    open_page(browser, page, fragment)
    assert said in browser.execute_script(TEXT, "problem")
    assert errors(browser) == []


def test_keyboard_only(browser, page):
    from selenium.webdriver import ActionChains, Keys

    open_page(browser, page, state(nodes=2, ranks=2, plan="1x4", versus="", length=4096))

    def press(*keys):
        for key in keys:
            ActionChains(browser).send_keys(key).perform()

    focus = "return document.activeElement.id || document.activeElement.name || document.activeElement.className"
    seen = []
    for _ in range(30):
        press(Keys.TAB)
        seen.append(browser.execute_script(focus))
        if seen[-1] == "ahead":
            press(Keys.ENTER)
            assert browser.execute_script("return startrail.step") == 1
        if seen[-1] == "machine":
            press(Keys.ARROW_RIGHT)
            assert browser.execute_script("return startrail.views[0].rank") == 1
        if seen[-1] == "matrix":
            press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
            assert browser.execute_script("return startrail.state.cell") == "2-1"
        if seen[-1] == "timeline":
            press(Keys.ARROW_RIGHT, " ")
            assert browser.execute_script("return [startrail.step, startrail.playing]") == [2, True]
            press(" ")
            break
    assert {"nodes", "plan", "versus", "back", "play", "ahead", "scrub", "machine", "matrix", "timeline"} <= set(seen)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('canvas')].map((c) => c.getAttribute('aria-label'))"
    )
    assert all(len(label) > 40 for label in labels)
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select, button')].filter((field) => "
        "!(field.labels && field.labels.length) && !field.ariaLabel && !field.textContent.trim())"
        ".map((field) => field.outerHTML)"
    )
    assert unnamed == []


def test_phone_width_dark_and_light(browser, page):
    backs = []
    try:
        for scheme in ("light", "dark"):
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True},
            )
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            open_page(browser, page)
            width, inner = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert width <= inner == 390
            backs.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
            contrast = browser.execute_script(
                "const of = (name) => cssColour(name).match(/[0-9a-f]{2}/g).map((x) => (parseInt(x, 16) / 255) ** 2.2);"
                "const light = (name) => of(name).reduce((t, x, i) => t + x * [0.2126, 0.7152, 0.0722][i], 0.05);"
                "return ['--text', '--quiet', '--accent', '--near', '--far'].map((name) => {"
                "const [a, b] = [light(name), light('--back')]; return Math.max(a, b) / Math.min(a, b)})"
            )
            assert min(contrast) > 3.5 and contrast[1] > 4.5, contrast
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert backs[0] != backs[1]
    assert errors(browser) == []


def test_no_request_leaves_the_page(browser, page):
    browser.get_log("performance")
    open_page(browser, page)
    choose(browser, "plan", "u4/1x8")
    click(browser, "ahead")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith(("file://", "data:", "about:")) for url in asked), asked


def test_large_worlds_open_fast_and_play_smoothly(browser, page):
    """About 0.7 s on two idle cores; the limit leaves room for a busy machine. Frames are timed as script time."""
    open_page(browser, page, state(nodes=8, ranks=8, plan="u8/1x8", versus="1x64", heads=64, cluster="h100-8x8"))
    assert browser.execute_script("return startrail.opened") < 4000
    script = """
        const times = [];
        for (let at = 0; at < 60; at++) {
          const start = performance.now();
          for (const view of startrail.views) view.frame(3 + at / 60);
          times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b)[30];
    """
    assert browser.execute_script(script) < 16
    click(browser, "play")
    wait_for(browser, "startrail.frames.length > 20")
    click(browser, "play")
    assert errors(browser) == []
    open_page(
        browser, page, state(nodes=128, ranks=8, plan="2x64/u8", versus="1x1024", length="4m", cluster="h100-8x8")
    )
    assert browser.execute_script("return startrail.opened") < 8000
    assert "Rank 512 stands for all 1024 ranks" in browser.execute_script(
        "return startrail.views[0].summary.textContent"
    )
    assert browser.execute_script(TEXT, "problem") == "" and errors(browser) == []


def test_a_plan_that_is_not_on_offer_is_added(browser, tmp_path):
    path = tmp_path / "page.html"
    plan = Plan.parse("2x3/u2,keep=all,groups=2")
    path.write_text(html_page({"nodes": "3", "ranks": "4", "plan": str(plan), "versus": "1x12"}, plan), "utf-8")
    open_page(browser, path)
    assert browser.execute_script(TEXT, "problem") == ""
    assert [view.text for view in browser.find_elements("css selector", "#views h2")] == [str(plan), "1x12"]


def test_every_machine_on_offer_has_ring_and_ulysses():
    for machine in machines():
        plans = [str(plan) for plan in offered(machine)]
        assert f"1x{machine.world}" in plans and len(plans) == len(set(plans))
        assert machine == LARGE or f"u{machine.world}" in plans

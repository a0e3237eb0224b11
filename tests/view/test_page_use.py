"""Using the page in a real browser: by mouse, by keyboard, on a phone, with links, and with mistakes."""

import json

import pytest

from startrail.cli import main
from startrail.view.page import html_page, scene
from tests.view.browser import TEXT, choose, click, errors, open_page, settled, state, wait_for


def test_choosing_stepping_playing_and_comparing(browser, page):
    open_page(browser, page)
    browser.get_log("performance")
    choose(browser, "example", 1)
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


def test_every_recorded_plan_and_both_passes_can_be_chosen(browser, page):
    """The well-known ones are there, with what auto finds; each shows itself."""
    open_page(browser, page)
    offered = browser.execute_script(
        "return [...document.querySelector('[name=plan]').options].map((o) => [o.value, o.text])"
    )
    names = dict(offered)
    assert {"auto", "1x32", "u4/1x8", "1x4/u8", "star2"} <= set(names)
    assert (
        names["1x32"].startswith("1x32 (Ring Attention), ") and names["auto"] == "auto (the planner's choice: 1x4/u8)"
    )
    for plan in names:
        for pass_ in ("forward", "backward"):
            choose(browser, "plan", plan)
            choose(browser, "pass", pass_)
            title, summary = browser.execute_script(
                "const {title, summary} = startrail.views[0]; return [title.textContent, summary.textContent]"
            )
            assert title == (plan if plan != "auto" else "1x4/u8") and f"this {pass_} pass takes" in summary
    assert errors(browser) == []


def test_a_click_on_a_cell_says_who_when_and_over_which_links(browser, page):
    open_page(browser, page, state(example=1, plan="1x8", versus=""))
    canvas = browser.find_element("css selector", "canvas.matrix")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    from selenium.webdriver import ActionChains

    side = canvas.size["height"]
    unit = (side - 18) / 16  # 16 chunks and the edge with the labels
    x, y = 18 + 2.5 * unit - canvas.size["width"] / 2, 18 + 6.5 * unit - side / 2  # chunk 6 sees chunk 2
    ActionChains(browser).move_to_element_with_offset(canvas, x, y).click().perform()
    said = browser.execute_script("return document.querySelector('.details').textContent")
    assert "Queries 3072 to 3583 (shard 6), keys 1024 to 1535 (shard 2)" in said
    assert f"{512 * 512:,} visible pairs" in said
    assert "Rank 6 computes it in step 4, from" in said
    assert "rank 3 to rank 4 between nodes, level 0" in said and "rank 5 to rank 6 within the node" in said
    assert "cell=6-2" in browser.execute_script("return startrail.link()")
    browser.execute_script("startrail.change({cell: '2-6'})")
    assert "nothing is computed" in browser.execute_script("return document.querySelector('.details').textContent")


def test_a_link_restores_the_view_and_can_be_copied_as_command_and_python(browser, server):
    parts = dict(
        nodes=2, ranks=2, plan="u2/1x2", versus="star2", mask="window", window=300, heads=8, kv=2, dim=64, length=4096,
        step=2, rank=3, cell="3-2", cluster="h100-8x8", outer=3,
    )  # fmt: skip
    parts["pass"] = "backward"
    open_page(browser, server, state(**parts))
    now = browser.execute_script("return startrail.state")
    assert {name: now[name] for name in parts} == {name: str(value) for name, value in parts.items()}
    assert browser.execute_script("return startrail.scene.levels[0][1]") == 3e9
    url = browser.execute_script("return startrail.link()")
    picture = browser.execute_script("return document.querySelector('canvas.timeline').toDataURL()")
    browser.get("about:blank")
    browser.get(url)
    settled(browser)
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


def test_a_link_restores_a_page_from_disk(browser, page):
    parts = state(example=3, plan="1x2/1x4", versus="1x8", step=2, rank=5, cell="40-39") + "&pass=backward"
    open_page(browser, page, parts)
    assert browser.execute_script(TEXT, "problem") == ""
    now = browser.execute_script(
        "return [startrail.state, startrail.scene.title, startrail.views[0].rank, startrail.step]"
    )
    assert (now[0]["mask"], now[0]["pass"], now[2], now[3]) == ("documents", "backward", 5, 2)
    assert now[1] == "2 nodes of 4 ranks, a100-4x8, 8 documents, 16,384 tokens"
    assert set(parts.split("&")) <= set(browser.execute_script("return startrail.link()").split("#")[1].split("&"))


@pytest.mark.parametrize(
    "fragment, said",
    [
        (state(nodes=2, ranks=2, plan="u4", versus="", heads=6, kv=6), "6 query heads cannot be split over u4; use u1"),
        (state(nodes=2, ranks=2, plan="3x3", versus=""), "; plans that fit 4 ranks: 1x4, 2x2"),
        (state(nodes="x"), "nodes = 'x' is not a whole number"),
        (state(nodes=2000, plan="1x4000"), "a page needs at least 2 ranks and has at most 1024, not 4000"),
        (state(heads=12, kv=5), "12 query heads are not a multiple of 5 key/value heads"),
        (
            state(length=4096, mask="documents", documents="1000,2000"),
            "sum to 3000, but the sequence has 4096 tokens: add one of 1096",
        ),
        (state(length=4096, mask="documents", documents="a,b"), "whole numbers separated by commas"),
        (state(length="ten"), "'ten' is not a whole number"),
        (state(rank=99), "Rank 99 is not one of 0 to 3"),
        (state(colour="red"), "unknown setting colour"),
        (state(outer=-1), "a link of '-1' GB/s does not work"),
        (state(mask="window", window=0), "window = '0' is not a whole number of at least 1"),
        (state(mask="holes"), "mask 'holes' is not one of causal, full, window, documents"),
        (state(cluster="mine"), "no cluster 'mine'; choose from"),
        (state(cluster="/etc/passwd"), "no cluster '/etc/passwd'; choose from"),
        (state(plan="direct"), "plan direct depends on the mask"),
        (state(plan="1x4,groups=128"), "at most groups=64 on 4 ranks"),
        (state(dim=100000), "dim = 100000 is more than 1024"),
        ("pass=sideways", "Pass sideways is not forward or backward"),
    ],
)  # fmt: skip
def test_bad_input_is_explained_with_what_would_fit(browser, server, fragment, said):
    open_page(browser, server, fragment)
    lines = browser.execute_script(TEXT, "problem")
    assert said in lines and "\n" not in lines
    assert errors(browser) == []


def test_a_page_from_disk_says_what_it_does_not_have(browser, page):
    open_page(browser, page, state(nodes=3, plan="3x3"))
    said = browser.execute_script(TEXT, "problem")
    assert "nodes = 3 is not in this page, which has 4" in said and "Plan 3x3 is not in this page; it has 1x32" in said
    assert "startrail serve" in said and errors(browser) == []
    disabled = "return [...document.querySelectorAll('#settings :disabled')].map((field) => field.name)"
    names = set(browser.execute_script(disabled))
    assert {"nodes", "ranks", "cluster", "outer", "heads", "kv", "length", "mask", "other"} <= names
    assert not names & {"plan", "versus", "pass", "example"}
    note = browser.find_element("id", "offline")
    assert note.is_displayed() and "startrail serve" in note.text


def test_windows_and_documents_show_what_runs(browser, server, tmp_path):
    open_page(browser, server, state(nodes=2, ranks=4, plan="1x2/1x4", versus="1x8", length=16384))
    said = "return startrail.views[0][arguments[0]].textContent"
    assert browser.execute_script("return startrail.views[0].routes.hidden")
    choose(browser, "mask", "documents")  # with lengths to begin with
    assert browser.execute_script(TEXT, "problem") == ""
    assert browser.execute_script("return startrail.state.documents") == "8192,4096,2048,1024,512,256,128,128"
    runs = browser.execute_script(said, "routesTable")
    assert "ranks 0 to 7direct" in runs and "ranks 0 to 3direct" in runs and "rank 0alonenothing" in runs
    assert "75% over 8 ranks direct" in browser.execute_script(said, "routesNote")
    choose(browser, "mask", "window")
    choose(browser, "window", 300)
    runs = browser.execute_script(said, "routesTable")
    assert "direct" in runs and "tokens sent·kv" in browser.execute_script(said, "table")
    browser.execute_script("startrail.change({cell: '40-39'})")  # queries 5120 to 5247, keys 4992 to 5119
    cell = browser.execute_script(said, "details")
    assert "are in the zone of ranks 0 to 7, which runs direct. " in cell.replace("direct.Rank", "direct. Rank")
    assert "Rank 5 computes it in step 1" in cell and "Its keys: rank 4 to rank 5 within the node" in cell
    click(browser, "play")
    wait_for(browser, "startrail.step >= 1")
    assert errors(browser) == []
    path = tmp_path / "page.html"
    options = ["--nodes", "2", "--length", "16k", "--window", "300", "--cluster", "h100-8x8", "--html", str(path)]
    assert main(["show", "1x2/1x4", *options]) == 0
    open_page(browser, path)
    assert "direct" in browser.execute_script(said, "routesTable")


def test_keyboard_only(browser, page):
    from selenium.webdriver import ActionChains, Keys

    open_page(browser, page, state(example=4, plan="1x4", versus=""))

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
    assert {
        "example",
        "plan",
        "versus",
        "pass",
        "back",
        "play",
        "ahead",
        "scrub",
        "machine",
        "matrix",
        "timeline",
    } <= set(seen)
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


def test_live_settings_by_keyboard(browser, server):
    from selenium.webdriver import ActionChains, Keys

    open_page(browser, server)
    field = browser.find_element("css selector", "[name=heads]")
    ActionChains(browser).double_click(field).send_keys("12", Keys.TAB).perform()
    settled(browser)
    assert "12 query heads are not a multiple of 8" in browser.execute_script(TEXT, "problem")
    assert browser.execute_script("return document.activeElement.name") == "kv"
    ActionChains(browser).send_keys("4", Keys.TAB).perform()
    settled(browser)
    assert browser.execute_script(TEXT, "problem") == ""
    assert browser.execute_script("const {settings} = startrail.scene; return [settings.heads, settings.kv]") == [
        "12",
        "4",
    ]


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
            for example in (2, 0):
                open_page(browser, page, state(example=example))
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
    open_page(browser, page, state(plan="1x32"))
    choose(browser, "plan", "u4/1x8")
    choose(browser, "example", 2)
    click(browser, "ahead")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith(("file://", "data:", "about:")) for url in asked), asked


def test_large_worlds_open_and_play(browser, tmp_path):
    """Prints times (``-s``); a busy machine must not fail the test. docs/view.md has some."""
    path = tmp_path / "page.html"
    large = dict(
        nodes="8", ranks="8", cluster="h100-8x8", heads="64", kv="8", length="256k", plan="u8/1x8", versus="1x64"
    )
    for mask in ("causal", "window"):
        path.write_text(html_page([scene({**large, "mask": mask}, all_roles=mask == "causal")]), "utf-8")
        assert path.stat().st_size < 1_000_000
        open_page(browser, path)
        opened = browser.execute_script("return startrail.opened")
        click(browser, "play")
        wait_for(browser, "startrail.frames.length > 20")
        click(browser, "play")
        frames = sorted(browser.execute_script("return startrail.frames"))
        print(f"64 ranks, {mask}: open after {opened:.0f} ms, a frame every {frames[len(frames) // 2]:.1f} ms (median)")
        timed = "return startrail.views.map(({recording, pass}) => recording.timed(pass).length)"
        assert browser.execute_script(timed) == [64, 64]
        assert errors(browser) == []
    options = ["--nodes", "128", "--length", "4m", "--heads", "64", "--kv-heads", "8", "--cluster", "h100-8x8"]
    assert main(["show", "2x64/u8", *options, "--html", str(path)]) == 0
    assert path.stat().st_size < 1_000_000
    open_page(browser, path)
    print(f"1,024 ranks: open after {browser.execute_script('return startrail.opened'):.0f} ms")
    assert browser.execute_script(timed) == [1, 1]
    assert "stands for all 1024 ranks, as it has the most work" in browser.execute_script(
        "return startrail.views[0].summary.textContent"
    )
    assert "It holds only the plans that were asked for" in browser.execute_script(TEXT, "comparison")
    assert browser.execute_script(TEXT, "problem") == "" and errors(browser) == []

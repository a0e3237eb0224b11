"""Drawings and text grids: what they show is what the plan does."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from startrail.cli import main
from startrail.compile.call import compile_call
from startrail.compile.problem import Boundaries, Split
from startrail.geometry.layout import weights_of, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.planner.topology import Machine
from startrail.planner.workload import find_model
from startrail.schedule.plan import Plan, plans_for
from startrail.schedule.values import FORWARD, PASSES
from startrail.view import forms_svg, forms_text, show_batch
from startrail.view.matrix import owners_of
from startrail.view.svg import grids_of, svg
from startrail.view.text import problem_of

SVG = "{http://www.w3.org/2000/svg}"


def shapes(text, kind):
    return [each for each in ElementTree.fromstring(text).iter() if kind in each.get("class", "").split()]


@pytest.mark.parametrize("plan", list(plans_for(16, max_levels=2))[::3], ids=str)
def test_every_rank_is_drawn_once_and_no_two_overlap(plan):
    text = svg(plan, Machine(4, 4))
    ranks = [(float(each.get("cx")), float(each.get("cy")), float(each.get("r"))) for each in shapes(text, "rank")]
    assert len(ranks) == 16
    for at, (x, y, r) in enumerate(ranks):
        assert all((x - a) ** 2 + (y - b) ** 2 > (2 * r) ** 2 for a, b, _ in ranks[:at])
    box = [float(number) for number in ElementTree.fromstring(text).get("viewBox").split()]
    assert all(r <= x <= box[2] - r and r <= y <= box[3] - r for x, y, r in ranks)


def test_rings_teams_heads_and_links_between_nodes_are_distinguished():
    ring = svg(Plan.parse("1x8"), Machine(2, 4))
    assert (len(shapes(ring, "near")), len(shapes(ring, "far"))) == (6 + 1, 2 + 1)  # with the legend's
    nested = svg(Plan.parse("2x4"), Machine(1, 8))
    assert len(shapes(nested, "team")) == 4 + 1 and len(shapes(nested, "near")) == 8 + 1
    heads = svg(Plan.parse("u2/1x4"), Machine(2, 4))
    assert len([each for each in shapes(heads, "far") if "heads" in each.get("class")]) == 1 + 1
    assert "between nodes" in heads and "between nodes" not in nested
    (star,) = grids_of(Plan.parse("star2"), 16)
    assert (star.rings, star.places) == (4, 4)  # C² sub-rings of P/C² ranks
    with pytest.raises(ValueError, match="at most 1024 ranks, not 2048"):
        svg(Plan.parse("1x2048"), Machine(1, 2048))


def test_the_matrix_shows_only_cells_with_visible_pairs():
    def cells(mask):
        return len(shapes(svg(Plan.parse("1x4"), Machine(1, 4), mask, 64), "cell"))

    assert cells(Mask()) == 64  # 8 x 8 chunks
    assert cells(Mask(causal=True)) == 36
    assert cells(Mask(causal=True, window=8)) == 32 * 5 - 10  # 32 x 32 cells; each sees the four before it
    assert cells(Mask(causal=True, documents=(0, 16, 64))) == 8 * 9 // 2 + 24 * 25 // 2


@pytest.mark.parametrize("pass_", PASSES, ids=str)
def test_the_text_grid_leaves_out_blocks_that_the_mask_hides(pass_):
    plan, mask = Plan.parse("1x8"), Mask(causal=True, window=40)
    runs = [zigzag(range(8), 128).runs(rank) for rank in range(8)]
    text = show_batch(plan, 8, mask, 128, pass_, range(8), 1000)
    found = {tuple(map(int, block)) for block in re.findall(r"\b(\d)x(\d)\b", text.split("step", 1)[1])}
    seen = {(row, column) for row in range(8) for column in range(8) if tiles_of(mask, runs[row], runs[column])}
    assert found == seen and len(seen) < 64


def test_the_matrix_of_a_batch_has_the_owners_of_its_zones():
    """Every pair of tokens of a cell is computed by the rank that the batch's programs say."""
    plan, length, documents = Plan.parse("1x2/1x2"), 32, (0, 12, 20, 25, 29, 32)
    for mask in (Mask(causal=True, documents=documents), Mask(causal=True, window=3)):
        cells, owners = owners_of(plan, 4, mask, length)
        assert cells == length  # one token each
        problem, split = problem_of(plan, mask, length), Split(plan, 4)
        computed = {}
        for rank in range(4):
            for route in compile_call(problem, split, rank).parts:
                programs = route.program(FORWARD)
                for block in (block for step in programs.steps for block in step.blocks):
                    rows, keys = (tokens_of(route, shard, length) for shard in (block.row, block.column))
                    pairs = ((q, k) for q in rows for k in keys if mask.visible(q, length)[0] <= k <= q)
                    assert not any(computed.setdefault(pair, rank) != rank for pair in pairs)
        assert owners == computed


def tokens_of(route, shard, length):
    runs = route.zone.runs_of((shard,), length) if shard < route.zone.size else None
    runs = runs or list(route.demand.messages.values())[shard - route.zone.size]
    return [at for start, count in runs for at in range(start, start + count)]


def test_the_matrix_of_unequal_shards_has_the_rank_that_holds_each_query():
    plan, length, shares = Plan.parse("1x4"), 32, weights_of((1, 1, 0.5, 1), 4)
    cells, owners = owners_of(plan, 4, Mask(causal=True), length, shares)
    layout = Split(plan, 4).layout_of(Boundaries((0, length), shares=shares))
    holders = {
        at: rank for rank, runs in enumerate(layout.table) for first, n in runs for at in range(first, first + n)
    }
    assert cells == length and owners == {(q, k): holders[q] for q in range(length) for k in range(q + 1)}
    assert layout.counts[2] == min(layout.counts) < layout.counts[0]


def test_latents_and_keys_are_drawn_to_scale_and_send_the_closed_form():
    model = find_model("deepseek-v3")
    text, drawing = (of(Plan.parse("1x4"), 4, model, 4096) for of in (forms_text, forms_svg))
    small, large = (shapes(drawing, kind) for kind in ("form-small", "form-large"))
    areas = [float(square.get("width")) * float(square.get("height")) for square in (small[0], large[0])]
    assert areas[1] / areas[0] == pytest.approx(40_960 / 576, rel=0.01)
    assert float(large[1].get("width")) / float(small[1].get("width")) == pytest.approx(40_960 / 576, rel=0.05)
    for width, shown in ((576, "latents"), (40_960, "keys, values")):
        megabytes = 3 * (2 + 2 + 4) * 1024 * width / 1e6  # 3 hops in each pass, and those of gradients in float32
        (line,) = (line for line in text.splitlines() if line.startswith(shown))
        assert float(line.split()[-2].replace(",", "")) == pytest.approx(megabytes, rel=0.01)


def test_show_writes_files_and_explains_mistakes(tmp_path, capsys):
    drawing, page = tmp_path / "plan.svg", tmp_path / "page.html"
    options = ["--nodes", "2", "--documents", "3000,1000,96", "--svg", str(drawing), "--html", str(page)]
    assert main(["show", "u2/1x4", *options]) == 0
    assert f"wrote {drawing}" in capsys.readouterr().out
    assert drawing.read_text().startswith("<svg") and page.read_text().startswith("<!doctype html>")
    assert main(["show", "1x4", "--window", "4096"]) == 0
    assert "mask: causal, window 4096, 16384 tokens; blocks without visible pairs" in capsys.readouterr().out
    for wrong, said in (
        (["1x4", "--documents", "10,x"], "--documents '10,x' is not a list of lengths, such as 3000,1000,96"),
        (["1x4", "--documents", "10,20", "--length", "64"], "--documents sum to 30 tokens, but --length is 64"),
        (["1x4", "--full", "--window", "3"], "--full cannot be combined with --window or --documents"),
        (["1x4", "--window", "0"], "window=0 must be at least 1"),
        (["1x4", "--shares", "1,1,1,2"], "--shares is for --scan and --svg"),
        (["1x4", "--shares", "1,1", "--scan"], "got 2 shares for 4 ranks"),
        (["1x4", "--scan", "--latents", "deepseek-v3"], "pass either --scan or --latents, not both"),
        (["1x4", "--latents", "gpt-7b"], "--latents gpt-7b: its keys and values are not expanded from latents"),
        (["1x4", "--nodes", "3", "--svg", str(drawing)], "--ranks 4 is not a multiple of --nodes 3"),
        (["1x4", "--html", str(tmp_path / "no" / "x.html")], "No such file or directory"),
        (["1x4", "--html", str(page), "--rank", "4"], "--rank 4 does not exist: ranks are 0 to 3"),
        (["1x4", "--nodes", "2", "--cluster", "pcie-8", "--html", str(page)], "do not describe 2 nodes of 2 ranks"),
        (["u1", "--html", str(page)], "a page needs at least 2 ranks"),
        (["direct", "--ranks", "8", "--html", str(page)], "has no rings to draw: pass a plan such as 1x8"),
    ):
        assert main(["show", *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments, hops, between", [
    (["1x2/1x4"], 14, [2]),
    (["1x2/1x4", "--documents", "10000,22768"], 17 + 6, [2, 0]),  # the longer one is cut between nodes
    (["u2/1x2"], 6, [6]),
])  # fmt: skip
def test_the_drawing_of_a_scan_has_every_hop(arguments, hops, between, tmp_path, capsys):
    file = tmp_path / "scan.svg"
    assert main(["show", *arguments, "--scan", "--svg", str(file)]) == 0
    text = file.read_text()
    assert (len(shapes(text, "tip-near")), len(shapes(text, "tip-far"))) == (hops - sum(between), sum(between))
    assert main(["show", *arguments, "--scan"]) == 0
    assert [int(states) for states in re.findall(r"(\d+) states between nodes", capsys.readouterr().out)] == between

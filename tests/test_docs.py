"""README and docs: code runs, commands exist, links lead somewhere, and figures are those of the recorded results."""

import ast
import re
import runpy
import shlex
import textwrap

import pytest
import torch

import startrail
from docs.messages import messages, raises
from results import figures
from startrail import __version__
from startrail.cli.app import build_parser, main
from startrail.cli.options import UsageError
from startrail.compile.attention import Attention
from startrail.launch.local import run_local
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict
from startrail.schedule.plan import Plan
from tests.helpers import ROOT, fork_ranks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    """The code blocks of a page."""
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page):
    """Every call of `startrail` in a page's shell blocks, as arguments."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\s)(?:startrail|-m startrail\.cli) (.*)", line.partition("  #")[0])
            if found and "--help" not in found[1]:
                yield shlex.split(re.sub(r"[|>&].*", "", found[1]), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_exist(page):
    for arguments in commands(page):
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        try:
            _, unknown = build_parser().parse_known_args(own)
        except UsageError as error:
            pytest.fail(f"startrail {' '.join(arguments)}: {error}")
        assert not unknown, f"startrail {' '.join(arguments)}: no such options: {unknown}"


def test_the_readme_and_the_first_example_run_as_they_stand(tmp_path):
    block, _ = blocks(ROOT / "README.md", "python")
    readme, log = tmp_path / "readme.py", tmp_path / "log"
    readme.write_text(f"{block}\nprint(tuple(whole.shape))\n")
    for script in (readme, ROOT / "examples" / "first.py"):
        assert fork_ranks(4, lambda script=script: runpy.run_path(str(script)) and 0, log) == [0] * 4, log.read_text()
    assert log.read_text().count("(1, 8, 1000, 64)") == 4
    error = float(re.search(r"largest difference from one process: (\S+)", log.read_text())[1])
    assert 0 < error < 3e-6


def test_the_layer_of_the_hybrid_guide_gives_the_results_of_one_process():
    (block,), names = blocks(ROOT / "docs/guides/hybrid.md", "python"), {}
    exec(block, names)

    def outputs(plan):
        torch.manual_seed(0)
        layer, x = names["DeltaLayer"](8, 2), torch.randn(1, 50, 8)
        seq = startrail.SequenceParallel(plan).sequence(50, documents=[0, 13, 50])
        return seq.unshard(layer(seq.shard(x, dim=1), seq), dim=1).detach()

    found = run_local(lambda rank: outputs("1x3"), 3)[0]
    torch.testing.assert_close(found, outputs("1x1"), rtol=1e-5, atol=1e-5)


def test_commands_of_the_readme_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [arguments for arguments in commands(ROOT / "README.md") if arguments[0] in ("show", "check")]
    inline = re.findall(
        r"`startrail ((?:show|plan)[^`]*)`", textwrap.fill(ROOT.joinpath("README.md").read_text(), 10**6)
    )
    for arguments in [*shown, *map(shlex.split, inline)]:
        assert main(arguments) == 0, arguments
    assert (tmp_path / "page.html").exists()
    assert "ok: exact" in capsys.readouterr().out


def test_the_readmes_drawing_is_what_show_draws(tmp_path):
    assert main(["show", "1x2/1x4", "--scan", "--svg", str(tmp_path / "scan.svg")]) == 0
    drawn = (tmp_path / "scan.svg").read_text()
    assert drawn == (ROOT / "docs/images/scan.svg").read_text(), (
        "startrail show 1x2/1x4 --scan --svg docs/images/scan.svg"
    )


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            generated = re.search(r"drawings/|page\.html|reference/(commands|errors|models)\.md|hardware\.md", target)
            if not re.match(r"https?:|mailto:", target) and not generated:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_errors_has_texts_wherever_they_are_written():
    found = {text for _, text in messages()}
    for text in (
        "blocks end at ..., but the sequence has ... tokens",  # raised as it is
        "sequence(length) needs the number of tokens of the whole sequence",  # returned by a function
    ):
        assert text in found
    silent = {(module, ast.unparse(node)) for module, node, texts in raises() if not texts}
    passed_on = r"str\(error\)|\{error|in_short\(error\)|aborted|failure|refusal|problems?\b|verdict\.text"
    assert {each for each in silent if not re.search(passed_on, each[1])} == set()  # others are listed where they begin


def test_tests_that_pages_name_exist():
    for page in PAGES:
        for path in re.findall(r"`(tests/[\w/.-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_files_and_names_that_contributing_sends_a_reader_to_exist():
    page, suffixes = (ROOT / "CONTRIBUTING.md").read_text(), (".py", ".toml", ".md", ".yml", ".json", ".txt")
    code = [path for folder in ("src", "tests", "workshop", "results") for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in code)))
    for name in sorted(set(re.findall(r"`(\w[\w./-]*)`", page))):
        if name.endswith(suffixes) and "NAME" not in name:
            known = (ROOT / name).exists() or any(path.as_posix().endswith(f"/{name}") for path in code)
            assert known, f"there is no file {name}"
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) and "NAME" not in name:
            assert name.rpartition(".")[2] in words, f"nothing is called {name}"


def test_every_promise_about_gpus_names_its_test_and_what_it_cannot_show():
    """Each bullet: a test file that exists (`test_tests_that_pages_name_exist`), and what only hardware can show."""
    promises = re.split(r"\n- \*\*", ROOT.joinpath("docs", "gpus.md").read_text().split("\n## ")[0])[1:]
    assert len(promises) > 20
    for promise in promises:
        name = promise.split("**")[0]
        assert re.search(r"`tests/[\w/]+/test_\w+\.py`|`tests/(kernels|geometry)`", promise), f"{name}: no test"
        assert "*Not shown:*" in promise, f"{name}: it does not say what only hardware can show"


def test_figures_are_those_of_the_recorded_results():
    assert list(figures.problems(write=False)) == []


def test_every_other_figure_has_a_source():
    assert list(figures.untraced()) == []


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_first_gpu_run_has_the_planners_predictions():
    rows = re.findall(r"`(\S+)` \| ([\d.]+) ms", (ROOT / "docs" / "first-gpu-run.md").read_text())
    assert len(rows) == 9
    for plan, milliseconds in rows:
        ranks = Plan.parse(plan).size
        call = Attention.of(8192 * ranks, 1, 16, 16, 128, True)
        found = predict(find_cluster(f"h100-8x8@{ranks // 8}x8"), Plan.parse(plan), call).seconds
        assert float(milliseconds) == pytest.approx(1000 * found, abs=0.1), plan


def test_torch_has_what_docs_gpus_designs_with_but_not_on_cpus():
    from torch.distributed import _symmetric_memory as symmetric

    for name in ("rendezvous", "put_signal", "wait_signal"):
        assert callable(getattr(symmetric._SymmetricMemory, name))
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        symmetric.empty(4, device="cpu")

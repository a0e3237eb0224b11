"""``startrail bench engine --against``: two source trees are measured in turns, and each is really the one it says."""

import json
import shutil

import pytest

from startrail.cli import main
from tests.helpers import ROOT, refusal
from workshop.trials.against import Tree, source_of, table

SMALL = ["bench", "engine", "--length", "64", "--heads", "2", "--head-dim", "8", "--ranks", "2", "--rounds", "2"]


def pairs(*ratios):
    return [([1.0, 1.0], [ratio, ratio]) for ratio in ratios]


def test_both_trees_answer_every_question(tmp_path, monkeypatch, capfd):
    """The other tree is a copy. The working directory has another startrail, which must not be found."""
    other = tmp_path / "other" / "src"
    shutil.copytree(ROOT / "src" / "startrail", other / "startrail", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "startrail").mkdir()
    (tmp_path / "startrail" / "__init__.py").write_text("raise SystemExit('another startrail')")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "against.json"
    options = ["--plans", "u2,1x2", "--calls", "2", "--against", str(other.parent), "--json", str(file)]
    assert main([*SMALL, *options]) == 0
    output = capfd.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    cases = ["causal, u2", "causal, 1x2", "2 documents, u2", "window 4, u2", "host, u2", "host, 1x2"]
    assert [row["case"] for row in rows] == cases and all(len(row["pairs"]) == 2 for row in rows)
    assert all(min(*before, *after) > 0 for row in rows for before, after in row["pairs"])
    assert f"{ROOT / 'src'} against {other}, 2 rounds" in output
    assert all(case in output for case in cases)


def test_the_other_tree_is_the_one_that_is_measured(tmp_path):
    """Although this environment has startrail installed."""
    other = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "startrail", other / "startrail", ignore=shutil.ignore_patterns("__pycache__"))
    host = other / "startrail" / "bench" / "host.py"
    host.write_text("def host_times(*_):\n    return [2.0], [5.0], 0.0\n")
    with Tree(source_of(tmp_path)) as tree:
        assert tree.ask("host", "u2", 2, 2, 1) == [0.007]


def test_verdicts_follow_from_the_medians_of_pairs():
    text = table({"causal, u8": pairs(1.009, 0.5, 5.0), "host, u8": pairs(0.6, 0.55, 0.61)})
    assert "slower by more than 1%: none" in text and "host time at most 60% of before" in text
    text = table(
        {"causal, u8": pairs(1.02), "causal, 1x8": pairs(1.0), "host, u8": pairs(0.5), "host, 1x8": pairs(0.7)}
    )
    assert "slower by more than 1%: causal, u8\n" in text and "host time at most 70% of before" in text
    assert "slower" not in table({"host, u8": pairs(0.5)})


@pytest.mark.parametrize(
    "options, words",
    [
        (["--against", "/nowhere", "--plans", "u2"], "neither /nowhere nor /nowhere/src has a startrail package"),
        (["--against", str(ROOT), "--plans", "u2", "--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--against", str(ROOT), "--plans", "1x3"], "1x3"),
    ],
)
def test_mistakes_are_one_line(options, words, capfd):
    assert words in refusal([*SMALL, *options], capfd)

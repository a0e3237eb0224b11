import subprocess
import sys

import pytest

import startrail
from startrail.cli import main
from tests.helpers import refusal


@pytest.mark.parametrize(
    "argv, message",
    [
        (["show", "2y2"], "cannot read '2y2'"),
        (["show", "star2"], "needs --ranks, a multiple of 4"),
        (["show", "2x2", "--ranks", "6"], "world size 6 is not teams 2 x ring 2 x heads 1 = 4"),
        (["show", "2x2", "--rank", "4"], "--rank 4 is not in a world of 4"),
        (["check", "1x2", "--window", "0"], "window=0 must be at least 1"),
        (["check", "1x2", "--documents", "0,x"], "write whole numbers with commas"),
        (["check", "1x2", "--documents", "0,5", "--length", "6"], "documents end at 5, but the sequence has 6 tokens"),
        (["check", "u4", "--heads", "6"], "6 query heads cannot be split over u4; use u1, u2, u3, u6"),
        (["check", "1x2", "--heads", "6", "--kv-heads", "4"], "6 query heads are not a multiple of 4"),
        (["check", "1x2", "--head-dim", "512"], "head dim 512 is more than 256"),
        (["check", "1x2", "--length", "0"], "length 0 must be at least 1"),
        (["check", "auto"], "plan auto needs --ranks"),
        (["check", "40x50"], "2,000 ranks, a process each: at most 256 are started on one machine"),
        (["train", "--ranks", "2000", "--plan", "1x2000"], "2,000 ranks, a process each: at most 256"),
        (["verify", "no.such:thing", "--ranks", "2000"], "2,000 ranks, a process each: at most 256"),
        (["doctor", "--ranks", "2000"], "2,000 ranks, a process each: at most 256"),
        (["train", "gpt-nope", "--help"], "gpt-nope"),
        (["check", "1x2", "--length", "1000000"], "the float64 reference of 1,000,000 tokens 238418.6 GiB, but"),
        (["show", "auto"], "auto chooses a plan for a machine and a model: give --ranks and --heads"),
        (["show", "auto", "--ranks", "6", "--nodes", "4", "--heads", "8"], "--ranks 6 do not fill --nodes 4 evenly"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    assert message in refusal(argv, capsys)


def test_check_reports_errors_bytes_and_waiting(capsys):
    assert main(["check", "2x1", "--causal", "--length", "100", "--heads", "2", "--head-dim", "8"]) == 0
    text = capsys.readouterr().out
    for part in ("plan 2x1 on 2 ranks, 100 tokens, causal", "dv ", "level 0", "waiting for transfers", "ok: exact"):
        assert part in text


def test_check_takes_every_mask_at_once(capsys):
    argv = ["check", "1x2", "--causal", "--window", "9", "--documents", "0,30,64", "--length", "64", "--kv-heads", "2"]
    for wire in ("bfloat16", "float64"):
        assert main([*argv, "--dtype", "bfloat16", "--wire-dtype", wire, "--heads", "4", "--head-dim", "8"]) == 0


def test_show_keeps_lines_readable_whatever_the_plan(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for plan, more in (("64x32/u8", "more ranks; choose with --rank"), ("2x2", "rank 3")):
        assert main(["show", plan]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100
        assert more in text
    assert main(["show", "64x32/u8", "--rank", "5", "--rank", "77"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 130


def test_show_auto_says_what_it_chose(capsys, monkeypatch):
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    assert main(["show", "auto", "--ranks", "8", "--nodes", "2", "--heads", "8", "--kv-heads", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("auto chose ") and "cluster assumed to be like h100-8x8" in text and "step  rank 0" in text


def test_version_and_python_dash_m(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"startrail {startrail.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "startrail", "show", "1x2"], capture_output=True, text=True)
    assert done.returncode == 0 and "1x2 on 2 ranks, forward" in done.stdout


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], ["what gpt-tiny has", "steps in all [120]", "--width 128", "rows x columns) [2048]"]),
        (["gpt-3b"], ["what gpt-3b has", "steps in all [10000]", "rows x columns) [131072]"]),
        (["dit-tiny", "--steps", "7"], ["what dit-tiny has", "steps in all [7]", "minutes that a rank may hang"]),
    ],
)
def test_train_help_shows_the_chosen_recipe(argv, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", *argv, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in expected), text
    assert "143 if SIGTERM stopped the run" in text


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "startrail check 2x2/u2 --ranks 8 --causal" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["engine", "train", "memory"])
def test_bench_lists_its_tools_and_each_has_an_example(word, capsys):
    for argv, expected in ((["bench", "--help"], f"startrail bench {word} "), (["bench", word, "--help"], "example:")):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["engine", "--plans", "1x8,2y4"], "cannot read '2y4'"),
        (["engine", "--plans", "1x4"], "world size 8 is not teams 1 x ring 4"),
        (["train", "--recipes", "gpt-tinny"], "gpt-tinny"),
        (["memory", "--worlds", "2,x"], "write whole numbers with commas"),
        (["memory", "--ranks", "3"], "3 ranks have no plan here; use 1, 2, 4, 8, 16"),
    ],
)
def test_a_mistake_in_a_bench_tool_is_one_line_and_exit_code_2(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

import subprocess
import sys

import pytest

import startrail
from startrail.cli import main
from startrail.cli.app import COMMANDS
from startrail.schedule.demand import Demand
from tests.helpers import refusal

BEYOND_LIMIT = "2,000 ranks need a process each, and one machine runs at most 256"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["show", "2y2"], "cannot read '2y2'"),
        (["show", "star2"], "needs --ranks, a multiple of 4"),
        (["show", "2x2", "--ranks", "6"], "world size 6 is not teams 2 x ring 2 x heads 1 = 4"),
        (["show", "2x2", "--scan", "--window", "8"], "pass either --scan or --window, not both"),
        (["check", "2x2", "--scan"], "--scan needs --prove"),
        (["show", "2x2", "--rank", "4"], "--rank 4 does not exist: ranks are 0 to 3"),
        (["check", "1x2", "--window", "0"], "window=0 must be at least 1"),
        (["check", "1x2", "--documents", "0,x"], "write whole numbers with commas"),
        (["check", "1x2", "--documents", "0,5", "--length", "6"], "documents end at 5, but the sequence has 6 tokens"),
        (["check", "u4", "--heads", "6"], "6 query heads cannot be split over u4; use u1, u2, u3, u6"),
        (["check", "1x2", "--heads", "6", "--kv-heads", "4"], "6 query heads are not a multiple of 4"),
        (["check", "1x2", "--head-dim", "512"], "head dim 512 is more than 256"),
        (["check", "1x2", "--length", "0"], "length 0 must be at least 1"),
        (["check", "auto"], "plan auto needs --ranks"),
        (["check", "auto", "--ranks", "2", "--prove"], "--prove needs a plan"),
        (["check", "40x50"], BEYOND_LIMIT),
        (["train", "--ranks", "2000", "--plan", "1x2000"], BEYOND_LIMIT),
        (["verify", "no.such:thing", "--ranks", "2000"], BEYOND_LIMIT),
        (["doctor", "--ranks", "2000"], BEYOND_LIMIT),
        (["train", "gpt-nope", "--help"], "gpt-nope"),
        (["check", "1x2", "--length", "1000000"], "the float64 reference of 1,000,000 tokens 238418.6 GiB, but"),
        (["show", "auto"], "auto chooses a plan for a cluster and a model: pass --ranks and --heads"),
        (["show", "auto", "--ranks", "6", "--nodes", "4", "--heads", "8"], "--ranks 6 is not a multiple of --nodes 4"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    assert message in refusal(argv, capsys)


def test_check_reports_errors_bytes_and_waiting(capsys):
    assert main(["check", "2x1", "--causal", "--length", "100", "--heads", "2", "--head-dim", "8"]) == 0
    text = capsys.readouterr().out
    for part in ("plan 2x1 on 2 ranks, 100 tokens, causal", "dv ", "level 0", "waiting for transfers", "ok: exact"):
        assert part in text


@pytest.mark.parametrize(
    "argv, text",
    [
        (["2x2/u2", "--causal", "--length", "1000"], "2x2/u2 on 8 ranks, 1000 tokens, causal"),
        (["star4", "--ranks", "64", "--length", "600"], "star4 on 64 ranks, 600 tokens, full"),
        (
            ["8x8", "--causal", "--window", "9", "--length", "999"],
            "8x8 (as direct) on 64 ranks, 999 tokens, causal, window",
        ),
        (
            ["1x4/1x8", "--causal", "--documents", "0,7,450,512", "--length", "512"],
            "32 ranks, 512 tokens, causal, 3 documents",
        ),
        (
            ["1x4/1x8", "--scan", "--documents", "0,7,450,1024"],
            "scan and halo by 1x4/1x8 on 32 ranks, 1024 tokens in 3",
        ),
    ],
)
def test_check_proves_any_number_of_ranks_without_starting_one(argv, text, capsys, monkeypatch):
    monkeypatch.setattr("startrail.launch.local.run_local", None)
    assert main(["check", *argv, "--prove"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("proven: ") and text in out


def test_check_proves_what_it_runs_and_does_not_run_what_is_wrong(capsys, monkeypatch):
    argv = ["check", "1x2/1x2", "--causal", "--window", "9", "--length", "64", "--heads", "2", "--head-dim", "8"]
    assert main(argv) == 0
    assert (
        "proven: 1x2/1x2 (as direct) on 4 ranks, 64 tokens, causal, window 9\nplan 1x2/1x2" in capsys.readouterr().out
    )
    right = Demand.of

    def without_one(*arguments):
        demand = right(*arguments)
        del demand.pieces[max(demand.pieces)]
        return demand

    monkeypatch.setattr(Demand, "of", without_one)
    monkeypatch.setattr("startrail.diagnostics.exactness.run_local", None)
    for more in ([], ["--prove"]):
        assert main([*argv, *more]) == 1
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("startrail check: the schedule is wrong: rank ") and "misses one" in error


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
        (
            [],
            [
                "in brackets: gpt-tiny",
                "total optimizer steps [120]",
                "GPT and DiT [128]",
                "rows x columns) [2048]",
                "GPT [4]",
            ],
        ),
        (["gpt-3b"], ["in brackets: gpt-3b", "total optimizer steps [10000]", "rows x columns) [131072]"]),
        (
            ["dit-tiny", "--steps", "7"],
            ["in brackets: dit-tiny", "total optimizer steps [7]", "minutes to wait for a rank that hangs"],
        ),
    ],
)
def test_train_help_shows_the_chosen_recipe(argv, expected, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main(["train", *argv, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in expected), text
    assert "143 if SIGTERM stopped the run" in text


def help_of(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_one_example_per_command_and_a_command_its_own(capsys):
    lines = help_of([], capsys).partition("examples:\n")[2].splitlines()
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    assert [line.split()[1] for line in lines] == names
    for name in names:
        examples = help_of([name], capsys).partition("examples:\n")[2].partition("\n\n")[0].splitlines()
        assert examples and all(
            f"startrail {name}" in line or f"-m startrail.{name}" in line or f"-m startrail.cli {name}" in line
            for line in examples
        )


@pytest.mark.parametrize("benchmark", ["engine", "train", "memory"])
def test_bench_lists_its_benchmarks_and_each_has_an_example(benchmark, capsys):
    assert f"\n    {benchmark} " in help_of(["bench"], capsys)
    assert f"examples:\n  startrail bench {benchmark} --" in help_of(["bench", benchmark], capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "auto", "--ranks", "8", "--heads", "8", "--kv-heads", "0"],
        ["check", "1x2", "--heads", "6", "--kv-heads=4"],
        ["plan", "--model", "gpt-7b", "--cluster", "a100-4x8", "--length", "1M", "--no-recompute", "--dtype=int8"],
        ["train", "--data-parallel", "3"],
        ["train", "--kv-heads", "3", "--wait-minutes=0"],
        ["lab", "run", "--rack-link", "1gbit", "--log-dir", "logs", "--", "x"],
        ["bench", "engine", "--head-dim", "8", "--plans", "1x4"],
        ["bench", "memory", "--no-recompute", "--ranks", "3"],
        ["verify", "no.such:thing", "--no-such-option"],
    ],
)
def test_options_take_hyphens_and_underscores(argv, capsys):
    with_underscores = [f"--{part[2:].replace('-', '_')}" if part.startswith("--") else part for part in argv]
    with_underscores = ["--" if part == "--" else part for part in with_underscores]
    assert with_underscores != argv
    assert refusal(argv, capsys) == refusal(with_underscores, capsys)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "startrail: the following arguments are required: COMMAND (see startrail --help)"),
        (["shw"], "invalid choice: 'shw'"),
        (["show", "2x2", "--rnk", "3"], "startrail show: unrecognized arguments: --rnk 3; did you mean --rank"),
        (["check", "1x2", "--length", "x"], "startrail check: argument --length: invalid int value: 'x'"),
        (["show", "2x2", "--", "script.py"], "startrail show: unrecognized arguments: -- script.py"),
        (["lab"], "startrail lab: the following arguments are required: command"),
        (["lab", "run", "--slow", "3"], "startrail lab run: argument --slow: '3' is not NODE=RATE, such as 3=50mbit"),
        (["lab", "run"], "startrail lab run: no program to run: put it after --"),
        (["lab", "run", "--link", "fast", "--", "x"], "startrail lab run: 'fast' is not a rate"),
        (["bench", "--minutes", "0"], "startrail bench: --minutes 0 is not a positive number"),
        (["bench", "engine", "--plans", "1x8,2y4"], "startrail bench engine: plan '2y4': cannot read '2y4'"),
    ],
)
def test_a_mistake_names_the_command_it_was_made_in(argv, message, capsys):
    assert message in refusal(argv, capsys)


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
def test_a_mistake_in_a_benchmark_is_one_line_and_exit_code_2(argv, message, capsys):
    assert message in refusal(["bench", *argv], capsys)

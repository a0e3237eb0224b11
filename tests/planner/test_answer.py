"""The answer as a table, a paragraph and JSON, and ``startrail plan``, which prints it."""

import json
from dataclasses import replace

import pytest

import startrail
from startrail.cli import main
from startrail.planner.answer import plan as ask
from startrail.planner.cluster import SlowMember, find_cluster
from startrail.planner.search import search
from startrail.planner.workload import Run, find_model
from startrail.schedule.plan import Plan
from tests.helpers import refusal


@pytest.mark.parametrize("share, advice", [(0.95, "keep it"), (0.02, "leave it out")])
def test_a_slow_node_is_named_with_advice(share, advice):
    cluster = replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 2, bandwidth=share),))
    why = ask(cluster, "gpt-3b", "128k").why
    assert f"node 2 (bandwidth {share:.0%}, compute 100%)" in why
    assert "the other 3 nodes alone take" in why
    assert advice in why


def test_what_would_change_the_answer_is_a_new_search():
    """It is not limited to the rows of the first search."""
    cluster, model, run = find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**17)
    why = ask(cluster, model, run.length, top=1, memory="26 GB").why
    half = search(cluster, model, run, top=1, memory=13e9, known=False).best
    assert f"with half the memory, {half.name} becomes best (" in why
    twice = search(cluster.faster(0, 2.0), model, run, top=1, memory=26e9, known=False).best
    assert f"With twice the bandwidth between nodes, {twice.name} becomes best (" in why
    assert "with half the memory, no plan fits: " in ask(cluster, model, 2 * run.length, top=1).why


def test_rows_as_json(capsys):
    argv = ["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "64k", "--json", "--top", "2"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        for key in ("plan", "seconds", "low", "high", "tokens_per_second", "exposed", "bytes", "memory"):
            assert key in row
        assert row["low"] < row["seconds"] < row["high"]
        assert row["why_not"] is None
        assert set(row["bytes"]) == {"node", "gpu"}
        Plan.parse(row["plan"]).check_world(32)


def test_the_function_and_the_command_give_the_same_answer(capsys):
    answer = startrail.plan("a100-4x8", "gpt-3b", "64k")
    assert main(["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "65536"]) == 0
    text = capsys.readouterr().out
    assert text == f"{answer}\n"
    columns = "tokens/s", "MFU", "exposed", "node GB/rank", "GPU GB/rank"
    for part in (*columns, " wins: ", "The runner-up", "twice the bandwidth between nodes"):
        assert part in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--cluster", "a100-4x9"], "no cluster 'a100-4x9'; did you mean 'a100-4x8'?"),
        (["--cluster", "a100-4x8@4"], "'4' is not NODExGPU"),
        (["--cluster", "none.toml"], "none.toml: No such file or directory"),
        (["--model", "gpt-8b"], "no model 'gpt-8b'; did you mean 'gpt-"),
        (["--length", "-5"], "length = '-5' is not a whole number of at least 1"),
        (["--length", "9" * 320], "length = '99999"),
        (["--length", "16"], "length 16 has fewer tokens than cluster a100-4x8 has ranks, 32"),
        (["--length", "16M"], "tokens would"),
        (["--batch", "0"], "batch = '0' is not a whole number"),
        (["--memory", "much"], "memory = 'much' is not an amount of memory"),
        (["--memory", "0 GB"], "memory = '0 GB' is not between 1 MB and"),
        (["--top", "x"], "argument --top: 'x' is not a whole number"),
        (["--zero", "x"], "argument --zero: 'x' is not a whole number"),
        (["--zero", "1"], "zero = 1 is not one of 0, 2, 3"),
        (["--dtype", "float32"], "has no rates in float32; it has bfloat16"),
        (["--dtype", "int8"], "dtype = 'int8' is not one of"),
        (["--top", "0"], "top = 0 is not a whole number of at least 1"),
        (["--memory", "2 GB"], "does not fit cluster a100-4x8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    whole = ["plan", "--cluster", "a100-4x8", "--model", "gpt-7b", f"--length={64 * 1024}"]
    if argv[0] == "--length":
        argv = [f"--length={argv[1]}"]
    assert message in refusal([*whole, *argv], capsys)

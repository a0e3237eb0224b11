"""The longest sequence, the fewest devices, the batch, the cost, the picture."""

import pytest

from startrail.cli import main
from startrail.planner.answer import plan as ask
from startrail.planner.cluster import find_cluster
from startrail.planner.operate import cost_per_million, fits, longest_length, smallest_cluster, worthwhile_batch
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.workload import Run, find_model
from startrail.view.plan_plot import parts_of, plot_answer, shown_rows
from tests.helpers import refusal

A100, MODEL = find_cluster("a100-4x8@2x4"), find_model("gpt-3b")


def test_the_longest_length_fits_and_the_next_does_not():
    length = longest_length(A100, MODEL, Run(1))
    assert fits(A100, MODEL, Run(length)) and not fits(A100, MODEL, Run(length + 1024))
    assert longest_length(A100, MODEL, Run(1), memory=30e9) < length
    assert ask(A100, MODEL, max_length=True, top=1).result.run.length == length
    with pytest.raises(ValueError, match="gpt-3b does not fit cluster a100-4x8@2x4 even with 1024 tokens"):
        longest_length(A100, MODEL, Run(1), memory=3e9)


def test_the_longest_length_asks_few_plans_more_than_once(monkeypatch):
    """On thousands of nodes there are tens of thousands of plans."""
    cluster, asked = find_cluster("h100-8x8@256x8"), []
    memory = Training.memory
    monkeypatch.setattr(Training, "memory", lambda self, plan: asked.append(plan) or memory(self, plan))
    longest_length(cluster, MODEL, Run(1))
    assert len(set(asked)) > 10_000 and len(asked) < 1.05 * len(set(asked))


def test_the_smallest_cluster_fits_and_the_next_smaller_does_not():
    run = Run(2**18)
    cluster = smallest_cluster(A100, MODEL, run)
    nodes = cluster.levels[0].size
    assert cluster.name == f"a100-4x8@{nodes}x4" and nodes > 1
    assert fits(cluster, MODEL, run) and not fits(A100.resized([{2: 1, 3: 2, 4: 3, 6: 4}[nodes], 4]), MODEL, run)


def test_twice_the_worthwhile_batch_adds_little():
    run = Run(2**15)
    batch = worthwhile_batch(A100, MODEL, run)
    assert batch > 1 and ask(A100, MODEL, 2**15, batch="auto", top=1).result.run.batch == batch


def test_the_cost_per_million_tokens_is_that_of_the_device_hours():
    answer = ask(A100, MODEL, 65536, top=1, price=3.0)
    row = answer.rows[0]
    assert row["cost"] == pytest.approx(3.0 * 8 / 3600 * 1e6 / row["tokens_per_second"])
    assert row["cost"] == cost_per_million(answer.result.best, 3.0) and "cost/M" in answer.table
    assert "cost/M" not in ask(A100, MODEL, 65536, top=1).table


def test_the_parts_of_a_step_add_up(tmp_path):
    result = search(A100, MODEL, Run(65536))
    for row in shown_rows(result):
        assert sum(parts_of(row).values()) == pytest.approx(row.seconds, rel=0.02)
    pytest.importorskip("matplotlib")
    plot_answer(result, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_only_one_way_to_say_the_length(capsys):
    argv = ["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "64k", "--max-length"]
    assert "pass only one of --length, --max-length and --gpus-for" in refusal(argv, capsys)


def test_the_fewest_gpus_on_the_command_line(capsys):
    assert main(["plan", "--cluster", "a100-4x8@2x4", "--model", "gpt-3b", "--gpus-for", "256k", "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "1 x 262144 tokens" in text
    assert "the fewest that fit 262,144 tokens: " in text


def test_the_longest_length_and_the_batch_are_said(capsys):
    argv = ["plan", "--cluster", "h100-8x8@1x2", "--model", "gpt-3b", "--top", "1"]
    assert main([*argv, "--max-length"]) == 0
    assert "the longest sequence that fits: " in capsys.readouterr().out
    assert main([*argv, "--length", "32k", "--batch", "auto"]) == 0
    assert "batch 2: twice as many sequences do not fit, or add less than 2%" in capsys.readouterr().out


def test_what_saves_enough_memory_is_named(capsys):
    """And it does fit: the message is no guess."""
    argv = ["plan", "--cluster", "h100-8x8@1x8", "--model", "llama3-8b", "--length", "1M", "--top", "1"]
    assert "it would fit with repeat_attention = true and offload = true; " in refusal(argv, capsys)
    assert main([*argv, "--repeat-attention", "--offload"]) == 0

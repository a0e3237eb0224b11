"""run.html: what a run measured, with labelled axes, and how to repeat it."""

import json
from dataclasses import replace
from math import inf

import pytest

from startrail.cli.app import build_parser
from startrail.planner.memory import Memory
from startrail.schedule.plan import Plan
from startrail.training.display import Display, Summary
from startrail.training.forecast import Forecast
from startrail.training.recipes import RECIPES, find
from startrail.training.record import RunRecord, command_of, read_metrics, run_page
from startrail.view.plots import Bar, Series, bar_chart, line_chart, ticks


@pytest.mark.parametrize(
    "recipe",
    [
        replace(RECIPES["gpt-tiny"], steps=7, packed=True, out="runs/a b", learning_rate=1e-3),
        RECIPES["dit-tiny"].with_({"data": "photos", "rows": 16, "columns": 16, "plan": "1x4"}),
        replace(RECIPES["dit-1b"], zero=2),
    ],
)
def test_the_command_repeats_the_run(recipe):
    import shlex

    program, *arguments = shlex.split(command_of(recipe))
    assert program == "startrail"
    parsed = vars(build_parser().parse_args(arguments))
    changes = {name: value for name, value in parsed.items() if name in recipe.as_dict()}
    assert find(parsed["recipe"]).with_(changes) == recipe


def test_the_page_shows_what_was_measured(tmp_path):
    recipe = replace(RECIPES["gpt-tiny"], out=str(tmp_path), steps=4)
    lines = [
        {"step": n, "loss": 5.0 / n, "tokens_per_second": 100.0 * n, "waiting": 0.2, "sent": {}} for n in (1, 2, 2, 3)
    ]
    lines[2]["loss"] = None  # not finite
    lines[3]["held_out"] = 1.75
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [5.0, None, 5.0 / 3]
    forecast = Forecast(Plan.parse("2x2/u2"), 8, "some <data>", Memory(2.0**20, 0, 0, 0, 0, 0, inf), {}, {})
    steps = read_metrics(tmp_path / "metrics.jsonl")
    text = run_page(recipe, forecast, steps, 2.0**19, "a prompt|and its <continuation>", "finished")
    for part in (
        "finished, step 3 of 4", "some &lt;data&gt;", "startrail train gpt-tiny --steps 4", "loss (nats per token)",
        "tokens per second", "exposed communication (%)", "held-out loss, 1.75 at step 3", "512.0 KiB", "1.0 MiB",
        "and its &lt;continuation&gt;", "data:image/svg+xml", "training loss",
    ):  # fmt: skip
        assert part in text, part
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    "line", ["[1]", '{"step": "x"}', '{"step": 1, "loss": "high"}', '{"step": 1, "loss": 1e999}', "{"]
)
def test_a_page_that_cannot_be_written_does_not_end_the_run(line, tmp_path):
    notes = []
    display = Display()
    display.note = notes.append
    forecast = Forecast(Plan.parse("1x1"), 1, "", Memory(0, 0, 0, 0, 0, 0, inf), {}, {})
    record = RunRecord(replace(RECIPES["gpt-tiny"], out=str(tmp_path)), display, forecast)
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    record.open(0)
    record.finish(Summary(0, 0, 0, 0.0, 0.0, {}, 0.0, 0.0, "", False, forecast))
    assert all("run.html could not be written" in note for note in notes)
    assert bool(notes) != (tmp_path / "run.html").exists()


def test_plots_label_their_axes_and_survive_odd_data():
    assert "nothing measured yet" in line_chart([Series("a", [])], "step", "loss")
    assert "nothing measured yet" in line_chart([Series("a", [(1, float("nan"))])], "step", "loss")
    single = line_chart([Series("a", [(1, 2.0)]), Series("b", [(1, 3.0)])], "step (number)", "loss (nats)")
    assert "step (number)" in single and "loss (nats)" in single and "aria-label" in single
    assert 'stroke-dasharray="7 4"' in single  # the second series differs in more than its colour
    assert ticks(5.0, 5.0)[0] <= 5.0 <= ticks(5.0, 5.0)[-1]
    assert "3.5x" in bar_chart([Bar("ours", 3.5, "3.5x", True, 3.0, 4.0, 4.5)], "speed", "the bound")

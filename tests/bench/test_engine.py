"""``startrail bench engine`` under torchrun, and what a startrail without a clone says."""

import json
from functools import partial

import pytest

from startrail.bench import job
from startrail.cli import main
from tests.helpers import fork_ranks


def test_the_engine_under_torchrun_is_measured_on_the_jobs_ranks(tmp_path, monkeypatch, capsys):
    """The times themselves are not checked: this machine is shared."""
    monkeypatch.setattr(job, "CALLS", 2)
    file, log = tmp_path / "engine.json", tmp_path / "log"
    argv = ["bench", "engine", "--length", "64", "--heads", "2", "--head-dim", "8", "--json", str(file), "--plans"]
    assert fork_ranks(2, partial(main, [*argv, "1x2,u2"]), log) == [0, 0], log.read_text()
    head, yardstick, _, *rows = log.read_text().splitlines()
    assert "64 tokens, 2 heads x 8, causal, torch.float32, 2 ranks; cpu (ATen" in head
    milliseconds = float(yardstick.removeprefix("SDPA on one device: ").removesuffix(" ms"))
    found = json.loads(file.read_text())["rows"]
    assert [row["plan"] for row in found] == [row.split()[0] for row in rows[:2]] == ["1x2", "u2"]
    for row in found:
        assert row["efficiency"] * 2 * row["seconds"] == pytest.approx(milliseconds / 1000, abs=1e-5)
        assert 0 <= row["waiting"] <= 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*argv, "1x3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_engine_and_its_host_time_are_measured_for_every_plan(tmp_path, capsys):
    """The times themselves are not checked: this machine is shared."""
    file = tmp_path / "engine.json"
    argv = ["bench", "engine", "--length", "64", "--heads", "2", "--head-dim", "8", "--ranks", "2", "--rounds", "1"]
    options = [*argv, "--plans", "1x2,u2", "--calls", "3", "--json", str(file)]
    assert main(options) == 0
    output, rows = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    assert [(row["plan"], row["length"]) for row in rows] == [("1x2", 64), ("u2", 64), ("1x2", 256), ("1x2", 256)]
    assert [row.get("host_forward_ms", 0) > 0 for row in rows] == [True, True, False, False]
    assert "host time per call in ms: Python's time on rank 0 of 2 for one attention call,\nwhile kernels" in output
    assert main([*options, "--host"]) == 0
    output, rows = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    assert "efficiency" not in output and [row["plan"] for row in rows] == ["1x2", "u2"]
    host_lines = [line.split() for line in output.splitlines() if line.startswith(("1x2", "u2"))]
    for row, (plan, forward, _, backward, *_) in zip(rows, host_lines, strict=True):
        found = f"{row['host_forward_ms']:.2f}", f"{row['host_backward_ms']:.2f}"
        assert (plan, forward, backward) == (row["plan"], *found)

"""Runs that are stopped, killed or fail: what is saved, what is reported, and how they continue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from startrail.cli import main
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.training.display import Display
from startrail.training.loop import Trainer
from startrail.training.ranks import check_same_data
from tests.helpers import FULL, eventually, start, torchrun
from tests.training.runs import CPU, DEADLINE, RecordingDisplay, expected_plan, gpt, reference


def write_recipe(path, recipe):
    """Write all fields of ``recipe`` as a recipe file."""
    fields = recipe.as_dict()
    fields.pop("name")
    path.write_text(json.dumps({"recipe": "gpt-tiny", **fields}))
    return str(path)


def losses_in(out):
    """All losses by step; a step that was repeated after a kill has several."""
    losses = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        metrics = json.loads(line)
        losses.setdefault(metrics["step"], []).append(metrics["loss"])
    return losses


def wait_for_step(out, step, process, deadline=DEADLINE):
    def reached():
        assert process.poll() is None, "the run ended before it could be stopped"
        return max(losses_in(out), default=0) >= step

    assert eventually(reached, deadline), f"step {step} was not reached"


def check_curve(out, expected, steps):
    curve = losses_in(out)
    assert sorted(curve) == list(range(1, steps + 1))
    for step, losses in curve.items():
        for loss in losses:
            assert abs(loss / expected[step - 1] - 1) <= 1e-5, (step, loss, expected[step - 1])


def startrail_train(*arguments, launcher=(sys.executable,)):
    return start([*launcher, "-m", "startrail.cli", "train", *arguments])


def test_sigterm_saves_and_the_same_command_resumes(data, tmp_path, capfd):
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="1x2", length=512, steps=20, zero=2)
    expected, _ = reference(recipe)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    process = startrail_train(file)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, error
    stopped = max(losses_in(tmp_path / "run"))
    assert 3 <= stopped < 20
    assert f"stopped after step {stopped} and saved; the same command continues from there" in out
    assert main(["train", file, "--ranks", "4", "--plan", "auto"]) == 0
    out, _ = capfd.readouterr()
    assert f"on 4 ranks as {expected_plan(recipe, 4)}" in out and f"continuing {recipe.out} after step {stopped}" in out
    check_curve(tmp_path / "run", expected, 20)


@pytest.mark.skipif(not FULL, reason="make test-all: takes 20 s; make chaos kills ranks too")
def test_a_killed_rank_under_torchrun_costs_at_most_the_steps_since_the_last_checkpoint(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", plan="1x2", length=512, steps=20, zero=3, save_every=4)
    expected, _ = reference(recipe)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    process = startrail_train(file, launcher=torchrun(2, "--max-restarts=1"))
    wait_for_step(tmp_path / "run", 9, process)
    victim = worker_of(process.pid, rank=1)
    os.kill(victim, signal.SIGKILL)
    out, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, error
    check_curve(tmp_path / "run", expected, 20)
    continued = int(out.split(f"continuing {recipe.out} after step ")[1].split()[0])
    repeated = [step for step, losses in losses_in(tmp_path / "run").items() if len(losses) == 2]
    assert continued >= 4
    assert len(repeated) <= 8, "more steps were repeated than since the last complete checkpoint"


def worker_of(launcher, rank):
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"rank {rank} not found")


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_checkpoint(data, tmp_path):
    """Files are limited to 32 KiB, so that writing fails halfway, as on a full disk."""
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="u2", steps=8, zero=2)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    assert main(["train", file, "--steps", "4"]) == 0
    limited = ["bash", "-c", f"ulimit -f 32; exec {sys.executable} -m startrail.cli train {file}"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "startrail train: the checkpoint of step 8 could not be written: " in done.stderr
    assert "File too large; the one of step 4 is kept" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_all_ranks_raise_when_their_data_differ():
    def on_rank(rank):
        check_same_data(100, 7)
        with pytest.raises(ValueError, match=r"rank 1 sees 101 .* rank 0 sees 100: every node needs the same data"):
            check_same_data(100 + rank, 7)
        with pytest.raises(ValueError, match=r"rank 1 sees as many tokens .* rank 0 \(100\), but different ones"):
            check_same_data(100, 7 + rank)
        return True

    assert run_local(on_rank, 2) == [True, True]


def test_unreadable_data_on_one_rank_ends_the_run_on_all_and_keeps_the_checkpoint(data, tmp_path):
    def on_rank(rank):
        from startrail.training.ranks import TrainingError

        trainer = Trainer(
            gpt(data, tmp_path / "run", plan="1x2", steps=4, save_every=2, zero=2), CPU, Display(), Stop()
        )
        load = trainer.task.load

        def broken(index, held_out=False):
            if rank == 1 and index == 2:
                raise ValueError("cannot read texts/07.txt: Input/output error")
            return load(index, held_out)

        trainer.task.load = broken
        with pytest.raises(TrainingError, match=r"cannot read texts/07\.txt"):
            trainer.run()
        return [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]

    assert run_local(on_rank, 2) == [["step-00000002"]] * 2


def test_a_run_locks_its_folder_and_resumes_with_its_own_weight_decay(data, tmp_path):
    def on_rank(rank):
        recipe = gpt(data, tmp_path / "run", plan="1x2", steps=2, zero=2)
        first = Trainer(recipe, CPU, Display(), Stop())
        with pytest.raises(ValueError, match="another run is writing to"):
            Trainer(recipe, CPU, Display(), Stop())
        first.run()
        second = Trainer(replace(recipe, steps=3, weight_decay=0.5), CPU, Display(), Stop())
        assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.5, 0.0]
        return second.run()

    assert run_local(on_rank, 2) == [True, True]


def test_a_run_continues_when_its_output_pipe_is_closed(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", ranks=1, plan="1x1", steps=3)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    command = f"{sys.executable} -m startrail.cli train {file} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_sigterm_interrupts_an_evaluation(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="1x2", steps=3, zero=2, evaluate_batches=100_000)
    process = startrail_train(write_recipe(tmp_path / "recipe.json", recipe))
    assert process.stdout is not None
    assert "estimated memory" in "".join(process.stdout.readline() for _ in range(3))
    time.sleep(1)  # now in the evaluation before the first step, which takes minutes
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (143, "")
    assert "stopped after step 0; the same command continues from there" in out


def test_good_parameters_are_saved_when_a_step_is_not_finite(data, tmp_path):
    def on_rank(rank):
        from startrail.training.ranks import TrainingError

        trainer = Trainer(gpt(data, tmp_path / "run", plan="1x2", steps=4, zero=2), CPU, Display(), Stop())
        loss_sum, calls = trainer.task.loss_sum, []

        def broken(model, batch):
            calls.append(batch)
            return loss_sum(model, batch) * (float("nan") if len(calls) == 3 else 1)

        trainer.task.loss_sum = broken
        with pytest.raises(TrainingError, match=r"step 3: loss nan, .*; those of step 2 are saved"):
            trainer.run()
        return [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]

    assert run_local(on_rank, 2) == [["step-00000002"]] * 2


def test_a_step_that_is_not_finite_stops_or_is_skipped(data, tmp_path):
    def on_rank(rank):
        from startrail.training.ranks import TrainingError

        outcomes = []
        for on_nan in ("stop", "skip"):
            recipe = gpt(data, tmp_path / on_nan, plan="1x2", steps=4, on_nan=on_nan, zero=2)
            display = RecordingDisplay()
            trainer = Trainer(recipe, CPU, display, Stop())
            load = trainer.task.load

            def poisoned(index, held_out=False, load=load, trainer=trainer):
                batch = load(index, held_out)
                if index == 2:  # like a broken sample
                    with torch.no_grad():
                        trainer.model.norm.weight.to_local().fill_(float("inf"))
                return batch

            trainer.task.load = poisoned
            try:
                trainer.run()
            except TrainingError as error:
                outcomes.append(str(error))
            outcomes.append([metrics.get("skipped", False) for metrics in display.metrics])
        return outcomes

    results = run_local(on_rank, 2)
    assert results[0] == results[1]
    text, before, skipped = results[0]
    assert text.startswith("step 3: loss nan, gradient norm nan; stopped before the parameters changed")
    assert "they are not finite themselves, so nothing was saved" in text
    assert before == [False, False]
    assert skipped[:3] == [False, False, True]

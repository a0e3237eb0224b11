"""Training on several ranks gives the losses and gradients of one process, whatever the plan, also after a stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from startrail.compile.attention import Attention
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import trace_prediction
from startrail.schedule.plan import Plan
from startrail.training.display import Display
from startrail.training.loop import Trainer
from startrail.view.trace import EventRecorder, chrome_trace, compare, read_trace
from tests.helpers import FULL, gradient_mistakes
from tests.training.runs import CPU, DEADLINE, RecordingDisplay, dit, expected_plan, gpt, mismatches, reference, run

PLANS = {4: ["1x4", "star2", "2x2", "u4", "u2/2x1"], 8: ["1x8", "star2", "2x2/u2", "u2/2x2"]}
# Options that the plans use in turn, so that each option runs with several plans.
OPTIONS = [
    dict(zero=0, recompute=False),
    dict(zero=3, recompute=True),
    dict(zero=2, recompute=False),
    dict(zero=3, recompute=True, offload=True),
]


@pytest.mark.parametrize("world", PLANS if FULL else [4])
def test_every_plan_trains_like_one_process(world, data, tmp_path):
    cases = []
    steps = 30 if FULL else 3  # with gradients of the first, and losses after two updates
    for number, plan in enumerate(PLANS[world] if FULL else PLANS[world][1:]):  # without the ring
        layers = 2 if world == 4 else 1  # eight ranks on two cores are slow
        options = dict(plan=plan, steps=steps, **OPTIONS[number % len(OPTIONS)])
        cases.append(gpt(data, tmp_path / f"gpt-{number}", layers=layers, **options))
        if FULL or number % 2 == (world == 8):  # every option and kind of plan on one of the two
            cases.append(dit(data, tmp_path / f"dit-{number}", layers=1, **options))
    if world == 4:
        cases.append(gpt(data, tmp_path / "packed", packed=True, plan="2x2", steps=30 if FULL else 5, **OPTIONS[3]))
    else:
        groups = dict(plan="2x2", data_parallel=2, accumulate=2, zero=2, steps=steps)
        cases.append(gpt(data, tmp_path / "groups", layers=1, **groups))
    references = {}
    for recipe in cases:
        if reference_key(recipe) not in references:
            references[reference_key(recipe)] = reference(recipe)

    def on_rank(rank):
        wrong = []
        for recipe in cases:
            display, first = run(recipe)
            assert len(display.metrics) == recipe.steps
            lines = mismatches(display, first, references[reference_key(recipe)])
            wrong += [f"{recipe.plan} {Path(recipe.out).name}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world, deadline=DEADLINE) == [[]] * world


def test_ranks_of_different_speed_train_like_one_process(data, tmp_path, monkeypatch):
    """Also a checkpoint that they leave to ranks of equal speed, and the held-out loss."""
    speeds, asked = (1.0, 0.5, 1.0, 0.25), []

    def rates(device):
        asked.append(device)
        speed = speeds[dist.get_rank()]
        return {"matmul": speed, "forward": {"512": speed}, "backward": {"512": speed}}

    monkeypatch.setattr("startrail.planner.live.measure._rates", rates)
    options = dict(steps=4, evaluate_batches=1, evaluate_every=0, save_every=2, shares="measured")
    recipes = [
        gpt(data, tmp_path / "gpt", plan="1x4", **OPTIONS[1], **options),
        gpt(data, tmp_path / "packed", plan="u2/1x2", packed=True, layers=1, **OPTIONS[2], **options),
        dit(data, tmp_path / "dit", plan="2x2", layers=1, **OPTIONS[0], **options),
    ]
    references = [reference(recipe) for recipe in recipes]

    def on_rank(rank):
        wrong, held_out = [], []
        for recipe, expected in zip(recipes, references, strict=True):
            display, first = run(recipe)
            wrong += mismatches(display, first, expected)
            if rank == 0:
                shutil.rmtree(Path(recipe.out, "checkpoints", "step-00000004"))
            dist.barrier()
            again, _ = run(replace(recipe, shares="equal"))
            wrong += mismatches(again, {}, (expected[0], {}))
            assert [metrics["step"] for metrics in again.metrics] == [3, 4]
            held_out.append([shown.metrics[-1]["held_out"] for shown in (display, again)])
        assert len(asked) == 3 * len(recipes), "rounds of each run with measured shares"
        return wrong, held_out

    for wrong, held_out in run_local(on_rank, 4, deadline=DEADLINE):
        assert wrong == []
        assert all(mine == pytest.approx(equal, rel=1e-5) for mine, equal in held_out)


def reference_key(recipe):
    return recipe.config, recipe.packed, recipe.data_parallel, recipe.batch, recipe.steps


def test_a_hybrid_trains_like_one_process_and_resumes(data, tmp_path):
    """Losses, first gradients and all weights after five steps, the last two after a stop and with another plan. Bytes
    are those that the forecast says, unless documents end on ranks."""
    plans = PLANS[4] if FULL else ["1x4", "u2/2x1"]
    hybrid = dict(layers=4 if FULL else 2, attention_every=4 if FULL else 2, steps=5)
    cases, expected, weights = {}, {}, {}
    for packed in (False, True):
        key = "packed" if packed else "whole"
        options = dict(**hybrid, packed=packed, batch=1 if packed else 2)
        weights[key] = {}
        expected[key] = reference(gpt(data, tmp_path / key, **options), weights[key])
        for number, plan in enumerate(plans):
            legs = dict(plan=plans[number - 1], **OPTIONS[number]), dict(plan=plan, **OPTIONS[number - 1])
            out = tmp_path / f"{key}-{number}"
            cases[key, plan] = [gpt(data, out, **options, **leg) for leg in legs]

    def on_rank(rank):
        wrong = []
        for (key, plan), (first_leg, second_leg) in cases.items():
            found, stop = {}, Stop()
            recorded, first = run(first_leg, stop=StopAfter(3))
            lines = mismatches(recorded, first, expected[key])
            resumed, _ = run(second_leg, stop, found)
            assert [metrics["step"] for metrics in recorded.metrics + resumed.metrics] == [1, 2, 3, 4, 5]
            lines += mismatches(resumed, {}, (expected[key][0], {}))
            lines += gradient_mistakes(found, weights[key], 1e-4)
            if key == "whole":
                assert resumed.metrics[0]["sent"] == resumed.summary.forecast.traffic
            wrong += [f"{plan} {key}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, 4, deadline=DEADLINE) == [[]] * 4


class StopAfter:
    """A signal that comes in this step."""

    def __init__(self, step):
        self.left, self.interrupted = step, False

    @property
    def requested(self):
        self.left -= 1
        return self.left <= 0


def test_a_step_sends_the_predicted_bytes_on_every_level(data, tmp_path):
    recipes = {
        plan: gpt(data, tmp_path / plan.replace("/", "-"), plan=plan, length=64, steps=1, accumulate=2)
        for plan in ("auto", "u2/1x2", "1x2/u2", "star2")
    }
    chosen = {plan: plan for plan in recipes} | {"auto": expected_plan(recipes["auto"], 4)}

    def on_rank(rank):
        results = {}
        for plan, recipe in recipes.items():
            display, _ = run(recipe)
            results[plan] = display.plan, display.metrics[0]["sent"], display.summary.forecast.traffic
        return results

    for plan, (shown, sent, predicted) in run_local(on_rank, 4)[0].items():
        assert shown == chosen[plan]
        assert list(sent) == [f"level {level}" for level in range(len(shown.split("/")))]
        assert sent == predicted


def test_a_run_writes_a_page_and_a_trace_of_the_requested_step(data, tmp_path):
    """The trace has the ranks of the first data-parallel group, and the labels of the prediction."""
    recipe = gpt(data, tmp_path / "run", plan="1x2", data_parallel=2, length=64, steps=3, trace=2)

    def on_rank(rank):
        display, _ = run(recipe)
        return display.notes

    notes = run_local(on_rank, 4, deadline=DEADLINE)
    assert notes[0][0].startswith(f"wrote {tmp_path / 'run' / 'trace.json'}: open it in https://ui.perfetto.dev")
    assert "finished, step 3 of 3" in (tmp_path / "run" / "run.html").read_text()
    measured = read_trace(tmp_path / "run" / "trace.json")
    recorders = [EventRecorder(rank) for rank in range(2)]
    call = Attention.of(64, 1, 8, 4, 4, causal=True, dtype="float32")
    trace_prediction(find_cluster("lab").resized([1, 2]), Plan.parse("1x2"), call, recorders.__getitem__)
    predicted = tmp_path / "predicted.json"
    predicted.write_text(json.dumps(chrome_trace([recorder.records for recorder in recorders], "predicted")))
    assert "whole pass" in compare(read_trace(predicted), measured)  # raises unless the labels are the same
    assert {slice_["args"]["call"] for slice_ in measured.slices[0]} == set(range(4))  # two layers, both passes


def test_a_stop_on_one_rank_stops_all_and_any_plan_and_world_size_resumes(data, tmp_path):
    """4 ranks, then 2 as two data-parallel groups of 1, then 8, with every ZeRO level: one loss curve."""
    legs = [
        (4, dict(plan="2x2", zero=3, recompute=True, accumulate=2), 4),
        (2, dict(plan="1x1", zero=0, data_parallel=2), 8),
        (8, dict(plan="1x2/u4", zero=2, accumulate=2, keep_checkpoints=1), None),
    ]
    steps = 12
    losses, _ = reference(gpt(data, tmp_path / "reference", steps=steps, accumulate=2))
    out = tmp_path / "run"
    for world, options, last in legs:
        recipe = gpt(data, out, steps=steps, save_every=4, **options)

        def on_rank(rank, recipe=recipe, last=last, world=world):
            class Stopping(RecordingDisplay):
                def step(self, metrics):
                    super().step(metrics)
                    if metrics["step"] == last and rank == world - 1:
                        os.kill(os.getpid(), signal.SIGTERM)

            display = Stopping()
            with Stop() as stop:
                trainer = Trainer(recipe, CPU, display, stop)
                begin = trainer.begin
                finished = trainer.run()
            wrong = mismatches(display, {}, (losses, {}))
            return begin, display.metrics[-1]["step"], finished, display.summary.stopped, wrong

        results = run_local(on_rank, world, deadline=DEADLINE)
        end = steps if last is None else last + 1  # the signal takes effect at the end of the next step
        begin = {4: 0, 2: 5, 8: 9}[world]
        assert results == [(begin, end, last is None, last is not None, [])] * world
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == [f"step-{steps:08d}"]
    written = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, steps + 1))


def test_bfloat16_weights_are_gathered_in_bfloat16_and_learn_the_same(data, tmp_path):
    """Autocast alone would gather float32 and convert to bfloat16 afterwards."""

    def on_rank(rank):
        losses, dtypes = [], []
        for zero in (0, 2):
            recipe = gpt(data, tmp_path / str(zero), plan="1x2", precision="bfloat16", zero=zero)
            trainer = Trainer(recipe, CPU, Display(), Stop())
            for part in (trainer.model.blocks[0].query, trainer.model.embedding):
                part.register_forward_hook(lambda module, _, out: dtypes.append((module.weight.dtype, out.dtype)))
            trainer.model.blocks[0].register_forward_pre_hook(
                lambda module, arguments: dtypes.append(("residual stream", arguments[0].dtype))
            )
            losses.append([trainer._step(index)[0] for index in range(1, 4)])
        return losses, set(dtypes)

    for (plain, sharded), dtypes in run_local(on_rank, 2, DEADLINE):
        wide, narrow = torch.float32, torch.bfloat16
        assert dtypes == {(wide, narrow), (wide, wide), (narrow, narrow), ("residual stream", wide)}
        assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) < 1e-2

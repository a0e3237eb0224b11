"""Training on several ranks: losses and gradients of one process, whatever the plan, and after every interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import startrail
from startrail.cli import main
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.planner.auto import fitted, plan_for_job
from startrail.planner.cluster import find_cluster
from startrail.planner.topology import Machine
from startrail.training.all_ranks import check_same_data
from startrail.training.data.images import save_grid
from startrail.training.display import Display
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import Recipe
from startrail.training.tasks import ImageTask, TextTask, make_model
from startrail.training.trainer import BETAS, Trainer
from tests.helpers import causal_mask, eventually, gradient_mistakes, start, torchrun, write_words

STEPS = 30
DEADLINE = 900  # seconds, for a machine that others use too
CPU = torch.device("cpu")
GPT_CONFIG = GPTConfig(vocab=256, width=32, layers=2, heads=8, kv_heads=4, hidden=48, tied=True)
DIT_CONFIG = DiTConfig(channels=3, patch=2, rows=6, columns=6, classes=4, width=32, layers=2, heads=8)
PLAIN = dict(evaluate_batches=0, save_every=0, sample=0, steps=STEPS, learning_rate=1e-3, warmup=5)
PLAIN |= dict(zero=0, recompute=False)
PLANS = {4: ["1x4", "star2", "2x2", "u4", "u2/2x1"], 8: ["1x8", "star2", "2x2/u2", "u2/2x2"]}
# what goes with the plans in turn, so that each option meets several plans
OPTIONS = [
    dict(zero=0, recompute=False),
    dict(zero=3, recompute=True),
    dict(zero=2, recompute=False),
    dict(zero=3, recompute=True, offload=True),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Some text and some images, the same for all tests."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    write_words(folder / "texts")
    for number in range(4):
        (folder / "images" / str(number)).mkdir(parents=True)
        save_grid(torch.rand(1, 3, 16, 16, generator=generator) * 2 - 1, folder / "images" / str(number) / "0.png", 1)
    return folder


def gpt(data, out, layers=2, **changes):
    config = replace(GPT_CONFIG, layers=layers)
    return Recipe("gpt", config, data=str(data / "texts"), out=str(out), **{"length": 61, **PLAIN, **changes})


def dit(data, out, layers=2, **changes):
    config = replace(DIT_CONFIG, layers=layers)
    return Recipe("dit", config, data=str(data / "images"), out=str(out), **{"batch": 2, **PLAIN, **changes})


def reference(recipe):
    """Losses and the first gradients by plain torch on one process: its own loop, its own attention."""
    sp = startrail.SequenceParallel("1x1")
    text = isinstance(recipe.config, GPTConfig)
    task = (TextTask if text else ImageTask)(recipe, sp, CPU)
    model = make_model(recipe.config)
    fill(model, recipe)
    decayed = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed[0], weight_decay=recipe.weight_decay), dict(params=decayed[1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    losses, first = [], {}
    for step in range(recipe.steps):
        passes = recipe.accumulate * recipe.data_parallel
        batches = [task.load(step * passes + index) for index in range(passes)]
        loss = sum(dense_loss(model, batch, text) for batch in batches) / sum(batch.counted for batch in batches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        if step == 0:
            first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def fill(model, recipe):
    """The parameters that a run starts with; a run on one rank makes them."""
    from startrail.training.data.seeds import generator_of

    for name, parameter in model.named_parameters():
        torch.manual_seed(generator_of(recipe.seed, name).initial_seed())
        with torch.no_grad():
            model.reset_parameter(name, parameter)


def dense_loss(model, batch, text):
    if text:
        mask = causal_mask(batch.sequence.length, batch.sequence.documents.tolist())
        attention = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        logits = model.logits(model(batch.tokens, batch.sequence.positions(), attention))
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    t = batch.time.view(-1, 1, 1)
    moved = ((1 - t) * batch.patches + t * batch.noise).float()
    positions = batch.sequence.positions()
    velocity = model(moved, positions, batch.time, batch.labels, F.scaled_dot_product_attention)
    return (velocity - (batch.noise - batch.patches)).square().sum()


class Recorded(Display):
    def __init__(self):
        self.metrics, self.notes, self.summary, self.plan = [], [], None, ""

    def start(self, recipe, begin, data, plan, world, expected):
        self.plan = plan

    def step(self, metrics):
        self.metrics.append(metrics)

    def note(self, text):
        self.notes.append(text)

    def finish(self, summary):
        self.summary = summary


def run(recipe, stop=None):
    """A run on the ranks that are there: what it displayed, and the gradients of its first step."""
    display, first = Recorded(), {}
    trainer = Trainer(recipe, CPU, display, stop or Stop())

    def look(optimizer, arguments, keywords):
        if not first:
            for name, parameter in trainer.model.named_parameters():
                grad = parameter.grad
                first[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    trainer.optimizer.register_step_pre_hook(look)
    trainer.run()
    return display, first


def differences(display, first, truth):
    losses, grads = truth
    wrong = []
    for metrics in display.metrics:
        true = losses[metrics["step"] - 1]
        if not abs(metrics["loss"] / true - 1) <= 1e-5:
            wrong.append(f"step {metrics['step']}: loss {metrics['loss']}, one process {true}")
    return wrong + gradient_mistakes(first, grads, 1e-4, least=1e-12)


@pytest.mark.parametrize("world", PLANS)
def test_every_plan_trains_like_one_process(world, data, tmp_path):
    cases = []
    for number, plan in enumerate(PLANS[world]):
        layers = 2 if world == 4 else 1  # eight ranks on two cores are slow
        options = dict(plan=plan, **OPTIONS[number % len(OPTIONS)])
        cases.append(gpt(data, tmp_path / f"gpt-{number}", layers=layers, **options))
        cases.append(dit(data, tmp_path / f"dit-{number}", layers=1, **options))
    if world == 4:
        cases.append(gpt(data, tmp_path / "packed", packed=True, plan="2x2", **OPTIONS[3]))
    else:
        cases.append(gpt(data, tmp_path / "groups", layers=1, plan="2x2", data_parallel=2, accumulate=2, zero=2))
    truths = {}
    for recipe in cases:
        if key_of(recipe) not in truths:
            truths[key_of(recipe)] = reference(recipe)

    def on_rank(rank):
        wrong = []
        for recipe in cases:
            display, first = run(recipe)
            assert len(display.metrics) == recipe.steps
            lines = differences(display, first, truths[key_of(recipe)])
            wrong += [f"{recipe.plan} {Path(recipe.out).name}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world, deadline=DEADLINE) == [[]] * world


def key_of(recipe):
    return recipe.config, recipe.packed, recipe.data_parallel, recipe.batch, recipe.steps


def planned(recipe, ranks):
    """What ``auto`` must choose: the planner's word for the cluster that tests have (tests/conftest.py)."""
    return plan_for_job(fitted(find_cluster("lab"), Machine(1, ranks)), recipe.job("float32"))[0]


def test_a_step_sends_what_was_promised_level_by_level_under_the_plan_that_auto_chose(data, tmp_path):
    recipes = {
        plan: gpt(data, tmp_path / plan.replace("/", "-"), plan=plan, length=64, steps=1, accumulate=2)
        for plan in ("auto", "u2/1x2", "1x2/u2", "star2")
    }
    chosen = {plan: plan for plan in recipes} | {"auto": planned(recipes["auto"], 4)}

    def on_rank(rank):
        found = {}
        for plan, recipe in recipes.items():
            display, _ = run(recipe)
            found[plan] = display.plan, display.metrics[0]["sent"], display.summary.traffic["ours"]
        return found

    for plan, (shown, sent, promised) in run_local(on_rank, 4)[0].items():
        assert shown == chosen[plan]
        assert list(sent) == [f"level {level}" for level in range(len(shown.split("/")))]
        assert sent == promised


def test_a_stop_on_one_rank_stops_all_and_any_plan_and_world_continues(data, tmp_path):
    """Ranks 4, then 2 as two data-parallel groups of 1, then 8, with every kind of sharding: one loss curve."""
    legs = [
        (4, dict(plan="2x2", zero=3, recompute=True, accumulate=2), 7),
        (2, dict(plan="1x1", zero=0, data_parallel=2), 13),
        (8, dict(plan="1x2/u4", zero=2, accumulate=2, keep_checkpoints=1), None),
    ]
    steps = 20
    truth = reference(gpt(data, tmp_path / "truth", steps=steps, accumulate=2))
    out = tmp_path / "run"
    for world, options, last in legs:
        recipe = gpt(data, out, steps=steps, save_every=4, **options)

        def on_rank(rank, recipe=recipe, last=last, world=world):
            class Stopping(Recorded):
                def step(self, metrics):
                    super().step(metrics)
                    if metrics["step"] == last and rank == world - 1:
                        os.kill(os.getpid(), signal.SIGTERM)

            display = Stopping()
            with Stop() as stop:
                trainer = Trainer(recipe, CPU, display, stop)
                begin = trainer.begin
                finished = trainer.run()
            wrong = differences(display, {}, (truth[0], {}))
            return begin, display.metrics[-1]["step"], finished, display.summary.stopped, wrong

        results = run_local(on_rank, world, deadline=DEADLINE)
        end = steps if last is None else last + 1  # the signal is heard at the end of the next step
        begin = {4: 0, 2: 8, 8: 14}[world]
        assert results == [(begin, end, last is None, last is not None, [])] * world
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == [f"step-{steps:08d}"]
    written = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, steps + 1))


def write_recipe(path, recipe):
    """A recipe file with everything that differs from the named one."""
    fields = recipe.as_dict()
    fields.pop("name")
    path.write_text(json.dumps({"recipe": "gpt-tiny", **fields}))
    return str(path)


def losses_in(out):
    """By step; where a step was repeated after a kill, both."""
    found = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        metrics = json.loads(line)
        found.setdefault(metrics["step"], []).append(metrics["loss"])
    return found


def wait_for_step(out, step, process, deadline=DEADLINE):
    def there():
        assert process.poll() is None, "the run ended before it could be stopped"
        return max(losses_in(out), default=0) >= step

    assert eventually(there, deadline), f"step {step} did not come"


def check_curve(out, truth, steps):
    found = losses_in(out)
    assert sorted(found) == list(range(1, steps + 1))
    for step, losses in found.items():
        for loss in losses:
            assert abs(loss / truth[step - 1] - 1) <= 1e-5, (step, loss, truth[step - 1])


def startrail_train(*arguments, launcher=(sys.executable,)):
    return start([*launcher, "-m", "startrail.cli", "train", *arguments])


def test_sigterm_saves_and_the_same_command_continues(data, tmp_path, capfd):
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="1x2", length=512, steps=40, zero=2)
    truth, _ = reference(recipe)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    process = startrail_train(file)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, error
    stopped = max(losses_in(tmp_path / "run"))
    assert 5 <= stopped < 40
    assert f"stopped after step {stopped} and saved; the same command continues from there" in out
    assert main(["train", file, "--ranks", "4", "--plan", "auto"]) == 0
    out, _ = capfd.readouterr()
    assert f"over 4 ranks as {planned(recipe, 4)}" in out and f"continuing {recipe.out} after step {stopped}" in out
    check_curve(tmp_path / "run", truth, 40)


def test_a_killed_rank_under_torchrun_costs_at_most_the_steps_since_the_last_checkpoint(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", plan="1x2", length=512, steps=40, zero=3, save_every=5)
    truth, _ = reference(recipe)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    process = startrail_train(file, launcher=torchrun(2, "--max-restarts=1"))
    wait_for_step(tmp_path / "run", 12, process)
    victim = worker_of(process.pid, rank=1)
    os.kill(victim, signal.SIGKILL)
    out, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, error
    check_curve(tmp_path / "run", truth, 40)
    continued = int(out.split(f"continuing {recipe.out} after step ")[1].split()[0])
    repeated = [step for step, losses in losses_in(tmp_path / "run").items() if len(losses) == 2]
    assert continued >= 5
    assert len(repeated) <= 10, "at most the steps since the last checkpoint that was complete"


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


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_what_was_good(data, tmp_path):
    """Files can grow to 32 KiB only: as on a full disk, writing fails in the middle."""
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="u2", steps=8, zero=2)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    assert main(["train", file, "--steps", "4"]) == 0
    limited = ["bash", "-c", f"ulimit -f 32; exec {sys.executable} -m startrail.cli train {file}"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "startrail train: the checkpoint of step 8 could not be written: " in done.stderr
    assert "File too large; that of step 4 is kept" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_ranks_that_see_other_data_end_in_one_error_on_all():
    def on_rank(rank):
        check_same_data(100, 7)
        with pytest.raises(ValueError, match=r"rank 1 sees 101 .* rank 0 sees 100: every node needs the same data"):
            check_same_data(100 + rank, 7)
        with pytest.raises(ValueError, match=r"rank 1 sees other tokens or images than rank 0, though as many \(100\)"):
            check_same_data(100, 7 + rank)
        return True

    assert run_local(on_rank, 2) == [True, True]


def test_data_that_one_rank_cannot_read_ends_the_run_on_all_with_what_was_saved(data, tmp_path):
    def on_rank(rank):
        from startrail.training.checkpoints.saving import TrainingError

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


def test_two_runs_do_not_share_a_folder_and_a_run_continues_with_its_own_decay(data, tmp_path):
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


def test_a_run_goes_on_when_nobody_reads_its_output(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", ranks=1, plan="1x1", steps=3)
    file = write_recipe(tmp_path / "recipe.json", recipe)
    command = f"{sys.executable} -m startrail.cli train {file} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_sigterm_in_an_evaluation_is_not_kept_waiting(data, tmp_path):
    recipe = gpt(data, tmp_path / "run", ranks=2, plan="1x2", steps=3, zero=2, evaluate_batches=100_000)
    process = startrail_train(write_recipe(tmp_path / "recipe.json", recipe))
    assert process.stdout is not None
    assert "memory, estimated" in "".join(process.stdout.readline() for _ in range(3))
    time.sleep(1)  # in the evaluation before the first step, which takes minutes
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (143, "")
    assert "stopped after step 0; the same command continues from there" in out


def test_what_is_good_is_saved_when_a_step_is_not_finite(data, tmp_path):
    def on_rank(rank):
        from startrail.training.checkpoints.saving import TrainingError

        trainer = Trainer(gpt(data, tmp_path / "run", plan="1x2", steps=4, zero=2), CPU, Display(), Stop())
        loss_sum, calls = trainer.task.loss_sum, []

        def broken(model, batch):
            calls.append(batch)
            return loss_sum(model, batch) * (float("nan") if len(calls) == 3 else 1)

        trainer.task.loss_sum = broken
        with pytest.raises(TrainingError, match=r"step 3: loss nan, .* and those of step 2 are saved"):
            trainer.run()
        return [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]

    assert run_local(on_rank, 2) == [["step-00000002"]] * 2


def test_a_step_that_is_not_finite_stops_or_is_skipped(data, tmp_path):
    def on_rank(rank):
        from startrail.training.checkpoints.saving import TrainingError

        said = []
        for on_nan in ("stop", "skip"):
            recipe = gpt(data, tmp_path / on_nan, plan="1x2", steps=4, on_nan=on_nan, zero=2)
            display = Recorded()
            trainer = Trainer(recipe, CPU, display, Stop())
            load = trainer.task.load

            def poisoned(index, held_out=False, load=load, trainer=trainer):
                batch = load(index, held_out)
                if index == 2:  # as a broken sample would
                    with torch.no_grad():
                        trainer.model.norm.weight.to_local().fill_(float("inf"))
                return batch

            trainer.task.load = poisoned
            try:
                trainer.run()
            except TrainingError as error:
                said.append(str(error))
            said.append([metrics.get("skipped", False) for metrics in display.metrics])
        return said

    results = run_local(on_rank, 2)
    assert results[0] == results[1]
    text, before, skipped = results[0]
    assert text.startswith("step 3: loss nan, gradient norm nan; stopped before the parameters changed")
    assert "which are not finite themselves: nothing was saved" in text
    assert before == [False, False]
    assert skipped[:3] == [False, False, True]


def test_bfloat16_weights_are_gathered_in_bfloat16_and_learn_the_same(data, tmp_path):
    """Autocast alone would gather float32 and make bfloat16 of it afterwards."""

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

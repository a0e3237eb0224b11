"""A training step waits for the device once: when its loss and gradient norm are read."""

import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

import startrail
from startrail.training.loop import Trainer
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import Recipe
from startrail.training.sharding import recompute_blocks
from startrail.training.tasks import ImageTask, TextTask, make_model
from tests.helpers import error_of, write_words

CPU = torch.device("cpu")


def gpt(folder, **changes):
    config = GPTConfig(vocab=256, width=16, layers=2, heads=2, kv_heads=1, hidden=24, tied=True)
    return Recipe("gpt", config, data=write_words(folder / "texts"), out="", **{"length": 32, "batch": 2, **changes})


def dit(folder, **changes):
    config = DiTConfig(channels=3, patch=2, rows=4, columns=4, classes=10, width=16, layers=1, heads=2)
    return Recipe("dit", config, data="photos", out="", batch=2, **changes)


@pytest.mark.parametrize(
    "make, task_of, changes",
    [
        (gpt, TextTask, {}),
        (gpt, TextTask, dict(packed=True, recompute=True, batch=1)),
        (dit, ImageTask, {}),
    ],
)
def test_losses_gradients_and_clipping_do_not_synchronize(make, task_of, changes, tmp_path):
    """Fake tensors have no values: reading one raises."""
    recipe = make(tmp_path, evaluate_batches=0, sample=0, **changes)
    task = task_of(recipe, startrail.SequenceParallel("1x1"), CPU)
    batches = [task.load(number) for number in range(2)]
    counted = sum(batch.counted for batch in batches)
    assert counted > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = make_model(recipe.config)
        if recipe.recompute:
            recompute_blocks(model, offload=False)
        for number, batch in enumerate(batches):
            tensors = ((item.name, getattr(batch, item.name)) for item in fields(batch))
            batches[number] = replace(batch, **{name: mode.from_tensor(x) for name, x in tensors if torch.is_tensor(x)})
        heartbeat = SimpleNamespace(advance=lambda step: None)
        step = SimpleNamespace(device=CPU, heartbeat=heartbeat, task=task, model=model, recipe=recipe)
        found = Trainer._gradients(step, 0, batches, counted)
        assert found.shape == (2,) and found.dtype == torch.float64
        assert all(parameter.grad is not None for parameter in model.parameters())
        with pytest.raises(DataDependentOutputException):
            found.tolist()


def test_a_step_synchronizes_once(tmp_path, monkeypatch):
    """Not counted: host tensors of gloo's sums, and what the engine and comparisons between ranks read from tensors on
    the CPU (on a GPU they read nothing: test_launches.py, test_agreement.py)."""
    from startrail.agreement import comparison
    from startrail.engine import attention, op_key, runner, session
    from startrail.engine import batch as engine_batch
    from startrail.kernels import cpu
    from startrail.launch.local import run_local
    from startrail.launch.signals import Stop
    from startrail.training import loop, ranks
    from startrail.training.display import Display
    from startrail.transport import nccl

    engine = {module.__file__ for module in (cpu, session, runner, attention, engine_batch, op_key, comparison, nccl)}

    def on_rank(rank):
        trainer = Trainer(recipe, CPU, Display(), Stop())
        reads = []
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            original = getattr(torch.Tensor, name)

            def counted(self, *arguments, original=original, name=name, **options):
                if sys._getframe(1).f_code.co_filename not in engine:
                    reads.append(name)
                return original(self, *arguments, **options)

            setattr(torch.Tensor, name, counted)

        def sums(numbers):
            before = len(reads)
            totals = ranks.sum_over_ranks(numbers)
            del reads[before:]
            return totals

        loop.sum_over_ranks = sums
        load = trainer.task.load

        def loaded(*arguments):
            before = len(reads)
            batch = load(*arguments)
            del reads[before:]
            return batch

        trainer.task.load = loaded
        counts = []
        for step in range(3):
            reads.clear()
            trainer._step(step)
            counts.append(list(reads))
        return counts

    recipe = gpt(tmp_path, evaluate_batches=0, sample=0, accumulate=2, steps=3)
    recipe = replace(recipe, out=str(tmp_path / "run"), plan="1x2", zero=0)
    for counts in run_local(on_rank, 2):
        assert counts[2] == ["tolist"], counts


def test_a_lost_peer_raises_before_the_parameters_change(tmp_path, monkeypatch):
    from startrail.launch.local import run_local
    from startrail.launch.signals import Stop
    from startrail.training.display import Display

    def lost(sp):
        raise startrail.PeerError("rank 3 is gone")

    monkeypatch.setattr(startrail.SequenceParallel, "check", lost)
    recipe = replace(gpt(tmp_path, evaluate_batches=0, sample=0, steps=3), out=str(tmp_path / "run"), plan="1x1")

    def on_rank(rank):
        trainer = Trainer(recipe, CPU, Display(), Stop())
        before = [x.detach().clone() for x in trainer.model.parameters()]
        text = error_of(lambda: trainer._step(0))
        return text, all(torch.equal(x, y) for x, y in zip(before, trainer.model.parameters(), strict=True))

    assert run_local(on_rank, 1) == [("PeerError: rank 3 is gone", True)]

"""Transformers of diffusers on 2, 4 and 8 ranks: training and sampling as on one process, and checks of first steps."""

import copy

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'startrail[diffusers]')")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDIMScheduler
from diffusers.models._modeling_parallel import ContextParallelInput

import startrail
from startrail.integrations.diffusers import attach, detach
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations import tiny_diffusers
from tests.integrations.split_runs import mistakes, spread


def made(name, dtype):
    """The model and its arguments in ``dtype``; the same on every rank."""
    model, batch = getattr(tiny_diffusers, name)()
    batch = {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in batch.items()
    }
    return spread(model).to(dtype), batch


def trained(name, recompute=False):
    def make(dtype):
        model, batch = made(name, dtype)

        def step(model):
            if recompute:
                model.enable_gradient_checkpointing()
            result = model(**batch, return_dict=False)[0]
            return F.mse_loss(result, torch.randn(result.shape, dtype=torch.float64).to(dtype))

        return model, step

    return make


def whole(model, sp):
    return attach(model, sp, text="whole")


MAKES = {name: trained(name) for name in ("dit", "sd3", "flux", "flux_of_one_head", "wan")}
MAKES |= {"sd3, whole text": trained("sd3"), "flux, whole text": trained("flux"), "qwen": trained("qwen")}
MAKES |= {"wan by token": trained("wan_by_token"), "dit recomputed": trained("dit", True)}
MAKES |= {"flux recomputed, whole text": trained("flux", True)}
ATTACHERS = {name: whole if "whole" in name else attach for name in MAKES}


@pytest.fixture(autouse=True)
def precise(monkeypatch):
    """Wan computes some norms in float32 whatever its dtype: in float64, for this comparison."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    torch.set_num_threads(1)


FIRST = {name: MAKES[name] for name in ("dit", "sd3", "flux", "flux_of_one_head", "wan")}


@pytest.mark.parametrize(
    "makes, plans",
    [
        (MAKES, [("1x2", torch.float64)]),
        (FIRST, [("1x4", torch.float32), ("u2/1x2", torch.float64)]),
        (FIRST, [("u2/2x2", torch.float64)]),
    ],
    ids=["2 ranks", "4 ranks", "8 ranks"],
)
def test_losses_and_gradients_are_those_of_one_process(makes, plans):
    assert mistakes(makes, plans, ATTACHERS) == []


def sample(model, batch):
    scheduler = DDIMScheduler(num_train_timesteps=10)
    scheduler.set_timesteps(4)
    x, labels = batch["hidden_states"], batch["class_labels"]
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, timestep=t.expand(len(x)), class_labels=labels).sample, t, x).prev_sample
    return x


def learn(model, batch, after=lambda: None, steps=20):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(batch["hidden_states"].shape, generator=generator, dtype=torch.float64)
        timestep = torch.randint(0, 10, (2,), generator=generator)
        loss = F.mse_loss(model(**{**batch, "hidden_states": noise, "timestep": timestep}).sample, noise)
        loss.backward()
        after()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_twenty_steps_and_samples_are_those_of_one_process():
    def model():
        torch.manual_seed(0)
        return made("dit", torch.float64)

    def both(model, batch, after=lambda: None):
        losses = learn(model.train(), batch, after)
        return losses, sample(model.eval(), batch)

    alone, sampled = both(*model())

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        split, batch = model()
        attach(split, sp)
        ours = both(split, batch, lambda: startrail.sum_gradients(split.parameters(), sp.group))
        from_copy = sample(copy.deepcopy(split), batch)
        detach(split)
        left = [key for each in split.modules() for key in vars(each) if "startrail" in key or key == "forward"]
        return *ours, from_copy, left

    for losses, ours, from_copy, left in run_local(on_rank, 4):
        assert losses == pytest.approx(alone, rel=1e-10) and left == []
        assert max(float((x - sampled).norm() / sampled.norm()) for x in (ours, from_copy)) < 1e-9


def test_first_steps_are_checked():
    """Two sequences of two ranks each: what must be equal within a sequence, and what must not be between them."""

    def on_rank(rank):
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        sp = startrail.SequenceParallel("1x2", group=group)

        def step(change=lambda batch: None, target=0.0, seed=0, share=False, check=True):
            torch.manual_seed(0)
            model, batch = made("dit", torch.float32)
            batch["hidden_states"] += rank // 2  # different data in each sequence
            change(batch)
            torch.manual_seed(seed)
            result = attach(model, sp, check=check)(**batch).sample
            result = result[:, :, sp.rank * 5 : sp.rank * 5 + 5] if share else result
            F.mse_loss(result, result.detach() + 1 + target).backward()

        return {
            "none": error_of(step),
            "noise": error_of(lambda: step(lambda batch: batch["hidden_states"].add_(sp.rank))),
            "noise, unchecked": error_of(lambda: step(lambda b: b["hidden_states"].add_(sp.rank), check=False)),
            "timestep": error_of(lambda: step(lambda batch: batch["timestep"].add_(sp.rank))),
            "groups": error_of(lambda: step(lambda batch: batch["hidden_states"].fill_(1))),
            "target": error_of(lambda: step(target=float(sp.rank))),
            "share": error_of(lambda: step(share=True)),
            "seed": error_of(lambda: step(seed=sp.rank)),
        }

    expected = {
        "none": "no error",
        "noise": "hidden_states differs between ranks of a sequence (rank 1 from rank 0)",
        "noise, unchecked": "ranks disagree",
        "timestep": "timestep differs between ranks of a sequence",
        "groups": "hidden_states is the same in several data-parallel groups",
        "target": "compute different losses",
        "share": "compute different losses",
        "seed": "the model draws random numbers (dropout, or dropped labels)",
    }
    for found in run_local(on_rank, 4):
        assert {name: text for name, text in found.items() if expected[name] not in text} == {}


def test_what_cannot_be_split_is_refused():
    sp = startrail.SequenceParallel("1x1")
    assert "got Linear" in error_of(lambda: attach(torch.nn.Linear(2, 2), sp))
    model, batch = made("sd3", torch.float32)
    assert "must be 'split' or 'whole'" in error_of(lambda: attach(model, sp, text="some"))
    attach(model, sp)
    assert "already attached" in error_of(lambda: attach(model, sp))
    assert "last block was not called" in error_of(lambda: model(**batch, skip_layers=[1]))
    model, batch = made("flux", torch.float32)
    model._cp_plan = {**model._cp_plan, "": {"hidden_states": [ContextParallelInput(split_dim=1)]}}
    assert "entry for '' that is not supported" in error_of(lambda: attach(model, sp))
    assert not any("startrail" in key for key in vars(model))

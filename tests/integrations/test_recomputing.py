"""Several calls per backward pass, with and without recomputation, while ranks collect garbage at different times."""

import copy
import gc
import random
from functools import partial

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'startrail[diffusers]')")

import torch
import torch.nn.functional as F

import startrail
from startrail.integrations import diffusers, modules, transformers
from startrail.launch.local import run_local
from tests.helpers import FULL, gradient_mistakes
from tests.integrations import tiny_diffusers
from tests.integrations.one_process import ordinary
from tests.integrations.plain_modules import GPT, Pyramid
from tests.integrations.split_runs import spread
from tests.integrations.tiny import gradients, tiny

STEPS = 12 if FULL else 4


def language_model(recompute):
    model = tiny("llama", torch.float64)

    def loss_of(model, sp, size):
        batch = ordinary(1 + size % 2, 24 + size)
        return model(**(batch if sp is None else transformers.shard_batch(sp, **batch)), use_cache=False).loss

    return model, transformers.attach, "gradient_checkpointing_enable" if recompute else None, loss_of


def plain_module(recompute):
    def loss_of(model, sp, size):
        ids = torch.arange(2 * (24 + size)).view(2, -1) * 7 % 31
        return model(ids, ids.roll(-1, 1))[1]

    return spread(GPT(recompute)).double(), modules.attach, None, loss_of


def pyramid(how, attention="auto"):
    """Several regions in one call, of different numbers of tokens."""

    def make(recompute):
        def loss_of(model, sp, size):
            ids = torch.arange(2 * (24 + 2 * size)).view(2, -1) * 7 % 31
            return model(ids).square().mean()

        attach = partial(modules.attach, attention=attention)
        return spread(Pyramid(how if recompute else "")).double(), attach, None, loss_of

    return make


def image_model(name, shape):
    def make(recompute):
        model, batch = getattr(tiny_diffusers, name)()
        batch = {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in batch.items()}

        def loss_of(model, sp, size):
            generator = torch.Generator().manual_seed(size)
            x = torch.randn(*shape(size), generator=generator, dtype=torch.float64)
            changed = dict(batch, hidden_states=x)
            if "img_ids" in batch:
                changed["img_ids"] = torch.zeros(x.shape[1], 3, dtype=torch.float64)
            return F.mse_loss(model(**changed, return_dict=False)[0], x)

        return spread(model).double(), diffusers.attach, "enable_gradient_checkpointing" if recompute else None, loss_of

    return make


MAKES = {
    "llama": language_model,
    "gpt": plain_module,
    "pyramid, blocks": pyramid("blocks"),
    "pyramid, levels": pyramid("levels"),
    "pyramid, levels, attention": pyramid(
        "levels", [f"levels.{level}.{block}.attention" for level in range(2) for block in range(2)]
    ),
    "chroma": image_model("chroma", lambda size: (1, 25 + size, 4)),
    "wan": image_model("wan", lambda size: (1, 4, 3 + size, 6, 6)),
    "flux": image_model("flux", lambda size: (1, 25 + size, 4)),
    "dit": image_model("dit", lambda size: (2, 4, 10, 10)),
}


def run(name, recompute, sp=None, disturb=lambda kept: None):
    """The gradients of several steps. Each adds up the losses of some calls and drops those of others."""
    torch.manual_seed(0)
    model, attach, enable, loss_of = MAKES[name](recompute)
    model.train()
    if sp is not None:
        attach(model, sp)
    if enable is not None:
        getattr(model, enable)()
    shared, found = random.Random(0), []
    for _ in range(STEPS):
        kept, weights = [], [1, *shared.choices((0, 1, 2), k=shared.randrange(3))]
        shared.shuffle(weights)
        for _ in weights:
            kept.append(loss_of(model, sp, shared.randrange(3)))
            disturb(kept)
        total = sum(weight * loss for weight, loss in zip(weights, kept, strict=True) if weight)
        model.zero_grad()
        total.backward()
        if sp is not None:
            startrail.sum_gradients(model.parameters(), sp.group)
        found.append(gradients(model))
    return found


def collector(rank):
    """Keeps graphs, in cycles that only the collector can free, and collects or not, differently on each rank."""
    own, elsewhere = random.Random(rank), []

    def disturb(kept):
        cycle = [copy.copy(kept)]
        cycle.append(cycle)
        if own.random() < 0.3:
            elsewhere.append(cycle)
        action = own.choice((gc.collect, gc.disable, gc.enable, elsewhere.clear, int))
        action()

    return disturb


@pytest.mark.parametrize("plan", ["1x4", "u2/1x2"])
def test_gradients_are_those_of_one_process_whatever_is_kept_or_collected(plan, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    torch.set_num_threads(1)
    names = list(MAKES) if FULL or plan == "1x4" else list(MAKES)[::2]
    truths = {name: run(name, False) for name in names}

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel(plan), []
        for name, truth in truths.items():
            for recompute in (False, True):
                ours = run(name, recompute, sp, collector(rank))
                for step, (mine, true) in enumerate(zip(ours, truth, strict=True)):
                    lines = gradient_mistakes(mine, true, 1e-9, 1e-6)
                    wrong += [f"{name}, recompute {recompute}, step {step}: {line}" for line in lines]
        gc.enable()
        return wrong

    assert run_local(on_rank, 4) == [[]] * 4

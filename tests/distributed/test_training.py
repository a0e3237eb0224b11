"""Training on several ranks: the losses and gradients of one process, whatever the plan, and after every interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import startrail
from startrail.local import run_local
from startrail.training.display import Display
from startrail.training.images import save_grid
from startrail.training.loop import BETAS, Trainer
from startrail.training.parallel import forget_gathered
from startrail.training.recipes import Recipe
from startrail.training.shapes import DiTConfig, GPTConfig
from startrail.training.stopping import Stop
from startrail.training.tasks import ImageTask, TextTask, make_model

STEPS = 30
CPU = torch.device("cpu")
GPT_SHAPE = GPTConfig(vocab=256, width=32, layers=2, heads=8, kv_heads=4, hidden=48, tied=True)
DIT_SHAPE = DiTConfig(channels=3, patch=2, rows=6, columns=6, classes=4, width=32, layers=2, heads=8)
QUIET = dict(evaluate_batches=0, save_every=0, sample=0, steps=STEPS, learning_rate=1e-3, warmup=5, zero=0, recompute=False)
PLANS = {4: ["1x4", "star2", "2x2", "u4"], 8: ["1x8", "star2", "2x2/u2", "u8"]}
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
    (folder / "texts").mkdir()
    words = ["for", "each", "step", "in", "ring:", "send()", "\n", "x = 1", "(", ")", "team", "wait"]
    for number in range(40):
        chosen = torch.randint(len(words), (60 + number,), generator=generator).tolist()
        (folder / "texts" / f"{number:02d}.txt").write_text(" ".join(words[index] for index in chosen))
    for number in range(4):
        (folder / "images" / str(number)).mkdir(parents=True)
        save_grid(torch.rand(1, 3, 16, 16, generator=generator) * 2 - 1, folder / "images" / str(number) / "0.png", 1)
    return folder


def gpt(data, out, **changes):
    source = str(data / "texts")
    return Recipe("gpt", GPT_SHAPE, data=source, out=str(out), **{"length": 61, **QUIET, **changes})


def dit(data, out, **changes):
    return Recipe("dit", DIT_SHAPE, data=str(data / "images"), out=str(out), **{"batch": 2, **QUIET, **changes})


def reference(recipe):
    """Losses and the first gradients by plain torch on one process: its own loop, its own attention."""
    sp = startrail.SequenceParallel("1x1")
    text = isinstance(recipe.shape, GPTConfig)
    task = (TextTask if text else ImageTask)(recipe, sp, CPU)
    model = make_model(recipe.shape)
    fill(model, recipe)
    decayed = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed[0], weight_decay=recipe.weight_decay), dict(params=decayed[1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    losses, first = [], {}
    for step in range(recipe.steps):
        passes = recipe.accumulate * recipe.data_parallel
        batches = [task.load(step * passes + index) for index in range(passes)]
        loss = sum(dense_loss(model, batch, text) for batch in batches) / sum(task.counted(batch) for batch in batches)
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
    from startrail.training.files import generator_of

    for name, parameter in model.named_parameters():
        torch.manual_seed(generator_of(recipe.seed, name).initial_seed())
        with torch.no_grad():
            model.reset_parameter(name, parameter)


def dense_loss(model, batch, text):
    if text:
        document = torch.bucketize(torch.arange(batch.length), torch.tensor(batch.documents or [0, batch.length])[1:], right=True)
        mask = (document.unsqueeze(1) == document).tril()
        attention = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        logits = model.logits(model(batch.tokens, batch.positions, attention))
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    t = batch.time.view(-1, 1, 1)
    moved = ((1 - t) * batch.patches + t * batch.noise).float()
    velocity = model(moved, batch.positions, batch.time, batch.labels, F.scaled_dot_product_attention)
    return (velocity - (batch.noise - batch.patches)).square().sum()


class Recorded(Display):
    def __init__(self):
        self.metrics, self.notes, self.summary = [], [], None

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
    for name, true in grads.items():
        error = ((first[name] - true).abs().max() / true.square().mean().sqrt().clamp(min=1e-12)).item()
        if not error <= 1e-4:
            wrong.append(f"gradient of {name}: worst error {error:.1e} of its root mean square")
    return wrong


@pytest.mark.parametrize("world", PLANS)
def test_every_plan_trains_like_one_process(world, data, tmp_path):
    cases = []
    for number, plan in enumerate(PLANS[world]):
        options = dict(plan=plan, **OPTIONS[number])
        cases.append(gpt(data, tmp_path / f"gpt-{number}", **options))
        cases.append(dit(data, tmp_path / f"dit-{number}", **options))
        cases.append(gpt(data, tmp_path / f"packed-{number}", packed=True, plan=plan, **OPTIONS[number - 1]))
    truths = {}
    for recipe in cases:
        key = recipe.shape, recipe.packed
        if key not in truths:
            truths[key] = reference(recipe)

    def on_rank(rank):
        wrong = []
        for recipe in cases:
            start = time.monotonic()
            display, first = run(recipe)
            assert len(display.metrics) == STEPS
            lines = differences(display, first, truths[recipe.shape, recipe.packed])
            wrong += [f"{recipe.plan} {Path(recipe.out).name}: {line}" for line in lines]
            if rank == 0:
                print(recipe.plan, Path(recipe.out).name, round(time.monotonic() - start, 2))
        return wrong

    assert run_local(on_rank, world) == [[]] * world

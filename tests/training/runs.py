"""Small training runs for tests: recipes, their reference on one process, and what a run displayed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import startrail
from startrail.launch.signals import Stop
from startrail.planner.auto import fit_cluster, plan_for_job
from startrail.planner.cluster import find_cluster
from startrail.planner.topology import Machine
from startrail.training.display import Display
from startrail.training.loop import BETAS, Trainer
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import Recipe
from startrail.training.tasks import ImageTask, TextTask, make_model
from tests.helpers import causal_mask, gradient_mistakes

DEADLINE = 900  # seconds, on a machine that is busy with other work
CPU = torch.device("cpu")
STEPS = 30
GPT_CONFIG = GPTConfig(vocab=256, width=32, layers=2, heads=8, kv_heads=4, hidden=48, tied=True)
DIT_CONFIG = DiTConfig(channels=3, patch=2, rows=6, columns=6, classes=4, width=32, layers=2, heads=8)
PLAIN = dict(evaluate_batches=0, save_every=0, sample=0, steps=STEPS, learning_rate=1e-3, warmup=5)
PLAIN |= dict(zero=0, recompute=False)


def gpt(data, out, layers=2, attention_every=1, **changes):
    config = replace(GPT_CONFIG, layers=layers, attention_every=attention_every)
    return Recipe("gpt", config, data=str(data / "texts"), out=str(out), **{"length": 61, **PLAIN, **changes})


def dit(data, out, layers=2, **changes):
    config = replace(DIT_CONFIG, layers=layers)
    return Recipe("dit", config, data=str(data / "images"), out=str(out), **{"batch": 2, **PLAIN, **changes})


def reference(recipe, weights=None):
    """Losses and first gradients on one process, by a separate loop with torch's own attention. The trained parameters
    go to ``weights``."""
    sp = startrail.SequenceParallel("1x1")
    text = isinstance(recipe.config, GPTConfig)
    task = (TextTask if text else ImageTask)(recipe, sp, CPU)
    model = make_model(recipe.config)
    initialize(model, recipe)
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
    if weights is not None:
        weights.update((name, parameter.detach()) for name, parameter in model.named_parameters())
    return losses, first


def initialize(model, recipe):
    """Give ``model`` the parameters that a run starts with."""
    from startrail.training.data.sources import generator_of

    for name, parameter in model.named_parameters():
        torch.manual_seed(generator_of(recipe.seed, name).initial_seed())
        with torch.no_grad():
            model.reset_parameter(name, parameter)


def dense_loss(model, batch, text):
    if text:
        mask = causal_mask(batch.sequence.length, batch.sequence.documents.tolist())
        attention = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        mixing = TokenByToken(batch.sequence.documents.tolist())
        logits = model.logits(model(batch.tokens, batch.sequence.positions(), attention, mixing))
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    t = batch.time.view(-1, 1, 1)
    moved = ((1 - t) * batch.patches + t * batch.noise).float()
    positions = batch.sequence.positions()
    velocity = model(moved, positions, batch.time, batch.labels, F.scaled_dot_product_attention)
    return (velocity - (batch.noise - batch.patches)).square().sum()


class TokenByToken:
    """Delta layers of one process, without our kernels; ``documents`` are cu_seqlens."""

    def __init__(self, documents):
        self.documents = list(pairwise(documents))

    def conv1d(self, x, weight, bias, activation, *, dim):
        assert (bias, activation, dim) == (None, "silu", 1)
        padded = (F.pad(x[:, start:stop], (0, 0, weight.shape[1] - 1, 0)) for start, stop in self.documents)
        return F.silu(torch.cat([F.conv1d(y.mT, weight.unsqueeze(1), groups=len(weight)).mT for y in padded], 1))

    def scan(self, kernel, q, k, v, g, beta, *, normalize):
        assert normalize and kernel is startrail.gated_delta_rule
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        outs, firsts = [], {start for start, _ in self.documents}
        for token in range(v.shape[1]):
            if token in firsts:
                state = v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3])
            state = state * g[:, token].exp()[..., None, None]
            error = v[:, token] - (k[:, token].unsqueeze(-1) * state).sum(-2)
            state = state + k[:, token].unsqueeze(-1) * (beta[:, token].unsqueeze(-1) * error).unsqueeze(-2)
            outs.append((q[:, token].unsqueeze(-1) * state).sum(-2) * q.shape[3] ** -0.5)
        return torch.stack(outs, 1)


class RecordingDisplay(Display):
    def __init__(self):
        self.metrics, self.notes, self.summary, self.plan = [], [], None, ""

    def start(self, recipe, begin, forecast):
        self.plan = str(forecast.plan)

    def step(self, metrics):
        self.metrics.append(metrics)

    def note(self, text):
        self.notes.append(text)

    def finish(self, summary):
        self.summary = summary


def run(recipe, stop=None, weights=None):
    """Train in the current process group; return the display and the gradients of the first step. The trained
    parameters go to ``weights``."""
    display, first = RecordingDisplay(), {}
    trainer = Trainer(recipe, CPU, display, stop or Stop())

    def record_gradients(optimizer, arguments, keywords):
        if not first:
            for name, parameter in trainer.model.named_parameters():
                grad = parameter.grad
                first[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    trainer.optimizer.register_step_pre_hook(record_gradients)
    trainer.run()
    for name, parameter in trainer.model.named_parameters() if weights is not None else ():
        weights[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    return display, first


def mismatches(display, first, expected):
    losses, grads = expected
    wrong = []
    for metrics in display.metrics:
        loss = losses[metrics["step"] - 1]
        if not abs(metrics["loss"] / loss - 1) <= 1e-5:
            wrong.append(f"step {metrics['step']}: loss {metrics['loss']}, one process {loss}")
    return wrong + gradient_mistakes(first, grads, 1e-4, least=1e-12)


def expected_plan(recipe, ranks):
    """The plan that ``auto`` must choose: the planner's for the tests' cluster (tests/conftest.py)."""
    return str(plan_for_job(fit_cluster(find_cluster("lab"), Machine(1, ranks)), recipe.job("float32")).plan)

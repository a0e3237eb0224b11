"""Runs a module on one process and on ranks, with everything that the two runs must share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import startrail
from tests.helpers import error_of

Step = Callable[[nn.Module], Tensor]


class Run(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]


def spread(model: nn.Module) -> nn.Module:
    """Parameters with random values, so that no gate is closed."""
    for x in model.parameters():
        x.data.copy_(torch.randn_like(x) * 0.3 / (x.shape[-1] ** 0.5 if x.dim() > 1 else 1))
    return model


def run(make: Callable[[torch.dtype], tuple[nn.Module, Step]], dtype: torch.dtype, attach=None, sp=None) -> Run:
    torch.manual_seed(0)
    model, step = make(dtype)
    if attach is not None:
        attach(model, sp)
    torch.manual_seed(1)
    loss = step(model)
    loss.backward()
    if sp is not None:
        startrail.sum_gradients(model.parameters(), sp.group)
    named = model.named_parameters()
    return Run(loss.detach(), {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in named})


def distance(ours: Run, truth: Run) -> float:
    """The difference of all gradients relative to their norm; more if a loss or a single gradient is far off."""
    pairs = [(ours.gradients[name].double(), x.double()) for name, x in truth.gradients.items()]
    off, norm = (torch.stack([x.norm() for x in each]) for each in ([a - b for a, b in pairs], [b for _, b in pairs]))
    each = (off / norm.clamp(min=1e-4 * norm.max())).max() / 10
    loss = (ours.loss.double() - truth.loss.double()).abs() / truth.loss.double().abs()
    return max(float(off.norm() / norm.norm()), float(each), float(loss))


def mistakes(makes: dict[str, Any], plans: list[str], attachers: dict[str, Any], truths: dict[str, tuple[Run, Run]]):
    """On one rank: a line for each case whose gradients are not those of one process. ``truths`` are one process's in
    float64 and float32."""
    wrong = []
    for plan in plans:
        sp = startrail.SequenceParallel(plan)
        for name, make in makes.items():
            exact, rounded = truths[name]
            for dtype, limit in ((torch.float64, 1e-12), (torch.float32, max(2e-6, 2 * distance(rounded, exact)))):
                far = [distance(run(make, dtype, attachers[name], sp), exact)]
                wrong += [f"{name} {plan} {dtype}: {x:.1e}" for x in far if not x <= limit]
    return wrong


def error(function: Callable[[], object]) -> str:
    """What ``function`` raises, on all ranks; short."""
    return error_of(function).removeprefix("ValueError: ")

"""Runs a module on one process and on ranks, with everything that the two runs must share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import startrail
from startrail.launch.local import run_local

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


def mistakes(makes: dict[str, Any], plans: list[tuple[str, torch.dtype]], attachers: dict[str, Any]) -> list[str]:
    """A line for each case that does not give on ranks what it gives on one process."""
    torch.set_num_threads(1)
    ranks = startrail.Plan.parse(plans[0][0]).size
    truths = {name: run(make, torch.float64) for name, make in makes.items()}
    limits = {name: max(2e-6, 2 * distance(run(make, torch.float32), truths[name])) for name, make in makes.items()}

    def on_rank(rank: int) -> list[str]:
        wrong = []
        for plan, dtype in plans:
            sp = startrail.SequenceParallel(plan)
            for name, make in makes.items():
                far = distance(run(make, dtype, attachers[name], sp), truths[name])
                if not far <= (limits[name] if dtype == torch.float32 else 1e-12):
                    wrong.append(f"{name} {plan} {dtype}: {far:.1e}")
        return wrong

    return [line for lines in run_local(on_rank, ranks) for line in lines]

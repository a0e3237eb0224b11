"""Cheap checks in the first steps: all ranks have the same parameters, and gradients come out as sums over ranks.

Both mistakes train without a word: ranks that drew other weights each follow a gradient of somebody else's, and DDP or
FSDP, which average, make every gradient P times too small.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

SAMPLE = 65_536  # numbers of a tensor that its digest looks at
STEPS = 2  # steps that are watched


def digest(x: Tensor) -> Tensor:
    """A number that equal tensors share, and others hardly ever; large ones are sampled.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    tensor(False)
    """
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)]
    if flat.is_floating_point() or flat.is_complex():
        flat = flat.contiguous().view(torch.uint8)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 4294967291
    return (flat.long() * weights).sum()


def check_same_parameters(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """``ValueError`` on every rank that names the first parameter that is not the same on all ranks of ``group``.

    Parameters that are sharded (DTensors) are different by design, and are not looked at.
    """
    whole = [(name, x) for name, x in named if not _is_sharded(x) and x.device.type != "meta"]
    if not whole or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    mine = torch.stack([digest(x) for _, x in whole])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    for index, (name, _) in enumerate(whole):
        others = [rank for rank, theirs in enumerate(everyone) if theirs[index] != everyone[0][index]]
        if others:
            raise ValueError(
                f"parameter {name} is not the same on all ranks (rank {others[0]} has another than rank 0): load the "
                "same weights, or set the same seed on every rank before the model is made"
            )


def _is_sharded(x: object) -> bool:
    return hasattr(x, "device_mesh")


class GradientWatch:
    """Looks, in the first optimizer steps, whether a parameter's gradient is the sum of what the ranks computed.

    One small parameter serves as the probe: what autograd gives it on this rank is added up, before DDP or anybody else
    reduces it, divided by what the loss was scaled with, and compared with what the optimizer finds. Only what is
    certain is an error: exactly the mean, or exactly this rank's own share. (Clipping changes the size, and then
    nothing is said.) FSDP hides the parameter, but the loss tells: a gradient of exactly 1 there means that nobody made
    up for the mean.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._probe: Tensor | None = None
        self._local: Tensor | None = None
        self._hooks: list[Any] = []
        self._left = STEPS
        self.loss_gradient: float | None = None

    @property
    def active(self) -> bool:
        return bool(self._hooks) and self._left > 0

    def begin(self) -> None:
        """Before each forward pass in training; the first one chooses the probe."""
        model = self._model()
        if self._hooks or self._left == 0 or model is None or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        from torch.distributed.fsdp import FSDPModule  # here: few need it, and it takes a while

        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        whole = [x for x in model.parameters() if x.requires_grad and x.dim()]
        if whole and not sharded:
            self._probe = min(whole, key=Tensor.numel)
            self._hooks.append(self._probe.register_hook(self._add))
        self._hooks.append(register_optimizer_step_pre_hook(self._compare))

    def _add(self, gradient: Tensor) -> None:
        gradient = gradient.detach().double()
        self._local = gradient if self._local is None else self._local + gradient

    def see_loss(self, gradient: Tensor) -> None:
        self.loss_gradient = float(gradient)

    def _compare(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        model = self._model()
        mine = {id(x) for x in model.parameters()} if model is not None else set()
        if not any(id(x) in mine for group in optimizer.param_groups for x in group["params"]):
            return
        self._left -= 1
        for hook in self._hooks if self._left == 0 else ():
            hook.remove()
        world = dist.get_world_size()
        if self._probe is None:
            if self.loss_gradient == 1.0:
                raise ValueError(average_text("FSDP", world))
            return
        local, self._local = self._local, None
        if local is None or self._probe.grad is None:
            return
        found = self._probe.grad.detach().double()
        total = local / (self.loss_gradient or 1.0)  # as if nobody had scaled the loss
        dist.all_reduce(total)
        known = torch.stack([(found - total * share).norm() for share in (1.0, 1 / world)])
        known = torch.stack([*known, (found - local).norm(), (local - total).norm(), total.norm()])
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        summed, averaged, own, uneven, size = known.tolist()
        small = 1e-4 * size
        if size == 0 or summed <= small:
            return
        if averaged <= small:
            raise ValueError(average_text("DDP", world))
        if own <= small < uneven:
            raise ValueError(
                "every rank still has its own share of the gradients: call startrail.sum_gradients(model.parameters()) "
                "after the backward pass"
            )


def average_text(who: str, world: int) -> str:
    return (
        f"gradients are averaged over {world} ranks, but must be summed ({who} divides by its number of ranks): call "
        f"(startrail.gradient_factor(model) * loss).backward()"
    )

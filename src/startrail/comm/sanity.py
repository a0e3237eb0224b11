"""Cheap checks in the first steps: all ranks have the same parameters, and gradients come out as sums over ranks.

Both mistakes train without a word: ranks that drew other weights each follow a gradient of somebody else's, and DDP or
FSDP, which average, make every gradient P times too small.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from startrail.comm.errors import peer_errors

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


@peer_errors("comparing parameters")
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


def unwatched(loss: Tensor) -> list[Tensor]:
    """The parameters that ``loss`` is made of, the nearest first, if nobody has looked at its gradients yet."""
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return []
    nearest = next(_parameters(loss), None)
    return [] if nearest is None or nearest in _watches else list(_parameters(loss))


def watch_gradients(loss: Tensor, new: list[Tensor], agreed: bool, group: dist.ProcessGroup | None) -> None:
    """Look at what the optimizer will find for ``loss``, in its first steps. ``new`` is what ``unwatched`` returned for
    it, and ``agreed`` whether every rank of ``group`` has something there: what begins to look must do so everywhere.
    """
    if torch.compiler.is_compiling():
        return
    if new:
        _watches[new[0]] = GradientWatch(new, group) if agreed and dist.get_world_size(group) > 1 else None
    nearest = next(_parameters(loss), None)
    watch = None if nearest is None else _watches.get(nearest)
    if watch is not None and watch.active:
        loss.register_hook(watch.see_loss)


class GradientWatch:
    """Looks, in the first optimizer steps, whether a parameter's gradient is the sum of what the ranks computed.

    One small parameter serves as the probe: what autograd gives it on this rank is added up, before DDP, FSDP or
    anybody else reduces it, divided by what the loss was scaled with, and compared with what the optimizer finds. Only
    what is certain is an error: exactly the mean, or exactly this rank's own share. (Clipping changes the size, and
    then nothing is said.) FSDP hands the optimizer another tensor than the one that autograd knows; it is the one of
    that shape that has these gradients. With n losses a step, as in gradient accumulation, their mean is right as well.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup | None) -> None:
        probe = min((x for x in parameters if x.dim() and not _is_sharded(x)), key=Tensor.numel, default=parameters[0])
        self._probe = weakref.ref(probe)
        self._parameters = [weakref.ref(x) for x in parameters]
        self._group = group
        self._left = STEPS
        self._local: Tensor | None = None
        self._scales: list[float] = []
        self._hook = probe.register_hook(self._add)
        _looking.append(self)
        weakref.finalize(probe, _looking.remove, self).atexit = False
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_any_step))

    @property
    def active(self) -> bool:
        return self._left > 0

    def see_loss(self, gradient: Tensor) -> None:
        self._scales.append(float(gradient))

    def _add(self, gradient: Tensor) -> None:
        mine = gradient.detach().clone()  # autograd may hand the same memory on, and then it is reduced in place
        self._local = mine if self._local is None else self._local + mine

    @peer_errors("comparing gradients")
    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step of any optimizer, ours or not."""
        probe = self._probe()
        given = {id(x): x for group in optimizer.param_groups for x in group["params"]}
        if probe is None or not self.active or not self._is_ours(given):
            return
        self._left -= 1
        if not self.active:
            self._hook.remove()
        local, self._local = self._local, None
        scales, self._scales = self._scales, []
        found = [probe] if id(probe) in given else self._sharded(probe, given)
        ready = local is not None and not _is_sharded(local) and len(set(scales)) == 1 and scales[0] != 0
        ready = ready and bool(found) and all(x.grad is not None for x in found)
        # Every rank takes part here, whatever it has: one that lacks a gradient would let the others wait.
        size = float(probe.numel())
        least = torch.tensor([float(ready), size, -size], dtype=torch.float64, device=probe.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        if least[0] == 0 or least[1] != -least[2]:
            return
        assert local is not None
        self._judge(local, scales, found, probe is found[0])

    def _judge(self, local: Tensor, scales: list[float], found: list[Any], whole: bool) -> None:
        world, losses = dist.get_world_size(self._group), len(scales)
        precision = max(torch.finfo(x.dtype).eps for x in (local, found[0]))
        local = local.double()
        own = local / scales[0]  # as if nobody had scaled the loss
        total = own.clone()
        dist.all_reduce(total, group=self._group)
        guesses = [total, total / losses, total / world, total / losses / world, local, own]
        rows = []
        for x in found:
            gradient = (x.grad if whole else x.grad.full_tensor()).detach().to(total).view_as(total)
            rows.append(torch.stack([(gradient - guess).norm() for guess in guesses]))
        known = torch.stack([*rows, total.norm().expand(len(guesses))])
        dist.all_reduce(known, op=dist.ReduceOp.MAX, group=self._group)
        fits = known[:-1] <= max(1e-4, 4 * precision) * known[-1]
        if not bool(known[-1].any()) or bool(fits[:, :2].any()):
            return
        if bool(fits[:, 2:4].any()):
            raise ValueError(average_text("DDP" if whole else "FSDP", world))
        if whole and bool(fits[:, 4:].any()):
            raise ValueError(
                "every rank still has its own share of the gradients: call startrail.sum_gradients(model.parameters()) "
                "after the backward pass"
            )

    def _is_ours(self, given: dict[int, Tensor]) -> bool:
        probe = self._probe()
        alive = {id(x()) for x in self._parameters}
        return bool(alive & given.keys()) or (probe is not None and bool(self._sharded(probe, given)))

    def _sharded(self, probe: Tensor, given: dict[int, Tensor]) -> list[Any]:
        """What FSDP may have made of ``probe``; nothing if it is over other ranks than those whose gradients count."""
        ranks = sorted(dist.get_process_group_ranks(self._group))
        like: list[Any] = [x for x in given.values() if _is_sharded(x) and x.shape == probe.shape]
        return [x for x in like if sorted(x.device_mesh.mesh.flatten().tolist()) == ranks]


def average_text(who: str, world: int) -> str:
    return (
        f"gradients are averaged over {world} ranks, but must be summed ({who} divides by its number of ranks): call "
        f"(startrail.gradient_factor(model) * loss).backward()"
    )


def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_looking):
        watch.compare(optimizer)


# Those whose parameters live. They share one hook, which stays: none may be removed while an optimizer goes through its
# hooks, and a model may well be collected just then.
_looking: list[GradientWatch] = []
_hooks: list[Any] = []
# Who looks at a model's gradients, by the parameter that is nearest to its loss; None if nobody can.
_watches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _parameters(loss: Tensor) -> Iterator[Tensor]:
    """Parameters in the graph of ``loss``, the nearest first."""
    waiting: deque[Any] = deque([loss.grad_fn])
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        for after, _ in node.next_functions:
            if after not in seen:
                seen.add(after)
                waiting.append(after)

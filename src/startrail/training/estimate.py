"""How much memory a training step will need, estimated before the start.

What a rank needs is its share of the parameters, their gradients and the optimizer's state, and the activations of its
own N/P tokens. The first is counted; the second is found by running one step on fake tensors, which have shapes
but no memory, and adding up what lives at the same time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from startrail.schedule.values import BACKWARD, FORWARD, PASSES
from startrail.training.memory import recompute_blocks
from startrail.training.recipes import Recipe
from startrail.training.tasks import ImageTask, TextTask, make_model

LIBRARIES = 30 * 2**20  # what libraries, threads and connections of a process take once they are used; measured
FLOAT = 4  # bytes: parameters, gradients and the optimizer's two moments are float32


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank needs at once."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    copy: int
    libraries: int

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))

    @property
    def checkpoint(self) -> int:
        """What this rank writes of a checkpoint."""
        return self.parameters + self.optimizer

    def __str__(self) -> str:
        each = ", ".join(f"{item.name} {mib(getattr(self, item.name))}" for item in fields(self))
        return f"{mib(self.total)} a rank: {each}"


NOTHING = Estimate(0, 0, 0, 0, 0, 0, 0)


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def estimate(recipe: Recipe, task: TextTask | ImageTask, world: int, batch: Any) -> Estimate:
    """What one step of ``recipe`` needs on each of ``world`` ranks, with batches such as ``batch``.

    ``gathered`` are whole parameters and gradients that FSDP has on their way: of everything (ZeRO-2) or of two blocks
    (ZeRO-3), and a block's gradients twice. ``activations`` has attention's buffers in it. ``copy`` is what a
    checkpoint holds while it is written, where that is the same memory.
    """
    with torch.device("meta"):
        model = make_model(recipe.config)
    whole = FLOAT * _count(model)
    block = FLOAT * _count(model.blocks[0])
    share = whole // (world if recipe.zero else 1)
    gathered = {0: 0, 2: whole + 2 * block, 3: whole - (recipe.config.layers - 2) * block + 2 * block}[recipe.zero]
    on_cpu = task.device.type == "cpu"
    return Estimate(
        parameters=share,
        gradients=share,
        optimizer=2 * share,
        gathered=gathered,
        activations=_activations(recipe, task, batch),
        copy=3 * share if on_cpu else 0,
        libraries=LIBRARIES if on_cpu else 0,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _activations(recipe: Recipe, task: TextTask | ImageTask, real: Any) -> int:
    """The most bytes alive at once in a forward and backward pass, beside parameters and their gradients."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the sequence has tensors of its own
        made = {
            item.name: mode.from_tensor(value)
            for item in fields(real)
            if isinstance(value := getattr(real, item.name), Tensor)
        }
        batch = replace(real, **made)
        with torch.device(task.device):
            model: Any = make_model(recipe.config)
        if recipe.recompute:
            recompute_blocks(model, recipe.offload)
        for parameter in model.parameters():  # gradients are counted apart: they leave when they are summed
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        sp = task.sequence.sp
        sizes = sp.sizes(*task.queries_and_keys())
        buffers = {pass_: sizes.pooled_bytes(pass_, sp.world) for pass_ in PASSES}
        ops = {
            FORWARD: torch.ops.startrail.attention.default,
            BACKWARD: torch.ops.startrail.attention_backward.default,
        }
        inside = {ops[pass_]: sizes.peak_bytes(pass_, sp.world) - buffers[pass_] for pass_ in PASSES}
        with _Watch(inside) as watch:
            task.loss_sum(model, batch).backward()
    return watch.peak + max(buffers.values())


class _Watch(TorchDispatchMode):
    """Adds up the bytes of all tensors made under it, as long as they live. ``inside``: what an op needs while it
    runs."""

    def __init__(self, inside: dict[Any, int]) -> None:
        super().__init__()
        self.inside = inside
        self.now = self.peak = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak = max(self.peak, self.now + self.inside.get(func, 0))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self.now += storage.nbytes()
            self._seen[key] = weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size

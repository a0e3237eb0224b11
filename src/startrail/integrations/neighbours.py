"""Do tokens see each other elsewhere than in attention? A recurrence, a convolution or a token shift would have to pass
its state from rank to rank, and would give wrong gradients without a word.

No names are listed: the model is run twice with nothing attended. With weights, one token is another the second time,
and no other token's output may change. Without weights (on the meta device) there are two tokens more the second time,
and the model must do the same operations, none of them a convolution over tokens: a loop over tokens has more steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, MORE = 4, 2
CHANGED = 1  # the token that is another the second time


class Operation(NamedTuple):
    name: str
    reach: int  # how many tokens a convolution looks at, else 1
    where: str  # the module that did it


class _Operations(TorchDispatchMode):
    """Writes down what is done, and by which module."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.done: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket)
        reach = max(args[1].shape[2:], default=1) if name == "aten.convolution" else 1
        self.done.append(Operation(name, reach, self.inside[-1] if self.inside else ""))
        return function(*args, **(kwargs or {}))


def seen_by_neighbours(model: nn.Module, run: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the first module in which a token's result depends on another token's, or None. ``run`` gives
    results (1, tokens, ...) for ids (1, tokens), without attention."""
    device = next(model.parameters()).device
    ids = torch.arange(TOKENS, device=device).unsqueeze(0) % 2
    if device.type == "meta":
        longer = torch.arange(TOKENS + MORE, device=device).unsqueeze(0)
        return _different_operation(*(_operations(model, run, x) for x in (ids, longer)))
    changed = ids.clone()
    changed[:, CHANGED] = 1 - ids[:, CHANGED]
    (results, inside), (others, other_inside) = (_results(model, run, x) for x in (ids, changed))
    if not _others_changed(results, others):
        return None
    for (name, x), (_, y) in zip(inside, other_inside, strict=False):
        if _others_changed(x, y):
            return name
    return type(model).__name__


def _others_changed(x: Tensor, y: Tensor) -> bool:
    """Whether other tokens' results differ by more than rounding: experts group tokens, and so round differently."""
    others = [index for index in range(TOKENS) if index != CHANGED]
    if x.shape != y.shape or x.shape[:2] != (1, TOKENS) or not x.is_floating_point():
        return False
    before, after = x[0, others].double().flatten(1), y[0, others].double().flatten(1)
    allowed = 8 * torch.finfo(x.dtype).eps * before.norm(dim=1)
    return bool(((after - before).norm(dim=1) > allowed).any())


def _results(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """What comes out, and what comes out of each module, in the order in which they finish."""
    inside: list[tuple[str, Tensor]] = []

    def note(name: str, module: nn.Module, arguments: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            inside.append((name, first))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(note, name)))
        return run(ids), inside


def _operations(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor) -> list[Operation]:
    operations = _Operations()

    def enter(name: str, *_: object) -> None:
        operations.inside.append(name)

    def leave(*_: object) -> None:
        operations.inside.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(leave))
        with operations:
            run(ids)
    return operations.done


def _different_operation(few: list[Operation], more: list[Operation]) -> str | None:
    for x, y in zip_longest(few, more):
        if x is None or y is None or x.name != y.name or x.reach > 1:
            return (x or y).where
    return None

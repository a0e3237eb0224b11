"""Do tokens see each other elsewhere than in attention? A recurrence, a convolution or a token shift would have to pass
its state from rank to rank, and would give wrong gradients without a word.

No names are listed: the model is run twice with nothing attended. With weights, one token is another the second time,
and no other token's output may change by more than rounding; and no gradient at all may flow to another token, which
finds what rounding hides. Without weights (on the meta device) there are two tokens more the second time, and the model
must do the same operations, none of them a convolution over tokens: a loop over tokens has more steps.
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
FIRST = 3  # the smallest id: padding, often 0, is embedded as zeros, through which nothing is seen
CHANGED = 1  # the token that is another the second time
ASKED = 2  # the token whose gradient is looked at: there are others on both sides


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
    ids = torch.arange(FIRST, FIRST + TOKENS, device=device).unsqueeze(0)
    if device.type == "meta":
        longer = torch.arange(FIRST, FIRST + TOKENS + MORE, device=device).unsqueeze(0)
        return _different_operation(*(_operations(model, run, x) for x in (ids, longer)))
    changed = ids.clone()
    changed[:, CHANGED] = FIRST + TOKENS
    first, second = (_results(model, run, x) for x in (ids, changed))
    if not (_others_changed(first.out, second.out) or _flows(first.out, first.embedded)):
        return None
    for (name, x), (_, y) in zip(first.inside, second.inside, strict=False):
        if _others_changed(x, y) or _flows(x, first.embedded):
            return name
    return type(model).__name__


def _others_changed(x: Tensor, y: Tensor) -> bool:
    """Whether other tokens' results differ by more than rounding: experts group tokens, and so round differently."""
    others = [index for index in range(TOKENS) if index != CHANGED]
    if x.shape != y.shape or x.shape[:2] != (1, TOKENS) or not x.is_floating_point():
        return False
    before, after = (z.detach()[0, others].double().flatten(1) for z in (x, y))
    allowed = 8 * torch.finfo(x.dtype).eps * before.norm(dim=1)
    return bool(((after - before).norm(dim=1) > allowed).any())


def _flows(x: Tensor, embedded: Tensor | None) -> bool:
    """Whether a token's part of ``x`` has a gradient for another token."""
    if embedded is None or not x.requires_grad or x.shape[:2] != (1, TOKENS):
        return False
    with torch.enable_grad():
        mine = x[0, ASKED].flatten()
    weights = torch.linspace(0.5, 1.5, len(mine), device=mine.device).to(mine.dtype)  # nothing cancels
    (found,) = torch.autograd.grad(mine, embedded, weights, retain_graph=True, allow_unused=True)
    others = [index for index in range(TOKENS) if index != ASKED]
    return found is not None and bool(found[0, others].any())


class Results(NamedTuple):
    out: Tensor
    inside: list[tuple[str, Tensor]]  # what comes out of each module, in the order in which they finish
    embedded: Tensor | None  # the tokens' embeddings, which gradients are taken for


def _results(model: Any, run: Callable[[Tensor], Tensor], ids: Tensor) -> Results:
    inside: list[tuple[str, Tensor]] = []
    embedded: list[Tensor] = []

    def note(name: str, module: nn.Module, arguments: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            inside.append((name, first))

    def embed(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    sharded = any(hasattr(x, "device_mesh") for x in model.parameters())  # FSDP's backward pass talks to other ranks
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(note, name)))
        hooks.enter_context(model.get_input_embeddings().register_forward_hook(embed))
        hooks.enter_context(torch.set_grad_enabled(not sharded))
        out = run(ids)
    return Results(out, inside, embedded[0] if len(embedded) == 1 else None)


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

"""Checks whether a model mixes tokens outside attention and the seams of ``recurrent.py``. Another recurrence, a
convolution or a token shift would need its state passed from rank to rank; without that, its gradients would be wrong
and nothing would raise.

The check knows no model by name. It runs the model twice with both disabled. With weights, the second run changes
one token: no other token's output may change by more than rounding, and no gradient may flow to another token, which
finds changes too small to see. Without weights (on the meta device), the second run has two more tokens: it must run
the same operations, none of them a convolution over tokens. A loop over tokens would run more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from startrail._compat import TorchDispatchMode

TOKENS, MORE_TOKENS = 4, 2
FIRST_ID = 3  # above the padding id, often 0, which is embedded as zeros and would hide changes
CHANGED = 1  # the token that the second run changes
PROBED = 2  # the token whose gradient is taken; it has neighbours on both sides


class Operation(NamedTuple):
    name: str
    reach: int  # the number of tokens that a convolution spans, else 1
    module: str


class _Recorder(TorchDispatchMode):
    """Records the operations that run, and the module of each."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []  # those that are running, outermost first
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket)
        reach = max(args[1].shape[2:], default=1) if name == "aten.convolution" else 1
        self.operations.append(Operation(name, reach, self.modules[-1] if self.modules else ""))
        return function(*args, **(kwargs or {}))


def find_token_mixing(model: nn.Module, run: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the first module in which a token's result depends on another token, or None. ``run`` maps ids
    (1, tokens) to results (1, tokens, ...) with attention disabled."""
    device = next(model.parameters()).device
    ids = torch.arange(FIRST_ID, FIRST_ID + TOKENS, device=device).unsqueeze(0)
    if device.type == "meta":
        longer = torch.arange(FIRST_ID, FIRST_ID + TOKENS + MORE_TOKENS, device=device).unsqueeze(0)
        return _first_difference(*(_operations(model, run, x) for x in (ids, longer)))
    changed = ids.clone()
    changed[:, CHANGED] = FIRST_ID + TOKENS
    first, second = (_outputs(model, run, x) for x in (ids, changed))
    if not (_neighbours_differ(first.final, second.final) or _gradient_leaks(first.final, first.embeddings)):
        return None
    for (name, x), (_, y) in zip(first.by_module, second.by_module, strict=False):
        if _neighbours_differ(x, y) or _gradient_leaks(x, first.embeddings):
            return name
    return type(model).__name__


def _neighbours_differ(x: Tensor, y: Tensor) -> bool:
    """True if tokens other than the changed one differ by more than rounding. Experts group tokens, so they round
    differently."""
    others = [index for index in range(TOKENS) if index != CHANGED]
    if x.shape != y.shape or x.shape[:2] != (1, TOKENS) or not x.is_floating_point():
        return False
    before, after = (z.detach()[0, others].double().flatten(1) for z in (x, y))
    allowed = 8 * torch.finfo(x.dtype).eps * before.norm(dim=1)
    return bool(((after - before).norm(dim=1) > allowed).any())


def _gradient_leaks(x: Tensor, embeddings: Tensor | None) -> bool:
    """True if a token's part of ``x`` has a gradient with respect to another token."""
    if embeddings is None or not x.requires_grad or x.shape[:2] != (1, TOKENS):
        return False
    with torch.enable_grad():
        probed = x[0, PROBED].flatten()
    weights = torch.linspace(0.5, 1.5, len(probed), device=x.device).to(x.dtype)  # uneven, so that nothing cancels
    (grad,) = torch.autograd.grad(probed, embeddings, weights, retain_graph=True, allow_unused=True)
    others = [index for index in range(TOKENS) if index != PROBED]
    return grad is not None and bool(grad[0, others].any())


class _Outputs(NamedTuple):
    final: Tensor
    by_module: list[tuple[str, Tensor]]  # in the order in which modules finish
    embeddings: Tensor | None  # of the tokens; gradients are taken with respect to them


def _outputs(model: Any, run: Callable[[Tensor], Tensor], ids: Tensor) -> _Outputs:
    by_module: list[tuple[str, Tensor]] = []
    embeddings: list[Tensor] = []

    def record(name: str, module: nn.Module, arguments: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            by_module.append((name, first))

    def embed(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # some models scale it in place

    sharded = any(hasattr(x, "device_mesh") for x in model.parameters())  # FSDP communicates in the backward pass
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(record, name)))
        hooks.enter_context(model.get_input_embeddings().register_forward_hook(embed))
        hooks.enter_context(torch.set_grad_enabled(not sharded))
        final = run(ids)
    return _Outputs(final, by_module, embeddings[0] if len(embeddings) == 1 else None)


def _operations(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor) -> list[Operation]:
    recorder = _Recorder()

    def enter(name: str, *_: object) -> None:
        recorder.modules.append(name)

    def leave(*_: object) -> None:
        recorder.modules.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(leave))
        with recorder:
            run(ids)
    return recorder.operations


def _first_difference(short: list[Operation], long: list[Operation]) -> str | None:
    """The module of the first operation that differs, or that is a convolution over tokens."""
    for x, y in zip_longest(short, long):
        if x is None or y is None or x.name != y.name or x.reach > 1:
            return (x or y).module
    return None

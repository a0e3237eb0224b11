"""Calls of modules and of ``F.scaled_dot_product_attention``: what runs in their place, arguments, callers, hooks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from startrail._compat import module_hooks, without_torch_functions

torch_attention = F.scaled_dot_product_attention

# --- attention


class TorchCall(NamedTuple):
    """The arguments of a call of ``F.scaled_dot_product_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> TorchCall:  # fmt: skip
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    @property
    def options(self) -> tuple[object, ...]:
        """What does not depend on the number of tokens."""
        return self.mask is None, self.dropout, self.causal, self.scale, self.gqa

    def run(self) -> Tensor:
        """Torch's own attention, which no mode sees."""
        with without_torch_functions():
            return torch_attention(
                self.q, self.k, self.v, self.mask, self.dropout, self.causal, scale=self.scale, enable_gqa=self.gqa
            )

    def is_key_mask(self) -> bool:
        """True if the mask has one value per key, the same for all queries."""
        return self.mask is not None and self.mask.dim() >= 2 and self.mask.shape[-2] == 1


class AttentionMode(TorchFunctionMode):
    """Inside, ``attend`` is called in place of ``F.scaled_dot_product_attention``."""

    def __init__(self, attend: Callable[[TorchCall], Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is torch_attention:
            return self._attend(TorchCall.of(*args, **options))
        if function is F.multi_head_attention_forward:  # calls attention where modes do not see it
            instead = patch.object(
                F, "scaled_dot_product_attention", lambda *a, **o: self._attend(TorchCall.of(*a, **o))
            )
            with instead, without_torch_functions():
                return function(*args, **options)
        return function(*args, **options)


# --- modules


def wrap(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace ``forward``, with a bound method: a copy of the module has one bound to the copy."""
    module.__dict__["_startrail_forward"] = module.__dict__.get("forward")
    module.forward = MethodType(run, module)


def unwrap(module: nn.Module) -> None:
    if "_startrail_forward" in module.__dict__:
        original = module.__dict__.pop("_startrail_forward")
        del module.__dict__["forward"]
        if original is not None:
            module.forward = original
    for name in ("_startrail", "_startrail_name", "_startrail_kinds", "_startrail_plan"):
        module.__dict__.pop(name, None)


def inner_forward(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` that a module had before it was wrapped."""
    original = module.__dict__.get("_startrail_forward")
    wrapped = "_startrail_forward" in module.__dict__
    return original or partial(type(module).forward, module) if wrapped else module.forward


def argument_names(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of ``module`` by name."""
    function = inspect.unwrap(type(module).forward)
    try:
        bound = inspect.signature(function).bind(module, *args, **kwargs).arguments
    except TypeError:  # a decorated forward; the call itself will say what is wrong
        bound = {**{str(index): x for index, x in enumerate(args)}, **kwargs}
    named = dict(bound)
    named.pop("self", None)
    for name in [name for name, x in named.items() if isinstance(x, dict)]:
        named.update(
            {f"{name}.{key}" if name not in ("kwargs", "options") else key: x for key, x in named.pop(name).items()}
        )
    return {name: x for name, x in named.items() if x is not module}


def calling_module(default: nn.Module) -> nn.Module:
    """The innermost attached module whose method is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and "_startrail_name" in owner.__dict__:
            return owner
        frame = frame.f_back
    return default


# Libraries whose hooks move or cast parameters and arguments, and keep no results.
HARMLESS = ("torch", "startrail", "accelerate", "diffusers", "peft", "transformers")


def users_hooks(module: nn.Module) -> list[str]:
    """The names of the user's own hooks on the calls of a module."""
    return [hook_name(hook) for hook in module_hooks(module) if is_users(hook)]


def is_users(hook: Any) -> bool:
    """True for a function that no known library defines."""
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).partition(".")[0] not in HARMLESS


def hook_name(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__qualname__", type(function).__name__))

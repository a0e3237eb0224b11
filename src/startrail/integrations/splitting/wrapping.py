"""Replaces the ``forward`` of modules, and reads their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn


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

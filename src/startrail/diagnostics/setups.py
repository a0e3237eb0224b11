"""What ``verify`` runs: the model, the batch and the steps that a user's function returns, and how to load it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail._compat import tree_leaves
from startrail.losses import sum_gradients
from startrail.parallel import SequenceParallel

RETURNS = "(model, batch), (model, batch, step) or (model, batch, step, reference)"


@dataclass
class Setup:
    """What the user's function returned.

    ``step(model, batch, sp)`` runs forward and backward on this rank, sums the gradients and returns the loss. Without
    it, a transformers model is attached to ``sp`` and called with ``shard_batch(sp, **batch)``. A model of diffusers or
    any other module is attached and called with ``batch``, a dictionary of its arguments; the loss is the mean squared
    error to its ``"target"``, or what the module returns as loss. ``reference(model, batch)`` does the same on one
    process, without startrail. Without it, the reference is the model called on one process; with a step of a model
    that is not of transformers, it is the step on a single rank.
    """

    model: nn.Module
    batch: Any
    step: Callable[[nn.Module, Any, SequenceParallel], Any] | None = None
    reference: Callable[[nn.Module, Any], Any] | None = None

    @classmethod
    def of(cls, make: Callable[[], Any]) -> Setup:
        torch.manual_seed(0)
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise ValueError(f"the function must take no arguments: {error}") from None
        except ValueError:
            pass  # a builtin without a signature
        made = make()
        if not isinstance(made, tuple) or len(made) not in (2, 3, 4) or not isinstance(made[0], nn.Module):
            raise ValueError(f"the function must return {RETURNS}; it returned {_kinds(made)}")
        setup = cls(*made)
        for name, function in (("step", setup.step), ("reference", setup.reference)):
            if function is not None and not callable(function):
                raise ValueError(f"the {name} must be a function, got {type(function).__name__}")
        if not any(x.requires_grad for x in setup.model.parameters()):
            raise ValueError(f"{type(setup.model).__name__} has no trainable parameters")
        if isinstance(setup.batch, Mapping) and not setup.batch:
            raise ValueError("the batch is empty")
        if setup.step is None and not setup.is_transformers and not isinstance(setup.batch, Mapping):
            raise ValueError(
                f"the batch of {type(setup.model).__name__} must be a dictionary of its arguments, with a target; "
                "or also return step(model, batch, sp)"
            )
        if setup.reference is None and setup.is_transformers:
            if not isinstance(setup.batch, Mapping):
                raise ValueError(
                    f"the batch of a transformers model must be a dictionary of its arguments, got "
                    f"{type(setup.batch).__name__}; or also return reference(model, batch)"
                )
            if "labels" not in setup.batch:
                raise ValueError("the batch has no labels: the model would return no loss")
        return setup

    @property
    def is_transformers(self) -> bool:
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # with adapters of peft
        return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)

    @property
    def limits(self) -> str:
        """What the comparison cannot see; empty if the reference is independent of the step."""
        if self.reference is not None or self.is_transformers or self.step is None:
            return ""
        return (
            "the same step on one rank is the reference, so mistakes that it makes there too, in a window, mask or "
            "label shift, cannot be seen: return a reference(model, batch) that does not use startrail"
        )

    def to(self, dtype: torch.dtype) -> Setup:
        """The same with all floating-point numbers in ``dtype``."""
        return Setup(self.model.to(dtype), _converted(self.batch, dtype), self.step, self.reference)

    def run_alone(self, model: nn.Module, batch: Any) -> Any:
        """The reference's loss."""
        if self.reference is not None:
            return self.reference(model, batch)
        if self.is_transformers:
            loss = model(**{"use_cache": False, **batch}).loss  # with a cache, packed documents see each other
        elif self.step is not None:
            return self.step(model, batch, SequenceParallel("1x1"))
        else:
            loss = _module_loss(model, batch)
        loss.backward()
        return loss

    def run_on_rank(self, sp: SequenceParallel) -> Any:
        default = _default_step if self.is_transformers else _default_module_step
        return (self.step or default)(self.model, self.batch, sp)


def _kinds(made: Any) -> str:
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(each).__name__ for each in made)})"


def _default_step(model: Any, batch: Any, sp: SequenceParallel) -> Tensor:
    from startrail.integrations.transformers import attach, shard_batch

    attach(model, sp)
    loss: Tensor = model(**shard_batch(sp, **batch)).loss
    loss.backward()
    sum_gradients(model.parameters(), sp.group)
    return loss


def _default_module_step(model: Any, batch: Any, sp: SequenceParallel) -> Tensor:
    if any(kind.__module__.startswith("diffusers.") for kind in type(model).__mro__):
        from startrail.integrations.diffusers import attach
    else:
        from startrail.integrations.modules import attach  # type: ignore[assignment]
    attach(model, sp)
    loss = _module_loss(model, batch)
    loss.backward()
    sum_gradients(model.parameters(), sp.group)
    return loss


def _module_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The mean squared error to the batch's target, or the only number among the results."""
    results = tree_leaves(model(**{name: x for name, x in batch.items() if name != "target"}))
    if "target" in batch:
        return F.mse_loss(results[0], batch["target"])
    numbers = [x for x in results if isinstance(x, Tensor) and x.dim() == 0]
    if len(numbers) != 1:
        raise ValueError(
            f"{type(model).__name__} returns no loss: give the batch a target, or return step(model, batch, sp)"
        )
    number: Tensor = numbers[0]
    return number


# --- batches


def batch_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, with names."""
    if isinstance(batch, Tensor):
        yield name or "tensor", batch
    elif isinstance(batch, Mapping):
        for key, x in batch.items():
            yield from batch_tensors(x, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for index, x in enumerate(batch):
            yield from batch_tensors(x, f"{name}[{index}]" if name else f"entry {index}")


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor replaced by ``change`` of it."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(x, change) for key, x in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [map_tensors(x, change) for x in batch]
        return parts if isinstance(batch, list) else type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def _converted(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


# --- loading


def load(name: str) -> Callable[[], Any]:
    """The function named by ``module:function`` or ``file.py:function``. Raises ``ValueError`` if it cannot be loaded.

    As when Python runs them, a file's neighbours can be imported, and so can modules of the working directory, also
    later, when the function runs.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} must be MODULE:FUNCTION, for example my.setup:make or setup.py:make")
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _load_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as error:
        kind = "" if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        own = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
        raise ValueError(f"{place} has no function {function!r}" + (f"; it has {', '.join(own)}" if own else ""))
    return make


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"{path} does not exist")
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_to_verify"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

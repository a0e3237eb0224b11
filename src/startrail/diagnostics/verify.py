"""Checks that a training step gives the same on many ranks as on one process, and names the fault if it does not.

``verify(make)`` calls ``make()`` for a model, a batch and optionally the user's own step, and runs it on one process
and on local ranks. It compares the loss and the gradient of every parameter. If they differ, it looks for a known fault
(``faults``) that gives the same gradients on one process.

A step is ``step(model, batch, sp)``: it runs forward and backward on this rank, sums the gradients and returns the
loss. Without a step, a transformers model is attached to ``sp`` and called with ``shard_batch(sp, **batch)``. The
reference is ``model(**batch).loss`` for a transformers model; for any other model, it is the step on a single rank.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from startrail.comm.digest import digest
from startrail.diagnostics import faults
from startrail.diagnostics.faults import EQUAL_TOLERANCE, MATCH_TOLERANCE, Gradients, distance, factor_text, gradients
from startrail.launch.local import RankError, run_local
from startrail.losses import sum_gradients
from startrail.parallel import SequenceParallel


@dataclass(frozen=True)
class Verdict:
    """``same``: loss and gradients are those of one process. ``text`` names the fault if they are not. ``conclusive``:
    the fault cannot come from padding or dropout, so there is no need to try without them."""

    same: bool
    text: str
    conclusive: bool = False


class Reference(NamedTuple):
    """The results of one process."""

    loss: float
    gradients: Gradients


@dataclass
class Setup:
    """What the user's function returned."""

    model: nn.Module
    batch: Any
    step: Callable[[nn.Module, Any, SequenceParallel], Tensor] | None

    @classmethod
    def of(cls, make: Callable[[], Any]) -> Setup:
        torch.manual_seed(0)
        made = make()
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
            raise ValueError("the function must return (model, batch) or (model, batch, step)")
        model, batch, *step = made
        setup = cls(model, batch, step[0] if step else None)
        if setup.step is None and not setup.is_transformers:
            raise ValueError(
                f"{type(model).__name__} is not a transformers model: return a step(model, batch, sp) as well"
            )
        return setup

    @property
    def is_transformers(self) -> bool:
        return any(kind.__name__ == "PreTrainedModel" for kind in type(self.model).__mro__)


def verify(make: Callable[[], Any], ranks: int = 4, plan: str | None = None, deadline: float = 300.0) -> Verdict:
    """Run what ``make`` returns on one process and on ``ranks`` local ranks, and compare."""
    torch.set_num_threads(1)  # ranks are forked from this process
    setup = Setup.of(make)
    if isinstance(setup.batch, Mapping) and not setup.batch:
        raise ValueError("the batch is empty")
    verdict = _run(make, _reference(setup), ranks, plan, deadline)
    if verdict.same or verdict.conclusive:
        return verdict
    for change, text in ((_without_padding, PADDING_COUNTED), (_without_dropout, DROPOUT_DIFFERS)):
        changed = change(setup, 2 * ranks)
        if changed is None:
            continue

        def make_changed(change: Callable[[Setup, int], Setup | None] = change) -> tuple[Any, ...]:
            again = change(Setup.of(make), 2 * ranks)
            assert again is not None
            return (again.model, again.batch, *([again.step] if again.step else []))

        if _run(make_changed, _reference(changed), ranks, plan, deadline).same:
            return Verdict(False, f"{text}\n{verdict.text}")
    return verdict


PADDING_COUNTED = (
    "padding is counted: with a length that needs no padding, the results are the same. Pad labels with -100, as "
    "seq.shard_labels does, and count labels before sharding"
)
DROPOUT_DIFFERS = (
    "dropout differs: without dropout, the results are the same. Each rank draws random numbers for its own tokens, "
    "in a different order than one process. This is not a mistake, but set dropout to 0 to compare"
)


def load(name: str) -> Callable[[], Any]:
    """The function named by ``module:function`` or ``file.py:function``. Raises ``ValueError`` if it does not exist."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} must be MODULE:FUNCTION, for example my.setup:make or setup.py:make")
    sys.path.insert(0, os.getcwd())
    try:
        module: Any = SimpleNamespace(**runpy.run_path(place)) if place.endswith(".py") else import_module(place)
    except (ImportError, OSError) as error:
        raise ValueError(f"{place}: {error}") from None
    finally:
        sys.path.pop(0)
    make: Any = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"{place} has no function {function!r}")
    return make


def _reference(setup: Setup) -> Reference:
    model = copy.deepcopy(setup.model)
    torch.manual_seed(1)
    if setup.is_transformers:
        loss = model(**{"use_cache": False, **setup.batch}).loss  # with a cache, packed documents see each other
        loss.backward()
    else:
        assert setup.step is not None
        loss = setup.step(model, setup.batch, SequenceParallel("1x1"))
    return Reference(float(loss.detach()), gradients(model))


def _run(make: Callable[[], Any], reference: Reference, ranks: int, plan: str | None, deadline: float) -> Verdict:
    try:
        verdict = run_local(lambda rank: _on_rank(make, reference, ranks, plan), ranks, deadline)[0]
    except RankError as error:
        reason = str(error).strip().splitlines()[-1]
        return Verdict(False, f"it does not run on {ranks} ranks: {reason}", conclusive=True)
    assert verdict is not None
    return verdict


def _on_rank(make: Callable[[], Any], reference: Reference, ranks: int, plan: str | None) -> Verdict | None:
    """The verdict, on rank 0."""
    setup, sp = Setup.of(make), SequenceParallel(plan or f"1x{ranks}")
    model = setup.model
    if name := _first_mismatch({name: digest(x) for name, x in _tensors(setup.batch)}):
        text = f"data differ between ranks: {name} of the batch; all ranks of a sequence need the same batch"
        return Verdict(False, text, conclusive=True)
    if name := _first_mismatch({name: digest(x) for name, x in model.named_parameters()}):
        text = f"weights differ between ranks: parameter {name}; load the same weights or set the same seed"
        return Verdict(False, text, conclusive=True)
    start = replace(setup, model=copy.deepcopy(model)) if dist.get_rank() == 0 else None
    torch.manual_seed(1)
    loss = (setup.step or _default_step)(model, setup.batch, sp).detach()
    grads = gradients(model)
    losses = [torch.empty(()) for _ in range(ranks)]
    dist.all_gather(losses, torch.tensor(float(loss)))
    unequal = _unequal_gradients(grads)
    return None if start is None else _judge(start, reference, grads, [float(x) for x in losses], unequal, sp)


def _default_step(model: nn.Module, batch: Any, sp: SequenceParallel) -> Tensor:
    from startrail.integrations.transformers import attach, shard_batch

    attach(model, sp)
    loss: Tensor = model(**shard_batch(sp, **batch)).loss
    loss.backward()
    sum_gradients(model.parameters(), sp.group)
    return loss


# --- the verdict


def _judge(
    start: Setup, reference: Reference, grads: Gradients, losses: list[float], unequal: list[str], sp: SequenceParallel
) -> Verdict:
    world = sp.world
    if unequal and len(unequal) == len(grads):
        remedy = "call startrail.sum_gradients(model.parameters()) after backward"
        return Verdict(False, f"gradients are not summed over ranks: {remedy}")
    if unequal:
        text = f"gradient of {unequal[0]} is not reduced over ranks ({len(unequal)} of {len(grads)} parameters)"
        return Verdict(False, text)
    off, factor = distance(grads, reference.gradients)
    wrong = faults.differing(grads, reference.gradients)
    if off <= EQUAL_TOLERANCE and abs(factor - 1) <= EQUAL_TOLERANCE and not wrong:
        if all(abs(x - reference.loss) > 1e-4 * abs(reference.loss) for x in (sum(losses), losses[0])):
            text = f"gradients are right, but the loss is not: {losses[:4]} on ranks, {reference.loss} on one process"
            return Verdict(False, text)
        results = f"loss {reference.loss:.6f} and {len(grads)} gradients"
        text = f"same: {results} on {world} ranks as on one process; relative difference {off:.1e} in norm"
        return Verdict(True, text)
    if off <= MATCH_TOLERANCE:
        return Verdict(False, factor_text(factor, world))
    for prediction in faults.predictions(start.model, start.batch, start.is_transformers, sp):
        mismatch, factor = distance(grads, prediction.gradients)
        if mismatch <= MATCH_TOLERANCE:
            also = "" if abs(factor - 1) < 1e-3 else f" (and {factor_text(factor, world)})"
            return Verdict(False, prediction.fault + also, prediction.conclusive)
    by_name = {name: float((grads[name] - x).norm()) for name, x in reference.gradients.items()}
    largest = max(wrong or by_name, key=lambda name: by_name[name])
    text = f"{len(wrong)} of {len(grads)} gradients differ from one process, by {off:.1e} of their norm in all"
    return Verdict(False, f"{text}; {largest} differs most. No known fault explains it")


# --- comparing ranks


def _unequal_gradients(grads: Gradients) -> list[str]:
    """Parameters whose gradients differ between ranks."""
    unequal = []
    for name, x in grads.items():
        ends = torch.stack([x, -x])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        spread = float((ends[0] + ends[1]).norm())
        if spread > MATCH_TOLERANCE * float(torch.maximum(ends[0].abs(), ends[1].abs()).norm()):
            unequal.append(name)
    return unequal


def _first_mismatch(digests: dict[str, Tensor]) -> str | None:
    """The first name whose digest differs between ranks."""
    if not digests:
        return None
    mine = torch.stack([x.cpu() for x in digests.values()])
    ends = torch.stack([mine, -mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    wrong = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    return list(digests)[wrong[0]] if wrong else None


# --- batches


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    if isinstance(batch, Mapping):
        return [(str(name), x) for name, x in batch.items() if isinstance(x, Tensor)]
    if isinstance(batch, tuple | list):
        return [(f"entry {index}", x) for index, x in enumerate(batch) if isinstance(x, Tensor)]
    return [("tensor", batch)] if isinstance(batch, Tensor) else []


def _without_padding(setup: Setup, unit: int) -> Setup | None:
    """The batch cut to a multiple of ``unit`` tokens; None if it already is, or if tokens are not in dimension 1."""
    tensors = _tensors(setup.batch)
    lengths = {x.shape[1] for _, x in tensors if x.dim() == 2}
    if len(lengths) != 1 or not isinstance(setup.batch, Mapping) or any(x.dim() != 2 for _, x in tensors):
        return None
    (length,) = lengths
    if length % unit == 0 or length < unit:
        return None
    cut = {name: x[:, : length // unit * unit] if isinstance(x, Tensor) else x for name, x in setup.batch.items()}
    return Setup(setup.model, cut, setup.step)


def _without_dropout(setup: Setup, unit: int) -> Setup | None:
    """The set-up with dropout switched off. None if it uses none."""
    active = [module for module in setup.model.modules() if isinstance(module, nn.Dropout) and module.p]
    for module in active:
        module.p = 0.0
    return setup if active else None

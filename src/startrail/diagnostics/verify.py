"""Is a training set-up the same on many ranks as on one process, and if not, what is wrong with it?

``verify(make)`` calls ``make()`` for a model, a batch, and optionally the user's own step, and runs it on one process
and on local ranks. It compares the loss and every parameter's gradient. Where they differ it looks for the reason: what
a known fault would have given is worked out on one process, and the fault that explains the gradients is named.

A step is ``step(model, batch, sp)``: forward, backward and whatever sums gradients, on this rank; it returns the loss.
Without one, a transformers model is attached to ``sp`` and gets ``shard_batch(sp, **batch)``. One process is the model
itself, ``model(**batch).loss``, for a transformers model; for any other, it is the step on a single rank.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from startrail.comm.sanity import digest
from startrail.diagnostics.faults import (
    EXPLAINED,
    SAME,
    Gradients,
    distance,
    factor_text,
    gradients,
    guesses,
    wrong_ones,
)
from startrail.launch.local import RankError, run_local
from startrail.losses import sum_gradients
from startrail.parallel import SequenceParallel


@dataclass(frozen=True)
class Verdict:
    same: bool
    text: str


@dataclass
class Setup:
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
                f"{type(model).__name__} is no transformers model: return a step(model, batch, sp) as well"
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
    truth = _truth(setup)
    found = _run(make, truth, ranks, plan, deadline)
    if found.same or "padding" in found.text:
        return found
    for name, change in (("padding is counted", _without_padding), ("dropout differs", _without_dropout)):
        other = change(setup, 2 * ranks)
        if other is None or found.text.startswith(("data", "weights", "it does not run")):
            continue

        def changed(change: Callable[[Setup, int], Setup | None] = change) -> tuple[Any, ...]:
            again = change(Setup.of(make), 2 * ranks)
            assert again is not None
            return (again.model, again.batch, *([again.step] if again.step else []))

        if _run(changed, _truth(other), ranks, plan, deadline).same:  # it goes away without
            return Verdict(False, f"{name}: {_WITHOUT[name]}\n{found.text}")
    return found


_WITHOUT = {
    "padding is counted": "with a length that needs none, all is well. Pad labels with -100, as seq.shard_labels does, "
    "and count labels before the sequence is cut",
    "dropout differs": "without dropout, all is well. Ranks draw for their own tokens, as one process would in another "
    "order: nothing is wrong, but set it to 0 to compare",
}


def load(name: str) -> Callable[[], Any]:
    """The function that ``module:function`` or ``file.py:function`` names; ``ValueError`` says what is not there."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} must be MODULE:FUNCTION, for example my.setup:make or setup.py:make")
    sys.path.insert(0, os.getcwd())
    try:
        if place.endswith(".py"):
            found: Any = SimpleNamespace(**runpy.run_path(place))
        else:
            found = import_module(place)
    except (ImportError, OSError) as error:
        raise ValueError(f"{place}: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(getattr(found, function, None)):
        raise ValueError(f"{place} has no function {function!r}")
    made: Callable[[], Any] = getattr(found, function)
    return made


def _truth(setup: Setup) -> tuple[float, Gradients]:
    model = copy.deepcopy(setup.model)
    torch.manual_seed(1)
    if setup.is_transformers:
        loss = model(**{"use_cache": False, **setup.batch}).loss  # with a cache, packed documents see each other
        loss.backward()
    else:
        assert setup.step is not None
        loss = setup.step(model, setup.batch, SequenceParallel("1x1"))
    return float(loss.detach()), gradients(model)


def _run(
    make: Callable[[], Any], truth: tuple[float, Gradients], ranks: int, plan: str | None, deadline: float
) -> Verdict:
    def on_rank(rank: int) -> tuple[bool, str]:
        return _on_rank(make, truth, ranks, plan)

    try:
        verdict = run_local(on_rank, ranks, deadline)[0]
    except RankError as error:
        return Verdict(False, f"it does not run on {ranks} ranks: {str(error).strip().splitlines()[-1]}")
    assert verdict is not None
    return Verdict(*verdict)


def _on_rank(make: Callable[[], Any], truth: tuple[float, Gradients], ranks: int, plan: str | None) -> tuple[bool, str]:
    setup = Setup.of(make)
    sp = SequenceParallel(plan or f"1x{ranks}")
    if text := _differ({name: digest(x) for name, x in _tensors(setup.batch)}):
        return False, f"data differ between ranks: {text} of the batch; all ranks of a sequence need the same batch"
    if text := _differ({name: digest(x) for name, x in setup.model.named_parameters()}):
        return False, f"weights differ between ranks: parameter {text}; load or seed them alike"
    model = setup.model
    pristine = copy.deepcopy(model) if dist.get_rank() == 0 else None
    torch.manual_seed(1)
    step = setup.step or _default_step
    loss = float(step(model, setup.batch, sp).detach())
    grads = gradients(model)
    losses = [torch.empty(()) for _ in range(ranks)]
    dist.all_gather(losses, torch.tensor(loss))
    uneven = _uneven(grads)
    if pristine is None:
        return True, ""
    losses_seen = [float(x) for x in losses]
    text = _fault(setup, pristine, truth, grads, losses_seen, uneven, sp)
    return (True, _same_text(truth, grads, ranks)) if text is None else (False, text)


def _default_step(model: nn.Module, batch: Any, sp: SequenceParallel) -> Tensor:
    from startrail.integrations.transformers import attach, shard_batch

    attach(model, sp)
    loss: Tensor = model(**shard_batch(sp, **batch)).loss
    loss.backward()
    sum_gradients(model.parameters(), sp.group)
    return loss


# --- what is wrong


def _fault(
    setup: Setup,
    pristine: nn.Module,
    truth: tuple[float, Gradients],
    grads: Gradients,
    losses: list[float],
    uneven: list[str],
    sp: SequenceParallel,
) -> str | None:
    """What is wrong, or None."""
    world = sp.world
    if uneven:
        if len(uneven) == len(grads):
            return (
                "gradients are not summed over ranks: call startrail.sum_gradients(model.parameters()) after backward"
            )
        return f"gradient of {uneven[0]} is not reduced over ranks ({len(uneven)} of {len(grads)} parameters)"
    off, factor = distance(grads, truth[1])
    if off <= SAME and abs(factor - 1) <= SAME and not wrong_ones(grads, truth[1]):
        right = [sum(losses), losses[0]]
        if all(abs(x - truth[0]) > 1e-4 * abs(truth[0]) for x in right):
            return f"gradients are right, but the ranks' losses, {losses[:4]}, neither sum up to {truth[0]} nor are it"
        return None
    if off <= EXPLAINED:
        return factor_text(factor, world)
    for name, guess in guesses(pristine, setup.batch, setup.is_transformers, sp):
        off_guess, factor = distance(grads, guess)
        if off_guess <= EXPLAINED:
            more = "" if abs(factor - 1) < 1e-3 else f" (and {factor_text(factor, world)})"
            return name + more
    wrong = wrong_ones(grads, truth[1])
    worst = max(wrong or list(truth[1]), key=lambda name: float((grads[name] - truth[1][name]).norm()))
    return (
        f"{len(wrong)} of {len(grads)} gradients differ from one process, {off:.1e} of their norm in all; the largest "
        f"is {worst}. No known fault explains it"
    )


# --- comparing


def _uneven(grads: Gradients) -> list[str]:
    """Parameters whose gradients are not the same on all ranks."""
    found = []
    for name, x in grads.items():
        ends = torch.stack([x, -x])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        spread = float((ends[0] + ends[1]).norm())
        if spread > EXPLAINED * float(torch.maximum(ends[0].abs(), ends[1].abs()).norm()):
            found.append(name)
    return found


def _differ(digests: dict[str, Tensor]) -> str | None:
    """The first whose digest is not the same on all ranks."""
    if not digests:
        return None
    mine = torch.stack([x.cpu() for x in digests.values()])
    ends = torch.stack([mine, -mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    wrong = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    return list(digests)[wrong[0]] if wrong else None


def _same_text(truth: tuple[float, Gradients], grads: Gradients, ranks: int) -> str:
    off, _ = distance(grads, truth[1])
    what = f"loss {truth[0]:.6f} and {len(grads)} gradients"
    return f"same: {what} on {ranks} ranks as on one process, {off:.1e} apart in norm"


# --- batches


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    if isinstance(batch, Mapping):
        return [(str(name), x) for name, x in batch.items() if isinstance(x, Tensor)]
    if isinstance(batch, tuple | list):
        return [(f"entry {index}", x) for index, x in enumerate(batch) if isinstance(x, Tensor)]
    return [("tensor", batch)] if isinstance(batch, Tensor) else []


def _without_padding(setup: Setup, unit: int) -> Setup | None:
    """The batch cut to a multiple of ``unit`` tokens; None if it is one already, or has no tokens in dimension 1."""
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
    active = [module for module in setup.model.modules() if isinstance(module, nn.Dropout) and module.p]
    for module in active:
        module.p = 0.0
    return setup if active else None

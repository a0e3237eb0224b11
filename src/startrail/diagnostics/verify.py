"""Checks that a training step gives the same results on many ranks as on one process, and names the fault if not.

``verify(make)`` calls ``make()`` for a model, a batch and optionally the user's own step and reference (``setups``),
and runs them on one process and on local ranks. It compares the loss of every rank, the gradient of every parameter and
the buffers. If they differ, it looks for a known fault (``faults``) that gives the same gradients on one process.

Every step runs twice: in the model's own dtype, and in float64, where rounding cannot hide a small difference. A model
that does not run in float64 is compared in float32 or in its own dtype, with a limit that follows that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from startrail._compat import dtype_name
from startrail.agreement.digest import digest
from startrail.agreement.gather import gather_tensors
from startrail.agreement.waits import rank_names
from startrail.diagnostics.compare import FLOAT32_LIMIT, Comparison, factor_of, lost_or_scaled, unexplained
from startrail.diagnostics.faults import attention_text, differing_arguments, factor_text, predictions, unsplit_text
from startrail.diagnostics.observe import Gradients, Observed, RankResults, Results, observe
from startrail.diagnostics.setups import Setup, batch_tensors, map_tensors
from startrail.launch.local import RankError, run_local
from startrail.parallel import SequenceParallel

PRECISE = (torch.float64, torch.float32)  # dtypes in which a step is repeated; the first that works
UNEQUAL = 1e-3  # relative difference between ranks of a gradient that is not summed


@dataclass(frozen=True)
class Verdict:
    """``same``: the results are those of one process. ``text`` names the fault if they are not. ``conclusive``: the
    fault cannot come from padding or dropout, so there is no need to try without them."""

    same: bool
    text: str
    conclusive: bool = False


def verify(make: Callable[[], Any], ranks: int = 4, plan: str | None = None, deadline: float = 300.0) -> Verdict:
    """Run what ``make`` returns on one process and on ``ranks`` local ranks, and compare."""
    torch.set_num_threads(1)  # ranks are forked from this process
    setup = Setup.of(make)
    if plan == "auto":
        _heads(setup)
    verdict, alone = _compare(make, ranks, plan, deadline)
    if verdict.same or verdict.conclusive or alone is None:
        return verdict
    retries: list[tuple[Callable[[Setup], Setup], str]] = []
    if _cut(setup, 2 * ranks) is not None:
        retries.append((lambda setup: _cut(setup, 2 * ranks) or setup, PADDING_COUNTED))
    if alone.native.dropout:
        retries.append((_without_dropout, DROPOUT_DIFFERS))
    for change, text in retries:

        def make_changed(change: Callable[[Setup], Setup] = change) -> tuple[Any, ...]:
            changed = change(Setup.of(make))
            return changed.model, changed.batch, changed.step, changed.reference

        if _compare(make_changed, ranks, plan, deadline)[0].same:
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


def _compare(make: Callable[[], Any], ranks: int, plan: str | None, deadline: float) -> tuple[Verdict, Results | None]:
    """The verdict, and what one process gave if it ran."""

    where = f"{ranks} ranks"
    try:
        found = run_local(lambda rank: run_rank(make, plan or f"1x{ranks}"), ranks, deadline)[0]
        if isinstance(found, str):
            return Verdict(False, found, conclusive=True), None
        assert found is not None
        where = "one process"
        judged = run_local(lambda rank: (judge(make, alone := run_alone(make), found), alone), 1, deadline)[0]
    except RankError as error:
        reason = str(error).strip().splitlines()[-1]
        return Verdict(False, f"it does not run on {where}: {reason}", conclusive=True), None
    assert judged is not None
    return judged


# --- running


def run_alone(make: Callable[[], Any]) -> Results:
    """What the reference gives on one process."""

    def run(setup: Setup) -> Observed:
        return observe(lambda: setup.run_alone(setup.model, setup.batch), setup.model, one_process=True)

    setup = Setup.of(make)
    dtype = _dtype(setup.model)
    native = run(setup)
    if not any(bool(x.any()) for x in native.gradients.values()):
        raise ValueError("on one process all gradients are zero or None: run backward, and do not clear them")
    return Results(native, *_precise(lambda precise: run(Setup.of(make).to(precise)), dtype))


def run_rank(make: Callable[[], Any], plan: str) -> RankResults | str | None:
    """On rank 0, what the step gives on ranks, or a text if ranks start with different data or weights."""
    setup = Setup.of(make)
    sp = _parallel(setup, plan)
    if name := _first_mismatch({name: digest(x) for name, x in batch_tensors(setup.batch)}):
        return f"data differ between ranks: {name} of the batch; all ranks of a sequence need the same batch"
    for kind, tensors in (("parameter", setup.model.named_parameters()), ("buffer", setup.model.named_buffers())):
        if name := _first_mismatch({name: digest(x) for name, x in tensors}):
            return f"weights differ between ranks: {kind} {name}; load the same weights or set the same seed"

    def run(setup: Setup) -> Observed:
        return observe(lambda: setup.run_on_rank(sp), setup.model, one_process=False, sp=sp)

    dtype = _dtype(setup.model)
    native = run(setup)
    names = torch.tensor([x.requires_grad for x in setup.model.parameters()])
    if name := _first_mismatch(dict(zip((n for n, _ in setup.model.named_parameters()), names.long(), strict=True))):
        return f"parameter {name} is trained on some ranks and frozen on others"
    precise, precise_dtype = _precise(lambda precise: run(Setup.of(make).to(precise)), dtype)
    losses = [torch.empty((), dtype=torch.float64) for _ in range(sp.world)]
    dist.all_gather(losses, torch.tensor((precise or native).loss, dtype=torch.float64))
    unequal, alike = _unequal_gradients(found := (precise or native).gradients), _alike_ranks(found)
    given = {name: torch.tensor(each) for name, (_, each) in native.arguments.items()}
    arguments = []
    while given and (name := _first_mismatch(given)):
        arguments.append(name)
        del given[name]
    if dist.get_rank():
        return None
    return RankResults(native, precise, precise_dtype, [float(x) for x in losses], unequal, alike, arguments)


def _parallel(setup: Setup, plan: str) -> SequenceParallel:
    if plan != "auto":
        return SequenceParallel(plan)
    heads, kv_heads = _heads(setup)
    return SequenceParallel("auto", heads=heads, kv_heads=kv_heads)


def _heads(setup: Setup) -> tuple[int, int]:
    """Query and key/value heads, for the planner."""
    config: Any = getattr(setup.model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError("plan auto needs the number of heads, which it reads from a transformers config: name a plan")
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _precise(run: Callable[[torch.dtype], Observed], dtype: torch.dtype) -> tuple[Observed | None, torch.dtype | None]:
    """What a step gives in the first of ``PRECISE`` that is more precise than ``dtype`` and in which it runs on all
    ranks."""
    for precise in PRECISE:
        if torch.finfo(precise).eps >= torch.finfo(dtype).eps:
            break
        try:
            found = run(precise)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            found = None
        ran = torch.tensor(found is not None)
        if dist.is_initialized():
            dist.all_reduce(ran, op=dist.ReduceOp.MIN)
        if found is not None and bool(ran):
            return found, precise
    return None, None


def _dtype(model: nn.Module) -> torch.dtype:
    """The least precise dtype of the parameters."""
    return max((x.dtype for x in model.parameters() if x.is_floating_point()), key=lambda x: torch.finfo(x).eps)


# --- the verdict


def judge(make: Callable[[], Any], alone: Results, ranks: RankResults) -> Verdict:
    """Compare what ranks gave with what one process gave. Runs faults, so needs a process of its own."""
    if alone.precise_dtype != ranks.precise_dtype:  # it runs in float64 on one side only
        alone = Results(alone.native, None, None)
        ranks = RankResults(ranks.native, None, None, ranks.losses, ranks.unequal, ranks.alike, ranks.arguments)
    ours, theirs = ranks.best, alone.best
    if text := _trainable_text(ours.gradients, theirs.gradients) or _not_finite(ours, theirs):
        return Verdict(False, text)
    if ranks.unequal:
        return Verdict(False, _unequal_text(ranks, ours.gradients))
    close = Comparison.of(alone, ranks)
    if not close.wrong:
        return _same(make, alone, ranks, close)
    return Verdict(*_name_fault(make, alone, ranks, close))


def _same(make: Callable[[], Any], alone: Results, ranks: RankResults, close: Comparison) -> Verdict:
    """The verdict if gradients are right."""
    expected, world = alone.best.loss, len(ranks.losses)
    limit = close.loss_limit * max(abs(expected), 1e-30)
    wrong = [rank for rank, loss in enumerate(ranks.losses) if not abs(loss - expected) <= limit]
    if wrong and not abs(sum(ranks.losses) - expected) <= limit:
        values = ", ".join(f"{loss:.6g}" for loss in ranks.losses[:8])
        text = f"gradients are right, but the loss is not: {values} on ranks, {expected:.6g} on one process"
        return Verdict(False, f"{text} (each rank must return the mean loss, or its share of it)", conclusive=True)
    if different := _different(ranks.best.buffers, alone.best.buffers, close.loss_limit):
        text = f"buffer {different[0]} differs from one process's: each rank updates it from its own tokens only"
        return Verdict(False, f"{text}; loss and gradients are the same", conclusive=True)
    parts = [f"loss {expected:.6f}", f"{len(alone.best.gradients)} gradients"]
    parts += [f"{len(alone.best.buffers)} buffers"] if alone.best.buffers else []
    results = f"{', '.join(parts[:-1])} and {parts[-1]}"
    text = f"same: {results} on {world} ranks as on one process; relative difference {close.text}"
    return Verdict(True, "; ".join([text, *_unseen(make, alone, ranks, close)]))


def _unseen(make: Callable[[], Any], alone: Results, ranks: RankResults, close: Comparison) -> list[str]:
    """What the comparison cannot see."""
    unseen = []
    here, there = (dtype_name(each.native.dtype) for each in (ranks, alone))
    if here != there:
        unseen.append(
            f"attention is in {here} on ranks and in {there} on one process (autocast on one side only?), and what "
            "that changes does not show"
        )
    if close.smallest > FLOAT32_LIMIT:
        unseen.append(f"in this dtype, differences below {close.smallest:.0%} of the gradients do not show")
    if limits := Setup.of(make).limits:
        unseen.append(limits)
    return unseen


def _different(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> list[str]:
    """The names of buffers that are not the same."""

    def same(x: Tensor, other: Tensor | None) -> bool:
        if other is None or other.shape != x.shape:
            return False
        largest = float(x.double().abs().amax()) if x.numel() else 0.0
        return torch.allclose(other.double(), x.double(), rtol=limit, atol=limit * largest, equal_nan=True)

    return [name for name, x in theirs.items() if not same(x, ours.get(name))]


def _name_fault(
    make: Callable[[], Any], alone: Results, ranks: RankResults, close: Comparison
) -> tuple[bool, str, bool]:
    ours, theirs, world = ranks.best, alone.best, len(ranks.losses)
    modes = [name for name, mode in theirs.training.items() if mode != ours.training.get(name, mode)]
    if modes:
        here, there = ("eval", "training") if theirs.training[modes[0]] else ("training", "eval")
        text = f"{modes[0] or 'the model'} is in {here} mode on ranks, and in {there} mode on one process"
        return False, f"{text}: dropout and normalization differ", True
    if arguments := differing_arguments(ranks, alone):
        return False, arguments, True
    factor = factor_of(ours.gradients, theirs.gradients, close.limit)
    if factor is not None and abs(factor - 1) > close.limit:
        left = unexplained(ours.gradients, theirs.gradients, theirs.gradients)
        if close.is_explained(left, abs(factor - 1)):
            return False, factor_text(factor, world), False
    dtype = alone.precise_dtype

    def make_again() -> Setup:
        setup = Setup.of(make)
        return setup if dtype is None else setup.to(dtype)

    for prediction in predictions(make_again, theirs, ours):
        factor = close.factor_if_explained(ours.gradients, theirs.gradients, prediction.gradients)
        if factor is not None:
            explained = any(abs(factor / each - 1) < close.match for each in (1.0, prediction.factor))
            also = "" if explained else f" (and {factor_text(factor, world)})"
            return False, prediction.fault + also, True
    if not any(bool(x.any()) for x in ours.gradients.values()):
        return False, "all gradients are zero or None on ranks: do not clear them in the step", True
    if different := _different(ours.constants, theirs.constants, close.loss_limit):
        text = f"buffer {different[0]} differs from one process's, and so do the gradients: the step changes the model"
        return False, text, False
    if partly := lost_or_scaled(ours.gradients, theirs.gradients, close, world):
        return False, partly, False
    count = f"{len(close.wrong)} of {len(theirs.gradients)} gradients differ from one process"
    text = f"{count}, by {close.total:.1e} of their norm; {close.wrong[0]} differs most. No known fault explains it"
    attention = unsplit_text(theirs, ours) or attention_text(theirs, ours)
    return False, text + (f", but attention differs: {attention}" if attention else ""), False


def _trainable_text(ours: Gradients, theirs: Gradients) -> str | None:
    for here, there, where, other in (
        (ours, theirs, "on ranks", "on one process"),
        (theirs, ours, "on one process", "on ranks"),
    ):
        if extra := [name for name in here if name not in there]:
            return (
                f"parameter {extra[0]} is trained {where}, but frozen {other} ({len(extra)} of {len(here)} parameters)"
            )
    return None


def _not_finite(ours: Observed, theirs: Observed) -> str | None:
    bad = [name for name, x in ours.gradients.items() if not bool(x.isfinite().all())]
    if not bad or not all(bool(x.isfinite().all()) for x in theirs.gradients.values()):
        return None
    text = f"gradients of {len(bad)} parameters are infinite or NaN on ranks, first {bad[0]}"
    return f"{text}: a rank without labels may divide by zero (startrail.global_mean does not)"


def _unequal_text(ranks: RankResults, grads: Gradients) -> str:
    unequal, alike = ranks.unequal, ranks.alike
    if len(unequal) == len([x for x in grads.values() if bool(x.any())]):
        remedy = "call startrail.sum_gradients(model.parameters()) after backward"
        if len(alike) == len(ranks.losses):
            return f"gradients are not summed over ranks: {remedy}"
        remedy = "let it reduce over all ranks, or call startrail.sum_gradients(model.parameters(), sp.group) as well"
        reduced = " and over ".join(map(rank_names, alike))
        return (
            f"gradients are reduced over {reduced} only, but all of them share a sequence: DDP or FSDP over the "
            f"data-parallel group alone does this; {remedy}"
        )
    return f"gradient of {unequal[0]} is not reduced over ranks ({len(unequal)} of {len(grads)} parameters)"


# --- comparing ranks


def _unequal_gradients(grads: Gradients) -> list[str]:
    """Parameters whose gradients differ between ranks."""
    unequal = []
    for name, x in grads.items():
        ends = torch.stack([x, -x])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        spread = float((ends[0] + ends[1]).norm())
        if spread > UNEQUAL * float(torch.maximum(ends[0].abs(), ends[1].abs()).norm()):
            unequal.append(name)
    return unequal


def _alike_ranks(grads: Gradients) -> list[list[int]]:
    """The ranks, those with the same gradients together."""
    x = torch.cat([x.flatten() for x in grads.values()])
    weights = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)
    ranks = gather_tensors(torch.stack([x.norm(), x @ weights]), None, "comparing gradients")
    limit = UNEQUAL * max(float(of_rank[0]) for of_rank in ranks)
    alike: list[list[int]] = []
    for rank, of_rank in enumerate(ranks):
        same = next((each for each in alike if float((ranks[each[0]] - of_rank).norm()) <= limit), None)
        alike.append([rank]) if same is None else same.append(rank)
    return alike


def _first_mismatch(digests: dict[str, Tensor]) -> str | None:
    """The first name whose digest differs between ranks."""
    if not digests:
        return None
    mine = torch.stack([x.cpu() for x in digests.values()])
    ends = torch.stack([mine, -mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    wrong = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    return list(digests)[wrong[0]] if wrong else None


# --- trying without padding and without dropout


def _cut(setup: Setup, unit: int) -> Setup | None:
    """The batch cut to a multiple of ``unit`` tokens; None if it already is, or if tokens are not in dimension 1."""
    tensors = [x for _, x in batch_tensors(setup.batch)]
    lengths = {x.shape[1] for x in tensors if x.dim() > 1}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    if length % unit == 0 or length < unit:
        return None
    batch = map_tensors(setup.batch, lambda x: x[:, : length // unit * unit] if x.dim() > 1 else x)
    return Setup(setup.model, batch, setup.step, setup.reference)


def _without_dropout(setup: Setup) -> Setup:
    """The set-up with dropout switched off."""
    step, reference = setup.step, setup.reference

    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with _NoDropout():
                return function(*arguments)

        return run

    for module in setup.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Setup(setup.model, setup.batch, step and quiet(step), reference and quiet(reference))


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.dropout:
            return args[0] if args else (kwargs or {})["input"]
        if function is F.scaled_dot_product_attention and kwargs and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **(kwargs or {}))

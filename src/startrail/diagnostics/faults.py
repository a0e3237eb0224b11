"""Known faults of sequence-parallel training, and the gradients that each of them gives: of attention, labels,
positions and losses; of layers that take a shard for the whole sequence; of states and halos (``carried``); of what
every rank has in full and counts.

A fault's gradients are computed on one process, with the model, the batch or torch's own functions changed as the fault
changes them. If they match the observed gradients up to a factor, that is the fault. To add a fault, yield its
``FaultPrediction``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from startrail._compat import tree_leaves
from startrail.diagnostics.carried import carrying, faults_of
from startrail.diagnostics.masks import mask_difference
from startrail.diagnostics.observe import (
    AttentionRecord,
    Gradients,
    Observed,
    RankResults,
    Results,
    changed_attention,
    gradients,
)
from startrail.diagnostics.setups import Setup, map_tensors
from startrail.geometry.layout import Layout
from startrail.integrations.splitting.calls import TorchCall
from startrail.losses import chunked_cross_entropy

IGNORE = -100
LABELS_LOST = "labels are lost at the edges of shards: shift labels before sharding"
AVERAGED = "losses are averaged on each rank: sum them, and divide by the number of all labels (startrail.global_mean)"
LOCAL_POSITIONS = "positions are local: pass seq.positions() to the model"
Make = Callable[[], Setup]


class FaultPrediction(NamedTuple):
    """The gradients that one process has with a fault. ``factor``: another multiple of them that the same fault
    gives."""

    fault: str
    gradients: Gradients
    factor: float = 1.0


def factor_text(factor: float, world: int) -> str:
    """What went wrong if all gradients are ``factor`` times those of one process."""
    if abs(factor * world - 1) < 1e-3:
        return (
            f"gradients are 1/{world} of one process's: they are averaged over ranks (DDP and FSDP do this); multiply "
            "the loss by startrail.gradient_factor(model)"
        )
    if abs(factor / world - 1) < 1e-3:
        return f"gradients are {world} times one process's: they are summed twice, or every rank counts all tokens"
    return f"gradients are {factor:.6g} times one process's: the loss is not divided by the number of all labels"


def attention_text(alone: Observed, ranks: Observed) -> str | None:
    """How attention on ranks differs from one process, in words; None if it does not, or if that is not known."""
    calls = _calls_on_ranks(alone, ranks)
    texts: list[str] = []
    for ours, theirs in zip(calls, alone.attention, strict=False):
        if ours.visible is not None and theirs.visible is not None:
            texts.append(mask_difference(ours.visible, theirs.visible) or "")
        if abs(ours.scale / theirs.scale - 1) > 1e-6:
            texts.append(f"attention's scale is {ours.scale:.4g} on ranks, {theirs.scale:.4g} on one process")
        if ours.softcap != theirs.softcap:
            texts.append(f"attention's softcap is {ours.softcap} on ranks, {theirs.softcap} on one process")
        if ours.sinks != theirs.sinks:
            texts.append(
                "attention has sinks on ranks, but not on one process" if ours.sinks else "attention sinks are ignored"
            )
    return "; ".join(dict.fromkeys(text for text in texts if text)) or None


def _calls_on_ranks(alone: Observed, ranks: Observed) -> list[AttentionRecord]:
    """The calls on ranks that correspond to those of one process. Layers that are recomputed call again, later."""
    return ranks.attention[: len(alone.attention)] if len(ranks.attention) >= len(alone.attention) else []


def _is_alike(ours: AttentionRecord, theirs: AttentionRecord) -> bool:
    """True if both records say which keys each query sees, among equally many tokens. Rows of a batch may be joined on
    ranks."""
    return (
        ours.visible is not None and theirs.visible is not None and ours.visible.shape[1:] == theirs.visible.shape[1:]
    )


def predictions(make: Make, alone: Observed, ranks: Observed) -> Iterator[FaultPrediction]:
    """What one process gives with each known fault. ``make`` makes the set-up afresh."""
    text = attention_text(alone, ranks)
    calls = _calls_on_ranks(alone, ranks)
    known = bool(calls) and all(_is_alike(*pair) for pair in zip(calls, alone.attention, strict=True))
    if text is not None and known:
        yield _predict(make, text, Changes(calls=calls))
    if ranks.layout is not None:
        layout = ranks.layout
        shards = shards_of(layout)
        positions = torch.zeros(layout.length, dtype=torch.long)
        for shard in shards:
            positions[shard] = torch.arange(len(shard))
        yield _predict(make, LOCAL_POSITIONS, Changes(positions=positions, calls=calls if known else None))
        yield _predict(make, LABELS_LOST, Changes(shards=shards, cut=True))
        if unsplit := unsplit_text(alone, ranks):
            separate = _separate_calls(alone, ranks, shards)
            if separate is not None:
                yield _predict(make, unsplit, Changes(calls=separate))
        yield from _layers_on_shards(make, shards)
        for fault, scans, convolutions in faults_of(alone.called):
            changes = Changes(carried=carrying(shards, scans, convolutions))
            yield _predict(make, fault, changes)
            if text is not None and known:
                changes = Changes(calls=calls, carried=carrying(shards, scans, convolutions))
                yield _predict(make, f"{text}; {fault}", changes)
        both = f"{LABELS_LOST}; losses are averaged: sum them"
        yield _predict(make, both, Changes(shards=shards, cut=True, mean=True))
        yield _predict(make, AVERAGED, Changes(shards=shards, mean=True))
        yield from _other_orders(make, layout, calls if known else None)
        yield from _counted_per_rank(make, alone, ranks)
    setup = make()
    if setup.is_transformers and setup.reference is None:
        yield from _changed_batches(make, setup.batch, None if ranks.layout is None else positions)
        yield from _changed_models(make)


def shards_of(layout: Layout) -> list[Tensor]:
    """The tokens of each rank."""
    runs = [layout.runs(rank) for rank in range(layout.world)]
    return [torch.tensor([start + i for start, count in own for i in range(count)], dtype=torch.long) for own in runs]


def _other_orders(make: Make, layout: Layout, calls: list[AttentionRecord] | None) -> Iterator[FaultPrediction]:
    """Ranks hold other tokens than attention takes them for."""
    length, world = layout.length, layout.world
    in_turn = torch.cat([torch.arange(rank, length, world) for rank in range(world)])
    slots = torch.cat(shards_of(layout))
    for taken, order in (("a contiguous slice", torch.arange(length)), (f"every {world}th token", in_turn)):
        fault = f"tokens are in another order: ranks take {taken} of the batch; pass all of it to seq.shard"
        for places in (torch.arange(length), slots):  # the batch was reordered and then sharded, or just cut
            tokens = torch.empty_like(order).index_copy(0, places, order)
            if not torch.equal(tokens, torch.arange(length)):
                yield _predict(lambda tokens=tokens: _reordered(make(), tokens), fault, Changes())  # type: ignore[misc]
        position = torch.empty_like(order).index_copy(0, order, slots)  # of each token; its label is right
        if calls and not torch.equal(position, torch.arange(length)):
            seen = [one._replace(visible=_reorder(_reorder(one.visible, position, 1), position, 2)) for one in calls]
            yield _predict(make, fault, Changes(calls=seen, positions=position))


def _reordered(setup: Setup, tokens: Tensor) -> Setup:
    return replace(setup, batch=map_tensors(setup.batch, lambda x: _reorder(x, tokens, 1 if x.dim() > 1 else 0)))


def _reorder(x: Tensor | None, tokens: Tensor, dim: int) -> Tensor:
    """``x`` with its tokens in this order, if it has as many in ``dim``."""
    assert x is not None
    return x.index_select(dim, tokens) if x.dim() > dim and x.shape[dim] == len(tokens) else x


def _predict(make: Make, fault: str, changes: Changes) -> FaultPrediction:
    setup = make()
    model = setup.model
    changes.own = {id(x) for x in (*model.parameters(), *model.buffers())}
    torch.manual_seed(1)
    with changes, changed_attention(changes.attend) if changes.calls else nullcontext(), changes.carried:
        setup.run_alone(model, setup.batch)
    return FaultPrediction(fault, gradients(model), changes.factor)


# --- changes of torch's functions


class Changes(TorchFunctionMode):
    """Inside, one process computes as ranks with a fault do.

    ``calls``: attention as these calls did it. ``positions``: positions 0, 1, ... are these instead. ``cut``: labels
    are shifted within ``shards``. ``mean``: losses are averaged over each shard, then over shards. ``carried``: changes
    recurrences and convolutions. ``own`` are the ids of the model's parameters and buffers, which may be tables of
    positions.
    """

    def __init__(
        self, calls: list[AttentionRecord] | None = None, positions: Tensor | None = None,
        shards: list[Tensor] | None = None, cut: bool = False, mean: bool = False,
        carried: AbstractContextManager[None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.calls, self.own, self.factor, self.carried = calls, set[int](), 1.0, carried or nullcontext()
        self._positions, self._shards, self._cut, self._mean = positions, shards, cut, mean
        self._next_call = itertools.cycle(calls or ())

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self.calls and function is F.scaled_dot_product_attention:
            call = TorchCall.of(*args, **options)
            if call.q.dim() == 4:
                return _attend(call.q, call.k, call.v, next(self._next_call))
        if self._shards is not None and function in _LOSSES:
            return self._loss(function, args, options)
        result = function(*args, **options)
        if self._positions is not None and function is torch.arange and not _is_ours(sys._getframe(1)):
            length = len(self._positions)
            if len(result) == length and int(result[0]) == 0 and int(result[-1]) == length - 1:
                return self._positions.to(result)
        if self._positions is not None and function is Tensor.__getitem__ and id(args[0]) in self.own:
            return self._rows(args[1], result)
        return result

    def _rows(self, index: Any, result: Tensor) -> Tensor:
        """The first rows of a table of positions, in the order of local positions."""
        assert self._positions is not None
        index = index if isinstance(index, tuple) else (index,)
        for dim, each in enumerate(index):
            if isinstance(each, slice) and each.start in (None, 0) and each.stop == len(self._positions):
                return result.index_select(dim, self._positions)
        return result

    def attend(self, original: Any, sequence: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """In place of ``Sequence.attention``."""
        if options.get("return_lse") or options.get("return_largest"):
            return original(sequence, q, k, v, **options)
        return _attend(q, k, v, next(self._next_call), options.get("sinks"))

    def _loss(self, function: Any, args: Any, options: dict[str, Any]) -> Any:
        """A loss with the changed labels and weights. Without labels, only weights change."""
        if function is chunked_cross_entropy:
            hidden, weight, labels = args[:3]
            logits = hidden.flatten(0, -2) @ weight.T
            total = self._loss(F.cross_entropy, (logits, labels.flatten()), {"reduction": "sum"})
            return total, (labels != IGNORE).sum()
        reduction, others = options.get("reduction", "mean"), {k: x for k, x in options.items() if k != "reduction"}
        is_labels = function in (F.cross_entropy, F.nll_loss)
        source, target, *rest = list(args) + [others.pop(name) for name in ("input", "target") if name in others]
        ignore = others.get("ignore_index", IGNORE)
        assert self._shards is not None
        length = sum(map(len, self._shards))
        changed = self._cut_labels(target, length, ignore) if self._cut and is_labels else target
        losses = function(source, changed, *rest, **others, reduction="none")
        counted = changed != ignore if is_labels else torch.ones_like(losses, dtype=torch.bool)
        before = int((target != ignore).sum()) if is_labels else losses.numel()
        if self._mean:
            losses = losses * self._weights(counted, length)
        elif is_labels:
            self.factor = before / max(1, int(counted.sum()))
        return losses if reduction == "none" else losses.sum() / (before if reduction == "mean" else 1)

    def _cut_labels(self, target: Tensor, length: int, ignore: int) -> Tensor:
        """Labels as they are if each shard is shifted by itself: its last token has none."""
        rows = _by_token(target, length)
        if rows is None:
            return target
        whole = F.pad(rows, (0, length - rows.shape[1]), value=ignore)
        cut = torch.full_like(whole, ignore)
        for shard in self._shards or ():
            cut[:, shard[:-1]] = whole[:, shard[1:] - 1]
        return cut[:, : rows.shape[1]].reshape(target.shape)

    def _weights(self, counted: Tensor, length: int) -> Tensor:
        """The weight of each loss in the mean of the shards' means, relative to that in the mean of all."""
        rows = _by_token(counted, length)
        if rows is None:
            return torch.ones_like(counted, dtype=torch.float32)
        weights = torch.zeros(rows.shape, dtype=torch.float64)
        shards = [shard[shard < rows.shape[1]] for shard in self._shards or ()]
        for shard in shards:
            weights[:, shard] = float(counted.sum()) / len(shards) / max(1.0, float(rows[:, shard].sum()))
        return weights.reshape(counted.shape)


def _is_ours(caller: FrameType) -> bool:
    """True in code of ours that counts something other than positions."""
    name: str = caller.f_globals.get("__name__", "")
    return name.startswith(("startrail.hybrid", "startrail.engine", "startrail.kernels"))


_LOSSES: tuple[Any, ...] = (
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy_with_logits, chunked_cross_entropy,
)  # fmt: skip


def _by_token(x: Tensor, length: int) -> Tensor | None:
    """``x`` with tokens in dimension 1, all of them or all but the last; None if there is no such dimension."""
    if x.dim() > 1 and x.shape[1] in (length, length - 1):
        return x
    for tokens in (length, length - 1):
        if x.dim() and tokens and len(x) % tokens == 0:
            return x.reshape(-1, tokens, *x.shape[1:])
    return None


def _attend(q: Tensor, k: Tensor, v: Tensor, record: AttentionRecord, sinks: Tensor | None = None) -> Tensor:
    """Dense attention as ``record`` describes it."""
    assert record.visible is not None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.mT) * record.scale
    if record.softcap is not None:
        logits = record.softcap * torch.tanh(logits / record.softcap)
    if record.counts is not None:
        logits = logits + record.counts.to(logits).log()
    logits = logits.masked_fill(~record.visible.unsqueeze(1), float("-inf"))
    if sinks is not None and record.sinks:
        extra = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, extra], -1).softmax(-1)[..., :-1] @ v
    hidden = ~record.visible.any(-1).view(-1, 1, logits.shape[2], 1)
    return logits.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0) @ v


# --- changes of transformers models and their batches


def _changed_batches(make: Make, batch: Any, positions: Tensor | None) -> Iterator[FaultPrediction]:
    """Faults in which a model gets other arguments."""
    if "input_ids" not in batch:
        return

    def predict(fault: str, changed: dict[str, Any]) -> FaultPrediction:
        return _predict(lambda: Setup(make().model, changed), fault, Changes())

    ids = batch["input_ids"]
    if "attention_mask" in batch:
        unmasked = {name: x for name, x in batch.items() if name != "attention_mask"}
        yield predict("padding is attended to: the attention mask is lost", unmasked)
    if "position_ids" in batch and "attention_mask" not in batch:
        leaking = {**batch, "attention_mask": torch.ones_like(ids)}
        yield predict("documents see each other: the packing in position_ids is lost", leaking)
    if positions is not None and len(positions) == ids.shape[1]:
        mask = batch.get("attention_mask", torch.ones_like(ids))
        yield predict(LOCAL_POSITIONS, {**batch, "position_ids": positions.expand_as(ids), "attention_mask": mask})


def _changed_models(make: Make) -> Iterator[FaultPrediction]:
    setup = make()
    model: Any = setup.model
    if getattr(model.config, "sliding_window", None):
        for module in model.modules():
            if getattr(getattr(module, "config", None), "sliding_window", None):
                module.config.sliding_window = 10**6
            if getattr(module, "sliding_window", None):
                module.sliding_window = 10**6
        yield _predict(lambda: setup, "the sliding window is ignored", Changes())
    if any("sinks" in name for name, _ in model.named_parameters()):
        setup = make()
        for name, x in setup.model.named_parameters():
            if "sinks" in name:
                x.data.fill_(-1e4)
        yield _predict(lambda: setup, "attention sinks are ignored", Changes())


# --- layers that take a shard for the whole sequence, and arguments that differ


def differing_arguments(ranks: RankResults, alone: Results) -> str | None:
    """Which whole arguments of the model differ between ranks. Those that are sharded have fewer tokens than on one
    process, and may differ."""
    whole = {name: shape for name, (shape, _) in alone.native.arguments.items()}
    for name in ranks.arguments:
        if ranks.native.arguments[name][0] == whole.get(name):
            what = "timestep" if "time" in name else "noise or data"
            return (
                f"{what} differs between ranks of a sequence: {name} of the model; draw it from a generator that is "
                "given the same seed on all of them"
            )
    return None


def unsplit_text(alone: Observed, ranks: Observed) -> str | None:
    """Which layers attended to a rank's own tokens only, in words; None if none did."""
    unsplit = [one for one in ranks.attention if one.unsplit is not None]
    whole = max((one.visible.shape[-1] for one in alone.attention if one.visible is not None), default=0)
    unsplit = [one for one in unsplit if one.tokens < whole]
    if not unsplit:
        return None
    layers = ", ".join(dict.fromkeys(str(one.unsplit) for one in unsplit[:3]))
    sent = sum(one.bytes for one in ranks.attention if one.unsplit is None)
    expected = sent + sum(one.bytes for one in unsplit)
    return (
        f"attention was not split in {len(unsplit)} of {len(ranks.attention)} calls ({layers}): each rank attended to "
        f"its own tokens only, and sent {sent:,} bytes instead of {expected:,}"
    )


def _separate_calls(alone: Observed, ranks: Observed, shards: list[Tensor]) -> list[AttentionRecord] | None:
    """One process's attention calls, in which those that were not split see only their own shard. None if the calls on
    ranks cannot be matched to them."""
    if len(alone.attention) != len(ranks.attention) or any(one.visible is None for one in alone.attention):
        return None
    number = torch.zeros(sum(map(len, shards)), dtype=torch.long)
    for index, shard in enumerate(shards):
        number[shard] = index
    same = number.unsqueeze(1) == number
    calls = []
    for theirs, ours in zip(alone.attention, ranks.attention, strict=True):
        assert theirs.visible is not None
        if theirs.visible.shape[-1] != len(number):
            return None
        calls.append(theirs if ours.unsplit is None else theirs._replace(visible=theirs.visible & same))
    return calls


def _layers_on_shards(make: Make, shards: list[Tensor]) -> Iterator[FaultPrediction]:
    """A layer that carries state from token to token restarts on each shard."""
    for name, module in make().model.named_modules():
        recurrent = isinstance(module, nn.RNNBase)
        if not recurrent and not (isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1):
            continue

        def on_shards(name: str = name) -> Setup:
            setup = make()
            module: Any = setup.model.get_submodule(name)
            module._startrail_shards = shards
            module.forward = MethodType(_run_shards, module)
            return setup

        kind = "recurrent layer" if recurrent else "convolution over tokens"
        state = "its state restarts" if recurrent else "its edges are padded"
        remedy = "gather its tokens with seq.unshard and split its results with seq.shard"
        yield _predict(on_shards, f"{kind} {name} ran on shards: {state} on every rank; {remedy}", Changes())


def _run_shards(module: Any, x: Tensor, *others: Any) -> Any:
    """``forward`` on each shard separately."""
    recurrent = isinstance(module, nn.RNNBase)
    dim = (1 if module.batch_first else 0) if recurrent else x.dim() - 1
    shards = [shard for shard in module._startrail_shards if len(shard)]
    if x.shape[dim] != sum(map(len, shards)):
        return type(module).forward(module, x, *others)
    results = [type(module).forward(module, x.index_select(dim, shard), *others) for shard in shards]
    rows = torch.cat([result[0] if recurrent else result for result in results], dim)
    ordered = rows.index_select(dim, torch.cat(shards).argsort())
    return (ordered, results[-1][1]) if recurrent else ordered


# --- what every rank has in full

MAX_RESULTS = 32  # of modules that are tried
IN_FULL = "what every rank has in full, such as text tokens, is"


class WholeRows(NamedTuple):
    """Rows of a module's result that every rank has in full: the first or last ``whole`` of ``size`` in ``dim``."""

    leaf: int
    dim: int
    whole: int
    size: int
    first: bool

    def __str__(self) -> str:
        place = "first" if self.first else "last"
        return "" if self.whole == self.size else f" for its {place} {self.whole} of {self.size} tokens"


def _counted_per_rank(make: Make, alone: Observed, ranks: Observed) -> Iterator[FaultPrediction]:
    """Rows that every rank has in full count once per rank: in the loss, or as keys. A loss that is divided by the
    number of tokens on all ranks gives another multiple of the same gradients."""
    assert ranks.layout is not None
    world, found = ranks.layout.world, {}
    if world == 1 or not any(shapes != alone.results.get(name) for name, shapes in ranks.results.items()):
        return
    for name, shapes in alone.results.items():
        if rows := _whole_rows(shapes, ranks.results.get(name, []), world):
            found[name] = rows
    length = max((one.visible.shape[-1] for one in alone.attention if one.visible is not None), default=0)
    extra, rest = divmod(ranks.layout.length - length, world - 1)
    known = all(one.visible is not None for one in alone.attention)
    text = (
        f"{IN_FULL} in the sequence once per rank: attention runs over {ranks.layout.length} tokens instead of "
        f"{length}, {extra} of them {world} times; shard these as well"
    )
    if known and not rest and 0 < extra < length:
        results = [[], *([each] for each in found.get("", []))]
        for first, rows in itertools.product((True, False), results):
            counts = _factors(length, extra, first, world)
            calls = [one._replace(counts=counts) if _is_over(one, length) else one for one in alone.attention]
            predicted = _predict(partial(_counting, make, "", rows, world), text, Changes(calls=calls))
            yield predicted._replace(factor=length / ranks.layout.length)
    for name, each in list(reversed([(name, each) for name, rows in found.items() for each in rows]))[:MAX_RESULTS]:
        factor = length / (length + (world - 1) * each.whole) if length else 1.0
        text = (
            f"{IN_FULL} counted once per rank: the gradient of the result of {name or 'the model'}{each} is {world} "
            "times one process's; let one rank count it, or divide it by the number of ranks"
        )
        predicted = _predict(partial(_counting, make, name, [each], world), text, Changes())
        yield predicted._replace(factor=factor)


def _factors(size: int, count: int, first: bool, factor: float) -> Tensor:
    """``factor`` for the first or the last ``count`` of ``size`` rows, 1 for the others."""
    factors = torch.ones(size)
    factors[slice(0, count) if first else slice(size - count, size)] = factor
    return factors


def _is_over(one: AttentionRecord, length: int) -> bool:
    return one.visible is not None and one.visible.shape[-1] == length


def _whole_rows(alone: list[tuple[int, ...]], ranks: list[tuple[int, ...]], world: int) -> list[WholeRows]:
    """The rows of a module's results that each of ``world`` ranks may have in full: shares of the others and all of
    these make up what a rank has.

    >>> _whole_rows([(1, 28, 8)], [(1, 10, 8)], 4)
    [WholeRows(leaf=0, dim=1, whole=4, size=28, first=True), WholeRows(leaf=0, dim=1, whole=4, size=28, first=False)]
    >>> _whole_rows([(1, 28, 8)], [(1, 7, 8)], 4)
    []
    """
    found = []
    for leaf, (whole, local) in enumerate(zip(alone, ranks, strict=False)):
        different = [dim for dim, sizes in enumerate(zip(whole, local, strict=False)) if sizes[0] != sizes[1]]
        if len(whole) != len(local) or not whole or len(different) > 1:
            continue
        dim = different[0] if different else int(len(whole) > 2)
        count, rest = divmod(world * local[dim] - whole[dim], world - 1)
        if not rest and 0 < count <= whole[dim]:
            ends = (True,) if count == whole[dim] else (True, False)
            found += [WholeRows(leaf, dim, count, whole[dim], first) for first in ends]
    return found


def _counting(make: Make, name: str, rows: list[WholeRows], world: int) -> Setup:
    """The set-up with a module whose results count more in these rows."""
    setup = make()

    def scale(gradient: Tensor, each: WholeRows) -> Tensor:
        factors = _factors(each.size, each.whole, each.first, world).to(gradient)
        return gradient * factors.view([-1 if dim == each.dim else 1 for dim in range(gradient.dim())])

    def count(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        for each in rows:
            x = tensors[each.leaf] if each.leaf < len(tensors) else None
            if x is not None and x.requires_grad and x.shape[each.dim] == each.size:
                x.register_hook(partial(scale, each=each))

    setup.model.get_submodule(name).register_forward_hook(count)
    return setup

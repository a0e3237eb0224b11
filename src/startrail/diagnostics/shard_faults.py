"""Faults of layers that ran on each rank's shard as if it were the whole sequence, of arguments that differ between
ranks although each should have the whole, and of text that every rank has in full and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from startrail._compat import tree_leaves
from startrail.diagnostics.observe import AttentionRecord, Observed, RankResults, Results
from startrail.diagnostics.setups import Setup


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


def separate_calls(alone: Observed, ranks: Observed, shards: list[Tensor]) -> list[AttentionRecord] | None:
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


def recurrent_layers(make: Callable[[], Setup], shards: list[Tensor]) -> Iterator[tuple[str, Callable[[], Setup]]]:
    """For each layer that carries state from token to token, the fault and a set-up in which it restarts on each
    shard."""
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
        yield f"{kind} {name} ran on shards: {state} on every rank; {remedy}", on_shards


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


class Counting(NamedTuple):
    """A fault, a set-up that counts as it does, its attention calls if those count so as well, and another multiple of
    the gradients that it gives: that of a loss which is divided by the number of tokens on all ranks."""

    fault: str
    make: Callable[[], Setup]
    calls: list[AttentionRecord] | None
    factor: float


def counted_per_rank(make: Callable[[], Setup], alone: Observed, ranks: Observed) -> Iterator[Counting]:
    """Faults in which rows that every rank has in full count once per rank: in the loss, or as keys."""
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
    repeated = known and not rest and 0 < extra < length
    for first, rows in product((True, False), ([], *([each] for each in found.get("", [])))) if repeated else ():
        counts = _factors(length, extra, first, world)
        calls = [one._replace(counts=counts) if _is_over(one, length) else one for one in alone.attention]
        yield Counting(text, partial(_counting, make, "", rows, world), calls, length / ranks.layout.length)
    for name, each in list(reversed([(name, each) for name, rows in found.items() for each in rows]))[:MAX_RESULTS]:
        factor = length / (length + (world - 1) * each.whole) if length else 1.0
        text = (
            f"{IN_FULL} counted once per rank: the gradient of the result of {name or 'the model'}{each} is {world} "
            "times one process's; let one rank count it, or divide it by the number of ranks"
        )
        yield Counting(text, partial(_counting, make, name, [each], world), None, factor)


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


def _counting(make: Callable[[], Setup], name: str, rows: list[WholeRows], world: int) -> Setup:
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

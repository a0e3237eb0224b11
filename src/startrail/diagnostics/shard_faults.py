"""Faults of layers that ran on each rank's shard as if it were the whole sequence, and of arguments that differ between
ranks although each should have the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

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

"""MLPs in tiles of tokens: only one tile's intermediate activations exist at a time."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from startrail.checkpoint import in_chunks
from startrail.integrations import recurrent
from startrail.integrations.probe import is_attention


def tile_mlps(model: PreTrainedModel, layers: nn.Module, tokens: int) -> None:
    """Make every MLP of ``layers`` run on ``tokens`` tokens at a time. ``untile_mlps`` undoes it."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tile_mlp={tokens!r} must be the number of tokens of a tile, at least 1")
    found = _mlps(layers)
    if not found:
        raise ValueError(f"tile_mlp: found no MLP next to an attention module in {type(model).__name__}")
    for module in found:
        module._startrail_tile = tokens
        module.forward = MethodType(_forward_in_tiles, module)


def untile_mlps(model: PreTrainedModel) -> None:
    for module in model.modules():
        if module.__dict__.pop("_startrail_tile", None) is not None:
            del module.forward


def _mlps(layers: nn.Module) -> list[Any]:
    """Modules with at least two weight matrices that stand next to an attention module or a recurrence."""
    found = []
    for parent in layers.modules():
        children = list(parent.children())
        if any(map(_mixes, children)):
            found += [child for child in children if not _has_mixing(child) and _num_matrices(child) > 1]
    return found


def _mixes(module: nn.Module) -> bool:
    return is_attention(module) or recurrent.is_layer(module)


def _has_mixing(module: nn.Module) -> bool:
    return any(map(_mixes, module.modules()))


def _num_matrices(module: nn.Module) -> int:
    return sum(x.dim() > 1 for x in module.parameters())


def _forward_in_tiles(module: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
    original = partial(type(module).forward, module)
    if torch.compiler.is_compiling():
        return original(hidden_states, *arguments, **options)
    name, width, others = module._startrail_name, hidden_states.shape[-1], None
    if hidden_states.dim() != 3 or arguments or options:
        raise ValueError(f"tile_mlp: {name} does not take just hidden states (batch, tokens, width)")

    def run(x: Tensor) -> Tensor:
        nonlocal others
        result = original(x)
        out, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(out, Tensor) or out.numel() != x.numel() or out.shape[-1] != width:
            shown = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"tile_mlp: {name} returns {shown}, expected one like its input {tuple(x.shape)}")
        others = len(rest) if isinstance(result, tuple) else None  # a router's scores, which the layer drops
        return out.view(x.shape)

    flat = hidden_states.flatten(0, 1).unsqueeze(0)
    out = in_chunks(module, run, flat, chunk=module._startrail_tile).view(hidden_states.shape)
    return out if others is None else (out, *(None,) * others)

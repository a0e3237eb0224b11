"""Known faults of sequence-parallel training, and the gradients that each of them gives.

A fault's gradients are computed on one process, with the model and the batch changed as the fault changes them. If they
match the observed gradients up to a factor, that is the fault. To add a fault, yield its ``FaultPrediction``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.engine.batch import positions_of
from startrail.parallel import SequenceParallel

EQUAL_TOLERANCE = 2e-5  # relative, in the norm of all gradients together; a single one may be off by ten times that
MATCH_TOLERANCE = 1e-3  # relative, of gradients that a fault explains
IGNORE = -100
Gradients = dict[str, Tensor]


class FaultPrediction(NamedTuple):
    """The gradients that one process has with a fault. ``conclusive``: see ``verify.Verdict``."""

    fault: str
    gradients: Gradients
    conclusive: bool = False


def gradients(model: nn.Module) -> Gradients:
    """The gradient of every trainable parameter, whole and in float64."""
    result = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            grad: Any = torch.zeros_like(x) if x.grad is None else x.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            result[name.removeprefix("module.")] = grad.detach().double()
    return result


def distance(actual: Gradients, expected: Gradients) -> tuple[float, float]:
    """The relative distance from ``actual`` to the nearest multiple of ``expected``, and that multiple."""
    a, b = (torch.cat([x[name].flatten() for name in expected]) for x in (actual, expected))
    factor = float(a @ b / (b @ b).clamp(min=1e-300))
    return float((a - factor * b).norm() / a.norm().clamp(min=1e-300)), factor


def differing(actual: Gradients, expected: Gradients) -> list[str]:
    """The parameters whose gradients differ by more than rounding."""
    least = max(float(x.norm()) for x in expected.values()) * 1e-4  # some gradients are zero except for rounding
    return [
        name
        for name, x in expected.items()
        if not float((actual[name] - x).norm()) <= 10 * EQUAL_TOLERANCE * max(float(x.norm()), least)
    ]


def factor_text(factor: float, world: int) -> str:
    """What went wrong if all gradients are ``factor`` times those of one process."""
    if abs(factor * world - 1) < 1e-3:
        return (
            f"gradients are 1/{world} of one process's: they are averaged over ranks (DDP and FSDP do this); multiply "
            "the loss by startrail.gradient_factor(model)"
        )
    if abs(factor / world - 1) < 1e-3:
        return f"gradients are {world} times one process's: they are summed twice, or every rank counts all tokens"
    return f"gradients are {factor:.4g} times one process's: the loss is not divided by the number of all labels"


def predictions(
    initial: nn.Module, batch: Any, is_transformers: bool, sp: SequenceParallel
) -> Iterator[FaultPrediction]:
    """What one process gives with each known fault, from the model's ``initial`` state."""
    if not is_transformers or "input_ids" not in batch or "labels" not in batch:
        return
    ids, labels = batch["input_ids"], batch["labels"]
    shards = _shards(sp, ids.shape[1])
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if "attention_mask" in batch:
        unmasked = {name: x for name, x in batch.items() if name != "attention_mask"}
        text = "padding is attended to: the attention mask is lost"
        yield FaultPrediction(text, _model_gradients(initial, unmasked), conclusive=True)
    if "position_ids" in batch and "attention_mask" not in batch:
        leaking = {**batch, "attention_mask": torch.ones_like(ids)}
        text = "documents see each other: the packing in position_ids is lost"
        yield FaultPrediction(text, _model_gradients(initial, leaking))
    local = torch.zeros_like(ids)
    for shard in shards:
        local[:, shard] = torch.arange(len(shard))
    misplaced = {**inputs, "position_ids": local, "attention_mask": batch.get("attention_mask", torch.ones_like(ids))}
    text = "positions are local: pass seq.positions() to the model"
    yield FaultPrediction(text, _loss_gradients(initial, misplaced, shifted))
    cut = torch.full_like(shifted, IGNORE)
    for shard in shards:
        cut[:, shard[:-1]] = labels[:, shard[1:]]
    text = "labels are lost at the edges of shards: shift labels before sharding"
    yield FaultPrediction(text, _loss_gradients(initial, inputs, cut))
    yield FaultPrediction(f"{text}; losses are averaged: sum them", _loss_gradients(initial, inputs, cut, shards))
    text = "losses are averaged on each rank: sum them, and divide by the number of all labels (startrail.global_mean)"
    yield FaultPrediction(text, _loss_gradients(initial, inputs, shifted, shards))
    yield from _changed_models(initial, batch)


def _changed_models(initial: nn.Module, batch: Any) -> Iterator[FaultPrediction]:
    config: Any = initial.config
    if getattr(config, "sliding_window", None):
        model: Any = copy.deepcopy(initial)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "sliding_window", None):
                module.config.sliding_window = 10**6
            if getattr(module, "sliding_window", None):
                module.sliding_window = 10**6
        yield FaultPrediction("the sliding window is ignored", _model_gradients(model, batch))
    if any("sinks" in name for name, _ in initial.named_parameters()):
        model = copy.deepcopy(initial)
        for name, x in model.named_parameters():
            if "sinks" in name:
                x.data.fill_(-1e4)
        yield FaultPrediction("attention sinks are ignored", _model_gradients(model, batch))


def _shards(sp: SequenceParallel, length: int) -> list[Tensor]:
    """The tokens of each rank."""
    layout = sp.sequence(length)._layout
    return [positions_of(layout.runs(rank)) for rank in range(layout.world)]


def _model_gradients(model: nn.Module, batch: Any) -> Gradients:
    """Gradients of the model's own loss."""
    model = copy.deepcopy(model)
    model(**{"use_cache": False, **batch}).loss.backward()
    return gradients(model)


def _loss_gradients(model: nn.Module, inputs: Any, shifted: Tensor, shards: list[Tensor] | None = None) -> Gradients:
    """Gradients of the mean cross-entropy with these labels; with ``shards``, of the mean of each shard's mean."""
    model = copy.deepcopy(model)
    logits = model(**{"use_cache": False, **inputs}).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORE, reduction="none")
    losses, counts = losses.view(shifted.shape), shifted != IGNORE
    if shards is None:
        (losses.sum() / counts.sum().clamp(min=1)).backward()
    else:
        means = [losses[:, shard].sum() / counts[:, shard].sum().clamp(min=1) for shard in shards]
        torch.stack(means).mean().backward()
    return gradients(model)

"""Faults of training on split sequences that are known, and the gradients that each of them gives.

What a fault does is worked out on one process, with the model and the batch changed as the fault would change them. If
that explains the gradients that were found, up to a factor, it is the fault.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.parallel import SequenceParallel

SAME = 2e-5  # relative, in norm, of all gradients together; a single one may be off by ten times that
EXPLAINED = 1e-3
IGNORE = -100
Gradients = dict[str, Tensor]


def gradients(model: nn.Module) -> Gradients:
    found = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            grad: Any = torch.zeros_like(x) if x.grad is None else x.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name.removeprefix("module.")] = grad.detach().double()
    return found


def distance(ours: Gradients, theirs: Gradients) -> tuple[float, float]:
    """How far ours are from a multiple of theirs, relative, and that multiple."""
    a, b = (torch.cat([x[name].flatten() for name in theirs]) for x in (ours, theirs))
    factor = float(a @ b / (b @ b).clamp(min=1e-300))
    return float((a - factor * b).norm() / a.norm().clamp(min=1e-300)), factor


def wrong_ones(ours: Gradients, theirs: Gradients) -> list[str]:
    least = max(float(x.norm()) for x in theirs.values()) * 1e-4  # gradients that are zero but for rounding
    return [
        name
        for name, x in theirs.items()
        if not float((ours[name] - x).norm()) <= 10 * SAME * max(float(x.norm()), least)
    ]


def factor_text(factor: float, world: int) -> str:
    if abs(factor * world - 1) < 1e-3:
        return (
            f"gradients are 1/{world} of one process's: they are averaged over ranks (DDP and FSDP do), multiply the "
            "loss by startrail.gradient_factor(model)"
        )
    if abs(factor / world - 1) < 1e-3:
        return f"gradients are {world} times one process's: they are summed twice, or every rank counts all tokens"
    return (
        f"gradients are {factor:.4g} times one process's: the loss is divided by another count than that of all labels"
    )


def guesses(
    pristine: nn.Module, batch: Any, is_transformers: bool, sp: SequenceParallel
) -> Iterator[tuple[str, Gradients]]:
    """Names of faults, and the gradients that one process would have with them."""
    if not is_transformers or "input_ids" not in batch or "labels" not in batch:
        return
    ids, labels = batch["input_ids"], batch["labels"]
    length = ids.shape[1]
    sequence = sp.sequence(length)
    layout = sequence._layout
    parts = [torch.tensor([i for chunk in rank for i in range(*_span(layout.run(chunk)))]) for rank in layout.chunks]
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    whole = {name: x for name, x in batch.items() if name != "labels"}
    if "attention_mask" in batch:
        without = {name: x for name, x in whole.items() if name != "attention_mask"}
        yield (
            "padding is attended to: the attention mask is lost",
            _gradients_of(pristine, {**without, "labels": labels}),
        )
    if "position_ids" in batch and "attention_mask" not in batch:
        leaking = {**batch, "attention_mask": torch.ones_like(ids)}
        yield "documents see each other: the positions' packing is lost", _gradients_of(pristine, leaking)
    local = torch.zeros_like(ids)
    for part in parts:
        local[:, part] = torch.arange(len(part))
    local_batch = {**whole, "position_ids": local, "attention_mask": batch.get("attention_mask", torch.ones_like(ids))}
    yield "positions are local: give the model seq.positions()", _own_loss(pristine, local_batch, shifted)
    cut = torch.full_like(shifted, IGNORE)
    for part in parts:
        cut[:, part[:-1]] = labels[:, part[1:]]
    yield "labels are lost at the shards' edges: shift before the sequence is cut", _own_loss(pristine, whole, cut)
    yield (
        "labels are lost at the shards' edges, and losses averaged: shift before the sequence is cut, sum losses",
        _own_loss(pristine, whole, cut, parts),
    )
    yield (
        "losses are averaged on each rank, not summed and divided by the count of all labels (startrail.global_mean)",
        _own_loss(pristine, whole, shifted, parts),
    )
    yield from _other_models(pristine, batch)


def _other_models(pristine: nn.Module, batch: Any) -> Iterator[tuple[str, Gradients]]:
    config: Any = pristine.config
    if getattr(config, "sliding_window", None):
        model: Any = copy.deepcopy(pristine)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "sliding_window", None):
                module.config.sliding_window = 10**6
            if getattr(module, "sliding_window", None):
                module.sliding_window = 10**6
        yield "the sliding window is ignored", _gradients_of(model, batch)
    if any("sinks" in name for name, _ in pristine.named_parameters()):
        model = copy.deepcopy(pristine)
        for name, x in model.named_parameters():
            if "sinks" in name:
                x.data.fill_(-1e4)
        yield "attention sinks are ignored", _gradients_of(model, batch)


def _own_loss(model: nn.Module, batch: Any, shifted: Tensor, parts: list[Tensor] | None = None) -> Gradients:
    """Gradients of cross-entropy with these labels; with ``parts``, of the mean over ranks of their means."""
    model = copy.deepcopy(model)
    logits = model(**{"use_cache": False, **batch}).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORE, reduction="none")
    losses, counts = losses.view(shifted.shape), shifted != IGNORE
    if parts is None:
        (losses.sum() / counts.sum().clamp(min=1)).backward()
    else:
        means = [losses[:, part].sum() / counts[:, part].sum().clamp(min=1) for part in parts]
        torch.stack(means).mean().backward()
    return gradients(model)


def _gradients_of(model: nn.Module, batch: Any) -> Gradients:
    model = copy.deepcopy(model)
    model(**{"use_cache": False, **batch}).loss.backward()
    return gradients(model)


def _span(run: tuple[int, int]) -> tuple[int, int]:
    return run[0], run[0] + run[1]

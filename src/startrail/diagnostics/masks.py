"""Says in words how the mask of attention on ranks differs from that of one process."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_difference(ranks: Tensor, alone: Tensor) -> str | None:
    """None if the masks are equal. Masks are (batch or 1, length, length), True where a query (row) sees a key.

    >>> causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    >>> mask_difference(causal, causal.triu(-2))
    'the sliding window is ignored (one process: 3 tokens)'
    >>> mask_difference(causal | True, causal)
    'attention is not causal on ranks'
    """
    if ranks.shape[1:] != alone.shape[1:]:
        return None  # rows of a batch may be joined on ranks
    ranks, alone = torch.broadcast_tensors(ranks, alone)
    seen = alone.any(1, keepdim=True) | alone.any(2).unsqueeze(1)  # keys that are not padding
    differs = (ranks != alone) & (alone.any(2, keepdim=True) & seen.mT)  # rows of padding do not matter
    if not bool(differs.any()):
        return None
    lost = _restriction(ranks, alone)
    if lost == "window" and _window(ranks) < ranks.shape[-1]:
        return f"the sliding window is {_window(ranks)} tokens on ranks, {_window(alone)} on one process"
    if lost is not None:
        return LOST[lost].format(_window(alone))
    added = _restriction(alone, ranks)
    if added is not None:
        return ADDED[added].format(_window(ranks))
    row, query, key = differs.nonzero()[0].tolist()
    where = "on ranks" if bool(ranks[row, query, key]) else "on one process"
    return f"attention masks differ: query {query} sees key {key} only {where}"


LOST = {
    "causal": "attention is not causal on ranks",
    "window": "the sliding window is ignored (one process: {} tokens)",
    "padding": "padding is attended to: the attention mask is lost",
    "documents": "documents see each other: their boundaries are lost",
}
ADDED = {
    "causal": "attention is causal on ranks, but not on one process",
    "window": "attention has a window of {} tokens on ranks, but not on one process",
    "padding": "some keys are masked on ranks, but not on one process",
    "documents": "documents are kept apart on ranks, but not on one process",
}


def _restriction(wide: Tensor, narrow: Tensor) -> str | None:
    """The kind of mask that ``narrow`` has, and ``wide``, which is equal otherwise, does not; None if there is none."""
    distance = _distance(narrow.shape[-1])
    first = narrow.int().argmax(2)  # the first key that each query sees: the start of its document
    kinds = {
        "causal": distance >= 0,
        "window": distance.abs() < _window(narrow),
        "padding": narrow.any(1, keepdim=True),
        "documents": first.unsqueeze(2) == first.unsqueeze(1),
    }
    rows = narrow.any(2)  # rows of padding do not matter
    return next((kind for kind, mask in kinds.items() if bool(((wide & mask) == narrow)[rows].all())), None)


def _distance(length: int) -> Tensor:
    return torch.arange(length).unsqueeze(1) - torch.arange(length)


def _window(visible: Tensor) -> int:
    """The smallest window that contains all visible pairs."""
    return int(_distance(visible.shape[-1]).expand_as(visible)[visible].abs().max()) + 1

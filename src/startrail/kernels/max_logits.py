"""The largest logit of each head, which QK-clip watches. Kernels do not return it, so it is computed separately, a few
rows at a time, and only on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.geometry.tiles import Tile
from startrail.kernels.base import row_chunks


def block_max_logits(q: Tensor, k: Tensor, visible: Sequence[Tile], scale: float) -> Tensor:
    """(batch, heads), -inf where nothing is visible. q (batch, heads, rows, dim); k may have fewer heads. No softcap is
    applied: it would hide the logits that QK-clip watches.

    >>> q = torch.tensor([[[[1.0], [2.0]]]])
    >>> block_max_logits(q, q, [Tile(0, 2, 0, 2, "causal")], 0.5).item()      # 0.5 * 2 * 2
    2.0

    The logit of the pair that is largest as kernels compute it is computed again in float64: one rounding instead of
    one per product.
    """
    batch, heads = q.shape[:2]
    largest = q.new_full((batch, heads), float("-inf"), dtype=torch.float32)
    k = k.repeat_interleave(heads // k.shape[1], 1)
    for tile in visible:
        low, high = _bounds(tile, q.device)
        keys = torch.arange(tile.k0, tile.k1, device=q.device)
        rows = q[:, :, tile.q0 : tile.q1]
        for part in row_chunks(rows, len(keys)):
            seen = (keys >= low[part].unsqueeze(1)) & (keys < high[part].unsqueeze(1))
            logits = (rows[:, :, part] @ k[:, :, tile.k0 : tile.k1].mT).mul_(scale).masked_fill_(~seen, float("-inf"))
            largest = torch.maximum(largest, _rounded_once(logits, rows[:, :, part], k[:, :, tile.k0 : tile.k1], scale))
    return largest


def _rounded_once(logits: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(batch, heads) the largest logits in float32, rounded once. Values that are not finite stay as they are."""
    largest, pair = logits.flatten(2).max(2)
    row, key = (index.view(*pair.shape, 1, 1) for index in (pair // k.shape[2], pair % k.shape[2]))
    chosen = (x.take_along_dim(index, 2).squeeze(2).double() for x, index in ((q, row), (k, key)))
    return (torch.linalg.vecdot(*chosen) * scale).float().where(largest.isfinite(), largest.float())


def _bounds(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys [low, high) that each row of a tile sees."""
    if tile.bounds:
        pairs = [(s, torch.arange(s.q1 - s.q0, device=device)) for s in tile.bounds]
        return torch.cat([s.low + t * s.dlow for s, t in pairs]), torch.cat([s.high + t * s.dhigh for s, t in pairs])
    rows = torch.arange(tile.q1 - tile.q0, device=device)
    low, high = torch.full_like(rows, tile.k0), torch.full_like(rows, tile.k1)
    if tile.form == "causal":
        high = tile.k0 + rows + 1
    if tile.form == "anticausal":
        low = tile.k0 + rows
    return low, high

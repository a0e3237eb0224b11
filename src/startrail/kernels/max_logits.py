"""The largest logit of each head, which QK-clip watches. Kernels do not return it, so it is computed separately, a few
rows at a time, and only on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.geometry.tiles import Tile
from startrail.kernels.accumulate import accumulator
from startrail.kernels.base import row_bounds, row_chunks


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
    largest = q.new_full((batch, heads), float("-inf"), dtype=accumulator(q.dtype))
    k = k.repeat_interleave(heads // k.shape[1], 1)
    for tile in visible:
        low, high = (bound.unsqueeze(1) for bound in row_bounds(tile, q.device))
        numbers = torch.arange(tile.k0, tile.k1, device=q.device)
        rows, keys = q[:, :, tile.q0 : tile.q1], k[:, :, tile.k0 : tile.k1]
        for part in row_chunks(rows, len(numbers)):
            seen = (numbers >= low[part]) & (numbers < high[part])
            logits = (rows[:, :, part] @ keys.mT).mul_(scale).masked_fill_(~seen, float("-inf"))
            largest = torch.maximum(largest, _rounded_once(logits, rows[:, :, part], keys, scale))
    return largest


def _rounded_once(logits: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(batch, heads) the largest logits, rounded once to float32, or float64 for float64 inputs. Values that are not
    finite stay as they are."""
    largest, pair = logits.flatten(2).max(2)
    row, key = (index.view(*pair.shape, 1, 1) for index in (pair // k.shape[2], pair % k.shape[2]))
    chosen = (x.take_along_dim(index, 2).squeeze(2).double() for x, index in ((q, row), (k, key)))
    exact, dtype = torch.linalg.vecdot(*chosen) * scale, accumulator(logits.dtype)
    return exact.to(dtype).where(largest.isfinite(), largest.to(dtype))

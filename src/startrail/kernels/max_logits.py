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
    k = (k if scale >= 0 else -k).repeat_interleave(heads // k.shape[1], 1)  # then the largest product is the largest
    for tile in visible:
        low, high = (bound.unsqueeze(1) for bound in row_bounds(tile, q.device))
        rows = q[:, :, tile.q0 : tile.q1]
        for part in row_chunks(rows, tile.k1 - tile.k0):
            k0, k1 = _keys_of(tile, part)
            some, keys = rows[:, :, part], k[:, :, k0:k1]
            products = some @ keys.mT
            if tile.form != "full":
                numbers = torch.arange(k0, k1, device=q.device)
                products.masked_fill_((numbers < low[part]) | (numbers >= high[part]), float("-inf"))
            largest = torch.maximum(largest, _rounded_once(products, some, keys, abs(scale)))
    return largest


def _keys_of(tile: Tile, rows: slice) -> tuple[int, int]:
    """The keys that some rows of a tile see, from the first to the last.

    >>> [_keys_of(Tile(4, 8, 10, 14, form), slice(2, 4)) for form in ("full", "causal", "anticausal")]
    [(10, 14), (10, 14), (12, 14)]
    """
    if tile.form == "full":
        return tile.k0, tile.k1
    if not tile.bounds:
        return (tile.k0, tile.k0 + rows.stop) if tile.form == "causal" else (tile.k0 + rows.start, tile.k1)
    q0, q1 = tile.q0 + rows.start, tile.q0 + rows.stop
    seen = [s for s in tile.bounds if s.q0 < q1 and s.q1 > q0]
    first = min(s.low + s.dlow * max(q0 - s.q0, 0) for s in seen)
    return first, max(s.high + s.dhigh * (min(q1, s.q1) - 1 - s.q0) for s in seen)


def _rounded_once(products: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(batch, heads) the largest logits, rounded once to float32, or float64 for float64 inputs. Values that are not
    finite stay as they are."""
    largest, pair = products.flatten(2).max(2)
    row, key = (index.view(*pair.shape, 1, 1) for index in (pair // k.shape[2], pair % k.shape[2]))
    chosen = (x.take_along_dim(index, 2).squeeze(2).double() for x, index in ((q, row), (k, key)))
    exact, dtype = torch.linalg.vecdot(*chosen) * scale, accumulator(products.dtype)
    return exact.to(dtype).where(largest.isfinite(), largest.to(dtype) * scale)

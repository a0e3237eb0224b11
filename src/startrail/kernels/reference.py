"""Plain math in float64: for tests, and for dtypes or softcaps that a device has no flash kernel for. Writes out the
logits of a few rows at a time. Slow."""

from __future__ import annotations

import torch
from torch import Tensor

from startrail.kernels.base import Kernel, TileMask, row_chunks


class ReferenceKernel(Kernel):
    name = "reference"

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def prepare(self, x: Tensor) -> Tensor:
        return x.double()

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return head_dim, value_dim

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        k, v = _for_queries(k, q), _for_queries(v, q)
        outs, sums = [], []
        for rows in row_chunks(q, k.shape[2]):
            scores = self._capped(q[:, :, rows], k, tile_mask).masked_fill_(_hidden(tile_mask, rows, k), float("-inf"))
            lse = scores.logsumexp(-1)
            weights = (scores - lse.unsqueeze(-1)).exp().masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
            outs.append(weights @ v)
            sums.append(lse)
        return torch.cat(outs, 2), torch.cat(sums, 2)

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.masked_fill(lse.isposinf(), torch.nan)  # as softmax gives: no weight of such a row is defined
        delta = (dout * out).sum(-1, keepdim=True)
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        k, v = _for_queries(k, q), _for_queries(v, q)
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows in row_chunks(q, k.shape[2]):
            capped = self._capped(q[:, :, rows], k, tile_mask)
            scores = capped.masked_fill(_hidden(tile_mask, rows, k), float("-inf"))
            weights = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
            dscores = weights * (dout[:, :, rows] @ v.mT - delta[:, :, rows]) * tile_mask.scale
            if self.softcap is not None:
                dscores *= 1 - (capped / self.softcap).square()  # the slope of tanh
            dq.append(dscores @ k)
            dk += dscores.mT @ q[:, :, rows]
            dv += weights.mT @ dout[:, :, rows]
        return torch.cat(dq, 2), dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)

    def _capped(self, q: Tensor, k: Tensor, tile_mask: TileMask) -> Tensor:
        """Logits under the softcap, including those of hidden pairs."""
        logits = q @ k.mT * tile_mask.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh_().mul_(self.softcap)


def _for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Key/value heads, repeated for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _hidden(tile_mask: TileMask, rows: slice, k: Tensor) -> Tensor:
    """(rows, keys), True where a row does not see a key."""
    if tile_mask.boolean is not None:
        return ~tile_mask.boolean[rows]
    row = torch.arange(rows.start, rows.stop, device=k.device).unsqueeze(1)
    keys = torch.arange(k.shape[2], device=k.device)
    return (keys > row) if tile_mask.causal else torch.zeros_like(keys, dtype=torch.bool)

"""Reference: plain math in float64, for tests and for devices without a flash kernel for a dtype. Makes (rows, keys)
matrices of one tile; never use it for speed."""

from __future__ import annotations

import torch
from torch import Tensor

from startrail.kernels.base import Kernel, Look


class ReferenceKernel(Kernel):
    name = "reference"

    def prepare(self, x: Tensor) -> Tensor:
        return x.double()

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, look)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
        return weights @ _for_queries(v, q), lse

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: Look
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.masked_fill(lse.isposinf(), torch.nan)  # of no use to any weight of its row, as softmax has it
        weights = (_scores(q, k, look) - lse.unsqueeze(-1)).exp()
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = weights * (dout @ _for_queries(v, q).mT - delta) * look.scale
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        dk = (dscores.mT @ q).unflatten(1, groups).sum(2)
        dv = (weights.mT @ dout).unflatten(1, groups).sum(2)
        return dscores @ _for_queries(k, q), dk, dv


def _for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Key/value heads repeated for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, look: Look) -> Tensor:
    scores, mask = q @ _for_queries(k, q).mT * look.scale, look.mask
    if look.causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))

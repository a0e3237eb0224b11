"""FlashAttention 4 (the package flash_attn.cute) with the signatures of ATen's flash attention.

torch 2.13 has its own adapter, but that unpacks exactly two results of a forward pass. The package has returned four
since 4.0.0.beta19 (June 2026), so every call would raise. This adapter ignores further results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., tuple[Tensor, ...]]


def fa4_ops(package: Any) -> tuple[Op, Op, Op, Op]:
    """Forward and backward of rectangles (batch, heads, rows, dim), and of bands (..., rows, heads, dim). They take
    ATen's arguments and ignore those for dropout. Raises ``AttributeError`` if it is another package."""
    fwd, bwd = package._flash_attn_fwd, package._flash_attn_bwd

    def bands_forward(
        q: Tensor, k: Tensor, v: Tensor,
        cu_seqlens_q: Any, cu_seqlens_k: Any, rows: int, keys: int, *dropout: Any, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, lse, *_ = fwd(q, k, v, return_lse=True, **_named(cu_seqlens_q, cu_seqlens_k, rows, keys, **options))
        return out, lse

    def bands_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_seqlens_q: Any, cu_seqlens_k: Any, rows: int, keys: int, *dropout: Any, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        same = torch.are_deterministic_algorithms_enabled()
        named = _named(cu_seqlens_q, cu_seqlens_k, rows, keys, **options)
        dq, dk, dv, *_ = bwd(q, k, v, out, dout, lse, deterministic=same, **named)
        return dq, dk, dv

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = bands_forward(q, k, v, None, None, q.shape[1], k.shape[1], scale=scale, causal=causal)
        return out.transpose(1, 2), lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_seqlens_q: None, cu_seqlens_k: None, rows: int, keys: int, dropout: float, causal: bool, *seed: Tensor,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = bands_backward(dout, q, k, v, out, lse, None, None, rows, keys, scale=scale, causal=causal)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return forward, backward, bands_forward, bands_backward


def _named(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, rows: int, keys: int, *,
    scale: float, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """Arguments by the package's names. An open side of a window is None there."""
    left, right = (None if side == -1 else side for side in (window_size_left, window_size_right))
    return dict(
        softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=rows, max_seqlen_k=keys,
    )  # fmt: skip

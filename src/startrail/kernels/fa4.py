"""FlashAttention 4 (the package flash_attn.cute) by the signatures of ATen's flash attention.

torch 2.13 has an adapter for it as well, which takes just two results of a forward pass: the package has given four
since 4.0.0.beta19 (June 2026), and every call would raise. Here the first ones are taken, however many come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., tuple[Tensor, ...]]


def fa4_ops(package: Any) -> tuple[Op, Op, Op, Op]:
    """Forward and backward of rectangles (batch, heads, rows, dim), and of bands (..., rows, heads, dim); they take
    ATen's arguments, of which those for dropout mean nothing here. ``AttributeError`` if it is another package."""
    fwd, bwd = package._flash_attn_fwd, package._flash_attn_bwd

    def bands_forward(
        q: Tensor, k: Tensor, v: Tensor, cuts_q: Any, cuts_k: Any, rows: int, keys: int, *dropout: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        out, lse, *_ = fwd(q, k, v, return_lse=True, **_named(cuts_q, cuts_k, rows, keys, **options))
        return out, lse

    def bands_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cuts_q: Any, cuts_k: Any, rows: int, keys: int, *dropout: Any, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        same = torch.are_deterministic_algorithms_enabled()
        named = _named(cuts_q, cuts_k, rows, keys, **options)
        dq, dk, dv, *_ = bwd(q, k, v, out, dout, lse, deterministic=same, **named)
        return dq, dk, dv

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = bands_forward(q, k, v, None, None, q.shape[1], k.shape[1], scale=scale, causal=causal)
        return out.transpose(1, 2), lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cuts_q: None, cuts_k: None, rows: int, keys: int, dropout: float, causal: bool, *seed: Tensor, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = bands_backward(dout, q, k, v, out, lse, None, None, rows, keys, scale=scale, causal=causal)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return forward, backward, bands_forward, bands_backward


def _named(
    cuts_q: Tensor | None, cuts_k: Tensor | None, rows: int, keys: int, *,
    scale: float, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """Arguments by the package's names; a side of a window that is open is None there."""
    left, right = (None if side == -1 else side for side in (window_size_left, window_size_right))
    return dict(
        softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right,
        cu_seqlens_q=cuts_q, cu_seqlens_k=cuts_k, max_seqlen_q=rows, max_seqlen_k=keys,
    )  # fmt: skip

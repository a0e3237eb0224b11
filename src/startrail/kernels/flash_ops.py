"""Flash attention with ATen's signatures, which `cuda.FlashKernel` calls.

The flash-attn package has its own layouts and names, and supports a softcap, which ATen's ops do not. It uses the GPU's
approximate tanh (relative error 2**-11), so under a softcap c a logit is off by up to c * 2**-11.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class FlashOps(NamedTuple):
    """Ops with ATen's signatures: for whole rectangles (batch, heads, rows, dim), and for bands (batch, rows, heads,
    dim), or (rows, heads, dim) if several are concatenated."""

    forward: Any
    backward: Any
    bands_forward: Any
    bands_backward: Any


def flash_attn_ops(package: Any, softcap: float | None = None) -> FlashOps:
    """The ops of flash-attn 2.7 and newer."""
    always = dict(softcap=0.0 if softcap is None else softcap, alibi_slopes=None)

    def bands_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, **window: int) -> tuple[Tensor, ...]:
        *lengths, dropout, causal, debug = rest  # cu_seqlens and the longest of both sides
        options = dict(dropout_p=dropout, softmax_scale=scale, causal=causal, return_softmax=debug, **always, **window)
        if lengths[0] is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(q, k, v, *lengths, **options)
        return out, lse

    def bands_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float, **window: int
    ) -> tuple[Tensor, ...]:
        *lengths, dropout, causal = rest[:6]  # the rest are seeds, unused without dropout
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        options = dict(dropout_p=dropout, softmax_scale=scale, causal=causal, **always, **window)
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if lengths[0] is None:
            package._flash_attn_backward(dout, q, k, v, out, lse, *grads, **options)
        else:
            package._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths, **options)
        return grads

    whole: Any = dict(window_size_left=-1, window_size_right=-1)

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = bands_forward(q, k, v, None, None, 0, 0, dropout, causal, False, scale=scale, **whole)
        return out.transpose(1, 2), lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = bands_backward(dout, q, k, v, out, lse, *rest, scale=scale, **whole)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return FlashOps(forward, backward, bands_forward, bands_backward)

"""CPU: ATen's flash attention kernel.

It computes in float32 (float64 for float64 inputs) for every input dtype: its half-precision paths are no faster on
CPUs without matrix units, up to ten times slower in the backward pass, and round every block's result.

The ATen op has traps. An empty side kills the process. A gap in the last dimension, or a number of query heads that is
not a multiple of the key/value heads, silently gives wrong numbers. A row that sees no key returns lse = 0. ``prepare``
closes gaps, ``check_block`` raises for the others, and tiles never contain a row that sees no key. The op also returns
lse = 0 if all logits are -inf, and loses NaN: blocks with such values, and their gradients, use plain math. So do calls
with a softcap, which the op does not support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from startrail._compat import cpu_flash_backward, cpu_flash_forward, dtype_name
from startrail.kernels.accumulate import accumulator
from startrail.kernels.base import BackwardTile, ForwardTile, Kernel, TileMask
from startrail.kernels.diagonal import backward_causal, forward_causal
from startrail.kernels.reference import ReferenceKernel

UNKNOWN = "unknown"


def _check_finite(x: Tensor) -> bool:
    """True if all numbers are finite. A prepared tensor remembers that, for all blocks that use it; the numbers of
    others may change."""
    known = getattr(x, "is_known_finite", None)
    if known is None:
        return _is_finite(x)
    if known is UNKNOWN:
        known = x.is_known_finite = _is_finite(x)  # type: ignore[attr-defined]
    return bool(known)


def _is_finite(x: Tensor) -> bool:
    """True if all numbers are finite. If only their sum overflows, plain math does no harm."""
    return bool(x.sum().isfinite())


class CpuKernel(Kernel):
    name = "cpu"

    def __init__(self, dtype: torch.dtype, softcap: float | None = None) -> None:
        self.dtype, self.softcap = accumulator(dtype), softcap
        op = "ATen's flash attention for CPUs"
        self.reason = f"{op}, in {dtype_name(self.dtype)}"
        if softcap is not None:
            self.reason = f"softcap={softcap}: plain math in float64; {op} does not support it"

    def prepare(self, x: Tensor) -> Tensor:
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        x = x.view_as(x)  # a new object, whose numbers do not change
        x.is_known_finite = UNKNOWN  # type: ignore[attr-defined]
        return x

    def select_forward(self, q: Tensor, k: Tensor) -> ForwardTile:
        finite = self.softcap is None and _check_finite(q) and _check_finite(k)
        return self.forward_tile if finite else self._plain_math

    def select_backward(self, out: Tensor, lse: Tensor) -> BackwardTile:
        """A query or visible key that is not finite shows in lse; a value or gradient shows in the sum of dout * out.
        So keys and values need no second check, except keys of which every visible logit is -inf under a mask."""
        finite = self.softcap is None and _check_finite(out) and _is_finite(lse.clamp(min=0))  # padding: -inf
        return self.backward_tile if finite else self._plain_math_backward

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        check_block(q, k, v)
        mask, scale = _additive(tile_mask.boolean, q.dtype), tile_mask.scale

        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            return cpu_flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

        return forward_causal(forward, q, k, v) if tile_mask.causal else forward(q, k, v, False)

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v)
        if tile_mask.boolean is not None and not _is_finite(k):  # a hidden logit of +inf minus inf would be NaN
            return self._plain_math_backward(dout, q, k, v, out, lse, tile_mask)
        mask, scale = _additive(tile_mask.boolean, q.dtype), tile_mask.scale

        def backward(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
        ) -> tuple[Tensor, Tensor, Tensor]:
            return cpu_flash_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)

        block = dout, q, k, v, out, lse
        return backward_causal(backward, *block) if tile_mask.causal else backward(*block, False)

    def _plain_math(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        return ReferenceKernel(self.softcap).forward_tile(q.double(), k.double(), v.double(), tile_mask)

    def _plain_math_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
        return ReferenceKernel(self.softcap).backward_tile(dout, q, k, v, out, lse, tile_mask)


def check_block(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ``ValueError`` for blocks that the kernels would crash on or silently get wrong."""
    if 0 in q.shape or 0 in k.shape or q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"block kernel: q {tuple(q.shape)} does not fit k {tuple(k.shape)}, v {tuple(v.shape)}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        strides = f"{q.stride()}, {k.stride()}, {v.stride()}"
        raise ValueError(f"block kernel: last dimension must be dense, strides {strides}")


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

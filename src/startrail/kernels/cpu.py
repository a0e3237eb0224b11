"""CPU: ATen's flash attention kernel.

It computes in float32 (float64 for float64 inputs) whatever the inputs' dtype: its half-precision paths are no faster
on CPUs without matrix units, up to ten times slower in the backward, and round every block's result.

Traps of the ATen op, all kept away from it here or by the caller: an empty side kills the process, a gap in the last
dimension and a head ratio that is not whole give wrong numbers without a word, and a row that sees nothing returns
lse = 0. ``prepare`` closes the gaps, ``check_block`` refuses the rest, and tiles never contain a row that sees nothing.
It also returns lse = 0 for logits that are all -inf, and loses NaN: blocks with such values take plain math, and so do
their gradients. So does everything under a softcap, which it does not have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from startrail.kernels.accumulate import accumulator
from startrail.kernels.base import Kernel, TileMask
from startrail.kernels.reference import ReferenceKernel

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuKernel(Kernel):
    name = "cpu"

    def __init__(self, dtype: torch.dtype, softcap: float | None = None) -> None:
        self.dtype, self.softcap = accumulator(dtype), softcap
        self.why = f"ATen's flash attention for CPUs, in {str(self.dtype).removeprefix('torch.')}"
        if softcap is not None:
            self.why = f"softcap={softcap}: plain math in float64, since ATen's flash attention for CPUs has none"

    def prepare(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        x = x.view_as(x)  # an object of our own, whose numbers stay: all its blocks share what is found of them
        x.is_finite = None  # type: ignore[attr-defined]
        return x

    def forward_of(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor, TileMask], tuple[Tensor, Tensor]]:
        return self.forward_tile if self.softcap is None and _finite(q) and _finite(k) else self._plain_math

    def backward_of(
        self, out: Tensor, lse: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, TileMask], tuple[Tensor, Tensor, Tensor]]:
        """A query, or a key that it sees, that is not finite shows in its lse; a value, or a gradient, in its sum of
        dout * out. So keys and values that pass by need not be looked at again."""
        finite = self.softcap is None and _finite(out) and _finite(lse.clamp(min=0))  # padding has lse = -inf
        return self.backward_tile if finite else self._plain_math_backward

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        check_block(q, k, v)
        return _forward(q, k, v, 0.0, look.causal, attn_mask=_additive(look.mask, q.dtype), scale=look.scale)

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v)
        mask = _additive(look.mask, q.dtype)
        return _backward(dout, q, k, v, out, lse, 0.0, look.causal, attn_mask=mask, scale=look.scale)

    def _plain_math(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        return ReferenceKernel(self.softcap).forward_tile(q.double(), k.double(), v.double(), look)

    def _plain_math_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
        return ReferenceKernel(self.softcap).backward_tile(dout, q, k, v, out, lse, look)


def _finite(x: Tensor) -> bool:
    """Whether all numbers are finite (a sum that overflows is no harm); remembered by what ``prepare`` made."""
    known: bool | None = getattr(x, "is_finite", None)
    if known is None:
        known = bool(x.sum().isfinite())
        if hasattr(x, "is_finite"):
            x.is_finite = known
    return known


def check_block(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what the kernels would crash on or silently get wrong."""
    if 0 in q.shape or 0 in k.shape or q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise ValueError(f"block kernel: q {tuple(q.shape)} does not go with k {tuple(k.shape)}, v {tuple(v.shape)}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError(
            f"block kernel: last dimension must be dense, strides {q.stride()}, {k.stride()}, {v.stride()}"
        )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

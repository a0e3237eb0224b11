"""CUDA: the flash-attn package (2.7 or newer) where it is installed, else ATen's flash attention; ATen's
memory-efficient attention for float32, for masked tiles and for what flash attention does not take.

Not run on hardware: checked with fake tensors only, and on CPU with stand-ins that enforce the demands listed here.

Demands of the kernels, read in their sources (flash-attn 2.8; headers of torch 2.13 and the rest near it). Those marked
! go unchecked there, and give wrong numbers or a crash when broken:

- all: head dims are multiples of 8, and addresses of rows aligned to 16 bytes!. Padding the head dim with zeros changes
  no score, since the scale is always explicit, and the surplus of every result is cut off again.
- flash: lse lies contiguous in memory!, also when it is a slice of a longer one. Fewer key/value heads are native.
- efficient: as many key/value heads as query heads; bias rows start at multiples of 16 elements; lse has its rows
  padded to a multiple of 32, with +inf! so that the surplus rows weigh nothing; out has the strides of (batch, rows,
  heads, dim) without gaps! (in half precision the backward takes them for granted, whatever the tensor says).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.kernels.base import Kernel, Look
from startrail.kernels.cpu import check_block
from startrail.kernels.reference import ReferenceKernel

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_efficient_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

_FLASH_HEAD_DIM = 256
_HEAD_DIM, _BIAS_ROW, _LSE_ROWS = 8, 16, 32  # sizes that must be multiples of these


def cuda_kernel(dtype: torch.dtype, head_dim: int) -> Kernel:
    """The fastest backend for the current CUDA device."""
    if dtype == torch.float64:
        return ReferenceKernel()
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"no CUDA attention kernel for {dtype}; use float16, bfloat16, float32 or float64")
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)  # flash needs Ampere
    if dtype == torch.float32 or head_dim > _FLASH_HEAD_DIM or old:
        return EfficientKernel(dtype)
    package = _flash_attn()
    return AtenFlashKernel(dtype) if package is None else FlashAttnKernel(dtype, package)


@cache
def _flash_attn() -> Any | None:
    """flash-attn's low-level interface, if it has the signatures of 2.7 and 2.8; 2.6 and older fall back to ATen."""
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        version = importlib.import_module("flash_attn").__version__
    except (ImportError, AttributeError):  # not there, built for another torch, or a later generation alone
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return interface if major == 2 and minor >= 7 else None


class EfficientKernel(Kernel):
    """ATen's memory-efficient attention; the flash kernels inherit its handling of sizes and of masked tiles."""

    name = "cuda-efficient"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x if x.stride(-1) == 1 else x.contiguous()

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
        check_block(q, k, v)
        dim = q.shape[-1]
        q, k, v = _fit(q), _fit(k), _fit(v)
        if look.mask is None:
            out, lse = self._forward(q, k, v, look.causal, look.scale)
        else:
            out, lse = _masked_forward(q, k, v, look)
        return out.narrow(-1, 0, dim), lse

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: Look
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v)
        dim = q.shape[-1]
        dout, out = self.prepare(dout), self.prepare(out)  # the global out is kept in float32
        dout, q, k, v, out = _fit(dout), _fit(q), _fit(k), _fit(v), _fit(out)
        lse = lse.float().contiguous()
        if look.mask is None:
            dq, dk, dv = self._backward(dout, q, k, v, out, lse, look.causal, look.scale)
        else:
            dq, dk, dv = _masked_backward(dout, q, k, v, out, lse, look)
        return dq.narrow(-1, 0, dim), dk.narrow(-1, 0, dim), dv.narrow(-1, 0, dim)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _masked_forward(q, k, v, Look(causal, None, scale))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _masked_backward(dout, q, k, v, out, lse, Look(causal, None, scale))


class AtenFlashKernel(EfficientKernel):
    name = "cuda-flash"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_forward(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = q.shape[2], k.shape[2]
        seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
        return _flash_backward(dout, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, seed, seed, scale=scale)


class FlashAttnKernel(EfficientKernel):
    """The flash-attn package, whose layout is (batch, rows, heads, dim)."""

    name = "cuda-flash-attn"

    def __init__(self, dtype: torch.dtype, package: Any) -> None:
        super().__init__(dtype)
        self._package = package

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = self._package._flash_attn_forward(
            q, k, v, return_softmax=False, **_flash_attn_options(causal, scale)
        )
        return out.transpose(1, 2), lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._package._flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, deterministic=deterministic, **_flash_attn_options(causal, scale)
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _flash_attn_options(causal: bool, scale: float) -> dict[str, Any]:
    window = dict(window_size_left=-1, window_size_right=-1)
    return dict(dropout_p=0.0, softmax_scale=scale, causal=causal, softcap=0.0, alibi_slopes=None, **window)


def _masked_forward(q: Tensor, k: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    out, lse, *_ = _efficient_forward(
        q, _expand(k, heads), _expand(v, heads), _bias(look.mask, q), True, 0.0, look.causal, scale=look.scale
    )
    return out, lse.narrow(-1, 0, rows)


def _masked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: Look
) -> tuple[Tensor, Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    k_all, v_all = _expand(k, heads), _expand(v, heads)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -rows % _LSE_ROWS), value=float("inf"))
    seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
    wanted = [True, True, True, False]  # no gradient of the bias
    dq, dk, dv, _ = _efficient_backward(
        dout, q, k_all, v_all, _bias(look.mask, q), out, lse, seed, seed, 0.0, wanted, look.causal, scale=look.scale
    )
    return dq, _collect(dk, k.shape[1]), _collect(dv, v.shape[1])


def _fit(x: Tensor) -> Tensor:
    """``x`` with its head dim padded to a multiple of 8, and starts of rows that are aligned."""
    if x.shape[-1] % _HEAD_DIM:
        return F.pad(x, (0, -x.shape[-1] % _HEAD_DIM))
    if any(step % _HEAD_DIM for step in (x.storage_offset(), *x.stride()[:-1])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _expand(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated for the query heads that share them; no copy where it is one head for all."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _collect(grad: Tensor, heads: int) -> Tensor:
    """Gradients of repeated heads, summed."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    rows, keys = mask.shape
    bias = q.new_zeros(rows, keys + -keys % _BIAS_ROW).narrow(1, 0, keys).masked_fill_(~mask, float("-inf"))
    return bias.expand(*q.shape[:2], rows, keys)

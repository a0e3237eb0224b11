"""CUDA: FlashAttention of the newest generation that is there and made for the GPU, and ATen's memory-efficient
attention for float32 and for what flash attention does not take. Packed documents and windows are flash attention's
own: one call for all documents of a block.

Not run on hardware: checked with fake tensors only, and on CPU with stand-ins that enforce the demands listed here.

Demands of the kernels, read in their sources (flash-attn 2.8; headers of torch 2.13 and the rest near it). Those marked
! go unchecked there, and give wrong numbers or a crash when broken:

- all: head dims are multiples of 8, and addresses of rows aligned to 16 bytes!. Padding the head dim with zeros changes
  no score, since the scale is always explicit, and the surplus of every result is cut off again.
- flash: lse lies contiguous in memory!, also when it is a slice of a longer one. Fewer key/value heads are native.
  FlashAttention 2 reads some windows differently! (`bands` makes none of them), and gives rows without a key an lse of
  +inf!: there are none.
- efficient: as many key/value heads as query heads; bias rows start at multiples of 16 elements; lse has its rows
  padded to a multiple of 32, with +inf! so that the surplus rows weigh nothing; out has the strides of (batch, rows,
  heads, dim) without gaps! (in half precision the backward takes them for granted, whatever the tensor says).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.geometry.tiles import Costs
from startrail.kernels.base import Kernel, TileMask
from startrail.kernels.cpu import check_block
from startrail.kernels.device import numbers_on, stream_of
from startrail.kernels.fa4 import fa4_ops
from startrail.kernels.flash_ops import FlashOps, ops_of_package
from startrail.kernels.reference import ReferenceKernel

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_bands_forward = torch.ops.aten._flash_attention_forward.default
_bands_backward = torch.ops.aten._flash_attention_backward.default
_efficient_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

_CALL = 3_000_000  # query-key pairs that an H100 computes in the time that a call costs
_FLASH_HEAD_DIM = 256
_HEAD_DIM, _BIAS_ROW, _LSE_ROWS = 8, 16, 32  # sizes that must be multiples of these


def cuda_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> Kernel:
    """The fastest backend for a CUDA device. What torch was told to use comes first, then the newest FlashAttention
    that is installed and made for this GPU. A softcap is flash-attn's alone: ATen's kernels have none, nor have
    torch's adapters for newer ones."""
    if dtype == torch.float64:
        return _because(ReferenceKernel(softcap), "float64: no flash attention computes in it")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"no CUDA attention kernel for {dtype}; use float16, bfloat16, float32 or float64")
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if softcap is not None:
        return _with_softcap(dtype, head_dim, softcap, capability)
    if dtype == torch.float32:
        return _because(EfficientKernel(dtype), "float32: flash attention takes half precision only")
    if head_dim > _FLASH_HEAD_DIM:
        return _because(EfficientKernel(dtype), f"head dim {head_dim}: flash attention ends at {_FLASH_HEAD_DIM}")
    if capability is not None and capability < (8, 0):
        return _because(EfficientKernel(dtype), f"compute capability {capability}: flash attention begins at (8, 0)")
    if chosen := torch.nn.attention.current_flash_attention_impl():
        if head_dim > (most := _LARGEST.get(chosen, _FLASH_HEAD_DIM)):  # there is no other flash attention then
            why = f"head dim {head_dim}: {chosen}, which torch was told to use, is known to be right up to {most}"
            return _because(EfficientKernel(dtype), why)
        return _because(FlashKernel(dtype), f"{chosen}, which torch was told to use")
    for name, path, generations in _NEWER:
        if capability is None or capability[0] not in generations or head_dim > _LARGEST.get(name, _FLASH_HEAD_DIM):
            continue
        if (ops := _newer_flash(name, path)) is not None:
            return _because(FlashKernel(dtype, ops, name), f"{name} is installed, and made for {capability}")
    hint = "; FlashAttention 3 or 4 would be faster here" if capability is not None and capability >= (9, 0) else ""
    package = _flash_attn()
    if package is None:
        return _because(FlashKernel(dtype), f"FlashAttention 2 of torch: no newer one is installed{hint}")
    kernel = FlashKernel(dtype, ops_of_package(package), "attn")
    return _because(kernel, f"flash-attn {package.__version__} is installed{hint}")


def _with_softcap(dtype: torch.dtype, head_dim: int, softcap: float, capability: tuple[int, int] | None) -> Kernel:
    problem = None
    if dtype == torch.float32:
        problem = "but takes half precision, not float32"
    elif head_dim > _FLASH_HEAD_DIM:
        problem = f"but ends at head dim {_FLASH_HEAD_DIM}, this is {head_dim}"
    elif capability is not None and capability < (8, 0):
        problem = f"but begins at compute capability (8, 0), this is {capability}"
    package = _flash_attn()
    if package is None:
        problem = "and is not installed (pip install flash-attn)"
    if problem is not None:
        raise ValueError(f"softcap={softcap}: of the kernels for GPUs only flash-attn from 2.7 on has it, {problem}")
    kernel = FlashKernel(dtype, ops_of_package(package, softcap), "attn", softcap)
    return _because(kernel, f"softcap={softcap}: flash-attn has it, other kernels for GPUs do not")


def _because(kernel: Kernel, why: str) -> Kernel:
    kernel.why = why
    return kernel


# By preference: packages, where they are found, and the generations of GPUs that they run on.
_NEWER = (("FA3", "flash_attn_interface", (9,)), ("FA4", "flash_attn.cute.interface", (9, 10)))
# Head dims above which a generation takes some on some GPUs only, in forward or backward passes only.
_LARGEST = {"FA4": 128}


@cache
def _newer_flash(name: str, path: str) -> FlashOps | None:
    """FlashAttention 3 through torch's adapter, 4 through our own, for our calls only: telling torch to use them would
    change what everybody else's attention runs on."""
    try:
        if name == "FA4":
            return FlashOps(*fa4_ops(importlib.import_module(path)))
        adapter = importlib.import_module("torch.nn.attention._fa3")
        adapter._fa3_import_module(path)
        whole, bands = "_fa3_scaled_dot_product_flash_attention", "_fa3_flash_attention"
        return FlashOps(
            getattr(adapter, f"{whole}_forward_impl_default"),
            getattr(adapter, f"{whole}_backward_impl"),
            getattr(adapter, f"{bands}_forward_impl_default"),
            getattr(adapter, f"{bands}_backward_impl"),
        )
    except (ImportError, AttributeError, RuntimeError):  # not there, or another torch's adapter
        return None


@cache
def _flash_attn() -> Any | None:
    """flash-attn's low-level interface, if it has the signatures of 2.7 and 2.8; 2.6 and older fall back to ATen."""
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        version = importlib.import_module("flash_attn").__version__
    except (ImportError, AttributeError):  # not there, built for another torch, or a later generation alone
        return None
    interface.__version__ = version  # type: ignore[attr-defined]
    major, minor = (int(part) for part in version.split(".")[:2])
    return interface if major == 2 and minor >= 7 else None


class EfficientKernel(Kernel):
    """ATen's memory-efficient attention; the flash kernels inherit its handling of sizes and of masked tiles."""

    name = "cuda-efficient"
    costs = Costs(call=_CALL)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x if x.stride(-1) == 1 else x.contiguous()

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        check_block(q, k, v)
        dim = q.shape[-1]
        q, k, v = _fit(q), _fit(k), _fit(v)
        if look.packs:
            out, lse = self._bands_forward(q, k, v, look)
        elif look.mask is None:
            out, lse = self._forward(q, k, v, look)
        else:
            out, lse = _masked_forward(q, k, v, look)
        return out.narrow(-1, 0, dim), lse

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v)
        dim = q.shape[-1]
        dout, out = self.prepare(dout), self.prepare(out)  # the global out is kept in float32
        dout, q, k, v, out = _fit(dout), _fit(q), _fit(k), _fit(v), _fit(out)
        lse = lse.float().contiguous()
        if look.packs:
            dq, dk, dv = self._bands_backward(dout, q, k, v, out, lse, look)
        elif look.mask is None:
            dq, dk, dv = self._backward(dout, q, k, v, out, lse, look)
        else:
            dq, dk, dv = _masked_backward(dout, q, k, v, out, lse, look)
        return dq.narrow(-1, 0, dim), dk.narrow(-1, 0, dim), dv.narrow(-1, 0, dim)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        return _masked_forward(q, k, v, look)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _masked_backward(dout, q, k, v, out, lse, look)

    def _bands_forward(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{self.name} takes no bands")

    def _bands_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError(f"{self.name} takes no bands")


class FlashKernel(EfficientKernel):
    """Flash attention by ATen's signatures: FlashAttention 2 inside torch, whatever torch was told to use instead, or
    the ``ops`` of a newer one or of flash-attn. Windows and packed documents are its own business: no tile is masked.
    """

    costs = Costs(call=_CALL, bands=True)

    def __init__(
        self, dtype: torch.dtype, ops: FlashOps | None = None, name: str = "", softcap: float | None = None
    ) -> None:
        super().__init__(dtype)
        self.softcap = softcap
        self.ops = FlashOps(_flash_forward, _flash_backward, _bands_forward, _bands_backward) if ops is None else ops
        self.name = f"cuda-flash-{name.lower()}" if name else "cuda-flash"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.ops.forward(q, k, v, 0.0, look.causal, scale=look.scale)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
        rest = (None, None, q.shape[2], k.shape[2], 0.0, look.causal, seed, seed)
        return self.ops.backward(dout, q, k, v, out, lse, *rest, scale=look.scale)

    def _bands_forward(self, q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
        """One rectangle under a window; or several, which a call takes for one batch entry, rows before heads."""
        cuts, longest, options = _cuts(look.packs, q.device), _longest(look.packs), _window(look)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cuts is None:
            out, lse, *_ = self.ops.bands_forward(q, k, v, None, None, *longest, 0.0, False, False, **options)
            return out.transpose(1, 2), lse
        entries = zip(q.unbind(0), k.unbind(0), v.unbind(0), strict=True)
        found = [self.ops.bands_forward(*x, *cuts, *longest, 0.0, False, False, **options)[:2] for x in entries]
        outs, lses = zip(*found, strict=True)
        return _batch(outs).transpose(1, 2), _batch(lses)

    def _bands_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        cuts, longest, options = _cuts(look.packs, q.device), _longest(look.packs), _window(look)
        seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        rest = (*longest, 0.0, False, seed, seed)
        if cuts is None:
            grads = self.ops.bands_backward(dout, q, k, v, out, lse, None, None, *rest, **options)
        else:
            entries = zip(*(x.unbind(0) for x in (dout, q, k, v, out, lse)), strict=True)
            found = [self.ops.bands_backward(*x, *cuts, *rest, **options) for x in entries]
            grads = tuple(map(_batch, zip(*found, strict=True)))
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _cuts(packs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Where the rows, and the keys, of each rectangle end; None of a single one."""
    return None if len(packs) == 1 else _cuts_on(packs, device, stream_of(device))


@lru_cache(maxsize=1024)
def _cuts_on(packs: tuple[tuple[int, int], ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    rows, keys = ([0, *accumulate(pack[side] for pack in packs)] for side in range(2))
    return numbers_on(device, rows, torch.int32), numbers_on(device, keys, torch.int32)


def _longest(packs: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return max(rows for rows, _ in packs), max(keys for _, keys in packs)


def _window(look: TileMask) -> dict[str, Any]:
    left, right = look.window
    return dict(scale=look.scale, window_size_left=left, window_size_right=right)


def _batch(entries: Sequence[Tensor]) -> Tensor:
    return entries[0].unsqueeze(0) if len(entries) == 1 else torch.stack(tuple(entries))


def _masked_forward(q: Tensor, k: Tensor, v: Tensor, look: TileMask) -> tuple[Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    out, lse, *_ = _efficient_forward(
        q, _expand(k, heads), _expand(v, heads), _bias(look.mask, q), True, 0.0, look.causal, scale=look.scale
    )
    return out, lse.narrow(-1, 0, rows)


def _masked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, look: TileMask
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

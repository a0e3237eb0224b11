"""CUDA: the newest FlashAttention that is installed and supports the GPU, cuDNN's attention on Hopper and newer without
one, and ATen's memory-efficient attention for float32 and whatever else flash attention does not support. Flash
attention handles packed documents and windows itself: one call for all documents of a block.

Never run on hardware: tested with fake tensors, and on CPU with stand-ins that enforce the requirements listed here.

Requirements of the kernels, from their sources (flash-attn 2.8; the headers of torch 2.13). The kernels do not check
those marked with !, and crash or return wrong numbers if they are violated:

- all: head dims are multiples of 8, and rows start at multiples of 16 bytes!. Padding the head dim with zeros changes
  no logit, because the scale is always explicit; the padding of each result is cut off.
- values of another width than keys: memory-efficient attention takes any; FlashAttention 3 keys of 129 to 192 with
  values of 97 to 128, FlashAttention 4 and cuDNN 192 with 128 (latent attention). Others need values as wide as keys.
- flash: lse is contiguous in memory!, also if it is a slice of a longer one. Fewer key/value heads are supported.
  FlashAttention 2 interprets some windows differently! (`bands` makes none of them), and returns lse = +inf for rows
  without a key! (tiles have none).
- cudnn: lse is (batch, heads, rows, 1). Whatever else it needs, torch checks for us (``can_use_cudnn``). It builds a
  plan for every new shape, which takes a moment, and is used for rectangles of whole blocks only.
- efficient: as many key/value heads as query heads; bias rows start at multiples of 16 elements; lse is padded to a
  multiple of 32 rows, with +inf! so that these rows have no weight; out has the strides of a dense (batch, rows, heads,
  dim)! (in half precision the backward pass assumes them).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail import _compat
from startrail.geometry.tiles import Costs
from startrail.kernels.base import Kernel, TileMask, pad_width
from startrail.kernels.cpu import check_block
from startrail.kernels.device import current_stream_id, ints_on
from startrail.kernels.fa4 import fa4_ops
from startrail.kernels.flash_ops import FlashOps, flash_attn_ops
from startrail.kernels.reference import ReferenceKernel

TRY_ROCM = "STARTRAIL_TRY_ROCM"
_CALL_PAIRS = 3_000_000  # query-key pairs that an H100 computes in the time of one call
_MAX_FLASH_HEAD_DIM = 256
_MAX_CUDNN_HEAD_DIM = 128
_MAX_KNOWN_SHAPES = 256
_HEAD_DIM_MULTIPLE, _BIAS_ROW_MULTIPLE, _LSE_ROW_MULTIPLE = 8, 16, 32


def cuda_kernel(
    device: torch.device, dtype: torch.dtype, key_dim: int, softcap: float | None = None, value_dim: int | None = None
) -> Kernel:
    """The fastest backend for a CUDA device: the implementation that torch is set to use, else the newest
    FlashAttention that is installed and supports this GPU. Only flash-attn supports a softcap: ATen's kernels and
    torch's adapters for newer ones do not."""
    widths = key_dim, key_dim if value_dim is None else value_dim
    head_dim = max(widths)
    if dtype == torch.float64:
        return _with_reason(ReferenceKernel(softcap), "float64: no flash attention supports it")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"no CUDA attention kernel for {dtype}; use float16, bfloat16, float32 or float64")
    if torch.version.hip is not None:
        return _rocm_kernel(dtype, softcap)
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if softcap is not None:
        return _with_softcap(dtype, head_dim, softcap, capability)
    if dtype == torch.float32:
        return _with_reason(EfficientKernel(dtype), "float32: flash attention supports half precision only")
    if head_dim > _MAX_FLASH_HEAD_DIM:
        reason = f"head dim {head_dim}: flash attention supports at most {_MAX_FLASH_HEAD_DIM}"
        return _with_reason(EfficientKernel(dtype), reason)
    if capability is not None and capability < (8, 0):
        return _with_reason(EfficientKernel(dtype), f"compute capability {capability}: flash attention needs (8, 0)")
    if chosen := _compat.chosen_flash_impl():
        if head_dim > (most := _max_head_dim(chosen)):
            reason = f"head dim {head_dim}: {chosen}, which torch is set to use, is known to be right up to {most}"
            return _with_reason(EfficientKernel(dtype), reason)
        return _with_reason(FlashKernel(dtype), f"torch is set to use {chosen}")
    for name, path, generations in _NEWER_PACKAGES:
        supported = capability is not None and capability[0] in generations
        known = head_dim <= _max_head_dim(name)
        supported = supported and (known or (widths == LATENT_WIDTHS and capability is not None and capability[0] > 9))
        if supported and (ops := _newer_flash(name, path)) is not None:
            return _with_reason(FlashKernel(dtype, ops, name), f"{name} is installed and supports {capability}")
    hint = ""
    if capability is not None and capability >= (9, 0):
        problem = _cudnn_problem(device, dtype, *widths)
        if problem is None:
            version = torch.backends.cudnn.version()
            return _with_reason(CudnnKernel(dtype), f"cuDNN {version}: neither FlashAttention 3 nor 4 is installed")
        install = "flash_attn_3 or flash-attn-4" if capability[0] == 9 else "flash-attn-4"
        hint = f"; about 1.5x faster here: install {install}, or use cuDNN ({problem})"
    if (found := _flash_attn()) is None:
        return _with_reason(FlashKernel(dtype), f"torch's FlashAttention 2: no newer one is installed{hint}")
    package, which = found
    return _with_reason(FlashKernel(dtype, flash_attn_ops(package), "attn"), f"{which}{hint}")


def _rocm_kernel(dtype: torch.dtype, softcap: float | None) -> Kernel:
    """An AMD GPU says that it is an NVIDIA GPU of some generation, and its flash attention returns lse in other shapes.
    A kernel of its own, such as AITER's, would be chosen here."""
    if os.environ.get(TRY_ROCM, "") in ("", "0"):
        raise ValueError(
            f"startrail has not run on AMD GPUs (ROCm {torch.version.hip}); to try it, run {TRY_ROCM}=1 torchrun "
            "--nproc-per-node N -m startrail.cli check all, and report what it prints"
        )
    if softcap is not None:
        raise ValueError(f"softcap={softcap}: no kernel on ROCm supports it")
    return _with_reason(EfficientKernel(dtype), f"ROCm, by {TRY_ROCM}: whole blocks and masks, unproven")


def _cudnn_problem(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Why cuDNN's attention cannot be used at all, or None. Single tiles are checked in ``CudnnKernel``."""
    if max(head_dim, value_dim) > _MAX_CUDNN_HEAD_DIM and (head_dim, value_dim) != LATENT_WIDTHS:
        return f"which supports head dims up to {_MAX_CUDNN_HEAD_DIM}"
    if not torch.backends.cudnn.is_available():
        return "which this torch lacks"
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "which is disabled: torch.backends.cuda.enable_cudnn_sdp(True)"
    if torch.are_deterministic_algorithms_enabled():
        return "whose gradients are not deterministic"
    if not _torch_allows_cudnn(device, dtype, head_dim, value_dim):
        return f"whose version {torch.backends.cudnn.version()} torch does not let attend here"
    return None


def _torch_allows_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """True if torch gives a plain block to cuDNN: else all tiles would go to FlashAttention 2, under cuDNN's name."""
    widths = (width + -width % _HEAD_DIM_MULTIPLE for width in (head_dim, value_dim))
    x, v = (torch.empty(1, 1, 128, width, device=device, dtype=dtype) for width in widths)
    return _compat.can_use_cudnn(x, x, v, False)


def _with_softcap(dtype: torch.dtype, head_dim: int, softcap: float, capability: tuple[int, int] | None) -> Kernel:
    problem = None
    if dtype == torch.float32:
        problem = "but only in half precision, not float32"
    elif head_dim > _MAX_FLASH_HEAD_DIM:
        problem = f"but only up to head dim {_MAX_FLASH_HEAD_DIM}, not {head_dim}"
    elif capability is not None and capability < (8, 0):
        problem = f"but only from compute capability (8, 0), not {capability}"
    found = _flash_attn()
    if found is None:
        problem = f"and it is not installed (pip install flash-attn, or load it first: {LOAD_FROM_HUB})"
    if found is None or problem is not None:
        raise ValueError(f"softcap={softcap}: of all GPU kernels only flash-attn >= 2.7 supports it, {problem}")
    kernel = FlashKernel(dtype, flash_attn_ops(found[0], softcap), "attn", softcap)
    return _with_reason(kernel, f"softcap={softcap}: of all GPU kernels only flash-attn supports it; {found[1]}")


def _with_reason(kernel: Kernel, reason: str) -> Kernel:
    kernel.reason = reason
    return kernel


# In order of preference: name, module, and the major compute capabilities that it supports.
_NEWER_PACKAGES = (("FA3", "flash_attn_interface", (9,)), ("FA4", "flash_attn.cute.interface", (9, 10)))
LATENT_WIDTHS = 192, 128  # of the keys and values that DeepSeek's models expand from latents


def _max_head_dim(implementation: str) -> int:
    """Above it, FlashAttention 4 supports some GPUs and passes only, and version 3's backward pass raises if it has to
    be deterministic."""
    if implementation == "FA3" and torch.are_deterministic_algorithms_enabled():
        return 192
    return 128 if implementation == "FA4" else _MAX_FLASH_HEAD_DIM


@cache
def _newer_flash(name: str, path: str) -> FlashOps | None:
    """FlashAttention 3 through torch's adapter, 4 through our own, for our calls only: setting torch to use them would
    change all other attention in the program."""
    try:
        if name == "FA4":
            return FlashOps(*fa4_ops(importlib.import_module(path)))
        return FlashOps(*_compat.fa3_ops(path))
    except (ImportError, AttributeError, RuntimeError):  # not installed, or for another torch
        return None


def _flash_attn() -> tuple[Any, str] | None:
    """flash-attn's low-level interface, if it has the signatures of 2.7 and 2.8, and where it is from."""
    return _installed_flash_attn() or flash_attn_from_hub()


@cache
def _installed_flash_attn() -> tuple[Any, str] | None:
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        version = importlib.import_module("flash_attn").__version__
    except (ImportError, AttributeError):  # not installed, built for another torch, or only a later generation
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return (interface, f"flash-attn {version} is installed") if major == 2 and minor >= 7 else None


LOAD_FROM_HUB = 'kernels.get_kernel("kernels-community/flash-attn2", version=4)'
_FLASH_ATTN_OPS = [f"_flash_attn_{kind}{pass_}" for kind in ("", "varlen_") for pass_ in ("forward", "backward")]


def flash_attn_from_hub() -> tuple[Any, str] | None:
    """What the program, or transformers, has loaded with the ``kernels`` package: we download nothing ourselves."""
    loaded_kernels = getattr(sys.modules.get("kernels"), "get_loaded_kernels", list)
    for loaded in loaded_kernels():
        interface = getattr(loaded.module, "flash_attn_interface", None)
        if all(hasattr(interface, name) for name in _FLASH_ATTN_OPS):  # FlashAttention 3 has others
            info = loaded.repo_info
            source = loaded.module.__name__ if info is None else f"{info.repo_id} ({info.revision})"
            return interface, f"flash-attn is loaded from the kernels hub: {source}"
    return None


class EfficientKernel(Kernel):
    """ATen's memory-efficient attention. The flash kernels inherit its handling of sizes and masked tiles."""

    name = "cuda-efficient"
    costs = Costs(call=_CALL_PAIRS)
    rows_first = True
    compiles = True  # the fused kernels by Triton, FlashAttention 4 itself, cuDNN's plans

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x if x.stride(-1) == 1 else x.contiguous()

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return head_dim, value_dim

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        check_block(q, k, v)
        dim = v.shape[-1]
        q, k, v = _align(q), _align(k), _align(v)
        if tile_mask.packs:
            out, lse = self._bands_forward(q, k, v, tile_mask)
        elif tile_mask.boolean is None:
            out, lse = self._forward(q, k, v, tile_mask)
        else:
            out, lse = _masked_forward(q, k, v, tile_mask)
        return out.narrow(-1, 0, dim), lse

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v)
        dim, value_dim = q.shape[-1], v.shape[-1]
        dout, out = self.prepare(dout), self.prepare(out)  # the global out is kept in float32
        dout, q, k, v, out = _align(dout), _align(q), _align(k), _align(v), _align(out)
        lse = lse.float().contiguous()
        if tile_mask.packs:
            dq, dk, dv = self._bands_backward(dout, q, k, v, out, lse, tile_mask)
        elif tile_mask.boolean is None:
            dq, dk, dv = self._backward(dout, q, k, v, out, lse, tile_mask)
        else:
            dq, dk, dv = _masked_backward(dout, q, k, v, out, lse, tile_mask)
        return dq.narrow(-1, 0, dim), dk.narrow(-1, 0, dim), dv.narrow(-1, 0, value_dim)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        return _masked_forward(q, k, v, tile_mask)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _masked_backward(dout, q, k, v, out, lse, tile_mask)

    def _bands_forward(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{self.name} does not support bands")

    def _bands_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError(f"{self.name} does not support bands")


class FlashKernel(EfficientKernel):
    """Flash attention: torch's FlashAttention 2 or whatever torch is set to use instead, or other ``ops`` with ATen's
    signatures. It handles windows and packed documents itself, so no tile has a boolean mask."""

    costs = Costs(call=_CALL_PAIRS, bands=True)

    def __init__(
        self, dtype: torch.dtype, ops: FlashOps | None = None, name: str = "", softcap: float | None = None
    ) -> None:
        super().__init__(dtype)
        self.softcap = softcap
        rectangles = _compat.cuda_flash_forward, _compat.cuda_flash_backward
        bands = _compat.cuda_bands_forward, _compat.cuda_bands_backward
        self.ops = FlashOps(*rectangles, *bands) if ops is None else ops
        self.name = f"cuda-flash-{name.lower()}" if name else "cuda-flash"
        self.package, self.is_fa3 = name, (name or _compat.chosen_flash_impl()) == "FA3"

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        native = (head_dim, value_dim) == LATENT_WIDTHS and self.package == "FA4"
        if native or (self.package == "FA3" and 128 < head_dim <= 192 and 96 < value_dim <= 128):
            return head_dim, value_dim
        return Kernel.widths(self, head_dim, value_dim)

    def prepare_dout(self, x: Tensor) -> Tensor:
        """ATen's backward copies dout and out to a dense (batch, rows, heads, dim) in every call: once per row will do.
        The other packages take any order."""
        x = self.prepare(x)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.ops.backward is _compat.cuda_flash_backward else x

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        with self._leaving_multiprocessors():
            out, lse, *_ = self.ops.forward(q, k, v, 0.0, tile_mask.causal, scale=tile_mask.scale)
        return out, lse

    def _leaving_multiprocessors(self) -> AbstractContextManager[None]:
        """All forward kernels of FlashAttention 3 are persistent: they take every multiprocessor that they may, until
        they end. One that belongs to a transfer would start its part when all others have ended, and a transfer that
        comes later would wait for the whole kernel."""
        return _compat.sm_margin(self.sm_margin) if self.sm_margin and self.is_fa3 else nullcontext()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
        rest = (None, None, q.shape[2], k.shape[2], 0.0, tile_mask.causal, seed, seed)
        return self.ops.backward(dout, q, k, v, out, lse, *rest, scale=tile_mask.scale)

    def _bands_forward(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        """One rectangle under a window, or several: then one call per batch entry, with rows before heads."""
        cu_seqlens, longest = _cu_seqlens(tile_mask.packs, q.device), _longest(tile_mask.packs)
        options = _window(tile_mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rest = (*longest, 0.0, False, False)
        with self._leaving_multiprocessors():
            if cu_seqlens is None:
                out, lse, *_ = self.ops.bands_forward(q, k, v, None, None, *rest, **options)
                return out.transpose(1, 2), lse
            entries = zip(q.unbind(0), k.unbind(0), v.unbind(0), strict=True)
            results = [self.ops.bands_forward(*x, *cu_seqlens, *rest, **options)[:2] for x in entries]
        outs, lses = zip(*results, strict=True)
        return _batch(outs).transpose(1, 2), _batch(lses)

    def _bands_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_seqlens, longest = _cu_seqlens(tile_mask.packs, q.device), _longest(tile_mask.packs)
        options = _window(tile_mask)
        seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        rest = (*longest, 0.0, False, seed, seed)
        if cu_seqlens is None:
            grads = self.ops.bands_backward(dout, q, k, v, out, lse, None, None, *rest, **options)
        else:
            entries = zip(*(x.unbind(0) for x in (dout, q, k, v, out, lse)), strict=True)
            results = [self.ops.bands_backward(*x, *cu_seqlens, *rest, **options) for x in entries]
            grads = tuple(map(_batch, zip(*results, strict=True)))
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


class CudnnKernel(FlashKernel):
    """ATen's cuDNN attention for full and causal rectangles that torch lets it compute; torch's FlashAttention 2 for
    the rest, bands included."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.name = "cuda-cudnn"
        self._known: dict[object, bool] = {}

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        native = (head_dim, value_dim) == LATENT_WIDTHS
        return LATENT_WIDTHS if native else super().widths(head_dim, value_dim)

    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        """FlashAttention 2 needs values as wide as keys."""
        width = v.shape[-1]
        if width != q.shape[-1] and (tile_mask.packs or not self._is_usable(q, k, v, tile_mask)):
            v = pad_width(v, q.shape[-1])
        out, lse = super().forward_tile(q, k, v, tile_mask)
        return out.narrow(-1, 0, width), lse

    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = v.shape[-1]
        if width != q.shape[-1] and (tile_mask.packs or not self._is_usable(q, k, v, tile_mask)):
            dout, v, out = (pad_width(x, q.shape[-1]) for x in (dout, v, out))
        dq, dk, dv = super().backward_tile(dout, q, k, v, out, lse, tile_mask)
        return dq, dk, dv.narrow(-1, 0, width)

    def _is_usable(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> bool:
        key = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), tile_mask.causal
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN_SHAPES:
                self._known.clear()
            self._known[key] = _compat.can_use_cudnn(q, k, v, tile_mask.causal)
        return self._known[key]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        if not self._is_usable(q, k, v, tile_mask):
            return super()._forward(q, k, v, tile_mask)
        options = (None, True, 0.0, tile_mask.causal, False)  # no bias, with lse
        out, lse, *_ = _compat.cuda_cudnn_forward(q, k, v, *options, scale=tile_mask.scale)
        return out, lse.squeeze(-1)  # cuDNN's has one more dimension

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._is_usable(q, k, v, tile_mask):
            return super()._backward(dout, q, k, v, out, lse, tile_mask)
        seed = q.new_empty((), dtype=torch.int64)  # never read without dropout
        rest = (seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, tile_mask.causal)
        return _compat.cuda_cudnn_backward(dout, q, k, v, out, lse.unsqueeze(-1), *rest, scale=tile_mask.scale)


def _cu_seqlens(packs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """cu_seqlens of the rows and of the keys; None for a single rectangle."""
    return None if len(packs) == 1 else _cu_seqlens_on(packs, device, current_stream_id(device))


@lru_cache(maxsize=1024)
def _cu_seqlens_on(packs: tuple[tuple[int, int], ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    rows, keys = ([0, *accumulate(pack[side] for pack in packs)] for side in range(2))
    return ints_on(device, rows, torch.int32), ints_on(device, keys, torch.int32)


def _longest(packs: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return max(rows for rows, _ in packs), max(keys for _, keys in packs)


def _window(tile_mask: TileMask) -> dict[str, Any]:
    left, right = tile_mask.window
    return dict(scale=tile_mask.scale, window_size_left=left, window_size_right=right)


def _batch(entries: Sequence[Tensor]) -> Tensor:
    return entries[0].unsqueeze(0) if len(entries) == 1 else torch.stack(tuple(entries))


def _masked_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    inputs = (q, _repeat_heads(k, heads), _repeat_heads(v, heads), _bias(tile_mask.boolean, q))
    out, lse, *_ = _compat.cuda_efficient_forward(*inputs, True, 0.0, tile_mask.causal, scale=tile_mask.scale)
    return out, lse.narrow(-1, 0, rows)


def _masked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> tuple[Tensor, Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    inputs = (q, _repeat_heads(k, heads), _repeat_heads(v, heads), _bias(tile_mask.boolean, q))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -rows % _LSE_ROW_MULTIPLE), value=float("inf"))
    seed = q.new_empty(2, dtype=torch.int64)  # never read without dropout
    wanted = [True, True, True, False]  # no gradient of the bias
    dq, dk, dv, _ = _compat.cuda_efficient_backward(
        dout, *inputs, out, lse, seed, seed, 0.0, wanted, tile_mask.causal, scale=tile_mask.scale
    )
    return dq, _sum_heads(dk, k.shape[1]), _sum_heads(dv, v.shape[1])


def _align(x: Tensor) -> Tensor:
    """``x`` with its head dim padded to a multiple of 8, and aligned rows."""
    if x.shape[-1] % _HEAD_DIM_MULTIPLE:
        return F.pad(x, (0, -x.shape[-1] % _HEAD_DIM_MULTIPLE))
    if any(step % _HEAD_DIM_MULTIPLE for step in (x.storage_offset(), *x.stride()[:-1])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key/value heads, repeated for the query heads that share them. A single head is not copied."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _sum_heads(grad: Tensor, heads: int) -> Tensor:
    """The sum of the gradients of repeated heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    rows, keys = mask.shape
    bias = q.new_zeros(rows, keys + -keys % _BIAS_ROW_MULTIPLE).narrow(1, 0, keys).masked_fill_(~mask, float("-inf"))
    return bias.expand(*q.shape[:2], rows, keys)

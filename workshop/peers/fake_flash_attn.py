"""A substitute for the flash-attn package, which needs a GPU, for peers that are built on it.

ring-flash-attn and yunchang import ``flash_attn``. Here they find a module of that name with the functions that they
call, on the engine's CPU kernel. Their communication is unchanged.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from startrail.geometry.mask import Mask, Segment
from startrail.geometry.tiles import Tile, cover, segments_of
from startrail.kernels.base import TileMask
from startrail.kernels.cpu import CpuKernel


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """flash-attn's own signature, whose names its callers inspect; tensors are (batch, tokens, heads, dim)."""
    _no_window(window_size_left, window_size_right)
    kernel, dtype = CpuKernel(q.dtype, softcap or None), q.dtype
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    forward = kernel.select_forward(q, k) if softcap else kernel.forward_tile  # peers do not pay for our check for NaN
    out, lse = forward(q, k, v, TileMask(causal, None, softmax_scale))
    return out.transpose(1, 2).to(dtype), lse.float(), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv in place, as flash-attn does."""
    _no_window(window_size_left, window_size_right)
    kernel = CpuKernel(q.dtype, softcap or None)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    backward = kernel.select_backward(out, softmax_lse) if softcap else kernel.backward_tile
    gradients = backward(dout, q, k, v, out, softmax_lse, TileMask(causal, None, softmax_scale))
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient.transpose(1, 2))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """Several documents, one after the other; tensors are (tokens, heads, dim)."""
    kernel, visible = CpuKernel(q.dtype), _varlen_tiles(cu_seqlens_q, cu_seqlens_k, causal, window_size_left)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    result = kernel.forward(q, k, v, visible, softmax_scale)
    return result.out[0].transpose(0, 1).to(q.dtype), result.lse[0].float(), None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    kernel, visible = CpuKernel(q.dtype), _varlen_tiles(cu_seqlens_q, cu_seqlens_k, causal, window_size_left)
    dout, q, k, v, out = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (dout, q, k, v, out))
    gradients = kernel.backward(dout, q, k, v, out, softmax_lse.unsqueeze(0), visible, softmax_scale)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient.value[0].transpose(0, 1))


def _varlen_tiles(cu_q: Tensor, cu_k: Tensor, causal: bool, left: int) -> tuple[Tile, ...]:
    """What a call sees. If it is causal, the last row of a document sees its last key, and a window of ``left`` keys
    before."""
    if not causal:
        _no_window(left, -1)
    segments = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        own = Mask.from_slices([(0, q1 - q0, 0, k1 - k0, causal)])
        shift = (k1 - k0) - (q1 - q0)  # row t is the document's token t + shift
        mask = own if left < 0 else Mask(causal=True, window=left + 1)
        rows = ((shift if left >= 0 else 0, q1 - q0),)
        for s in segments_of(mask, rows, ((0, k1 - k0),)):
            segments.append(Segment(s.q0 + q0, s.q1 + q0, s.low + k0, s.dlow, s.high + k0, s.dhigh))
    return cover(segments)


def _no_window(left: int, right: int) -> None:
    if (left, right) != (-1, -1):
        raise NotImplementedError(f"the substitute for flash_attn has no windows, got ({left}, {right})")


def _unsupported(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("the substitute for flash_attn lacks this function")


def install() -> None:
    """Make ``import flash_attn`` find the substitute."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = "2.7.0"  # type: ignore[attr-defined]  # the first with these signatures
    package.flash_attn_func = _unsupported  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    varlen = (_flash_attn_varlen_forward, _flash_attn_varlen_backward)
    for function in (_flash_attn_forward, _flash_attn_backward, *varlen):
        setattr(interface, function.__name__, function)
    sys.modules |= {package.__name__: package, interface.__name__: interface}


class CopyingTo(TorchFunctionMode):
    """``x.to(dtype)`` makes a copy, also of a tensor that has this dtype already.

    Both packages start their sums with ``buffer.to(torch.float32)`` and write to the buffer again. In half precision,
    which is all that flash-attn takes, that is a copy; in float32 it is the buffer itself, and the sums are lost.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return function(*args, **options | {"copy": True} if function is Tensor.to else options)


def in_float32(module: ModuleType, backward: str) -> None:
    """Run a package's backward pass under `CopyingTo`."""
    original = getattr(module, backward)

    def copying(*arguments: Any, **options: Any) -> Any:
        with CopyingTo():
            return original(*arguments, **options)

    setattr(module, backward, copying)

"""Small Triton kernels, one launch each, that replace many launches of torch: merging by log-sum-exp (9), delta (2 per
few heads) and the substitute for a row's output (10 to 40). The arithmetic is that of the plain versions in
`accumulate` and `base`.

Tensors are (batch, heads, rows, dim) with any strides, except that the last dimension is dense. Tests run them in
Triton's interpreter (TRITON_INTERPRET=1); they have not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # per program: with four times as many all three run out of registers


@triton.jit
def _merge(
    out, lse, new, new_lse,
    out_b, out_h, out_r, lse_b, lse_h, lse_r, new_b, new_h, new_r, new_lse_b, new_lse_h, new_lse_r,
    heads, rows, dim, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    here = row < rows
    nothing = float("-inf")
    at = lse + batch * lse_b + head * lse_h + row * lse_r
    total = tl.load(at, mask=here, other=nothing)
    added = tl.load(new_lse + batch * new_lse_b + head * new_lse_h + row * new_lse_r, mask=here, other=nothing)
    added = added.to(tl.float64)
    weight = 1.0 / (1.0 + tl.exp(total - added))
    weight = tl.where(added == nothing, 0.0, weight)  # not NaN if neither has seen a key
    more = tl.log(1.0 + tl.exp(-tl.abs(total - added)))  # NaN if either is; the maximum need not be
    more = tl.where(total == added, 0.6931471805599453, more)  # also if both are infinite
    tl.store(at, tl.maximum(total, added) + more, mask=here)

    inside = here[:, None] & (column < dim)[None, :]
    to = out + batch * out_b + head * out_h + row[:, None] * out_r + column[None, :]
    old = tl.load(to, mask=inside, other=0.0)
    value = tl.load(new + batch * new_b + head * new_h + row[:, None] * new_r + column[None, :], mask=inside, other=0.0)
    value = value.to(old.dtype)
    share = weight.to(old.dtype)[:, None]
    step = value - old
    tl.store(to, tl.where(share < 0.5, old + share * step, value - step * (1.0 - share)), mask=inside)


@triton.jit
def _row_sums(
    dout, out, sums, dout_b, dout_h, dout_r, out_b, out_h, out_r, heads, rows, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    a = tl.load(dout + batch * dout_b + head * dout_h + row[:, None] * dout_r + column[None, :], mask=inside, other=0.0)
    b = tl.load(out + batch * out_b + head * out_h + row[:, None] * out_r + column[None, :], mask=inside, other=0.0)
    total = tl.sum(a.to(tl.float64) * b.to(tl.float64), 1)
    tl.store(sums + tl.program_id(1).to(tl.int64) * rows + row, total.to(sums.dtype.element_ty), mask=row < rows)


@triton.jit
def _surrogate_out(
    dout, delta, out, dout_b, dout_h, dout_r, delta_b, delta_h, delta_r, out_b, out_h, out_r, heads, rows, dim, limit,
    PICKS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    here = row < rows
    inside = here[:, None] & (column < dim)[None, :]
    x = tl.load(dout + batch * dout_b + head * dout_h + row[:, None] * dout_r + column[None, :], mask=inside, other=0.0)
    rest = tl.load(delta + batch * delta_b + head * delta_h + row * delta_r, mask=here, other=0.0)
    wide = x.to(rest.dtype)
    size = tl.where((column < dim)[None, :], tl.abs(wide), -1.0)
    result = tl.zeros_like(wide)
    for _ in tl.static_range(PICKS):
        picked = column[None, :] == tl.argmax(size, 1)[:, None]
        value = tl.sum(tl.where(picked, wide, 0.0), 1)
        safe = tl.where(value == 0.0, 1.0, value)
        part = tl.where(value == 0.0, 0.0, tl.minimum(tl.maximum(rest / safe, -limit), limit))
        part = tl.where(tl.abs(rest) < float("inf"), part, float("nan"))  # comparisons would lose the NaN
        part = part.to(out.dtype.element_ty).to(rest.dtype)
        result = tl.where(picked, part[:, None], result)
        size = tl.where(picked, -1.0, size)  # do not pick it again
        rest -= value * part
    at = out + batch * out_b + head * out_h + row[:, None] * out_r + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


def merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge a result into the running ``out`` and ``lse``, in place."""
    new = _dense(new)
    strides = (*out.stride()[:3], *lse.stride(), *new.stride()[:3], *new_lse.stride())
    _launch(_merge, out, (out, lse, new, new_lse, *strides))


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    dout, out = _dense(dout), _dense(out)
    sums = torch.empty(dout.shape[:3], dtype=dtype, device=dout.device)
    _launch(_row_sums, dout, (dout, out, sums, *dout.stride()[:3], *out.stride()[:3]))
    return sums


def surrogate_out(dout: Tensor, delta: Tensor, picks: int) -> Tensor:
    dout, out = _dense(dout), torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    strides = (*dout.stride()[:3], *delta.stride(), *out.stride()[:3])
    _launch(_surrogate_out, dout, (dout, delta, out, *strides), torch.finfo(dout.dtype).max, PICKS=picks)
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(kernel: Any, x: Tensor, arguments: tuple[object, ...], *more: object, **constants: int) -> None:
    """Run ``kernel`` over the rows of ``x``; it takes the number of heads and rows, the dim and ``more`` at the end."""
    batch, heads, rows, dim = x.shape
    padded = triton.next_power_of_2(dim)
    block = min(max(1, ELEMENTS // padded), triton.next_power_of_2(rows))
    grid = (triton.cdiv(rows, block), batch * heads)
    kernel[grid](*arguments, heads, rows, dim, *more, **constants, ROWS=block, DIM=padded)

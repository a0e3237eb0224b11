"""Small Triton kernels, one launch each, that replace many launches of torch: merging by log-sum-exp (9), delta (2 per
few heads) and the substitute for a row's output (10 to 40). The arithmetic is that of the plain versions in
`accumulate` and `base`.

Tensors are (batch, heads, rows, dim) with any strides, except that the last dimension is dense. Tests run them in
Triton's interpreter (TRITON_INTERPRET=1); they have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from startrail.kernels.fused import MAX_MERGED

ELEMENTS, MERGED_ELEMENTS = 2048, 512  # per program: with four times as many they run out of registers


@triton.jit
def _weight(lse, top):
    """exp(lse - top): 0 for a row that has seen no key, also if none has."""
    return tl.where(lse == float("-inf"), 0.0, tl.where(lse == top, 1.0, tl.exp(lse - top)))


@triton.jit
def _merge(
    out, lse, new0, new1, new2, new3, lse0, lse1, lse2, lse3,
    out_b, out_h, out_r, lse_b, lse_h, lse_r,
    new0_b, new0_h, new0_r, new1_b, new1_h, new1_r, new2_b, new2_h, new2_r, new3_b, new3_h, new3_r,
    lse0_b, lse0_h, lse0_r, lse1_b, lse1_h, lse1_r, lse2_b, lse2_h, lse2_r, lse3_b, lse3_h, lse3_r,
    heads, rows, dim, COUNT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Merges ``COUNT`` results at once, so that the running one is read and written once. ``FIRST``: there is none yet.
    Results beyond ``COUNT`` repeat the first and are not read."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    here = row < rows
    nothing = float("-inf")
    at = lse + batch * lse_b + head * lse_h + row * lse_r
    old = tl.full((ROWS,), nothing, tl.float64)
    if not FIRST:
        old = tl.load(at, mask=here, other=nothing)
    a0 = tl.load(lse0 + batch * lse0_b + head * lse0_h + row * lse0_r, mask=here, other=nothing).to(tl.float64)
    a1 = tl.full((ROWS,), nothing, tl.float64)
    a2 = tl.full((ROWS,), nothing, tl.float64)
    a3 = tl.full((ROWS,), nothing, tl.float64)
    if COUNT > 1:
        a1 = tl.load(lse1 + batch * lse1_b + head * lse1_h + row * lse1_r, mask=here, other=nothing).to(tl.float64)
    if COUNT > 2:
        a2 = tl.load(lse2 + batch * lse2_b + head * lse2_h + row * lse2_r, mask=here, other=nothing).to(tl.float64)
    if COUNT > 3:
        a3 = tl.load(lse3 + batch * lse3_b + head * lse3_h + row * lse3_r, mask=here, other=nothing).to(tl.float64)
    top = tl.maximum(tl.maximum(tl.maximum(old, a0), tl.maximum(a1, a2)), a3)
    # 0 where a row has seen no key, 1 for the largest even if it is infinite, and NaN if any is
    w = _weight(old, top)
    w0, w1, w2, w3 = _weight(a0, top), _weight(a1, top), _weight(a2, top), _weight(a3, top)
    total = w + w0 + w1 + w2 + w3
    seen = total != 0.0
    tl.store(at, tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), nothing), mask=here)
    total = tl.where((top == float("inf")) & (total > 1.0), float("nan"), tl.where(seen, total, 1.0))  # two infinities

    inside = here[:, None] & (column < dim)[None, :]
    to = out + batch * out_b + head * out_h + row[:, None] * out_r + column[None, :]
    kind = out.dtype.element_ty
    at0 = new0 + batch * new0_b + head * new0_h + row[:, None] * new0_r + column[None, :]
    value = tl.load(at0, mask=inside, other=0.0).to(kind) * (w0 / total).to(kind)[:, None]
    if not FIRST:
        value += tl.load(to, mask=inside, other=0.0) * (w / total).to(kind)[:, None]
    if COUNT > 1:
        at1 = new1 + batch * new1_b + head * new1_h + row[:, None] * new1_r + column[None, :]
        value += tl.load(at1, mask=inside, other=0.0).to(kind) * (w1 / total).to(kind)[:, None]
    if COUNT > 2:
        at2 = new2 + batch * new2_b + head * new2_h + row[:, None] * new2_r + column[None, :]
        value += tl.load(at2, mask=inside, other=0.0).to(kind) * (w2 / total).to(kind)[:, None]
    if COUNT > 3:
        at3 = new3 + batch * new3_b + head * new3_h + row[:, None] * new3_r + column[None, :]
        value += tl.load(at3, mask=inside, other=0.0).to(kind) * (w3 / total).to(kind)[:, None]
    tl.store(to, value, mask=inside)


@triton.jit
def _add(
    total, new0, new1, new2, new3, total_b, total_h, total_r,
    new0_b, new0_h, new0_r, new1_b, new1_h, new1_r, new2_b, new2_h, new2_r, new3_b, new3_h, new3_r,
    heads, rows, dim, COUNT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Adds ``COUNT`` tensors one after the other, as single additions would."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    kind = total.dtype.element_ty
    to = total + batch * total_b + head * total_h + row[:, None] * total_r + column[None, :]
    at0 = new0 + batch * new0_b + head * new0_h + row[:, None] * new0_r + column[None, :]
    value = tl.load(at0, mask=inside, other=0.0).to(kind)
    if not FIRST:
        value = tl.load(to, mask=inside, other=0.0) + value
    if COUNT > 1:
        at1 = new1 + batch * new1_b + head * new1_h + row[:, None] * new1_r + column[None, :]
        value += tl.load(at1, mask=inside, other=0.0).to(kind)
    if COUNT > 2:
        at2 = new2 + batch * new2_b + head * new2_h + row[:, None] * new2_r + column[None, :]
        value += tl.load(at2, mask=inside, other=0.0).to(kind)
    if COUNT > 3:
        at3 = new3 + batch * new3_b + head * new3_h + row[:, None] * new3_r + column[None, :]
        value += tl.load(at3, mask=inside, other=0.0).to(kind)
    tl.store(to, value, mask=inside)


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


def merge(out: Tensor, lse: Tensor, results: Sequence[tuple[Tensor, Tensor]], first: bool = False) -> None:
    """Merge at most ``MAX_MERGED`` results (out, lse) into the running ``out`` and ``lse``, in place. ``first``: these
    hold nothing yet."""
    count = len(results)
    padded = [(_dense(new), new_lse) for new, new_lse in (*results, *[results[0]] * (MAX_MERGED - count))]
    tensors = (out, lse, *(new for new, _ in padded), *(new_lse for _, new_lse in padded))
    strides = (step for x in tensors for step in x.stride()[:3])
    _launch(_merge, out, (*tensors, *strides), elements=MERGED_ELEMENTS, COUNT=count, FIRST=first)


def add(total: Tensor, grads: Sequence[Tensor], first: bool) -> None:
    """Add at most ``MAX_MERGED`` tensors to ``total``, in place. ``first``: it holds nothing yet."""
    padded = [_dense(grad) for grad in (*grads, *[grads[0]] * (MAX_MERGED - len(grads)))]
    strides = (step for x in (total, *padded) for step in x.stride()[:3])
    _launch(_add, total, (total, *padded, *strides), elements=MERGED_ELEMENTS, COUNT=len(grads), FIRST=first)


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    dout, out = _dense(dout), _dense(out)
    sums = torch.empty(dout.shape[:3], dtype=dtype, device=dout.device)
    _launch(_row_sums, dout, (dout, out, sums, *dout.stride()[:3], *out.stride()[:3]))
    return sums


def surrogate_out(dout: Tensor, delta: Tensor, picks: int) -> Tensor:
    dout = _dense(dout)
    out = torch.empty_like(dout)  # in the order of dout's dimensions in memory, which kernels may depend on
    strides = (*dout.stride()[:3], *delta.stride(), *out.stride()[:3])
    _launch(_surrogate_out, dout, (dout, delta, out, *strides), torch.finfo(dout.dtype).max, PICKS=picks)
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    kernel: Any, x: Tensor, arguments: tuple[object, ...], *more: object, elements: int = ELEMENTS, **constants: int
) -> None:
    """Run ``kernel`` over the rows of ``x``; it takes the number of heads and rows, the dim and ``more`` at the end."""
    batch, heads, rows, dim = x.shape
    padded = triton.next_power_of_2(dim)
    block = min(max(1, elements // padded), triton.next_power_of_2(rows))
    grid = (triton.cdiv(rows, block), batch * heads)
    kernel[grid](*arguments, heads, rows, dim, *more, **constants, ROWS=block, DIM=padded)

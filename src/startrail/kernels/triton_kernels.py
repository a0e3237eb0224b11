"""Small Triton kernels, one launch each, that replace many launches of torch: merging by log-sum-exp (9), delta (2 per
few heads), the substitute for a row's output (10 to 40) and the copies of a head exchange (1 or 2 per tensor). The
arithmetic is that of the plain versions in `accumulate`, `base` and `rearrange`.

Tensors are (batch, heads, rows, dim) with any strides, except that the last dimension is dense. A launch takes the host
longer the more arguments it has, so results that are added at once must have equal strides, as those of one attention
kernel do; others are copied. Tests run them in Triton's interpreter (TRITON_INTERPRET=1); they have not run on a GPU
yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from startrail.kernels.fused import MAX_MERGED

# Per program; the second where several tensors take part: with four times as many they run out of registers.
ELEMENTS, MERGED_ELEMENTS = 2048, 512


@triton.jit
def _place(heads, rows, ROWS: tl.constexpr):
    """The batch entry, the head and the rows of this program. All are in the grid's first dimension: the others end at
    65,535, and a batch may have more entries x heads."""
    blocks = tl.cdiv(rows, ROWS)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    return pair // heads, pair % heads, (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _weight(lse, top):
    """exp(lse - top): 0 for a row that has seen no key, also if none has."""
    return tl.where(lse == float("-inf"), 0.0, tl.where(lse == top, 1.0, tl.exp(lse - top)))


@triton.jit
def _merge(
    out, lse, new0, new1, new2, new3, lse0, lse1, lse2, lse3,
    out_b, out_h, out_r, lse_b, lse_h, lse_r, new_b, new_h, new_r, new_lse_b, new_lse_h, new_lse_r,
    heads, rows, dim, COUNT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Merges ``COUNT`` results at once, so that the running result is read and written once. ``FIRST``: no running
    result exists yet. Results beyond ``COUNT`` repeat the first and are not read."""
    batch, head, row = _place(heads, rows, ROWS)
    column = tl.arange(0, DIM)
    here = row < rows
    nothing = float("-inf")
    at = lse + batch * lse_b + head * lse_h + row * lse_r
    old = tl.full((ROWS,), nothing, tl.float64)
    if not FIRST:
        old = tl.load(at, mask=here, other=nothing)
    at_new = batch * new_lse_b + head * new_lse_h + row * new_lse_r
    a0 = tl.load(lse0 + at_new, mask=here, other=nothing).to(tl.float64)
    a1 = tl.full((ROWS,), nothing, tl.float64)
    a2 = tl.full((ROWS,), nothing, tl.float64)
    a3 = tl.full((ROWS,), nothing, tl.float64)
    if COUNT > 1:
        a1 = tl.load(lse1 + at_new, mask=here, other=nothing).to(tl.float64)
    if COUNT > 2:
        a2 = tl.load(lse2 + at_new, mask=here, other=nothing).to(tl.float64)
    if COUNT > 3:
        a3 = tl.load(lse3 + at_new, mask=here, other=nothing).to(tl.float64)
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
    elements = batch * new_b + head * new_h + row[:, None] * new_r + column[None, :]
    value = tl.load(new0 + elements, mask=inside, other=0.0).to(kind) * (w0 / total).to(kind)[:, None]
    if not FIRST:
        value += tl.load(to, mask=inside, other=0.0) * (w / total).to(kind)[:, None]
    if COUNT > 1:
        value += tl.load(new1 + elements, mask=inside, other=0.0).to(kind) * (w1 / total).to(kind)[:, None]
    if COUNT > 2:
        value += tl.load(new2 + elements, mask=inside, other=0.0).to(kind) * (w2 / total).to(kind)[:, None]
    if COUNT > 3:
        value += tl.load(new3 + elements, mask=inside, other=0.0).to(kind) * (w3 / total).to(kind)[:, None]
    tl.store(to, value, mask=inside)


@triton.jit
def _add(
    total, new0, new1, new2, new3, total_b, total_h, total_r, new0_b, new0_h, new0_r, new_b, new_h, new_r,
    heads, rows, dim, COUNT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Adds ``COUNT`` tensors one after the other, in float32 or wider, and rounds once. The first one, which may be an
    accumulator, has strides of its own."""
    batch, head, row = _place(heads, rows, ROWS)
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    kind: tl.constexpr = tl.float64 if total.dtype.element_ty == tl.float64 else tl.float32
    to = total + batch * total_b + head * total_h + row[:, None] * total_r + column[None, :]
    at0 = new0 + batch * new0_b + head * new0_h + row[:, None] * new0_r + column[None, :]
    value = tl.load(at0, mask=inside, other=0.0).to(kind)
    if not FIRST:
        value = tl.load(to, mask=inside, other=0.0).to(kind) + value
    elements = batch * new_b + head * new_h + row[:, None] * new_r + column[None, :]
    if COUNT > 1:
        value += tl.load(new1 + elements, mask=inside, other=0.0).to(kind)
    if COUNT > 2:
        value += tl.load(new2 + elements, mask=inside, other=0.0).to(kind)
    if COUNT > 3:
        value += tl.load(new3 + elements, mask=inside, other=0.0).to(kind)
    tl.store(to, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums(
    dout, out, sums, dout_b, dout_h, dout_r, out_b, out_h, out_r, heads, rows, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head, row = _place(heads, rows, ROWS)
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    a = tl.load(dout + batch * dout_b + head * dout_h + row[:, None] * dout_r + column[None, :], mask=inside, other=0.0)
    b = tl.load(out + batch * out_b + head * out_h + row[:, None] * out_r + column[None, :], mask=inside, other=0.0)
    total = tl.sum(a.to(tl.float64) * b.to(tl.float64), 1)
    tl.store(sums + (batch * heads + head) * rows + row, total.to(sums.dtype.element_ty), mask=row < rows)


@triton.jit
def _surrogate_out(
    dout, delta, out, dout_b, dout_h, dout_r, delta_b, delta_h, delta_r, out_b, out_h, out_r, heads, rows, dim, limit,
    PICKS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head, row = _place(heads, rows, ROWS)
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


@triton.jit
def _copy_rows(
    to, source, places, to_k, to_b, to_h, to_r, source_k, source_b, source_h, source_r, heads, dim,
    ranks, batch, rows, chunk, TO_WHOLE: tl.constexpr, FROM_WHOLE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Copies rows (rank, batch, head, row). Of a whole piece, ``places`` (ranks, chunks) says where the row stands."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    row, head = index % rows, index // rows % heads
    sequence, rank = index // rows // heads % batch, index // rows // heads // batch
    here = rank < ranks  # the product of all sizes may have more than 32 bits
    to_row, source_row = row, row
    if TO_WHOLE or FROM_WHOLE:
        place = tl.load(places + rank * (rows // chunk) + row // chunk, mask=here, other=0) * chunk + row % chunk
        if TO_WHOLE:
            to_row = place
        else:
            source_row = place
    inside = here[:, None] & (column < dim)[None, :]
    at = source + rank * source_k + sequence * source_b + head * source_h + source_row * source_r
    into = to + rank * to_k + sequence * to_b + head * to_h + to_row * to_r
    value = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(into[:, None] + column[None, :], value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _rearrange(
    to0, to1, to2, source0, source1, source2, places,
    to0_k, to0_b, to0_h, to0_r, to1_k, to1_b, to1_h, to1_r, to2_k, to2_b, to2_h, to2_r,
    source0_k, source0_b, source0_h, source0_r, source1_k, source1_b, source1_h, source1_r,
    source2_k, source2_b, source2_h, source2_r, heads0, heads1, heads2, dim0, dim1, dim2, ranks, batch, rows, chunk,
    TO_WHOLE: tl.constexpr, FROM_WHOLE: tl.constexpr,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr,
    DIM0: tl.constexpr, DIM1: tl.constexpr, DIM2: tl.constexpr,
):  # fmt: skip
    """Copies up to three tensors, each by the programs of its own index in the grid's second dimension."""
    if tl.program_id(1) == 0:
        _copy_rows(
            to0, source0, places, to0_k, to0_b, to0_h, to0_r, source0_k, source0_b, source0_h, source0_r, heads0, dim0,
            ranks, batch, rows, chunk, TO_WHOLE, FROM_WHOLE, ROWS0, DIM0,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        _copy_rows(
            to1, source1, places, to1_k, to1_b, to1_h, to1_r, source1_k, source1_b, source1_h, source1_r, heads1, dim1,
            ranks, batch, rows, chunk, TO_WHOLE, FROM_WHOLE, ROWS1, DIM1,
        )  # fmt: skip
    else:
        _copy_rows(
            to2, source2, places, to2_k, to2_b, to2_h, to2_r, source2_k, source2_b, source2_h, source2_r, heads2, dim2,
            ranks, batch, rows, chunk, TO_WHOLE, FROM_WHOLE, ROWS2, DIM2,
        )  # fmt: skip


def rearrange(pairs: Sequence[tuple[Tensor, Tensor]], chunks: tuple[Tensor, int] | None, join: bool) -> None:
    """Copy each source to its target and cast it, up to three of them in one launch. Both are (ranks, batch, heads,
    rows, ...); with ``chunks`` the target (``join``) or the source is a whole piece (batch, heads, all rows, ...)."""
    split = chunks is not None and not join
    for start in range(0, len(pairs), 3):
        some = pairs[start : start + 3]
        targets, sources = zip(*some, *[some[0]] * (3 - len(some)), strict=True)
        sizes = [(*x.shape, 1)[:5] for x in (sources if join else targets)]
        targets = tuple(_rows_of_ranks(x, size, join) for x, size in zip(targets, sizes, strict=True))
        sources = tuple(_rows_of_ranks(_dense(x), size, split) for x, size in zip(sources, sizes, strict=True))
        ranks, batch, _, rows, _ = sizes[0]
        places, chunk = (targets[0], 1) if chunks is None else chunks
        widths = [triton.next_power_of_2(size[4]) for size in sizes]
        blocks = [max(1, MERGED_ELEMENTS // width) for width in widths]
        programs = max(triton.cdiv(ranks * batch * x[2] * rows, block) for x, block in zip(sizes, blocks, strict=True))
        strides = (step for x in (*targets, *sources) for step in x.stride()[:4])
        numbers = (*(size[2] for size in sizes), *(size[4] for size in sizes), ranks, batch, rows, chunk)
        constants = {f"ROWS{i}": block for i, block in enumerate(blocks)} | {f"DIM{i}": d for i, d in enumerate(widths)}
        _rearrange[programs, len(some)](
            *targets, *sources, places, *strides, *numbers, **constants, TO_WHOLE=join, FROM_WHOLE=split
        )


def _rows_of_ranks(x: Tensor, size: Sequence[int], whole: bool) -> Tensor:
    """``x`` with five dimensions: (ranks, batch, heads, rows, dim). A whole piece is the same for all ranks."""
    x = x.expand(size[0], *x.shape) if whole else x
    return x if x.dim() == 5 else x.unsqueeze(-1)


def merge(out: Tensor, lse: Tensor, results: Sequence[tuple[Tensor, Tensor]], first: bool = False) -> None:
    """Merge at most ``MAX_MERGED`` results (out, lse) into the running ``out`` and ``lse``, in place. ``first``: these
    hold nothing yet."""
    outs, lses = (_alike(some) for some in zip(*results, strict=True))
    strides = (step for x in (out, lse, outs[0], lses[0]) for step in x.stride()[:3])
    tensors = (out, lse, *_padded(outs), *_padded(lses))
    _launch(_merge, out, (*tensors, *strides), elements=MERGED_ELEMENTS, COUNT=len(results), FIRST=first)


def add(total: Tensor, grads: Sequence[Tensor], first: bool) -> None:
    """Add at most ``MAX_MERGED`` tensors to ``total``, in place. ``first``: it holds nothing yet."""
    some = [_dense(grads[0]), *_alike(grads[1:])]
    strides = (step for x in (total, some[0], some[-1]) for step in x.stride()[:3])
    _launch(_add, total, (total, *_padded(some), *strides), elements=MERGED_ELEMENTS, COUNT=len(some), FIRST=first)


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


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` with the strides of the first."""
    made = [_dense(x) for x in tensors[:1]]
    for x in tensors[1:]:
        if x.stride() != (strides := made[0].stride()):
            x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        made.append(x)
    return made


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As many as a launch takes; those that are not read repeat the first."""
    return [*tensors, *[tensors[0]] * (MAX_MERGED - len(tensors))]


def _launch(
    kernel: Any, x: Tensor, arguments: tuple[object, ...], *more: object, elements: int = ELEMENTS, **constants: int
) -> None:
    """Run ``kernel`` over the rows of ``x``; it takes the number of heads and rows, the dim and ``more`` at the end."""
    batch, heads, rows, dim = x.shape
    padded = triton.next_power_of_2(dim)
    block = min(max(1, elements // padded), triton.next_power_of_2(rows))
    programs = triton.cdiv(rows, block) * batch * heads
    kernel[(programs,)](*arguments, heads, rows, dim, *more, **constants, ROWS=block, DIM=padded)

"""A causal square as smaller squares and full rectangles, for kernels that compute the diagonal in large blocks.

ATen's CPU kernel takes 256 rows and 512 keys at a time, so a causal square of 1,024 rows costs 1.5 times its visible
pairs, and one of 512 rows twice. Cut in halves down to ``SIDE`` rows, it costs 1.06 times. All parts of one size go
into one call, as its batch, so there are only log2(rows / SIDE) + 1 calls. Here # are causal squares, and the same
letters are one call:

    #
    a#
    bb#
    bba#
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from startrail.kernels.accumulate import merge_rows

SIDE = 64  # rows of the smallest squares, at least; with fewer, calls cost more than they save
WORTHWHILE_ROWS, WORTHWHILE_WORK = 4 * SIDE, 1 << 23  # rows, and rows x rows x numbers per row, from which it pays

Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]  # q, k, v, causal
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def smallest_side(rows: int, width: int) -> int:
    """The rows of the smallest squares that a causal square is cut into; ``width`` numbers in all heads of a row.

    >>> [smallest_side(rows, 512) for rows in (8192, 1000, 255, 128)], smallest_side(512, 16)
    ([64, 125, 255, 128], 512)
    """
    side, pays = rows, rows >= WORTHWHILE_ROWS and rows * rows * width >= WORTHWHILE_WORK
    while pays and side >= 2 * SIDE and side % 2 == 0:
        side //= 2
    return side


def forward_causal(forward: Forward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a causal square. ``forward`` computes rectangles of any number of sequences."""
    if _side_of(q) == q.shape[2]:
        return forward(q, k, v, True)
    sequences = zip(*(x.split(1) for x in (q, k, v)), strict=True)
    outs, lses = zip(*(_forward_one(forward, *one) for one in sequences), strict=True)
    return _batch(outs), _batch(lses)


def _forward_one(forward: Forward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, least = q.shape[2], _side_of(q)
    q_, k_, v_ = (_squares(x, least, 0, least) for x in (q, k, v))
    first, first_lse = forward(q_, k_, v_, True)
    out, lse = _joined(first), _joined(first_lse).double()
    for side in _sides(least, rows):
        q_, out_, lse_ = (_squares(x, side, side, 2 * side) for x in (q, out, lse))
        k_, v_ = (_squares(x, side, 0, 2 * side) for x in (k, v))
        merge_rows(out_, lse_, *forward(q_, k_, v_, False))
    return out, lse


def backward_causal(
    backward: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a causal square."""
    if _side_of(q) == q.shape[2]:
        return backward(dout, q, k, v, out, lse, True)
    sequences = zip(*(x.split(1) for x in (dout, q, k, v, out, lse)), strict=True)
    dqs, dks, dvs = zip(*(_backward_one(backward, *one) for one in sequences), strict=True)
    return _batch(dqs), _batch(dks), _batch(dvs)


def _backward_one(
    backward: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, least = q.shape[2], _side_of(q)
    dout_, q_, k_, v_, out_, lse_ = (_squares(x, least, 0, least) for x in (dout, q, k, v, out, lse))
    dq, dk, dv = map(_joined, backward(dout_, q_, k_, v_, out_, lse_, True))
    for side in _sides(least, rows):
        dout_, q_, out_, lse_, dq_ = (_squares(x, side, side, 2 * side) for x in (dout, q, out, lse, dq))
        k_, v_, dk_, dv_ = (_squares(x, side, 0, 2 * side) for x in (k, v, dk, dv))
        for total, grad in zip((dq_, dk_, dv_), backward(dout_, q_, k_, v_, out_, lse_, False), strict=True):
            total.add_(grad)
    return dq, dk, dv


def _side_of(q: Tensor) -> int:
    return smallest_side(q.shape[2], q.shape[1] * q.shape[3])


def _sides(side: int, rows: int) -> Iterator[int]:
    """The sides of the rectangles: those of the smallest squares, then twice as many rows each time."""
    while side < rows:
        yield side
        side *= 2


def _squares(x: Tensor, side: int, first: int, step: int) -> Tensor:
    """``side`` rows of every ``step`` rows from ``first`` on: a view (squares, heads, side, ...) of a tensor (1, heads,
    rows, ...)."""
    (_, heads, rows, *dims), (_, by_head, by_row, *by_dim) = x.shape, x.stride()
    shape, strides = (rows // step, heads, side, *dims), (step * by_row, by_head, by_row, *by_dim)
    return x.as_strided(shape, strides, x.storage_offset() + first * by_row)


def _joined(x: Tensor) -> Tensor:
    """All rows (1, heads, rows, ...) from squares (squares, heads, side, ...)."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _batch(sequences: Sequence[Tensor]) -> Tensor:
    return sequences[0] if len(sequences) == 1 else torch.cat(tuple(sequences))

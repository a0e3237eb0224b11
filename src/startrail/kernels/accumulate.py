"""Running results: partial outputs merged by log-sum-exp, and gradients that add up.

Both return their tensors in the order of a message (``tensors``) and add those of a peer (``take``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.kernels.fused import MAX_MERGED, fused_on


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums are kept in float32, or in float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


class Partial:
    """Partial outputs, merged by log-sum-exp. Rows that saw no key have out 0 and lse -inf.

    ``out`` is kept in float32 or wider, ``lse`` in float64: it is one number per row, and its rounding would affect the
    weight of every later merge.

    A merge reads and writes the whole running output, in float32. On GPUs, where memory is what a merge costs, results
    in half precision wait until there are ``MAX_MERGED`` of the same rows, and are merged at once: of 8 results, 28
    bytes per element instead of 76.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._waiting: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # results by their rows

    @property
    def out(self) -> Tensor:
        self._settle()
        assert self._out is not None
        return self._out

    @property
    def lse(self) -> Tensor:
        self._settle()
        assert self._lse is not None
        return self._lse

    def _settle(self) -> None:
        while self._waiting:
            self._merge_waiting(next(iter(self._waiting)))
        self._allocate()

    def _merge_waiting(self, rows: tuple[int, int]) -> None:
        """Merge the results of these rows, after a first one of all rows: that needs no empty accumulators."""
        fused = fused_on(self.device)
        assert fused is not None
        everything = (0, self.shape[2])
        if self._out is None and rows != everything and everything in self._waiting:
            self._merge_waiting(everything)
        results = self._waiting.pop(rows)
        first = self._out is None and rows == everything
        if first:
            self._out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._lse = torch.empty(self.shape[:3], dtype=torch.float64, device=self.device)
        self._allocate()
        assert self._out is not None and self._lse is not None
        part = slice(*rows)
        fused.merge(_rows(self._out, part), _rows(self._lse, part), results, first)

    def _allocate(self) -> None:
        if self._out is None:
            self._out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._lse = torch.full(self.shape[:3], float("-inf"), dtype=torch.float64, device=self.device)

    def merge(self, out: Tensor, lse: Tensor, rows: slice = slice(None), donated: bool = False) -> None:
        """Merge a result for ``rows``. Rows with lse = -inf, which saw no key, change nothing.

        ``donated``: the caller gives the tensors away, so a first result for all rows needs no copy.
        """
        start, stop, _ = rows.indices(self.shape[2])
        if fused_on(self.device) is not None:
            self._waiting.setdefault((start, stop), []).append((out, lse))
            waits = donated and out.dtype != self.dtype
            if not waits or len(self._waiting[start, stop]) == MAX_MERGED:
                self._merge_waiting((start, stop))
            return
        if donated and self._out is None and out.shape == self.shape:
            self._out, self._lse = out.to(self.dtype), lse.double()
            return
        mine, total = _rows(self.out, rows), _rows(self.lse, rows)
        lse = lse.double()
        weight = torch.sigmoid(lse - total).masked_fill_(lse.isneginf(), 0.0)  # not NaN if neither has seen a key
        mine.lerp_(out.to(self.dtype), weight.to(self.dtype).unsqueeze(-1))
        total.copy_(torch.logaddexp(total, lse))

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.lse, self.out

    def take(self, tensors: Sequence[Tensor]) -> None:
        lse, out = tensors
        self.merge(out, lse)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """A part of the rows; all of them need no view."""
    start, stop, _ = rows.indices(x.shape[2])
    return x if stop - start == x.shape[2] else x[:, :, rows]


class Sum:
    """A sum of gradients, in float32 or wider. Zero where nothing was added."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._value

    def add(self, grad: Tensor, rows: slice = slice(None), donated: bool = False) -> None:
        if donated and self._value is None and grad.shape == self.shape:
            self._value = grad.to(self.dtype)
        else:
            mine = self.value if grad.shape[2] == self.shape[2] else self.value[:, :, rows]
            mine.add_(grad)  # value[rows] += grad would copy the rows onto themselves as well


class Sums:
    """Several sums that share a message, such as dk and dv."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        self.sums = tuple(Sum(shape, dtype, device) for shape in shapes)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part.value for part in self.sums)

    def take(self, tensors: Sequence[Tensor]) -> None:
        for part, x in zip(self.sums, tensors, strict=True):
            part.add(x)

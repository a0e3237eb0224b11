"""Running results: partial outputs merged by log-sum-exp, and gradients that add up.

Both return their tensors in the order of a message (``tensors``) and add those of a peer (``take``). Sums can also be
added to a peer's where these are (``add_to``), which is then sent on, and written where the caller gets them
(``store``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from startrail.kernels.fused import MAX_MERGED, fused_on


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums are kept in float32, or in float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


Result = TypeVar("Result")


class Accumulator(ABC, Generic[Result]):
    """A running result of some rows. On GPUs, single results wait and are added several at a time.

    Adding one reads and writes the running result, in float32, and memory is what that costs on a GPU. So results in
    half precision wait until there are ``MAX_MERGED`` of the same rows, and one launch adds them: of 8 results, 28
    bytes per element instead of 76.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._waiting: dict[tuple[int, int], list[Result]] = {}  # by their rows

    def _wait(self, result: Result, rows: slice, may_wait: bool) -> None:
        """Add a result with those that wait, as soon as there are enough; at once unless it ``may_wait``."""
        start, stop, _ = rows.indices(self.shape[2])
        waiting = self._waiting.setdefault((start, stop), [])
        waiting.append(result)
        if not may_wait or len(waiting) == MAX_MERGED:
            self._add_waiting((start, stop))

    def _only_result(self) -> Result | None:
        """The result of all rows if there is no other: it needs no accumulator."""
        alone = self._is_new and [*map(len, self._waiting.values())] == [1]
        return self._waiting[0, self.shape[2]][0] if alone and (0, self.shape[2]) in self._waiting else None

    def _settle(self) -> None:
        """Add all results that wait."""
        while self._waiting:
            self._add_waiting(next(iter(self._waiting)))
        if self._is_new:
            self._allocate(empty=True)

    def _add_waiting(self, rows: tuple[int, int]) -> None:
        """Add the waiting results of these rows. If none was added yet and one of all rows waits too, that one comes
        first: it becomes the accumulator."""
        everything = (0, self.shape[2])
        if self._is_new and rows != everything and everything in self._waiting:
            self._add_waiting(everything)
        first = self._is_new and rows == everything
        if self._is_new:
            self._allocate(empty=not first)
        self._add_all(self._waiting.pop(rows), slice(*rows), first)

    @property
    @abstractmethod
    def _is_new(self) -> bool:
        """True if there is no running result yet."""

    @abstractmethod
    def _allocate(self, empty: bool) -> None:
        """Make the running result: of nothing, or not initialized."""

    @abstractmethod
    def _add_all(self, results: Sequence[Result], rows: slice, first: bool) -> None:
        """Add several results at once. ``first``: the running result is not initialized."""


class Partial(Accumulator[tuple[Tensor, Tensor]]):
    """Partial outputs, merged by log-sum-exp. Rows that saw no key have out 0 and lse -inf.

    ``out`` is kept in float32 or wider, ``lse`` in float64: it is one number per row, and its rounding would affect the
    weight of every later merge.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

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

    @property
    def _is_new(self) -> bool:
        return self._out is None

    def _allocate(self, empty: bool) -> None:
        self._out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._lse = torch.empty(self.shape[:3], dtype=torch.float64, device=self.device)
        if empty:
            self._out.zero_()
            self._lse.fill_(float("-inf"))

    def _add_all(self, results: Sequence[tuple[Tensor, Tensor]], rows: slice, first: bool) -> None:
        fused = fused_on(self.device)
        assert fused is not None and self._out is not None and self._lse is not None
        fused.merge(_rows(self._out, rows), _rows(self._lse, rows), results, first)

    def merge(self, out: Tensor, lse: Tensor, rows: slice = slice(None), donated: bool = False) -> None:
        """Merge a result for ``rows``. Rows with lse = -inf, which saw no key, change nothing.

        ``donated``: the caller gives the tensors away. They may wait, and a first result for all rows needs no copy.
        """
        fused, wide = fused_on(self.device), out.dtype == self.dtype
        if donated and self._is_new and out.shape == self.shape and (wide or fused is None):
            self._out, self._lse = out.to(self.dtype), lse.double()
            return
        if fused is not None:
            self._wait((out, lse), rows, may_wait=donated and not wide)
            return
        merge_rows(_rows(self.out, rows), _rows(self.lse, rows), out, lse)

    def tensors(self) -> tuple[Tensor, Tensor]:
        if (only := self._only_result()) is not None:
            return only[1], only[0]
        return self.lse, self.out

    def take(self, tensors: Sequence[Tensor]) -> None:
        lse, out = tensors
        self.merge(out, lse)


def merge_rows(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge results of the same rows into ``out`` and ``lse`` (float64), in place."""
    new_lse = new_lse.double()
    weight = torch.sigmoid(new_lse - lse).masked_fill_(new_lse.isneginf(), 0.0)  # not NaN if neither has seen a key
    out.lerp_(new.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """A part of the rows; all of them need no view."""
    start, stop, _ = rows.indices(x.shape[2])
    return x if stop - start == x.shape[2] else x[:, :, rows]


class Sum(Accumulator[Tensor]):
    """A sum of gradients, in float32 or wider. Zero where nothing was added."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        self._settle()
        assert self._value is not None
        return self._value

    @property
    def _is_new(self) -> bool:
        return self._value is None

    def _allocate(self, empty: bool) -> None:
        make = torch.zeros if empty else torch.empty
        self._value = make(self.shape, dtype=self.dtype, device=self.device)

    def _add_all(self, results: Sequence[Tensor], rows: slice, first: bool) -> None:
        assert self._value is not None
        _add_to(_rows(self._value, rows), results, first)

    def add(self, grad: Tensor, rows: slice = slice(None), donated: bool = False) -> None:
        """Add a gradient of ``rows``. ``donated``: the caller gives the tensor away; it may wait."""
        fused, wide = fused_on(self.device), grad.dtype == self.dtype
        if donated and self._is_new and grad.shape == self.shape and (wide or fused is None):
            self._value = grad.to(self.dtype)
        elif fused is not None:
            self._wait(grad, rows, may_wait=donated and not wide)
        elif donated and self._is_new and not self._waiting:
            self._wait(grad, rows, may_wait=True)  # added to a peer's sum perhaps, which needs no zeros
        else:
            _add_to(_rows(self.value, rows), [grad])

    def result(self) -> Tensor:
        """The sum, in any dtype that holds it."""
        only = self._only_result()
        return self.value if only is None else only

    def store(self, target: Tensor, others: Sequence[Tensor]) -> None:
        """Write the sum, with ``others``, to ``target``, and round once. On GPUs, one launch adds up what belongs to a
        row: the accumulator is only read."""
        own, every_row = [*([] if self._value is None else [self._value]), *others], (0, self.shape[2])
        (waiting_rows, waiting), *more = [*self._waiting.items()] or [(every_row, [])]
        has_gaps = not own and (not waiting or waiting_rows != every_row)
        if fused_on(self.device) is None or more or has_gaps or len(own) + len(waiting) > MAX_MERGED:
            for x in others:
                self.add(x)
            target.copy_(self.result())
            return
        for rows in ((0, waiting_rows[0]), waiting_rows, (waiting_rows[1], self.shape[2])):
            if rows[0] < rows[1]:
                parts = [_rows(x, slice(*rows)) for x in own] + (waiting if rows == waiting_rows else [])
                _add_to(_rows(target, slice(*rows)), parts, first=True)

    def add_to(self, total: Tensor) -> None:
        """Add the sum to a peer's, in place, and round once."""
        if self._is_new and len(self._waiting) == 1:
            ((rows, grads),) = self._waiting.items()
            _add_to(_rows(total, slice(*rows)), grads)
        elif not self._is_new or self._waiting:
            _add_to(total, [self.value])


def _add_to(total: Tensor, grads: Sequence[Tensor], first: bool = False) -> None:
    """Add gradients of the same rows to ``total``, in place. ``first``: it holds nothing yet."""
    if (fused := fused_on(total.device)) is not None:
        fused.add(total, grads, first)
        return
    if first:
        total.copy_(grads[0])
    for grad in grads[first:]:
        total.add_(grad)


class Sums:
    """Several sums that share a message, such as dk and dv."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        self.sums = tuple(Sum(shape, dtype, device) for shape in shapes)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part.result() for part in self.sums)

    def values(self) -> tuple[Tensor, ...]:
        """The running sums themselves."""
        return tuple(part.value for part in self.sums)

    def take(self, tensors: Sequence[Tensor]) -> None:
        for part, x in zip(self.sums, tensors, strict=True):
            part.add(x)

    def store(self, targets: Sequence[Tensor], arrived: Sequence[Tensor] | None) -> None:
        """Write these sums, with those of a peer if any have ``arrived``."""
        for at, (part, target) in enumerate(zip(self.sums, targets, strict=True)):
            part.store(target, [] if arrived is None else [arrived[at]])

    def add_to(self, tensors: Sequence[Tensor]) -> None:
        """Add these sums to a peer's, in place."""
        for part, x in zip(self.sums, tensors, strict=True):
            part.add_to(x)

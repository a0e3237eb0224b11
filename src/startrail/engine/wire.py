"""Pieces as tensors: in memory and on the wire a piece is one flat run of bytes, its widest tensors first.

``Wire`` joins the sizes of one attention call with its dtypes and with where the tokens of a piece lie. It knows
nothing of who talks to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from startrail.kernels import accumulator
from startrail.kernels.device import numbers_on, stream_of
from startrail.schedule.sizes import Field, Sizes
from startrail.schedule.values import KINDS, Piece

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Wire:
    """``dtype`` is the inputs', ``travels`` what is sent. A piece consists of chunks of ``chunk`` tokens; ``places``
    says by head rank where its chunks stand in the piece (``Layout.places``)."""

    sizes: Sizes
    dtype: torch.dtype
    travels: torch.dtype
    chunk: int
    places: tuple[tuple[int, ...], ...]

    @property
    def acc(self) -> torch.dtype:
        return accumulator(self.dtype)

    @cached_property
    def _fields(self) -> dict[tuple[str, int], tuple[Field, ...]]:
        return {}

    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        if (kind, tokens) not in self._fields:
            self._fields[kind, tokens] = self.sizes.fields(kind, tokens)
        return self._fields[kind, tokens]

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Of a whole piece, by kind."""
        return self.sizes.by_kind

    @cached_property
    def part_bytes(self) -> dict[str, int]:
        """Of the part of a piece that one head rank's tokens are, by kind."""
        return {kind: self.sizes.part_bytes(kind) for kind in KINDS}

    def cut(self, flat: Tensor, fields: Sequence[Field]) -> list[Tensor]:
        """Views of the bytes (..., n) as these tensors. The widest lie first, so that each is aligned."""
        dtypes = [self.acc if field.wide else self.travels for field in fields]
        views: list[Tensor] = [flat] * len(fields)
        start = 0
        for index in sorted(range(len(fields)), key=lambda index: -dtypes[index].itemsize):
            shape, dtype = fields[index].shape, dtypes[index]
            stop = start + prod(shape) * dtype.itemsize
            views[index] = flat[..., start:stop].view(dtype).unflatten(-1, shape)
            start = stop
        return views

    def views(self, flat: Tensor, kind: str) -> tuple[Tensor, ...]:
        """The tensors of a whole piece, as views of its bytes."""
        return tuple(self.cut(flat, self.fields(kind, self.sizes.tokens)))

    @cached_property
    def format(self) -> str:
        """What tells pieces apart whose bytes mean something else; a text, since its hash is remembered."""
        return f"{self.sizes} {self.dtype} {self.travels}"

    def result_shapes(self, kind: str) -> list[tuple[int, ...]]:
        """Of the sums that a result is kept in; lse comes with its output."""
        return [field.shape for field in self.fields(kind, self.sizes.tokens) if len(field.shape) == 4]

    def local_results(self, kind: str, device: torch.device) -> tuple[Tensor, ...]:
        """Room for a result of this rank's tokens, all heads, in the user's dtype."""
        sizes = self.sizes
        rows = (sizes.batch, sizes.q_heads, sizes.local)
        keys = (sizes.batch, sizes.kv_heads * sizes.copies, sizes.local)
        dkv = self.acc if sizes.copies > 1 else self.dtype
        by_kind: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
            "out": [(rows, self.acc), ((*rows, sizes.out_dim), self.dtype)],
            "dq": [((*rows, sizes.head_dim), self.dtype)],
            "dkv": [((*keys, sizes.head_dim), dkv), ((*keys, sizes.out_dim), dkv)],
        }
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in by_kind[kind])

    def rounded(self, x: Tensor) -> Tensor:
        """``x`` as the peers will see it. If own blocks took more digits, a backward pass that computes them elsewhere
        would have other logits than those its lse is of, and other sums than those its delta is of. bfloat16 and
        float16 are of one size, but neither holds the other's numbers."""
        holds_all = torch.promote_types(self.travels, self.dtype) == self.travels
        return x if holds_all else x.to(self.travels)

    # --- key/value heads that are repeated

    def with_copies(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        copies = self.sizes.copies
        if copies == 1:
            return k, v
        return k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)

    def without_copies(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the copies add up to those of the head."""
        if self.sizes.copies == 1:
            return dk, dv
        heads = (self.sizes.kv_heads, self.sizes.copies)
        dk, dv = (x.unflatten(1, heads).sum(2).to(self.dtype) for x in (dk, dv))
        return dk, dv

    # --- heads

    def shares(self, x: Tensor, piece: Piece) -> Tensor:
        """What each head rank computes of a tensor (batch, heads, tokens, ...) for a piece: a view (head ranks, batch,
        heads, tokens, ...)."""
        ranks, groups, group = self.sizes.plan.heads, self.sizes.plan.groups, piece.group
        if self.sizes.split_heads:
            return x.unflatten(1, (ranks, groups, -1))[:, :, group].movedim(1, 0)
        batch = self.sizes.batch // groups
        return x[group * batch : (group + 1) * batch].unflatten(1, (ranks, -1)).movedim(1, 0)

    def join(self, whole: Tensor, parts: Tensor) -> None:
        """Put the tokens of all head ranks where they belong in the whole piece (batch, heads, tokens, ...)."""
        places, by_place, by_rank = self._chunks(whole, parts)
        by_place[places] = by_rank

    def split(self, whole: Tensor, parts: Tensor) -> None:
        """The inverse of ``join``."""
        places, by_place, by_rank = self._chunks(whole, parts)
        by_rank.copy_(by_place[places])

    def _chunks(self, whole: Tensor, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The places of all head ranks' chunks (head ranks, chunks), and views with these dimensions in front."""
        device, chunk = whole.device, self.chunk
        key = device, stream_of(device)
        if key not in self._places:
            self._places[key] = numbers_on(device, self.places, torch.int64)
        by_place, by_rank = whole.unflatten(2, (-1, chunk)).movedim(2, 0), parts.unflatten(3, (-1, chunk)).movedim(3, 1)
        return self._places[key], by_place, by_rank

    @cached_property
    def _places(self) -> dict[tuple[torch.device, int], Tensor]:
        return {}

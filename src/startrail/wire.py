"""What a piece looks like in memory and on the wire: one flat run of bytes, with its float32 statistics first.

``Shapes`` holds the sizes of one attention call and answers what each rank needs to know of them: which heads a rank
and a group compute, how large a piece is, and where its tokens lie. It knows nothing of who talks to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from startrail.kernels import accumulator
from startrail.layout import Layout
from startrail.plan import Plan, divisors
from startrail.schedule import INPUTS, RESULTS, Piece
from startrail.schedule.memory import stated_pieces

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = (*INPUTS, *RESULTS)
Fields = list[tuple[tuple[int, ...], torch.dtype]]
ALIGN = 64  # kept pieces start at multiples of this many bytes, so that every dtype may be viewed there


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call: ``tokens`` are local to a rank; ``kv_heads`` are the user's, ``copies`` how often each is
    repeated so that every rank and group gets whole ones."""

    plan: Plan
    layout: Layout
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    wire: torch.dtype

    def __post_init__(self) -> None:
        plan = self.plan
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.q_heads % plan.heads:
            fits = ", ".join(f"u{d}" for d in divisors(self.q_heads))
            raise ValueError(f"plan {plan}: {self.q_heads} query heads cannot be split over u{plan.heads}; use {fits}")
        if plan.groups > 1 and not self.split_heads and self.batch % plan.groups:
            raise ValueError(
                f"plan {plan}: groups={plan.groups} divides neither the {self.q_heads // plan.heads} query and "
                f"{self.kv_heads * self.copies // plan.heads} key/value heads of a rank nor the batch of {self.batch}"
            )

    @cached_property
    def copies(self) -> int:
        """>>> from startrail.plan import Plan
        >>> Shapes(Plan.parse("u8"), Layout("zigzag", 8, 64), 1, 16, 2, 64, torch.float32, torch.float32).copies
        4
        """
        for copies in divisors(self.q_heads // self.kv_heads):
            if self.kv_heads * copies % self.plan.heads == 0:
                return copies
        raise AssertionError("q_heads copies always fit")

    @cached_property
    def split_heads(self) -> bool:
        """Whether groups share out the heads; otherwise they share out the batch."""
        parts = self.plan.heads * self.plan.groups
        return self.q_heads % parts == 0 and self.kv_heads * self.copies % parts == 0

    @property
    def acc(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a whole piece: those of all ranks that share it by heads."""
        return self.layout.local * self.plan.heads

    def fields(self, kind: str, tokens: int) -> Fields:
        """Shape and dtype of each tensor in a piece of ``tokens`` tokens, in the order of their bytes."""
        if isinstance(tokens, torch.SymInt):  # while torch.compile traces: not hashable
            return self._make_fields(kind, tokens)
        if (kind, tokens) not in self._fields:
            self._fields[kind, tokens] = self._make_fields(kind, tokens)
        return self._fields[kind, tokens]

    @cached_property
    def _fields(self) -> dict[tuple[str, int], Fields]:
        return {}

    def _make_fields(self, kind: str, tokens: int) -> Fields:
        groups = self.plan.groups
        batch = self.batch if self.split_heads else self.batch // groups
        share = self.plan.heads * (groups if self.split_heads else 1)
        rows = (batch, self.q_heads // share, tokens)
        # the wire's dtype, but a sum that would be rounded at every hop travels as it is kept
        dtype = self.acc if kind in self.plan.running_sums else self.wire
        by_row = ((*rows, self.head_dim), dtype)
        by_key = ((batch, self.kv_heads * self.copies // share, tokens, self.head_dim), dtype)
        number = (rows, self.acc)
        by_kind: dict[str, Fields] = {
            "q": [by_row],
            "dq": [by_row],
            "out": [number, by_row],  # lse, out
            "do": [number, number, by_row],  # lse, delta, dout
            "kv": [by_key, by_key],
            "dkv": [by_key, by_key],
        }
        return by_kind[kind]

    def nbytes(self, kind: str, tokens: int | None = None) -> int:
        tokens = self.tokens if tokens is None else tokens
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.fields(kind, tokens))

    def peak_bytes(self, direction: str) -> int:
        """What one pass holds at most beside the tensors that the user gives: pieces that come in, own pieces packed
        for sending, sums, partial results on their way in and out, one block's result, and the final ones."""
        stated = stated_pieces(self.plan, self.layout.world, direction)
        inputs, results = (("q", "kv"), ("out",)) if direction == "forward" else (INPUTS, ("dq", "dkv"))
        total = 0
        for kind in inputs:
            total += (stated[kind] + (1 if self.layout.world > 1 else 0)) * self.nbytes(kind)
            if self.wire != self.acc:  # kernels may compute in a wider dtype than travels
                total += (stated[kind] + 1) * self._sum_bytes(kind)
        for kind in results:
            moving = stated[f"{kind}<"] + 1 if self.layout.world > 1 else 0
            total += moving * self.nbytes(kind) + (stated[kind] + 2) * self._sum_bytes(kind)
        if self.plan.heads > 1:  # parts for and from the other heads, and the whole pieces that they make
            exchanged = ("q", "kv", "out") if direction == "forward" else ("do", "dq", "dkv")
            total += sum(2 * self.nbytes(kind) for kind in exchanged)
        if direction == "backward":  # the stand-ins for the rows' outputs
            total += (stated["do"] + 1) * self._sum_bytes("dq")
        return total

    def _sum_bytes(self, kind: str) -> int:
        return sum(prod(shape) * self.acc.itemsize for shape, _ in self.fields(kind, self.tokens))

    def views(self, flat: Tensor, kind: str) -> tuple[Tensor, ...]:
        """The tensors of a piece, as views of its bytes."""
        return _cut(flat, self.fields(kind, self.tokens))

    def with_copies(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.copies == 1:
            return k, v
        return k.repeat_interleave(self.copies, 1), v.repeat_interleave(self.copies, 1)

    def without_copies(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the copies add up to those of the head."""
        if self.copies == 1:
            return dk, dv
        dk, dv = (x.unflatten(1, (self.kv_heads, self.copies)).sum(2).to(self.dtype) for x in (dk, dv))
        return dk, dv

    def shares(self, x: Tensor, group: int) -> Tensor:
        """What each head rank computes of a tensor (batch, heads, ...) in one group: a view (head ranks, batch, heads,
        ...)."""
        ranks, groups = self.plan.heads, self.plan.groups
        if self.split_heads:
            return x.unflatten(1, (ranks, groups, -1))[:, :, group].movedim(1, 0)
        batch = self.batch // groups
        return x[group * batch : (group + 1) * batch].unflatten(1, (ranks, -1)).movedim(1, 0)

    def part_bytes(self, kind: str) -> int:
        """Of the part of a piece that one head rank's tokens are."""
        return self.nbytes(kind, self.layout.local)

    def part_stride(self, kind: str) -> int:
        """From one part to the next, where those of all head ranks lie side by side."""
        return -(-self.part_bytes(kind) // ALIGN) * ALIGN

    def parts(self, flat: Tensor, kind: str) -> tuple[Tensor, ...]:
        """The tensors of all head ranks' parts side by side, (head ranks, batch, heads, tokens, ...), as views."""
        return _cut(flat.view(self.plan.heads, -1), self.fields(kind, self.layout.local))

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
        device, chunk = whole.device, self.layout.chunk
        if device not in self._places:
            self._places[device] = torch.tensor(self.layout.slots(self.plan.heads), device=device)
        by_place, by_rank = whole.unflatten(2, (-1, chunk)).movedim(2, 0), parts.unflatten(3, (-1, chunk)).movedim(3, 1)
        return self._places[device], by_place, by_rank

    @cached_property
    def _places(self) -> dict[torch.device, Tensor]:
        return {}

    def kept_slices(self, pieces: Sequence[Piece]) -> dict[Piece, slice]:
        """Where each kept piece lies in one buffer of bytes."""
        slices, start = {}, 0
        for piece in pieces:
            stop = start + self.nbytes(piece.kind)
            slices[piece] = slice(start, stop)
            start = -(-stop // ALIGN) * ALIGN
        return slices

    def kept_bytes(self, pieces: Sequence[Piece]) -> int:
        return max((part.stop for part in self.kept_slices(pieces).values()), default=0)


def _cut(flat: Tensor, fields: Fields) -> tuple[Tensor, ...]:
    """Views of the bytes (..., n) as the tensors that lie in them one behind the other."""
    views, start = [], 0
    for shape, dtype in fields:
        stop = start + prod(shape) * dtype.itemsize
        views.append(flat[..., start:stop].view(dtype).unflatten(-1, shape))
        start = stop
    return tuple(views)

"""The sizes of the pieces of one attention call, and the peak memory of a pass. Numbers only, no tensors.

>>> from startrail.schedule.plan import Plan
>>> sizes = Sizes(Plan.parse("u8"), local=8, batch=1, q_heads=16, kv_heads=2, head_dim=64)
>>> sizes.copies                                     # 2 key/value heads on 8 ranks: 4 copies of each
4
>>> sizes.fields("out", 8)                           # lse, and the outputs of a rank's 2 heads
(Field(shape=(1, 2, 8), wide=True), Field(shape=(1, 2, 8, 64), wide=False))
>>> sizes.nbytes("q"), sizes.nbytes_of("q", 8)         # 64 tokens x 2 heads x 64 x 4 bytes, and 8 tokens
(32768, 4096)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, NamedTuple

from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan, PlanError
from startrail.schedule.program import groups_at_once, stated_pieces
from startrail.schedule.values import BACKWARD, KINDS, Pass, Piece

# Bytes per element of what can travel. Torch names these dtypes.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGN = 64  # kept pieces start at multiples of this many bytes, so that they can be viewed as any dtype


class Field(NamedTuple):
    """One tensor of a piece. ``wide`` fields have the dtype of accumulators, others the wire dtype."""

    shape: tuple[int, ...]
    wide: bool


class PieceSizes(ABC):
    """The sizes of the pieces of one part of a call, of any kind. ``local`` is the number of tokens per rank, or the
    largest if ``of_shard`` lists those of each shard's ranks."""

    plan: Plan
    local: int
    batch: int
    of_shard: tuple[int, ...]
    kinds: ClassVar[tuple[str, ...]]

    @property
    def split_heads(self) -> bool:
        """True if groups split the heads, False if they split the batch."""
        return True

    @property
    def tokens(self) -> int:
        """Tokens of a whole piece: those of all ranks that split its heads. Of the largest piece, if they differ."""
        return self.local * self.plan.heads

    def tokens_of(self, shard: int) -> int:
        """Tokens of the whole pieces of a shard."""
        return self.of_shard[shard] * self.plan.heads if self.of_shard else self.tokens

    @abstractmethod
    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        """The tensors of a piece of ``tokens`` tokens."""

    def shapes(self, kind: str, tokens: int) -> list[tuple[int, ...]]:
        """The shapes (batch, heads, tokens, features) of a piece's tensors, without those that have one number for each
        row, such as lse, which comes with its output."""
        return [field.shape for field in self.fields(kind, tokens) if len(field.shape) == 4]

    @abstractmethod
    def bytes_of(self, field: Field) -> int:
        """Bytes of a tensor in a message."""

    @cached_property
    def by_kind(self) -> dict[str, int]:
        """Bytes of a whole piece of every kind."""
        return {kind: sum(map(self.bytes_of, self.fields(kind, self.tokens))) for kind in self.kinds}

    def nbytes_of(self, kind: str, tokens: int) -> int:
        """Bytes of a piece of ``tokens`` tokens."""
        return self.by_kind[kind] // (self.tokens or 1) * tokens

    def kept_slices(self, pieces: Sequence[Piece], start: int = 0) -> dict[Piece, slice]:
        """The position of each kept piece in one byte buffer, from ``start`` on."""
        slices = {}
        for piece in pieces:
            stop = start + self.nbytes_of(piece.kind, self.tokens_of(piece.shard))
            slices[piece] = slice(start, stop)
            start = aligned(stop)
        return slices

    def kept_bytes(self, pieces: Sequence[Piece]) -> int:
        return max((place.stop for place in self.kept_slices(pieces).values()), default=0)


@dataclass(frozen=True)
class RowSizes(PieceSizes):
    """Those of pieces with a row of ``features`` numbers for each of their tokens, or nothing (``empty`` kinds)."""

    plan: Plan
    local: int
    of_shard: tuple[int, ...]
    features: int
    itemsize: int
    batch: int = 1
    kinds: ClassVar[tuple[str, ...]] = ()
    empty: ClassVar[tuple[str, ...]] = ()

    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        return () if kind in self.empty else (Field((1, 1, tokens, self.features), False),)

    def bytes_of(self, field: Field) -> int:
        return prod(field.shape) * self.itemsize


@dataclass(frozen=True)
class Sizes(PieceSizes):
    """Those of attention. ``kv_heads`` are the user's; each is replicated ``copies`` times, so that every rank and
    group gets whole heads. ``itemsize`` and ``wire_itemsize`` are the bytes per element of inputs and payloads.
    ``value_dim`` is the width of values and outputs if it differs from ``head_dim``."""

    plan: Plan
    local: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 4
    wire_itemsize: int | None = None
    value_dim: int | None = None
    of_shard: tuple[int, ...] = ()
    kinds: ClassVar[tuple[str, ...]] = KINDS

    def __post_init__(self) -> None:
        plan = self.plan
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.q_heads % plan.heads:
            fits = ", ".join(f"u{d}" for d in divisors(self.q_heads))
            raise PlanError(
                f"plan {plan}: {self.q_heads} query heads cannot be split over u{plan.heads}", f"use {fits}"
            )
        if plan.groups > 1 and not self.split_heads and self.batch % plan.groups:
            raise ValueError(
                f"plan {plan}: groups={plan.groups} divides neither the {self.q_heads // plan.heads} query and "
                f"{self.kv_heads * self.copies // plan.heads} key/value heads of a rank nor the batch of {self.batch}"
            )

    @property
    def out_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @cached_property
    def copies(self) -> int:
        return key_copies(self.q_heads, self.kv_heads, self.plan.heads)

    @cached_property
    def split_heads(self) -> bool:
        """True if groups split the heads, False if they split the batch."""
        shares = self.plan.heads * self.plan.groups
        return self.q_heads % shares == 0 and self.kv_heads * self.copies % shares == 0

    def bytes_of(self, field: Field) -> int:
        return prod(field.shape) * (self._wide if field.wide else self._narrow)

    @property
    def _wide(self) -> int:
        return max(self.itemsize, 4)

    @property
    def _narrow(self) -> int:
        return self.itemsize if self.wire_itemsize is None else self.wire_itemsize

    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        """The tensors of a piece of ``tokens`` tokens."""
        groups = self.plan.groups
        batch = self.batch if self.split_heads else self.batch // groups
        share = self.plan.heads * (groups if self.split_heads else 1)
        rows = (batch, self.q_heads // share, tokens)
        wide = kind in self.plan.running_sums  # a sum that would be rounded at every hop travels in the wide dtype
        keys = (batch, self.kv_heads * self.copies // share, tokens)
        query, output = Field((*rows, self.head_dim), wide), Field((*rows, self.out_dim), wide)
        if kind in BACKWARD.by_column:
            return Field((*keys, self.head_dim), wide), Field((*keys, self.out_dim), wide)
        scalar = Field(rows, True)
        return {"out": (scalar, output), "do": (scalar, scalar, output)}.get(kind, (query,))  # lse, (delta,) output

    def nbytes(self, kind: str) -> int:
        """Bytes of a whole piece."""
        return self.by_kind[kind]

    def peak_bytes(self, pass_: Pass, world: int) -> int:
        """Peak memory of one pass besides the caller's tensors: received pieces, own pieces packed for sending,
        accumulators, partial results in flight, one block's result, and the final results of all groups."""
        stated, at_once = stated_pieces(self.plan, pass_, world), groups_at_once(self.plan, world)
        total = 0
        for kind in pass_.inputs:
            total += (stated[kind] + (at_once if world > 1 else 0)) * self.nbytes(kind)
            if self._narrow != self._wide:  # kernels may compute in a wider dtype than the wire dtype
                total += (stated[kind] + 1) * self.wide_bytes(kind)
        for kind in pass_.results:
            moving = stated[f"{kind}<"] + 1 if world > 1 else 0
            total += moving * self.nbytes(kind) + (stated[kind] + 1 + self.plan.groups) * self.wide_bytes(kind)
        total += self._exchanged_bytes(pass_, at_once)
        if not pass_.is_forward:  # placeholders for the rows' outputs
            total += (stated["do"] + 1) * self.wide_bytes("out")
        return total

    def pooled_bytes(self, pass_: Pass, world: int) -> int:
        """The part of ``peak_bytes`` that stays allocated between calls: send and receive buffers."""
        if world == 1:
            return 0
        stated, at_once = stated_pieces(self.plan, pass_, world), groups_at_once(self.plan, world)
        total = sum((stated[kind] + at_once) * self.nbytes(kind) for kind in pass_.inputs)
        total += sum((stated[f"{kind}<"] + 1) * self.nbytes(kind) for kind in pass_.results)
        return total + self._exchanged_bytes(pass_, at_once)

    def _exchanged_bytes(self, pass_: Pass, at_once: int) -> int:
        """Parts to and from the other head ranks: of inputs, and of results that may still be on their way."""
        if self.plan.heads == 1:
            return 0
        entering = sum(at_once * self.nbytes(kind) for kind in self.plan.entering(pass_))
        return 2 * (entering + sum(self.nbytes(kind) for kind in pass_.results))

    def wide_bytes(self, kind: str) -> int:
        """Bytes of a whole piece in the dtype of accumulators."""
        return sum(prod(field.shape) for field in self.fields(kind, self.tokens)) * self._wide


def key_copies(q_heads: int, kv_heads: int, split_over: int) -> int:
    """Copies of each key/value head needed for each of ``split_over`` ranks to get whole heads.

    >>> key_copies(16, 2, 8), key_copies(16, 16, 8)
    (4, 1)
    """
    return next(copies for copies in divisors(q_heads // kv_heads) if kv_heads * copies % split_over == 0)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN

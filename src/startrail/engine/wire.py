"""``Wire``: pieces as tensors. In memory and in messages a piece is one flat run of bytes, its widest tensors first.

A ``Wire`` combines the sizes of one part of a call with its dtypes and the places of a piece's tokens. It knows nothing
about which ranks talk to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from startrail.compile.call import Part
from startrail.kernels import accumulator
from startrail.kernels.device import current_stream_id, ints_on
from startrail.kernels.rearrange import Chunks
from startrail.schedule.sizes import Field
from startrail.schedule.values import Piece

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Wire:
    """``dtype`` is that of the inputs, ``wire_dtype`` that of messages. ``local`` is the number of this rank's tokens
    as the part's programs see them. A piece consists of chunks of ``chunk`` tokens; ``places`` says for each head rank
    where its chunks stand in the piece (``Zone.places``). ``rows_first``: the bytes are in the order (batch, rows,
    heads, dim), as the kernel takes them; views are (batch, heads, rows, dim) anyway.

    ``format`` tells apart pieces whose bytes mean different things; it is a text because Python caches a text's hash.
    """

    def __init__(self, part: Part, dtype: torch.dtype, wire_dtype: torch.dtype, rows_first: bool = False) -> None:
        self.sizes, self.local = part.sizes, part.padded_tokens
        self.dtype, self.wire_dtype, self.rows_first = dtype, wire_dtype, rows_first
        self.chunk, self.places = 1, tuple[tuple[int, ...], ...]()
        if part.sizes.plan.heads > 1:  # ranks that split heads sort the tokens of all of them by position
            self.chunk, self.places = part.padded_zone.places(part.place.shard_ranks(part.place.shard))
        self.acc = accumulator(dtype)
        self.format = f"{self.sizes} {self.local} {dtype} {wire_dtype} {rows_first}"
        self._holds_inputs = torch.promote_types(wire_dtype, dtype) == wire_dtype
        self._fields: dict[tuple[str, int], tuple[Field, ...]] = {}
        self._places_on: dict[tuple[torch.device, int], Chunks] = {}  # by device and stream

    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        if (kind, tokens) not in self._fields:
            self._fields[kind, tokens] = self.sizes.fields(kind, tokens)
        return self._fields[kind, tokens]

    def cut(self, flat: Tensor, fields: Sequence[Field]) -> list[Tensor]:
        """Views of the bytes (..., n) as these tensors. The widest lie first, so that each is aligned."""
        dtypes = [self.acc if field.wide else self.wire_dtype for field in fields]
        views: list[Tensor] = [flat] * len(fields)
        start = 0
        for index in sorted(range(len(fields)), key=lambda index: -dtypes[index].itemsize):
            shape, dtype = fields[index].shape, dtypes[index]
            stop = start + prod(shape) * dtype.itemsize
            numbers = flat[..., start:stop].view(dtype)
            if self.rows_first and len(shape) == 4:
                batch, heads, rows, dim = shape
                views[index] = numbers.unflatten(-1, (batch, rows, heads, dim)).transpose(-3, -2)
            else:
                views[index] = numbers.unflatten(-1, shape)
            start = stop
        return views

    def part_bytes(self, kind: str) -> int:
        """Bytes of the part of a piece that covers one rank's tokens."""
        return self.sizes.nbytes_of(kind, self.local)

    def views(self, flat: Tensor, kind: str, tokens: int) -> tuple[Tensor, ...]:
        """The tensors of a piece of ``tokens`` tokens, as views of its bytes."""
        return tuple(self.cut(flat, self.fields(kind, tokens)))

    def result_shapes(self, kind: str, tokens: int) -> list[tuple[int, ...]]:
        """The shapes of the sums that a result is accumulated in. lse is not one of them: it comes with its output."""
        return [field.shape for field in self.fields(kind, tokens) if len(field.shape) == 4]

    def rounded(self, x: Tensor) -> Tensor:
        """``x`` as the peers see it. The backward pass may compute a block on another rank than the forward pass did,
        from rounded inputs, so the rank that has the original numbers rounds them too: lse and delta would not match
        otherwise. bfloat16 and float16 have one size, but neither holds the other's numbers."""
        return x if self._holds_inputs else x.to(self.wire_dtype)

    # --- heads

    def shares(self, x: Tensor, piece: Piece) -> Tensor:
        """The part of a tensor (batch, heads, tokens, ...) that each head rank computes for a piece: a view (head
        ranks, batch, heads, tokens, ...)."""
        ranks, groups, group = self.sizes.plan.heads, self.sizes.plan.groups, piece.group
        if groups == 1:
            batch, heads, *rest = x.shape
            return x.unsqueeze(0) if ranks == 1 else x.view(batch, ranks, heads // ranks, *rest).transpose(0, 1)
        if self.sizes.split_heads:
            return x.unflatten(1, (ranks, groups, -1))[:, :, group].movedim(1, 0)
        batch = self.sizes.batch // groups
        return x[group * batch : (group + 1) * batch].unflatten(1, (ranks, -1)).movedim(1, 0)

    def share(self, x: Tensor, piece: Piece, head: int = 0) -> Tensor:
        """The part of one head rank, (batch, heads, tokens, ...)."""
        plan = self.sizes.plan
        return x if plan.heads == plan.groups == 1 else self.shares(x, piece)[head]

    def chunks_on(self, device: torch.device) -> Chunks:
        """Where the tokens of all head ranks stand in a whole piece."""
        key = device, current_stream_id(device)
        if key not in self._places_on:
            self._places_on[key] = Chunks(ints_on(device, self.places, torch.int64), self.chunk)
        return self._places_on[key]

"""``Wire``: pieces as tensors. In memory and in messages a piece is one flat run of bytes, its widest tensors first.

A ``Wire`` combines the sizes of one part of a call with its dtypes and the places of a piece's tokens. It knows nothing
about which ranks talk to each other. How tensors become those that travel is said here alone (``Wire.encoded``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from startrail.compile.call import Part
from startrail.kernels import Sums, accumulator
from startrail.kernels.device import current_stream_id, ints_on
from startrail.kernels.rearrange import Chunks
from startrail.schedule.sizes import ITEMSIZES, Field
from startrail.schedule.values import Piece

DTYPES = tuple(getattr(torch, name) for name in ITEMSIZES)  # of messages
Tensors = tuple[Tensor, ...]


class Cut(NamedTuple):
    """Where a tensor lies in the bytes of a piece, and its shape there: (batch, rows, heads, dim) if ``swapped``."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    swapped: bool

    def of(self, flat: Tensor) -> Tensor:
        """A view of the bytes (..., n)."""
        shape = *flat.shape[:-1], *self.shape
        if self.nbytes:
            x = flat.narrow(-1, self.start, self.nbytes).view(self.dtype).view(shape)
        else:  # a piece without tokens: torch refuses another dtype for rows of no bytes
            x = flat.new_empty(shape, dtype=self.dtype)
        return x.transpose(-3, -2) if self.swapped else x


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
        self._cuts: dict[tuple[str, int], list[Cut]] = {}
        self._places_on: dict[tuple[torch.device, int], Chunks] = {}  # by device and stream

    def cuts(self, fields: Sequence[Field]) -> list[Cut]:
        """Where these tensors lie. The widest lie first, so that each is aligned."""
        dtypes, start, cuts = [self.acc if field.wide else self.wire_dtype for field in fields], 0, {}
        for index in sorted(range(len(fields)), key=lambda index: -dtypes[index].itemsize):
            shape, dtype = fields[index].shape, dtypes[index]
            nbytes, swapped = prod(shape) * dtype.itemsize, self.rows_first and len(shape) == 4
            shape = (shape[0], shape[2], shape[1], shape[3]) if swapped else shape
            cuts[index] = Cut(start, nbytes, dtype, shape, swapped)
            start += nbytes
        return [cuts[index] for index in range(len(fields))]

    def views(self, flat: Tensor, kind: str, tokens: int) -> Tensors:
        """The tensors of a piece of ``tokens`` tokens, as views of its bytes."""
        if (kind, tokens) not in self._cuts:
            self._cuts[kind, tokens] = self.cuts(self.sizes.fields(kind, tokens))
        return tuple(cut.of(flat) for cut in self._cuts[kind, tokens])

    def rounded(self, x: Tensor) -> Tensor:
        """``x`` as the peers see it. The backward pass may compute a block on another rank than the forward pass did,
        from rounded inputs, so the rank that has the original numbers rounds them too: lse and delta would not match
        otherwise. bfloat16 and float16 have one size, but neither holds the other's numbers."""
        return x if self._holds_inputs else x.to(self.wire_dtype)

    # --- the form in which pieces are sent

    def encoded(self, kind: str, tensors: Tensors) -> Tensors:
        """The tensors of a piece as they travel, one for each of its ``fields``. They are copied to the piece's bytes,
        which converts their dtype. A scale is one more tensor, with a number for each token: bundles and heads are
        parts of pieces, and are cut from what this returns."""
        return tensors

    def decoded(self, kind: str, views: Tensors) -> Tensors:
        """The tensors of a piece from views of its bytes. Parts of several head ranks have one more dimension, in
        front."""
        return views

    def pack(self, kind: str, views: Tensors, tensors: Tensors) -> None:
        """Write the tensors of a piece to its bytes."""
        for view, tensor in zip(views, self.encoded(kind, tensors), strict=True):
            view.copy_(tensor)

    def add(self, kind: str, views: Tensors, sums: Sums) -> None:
        """Add our sums to those of a peer, in the bytes that it sent."""
        sums.add_to(views)

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

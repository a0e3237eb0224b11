"""Copies of the head exchange: tokens of several ranks, (ranks, batch, heads, tokens, ...), and whole pieces, (batch,
heads, tokens of all ranks, ...). On GPUs one launch copies all tensors of an exchange, and casts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from startrail.kernels.fused import fused_on

Pairs = Sequence[tuple[Tensor, Tensor]]  # targets and sources, all on one device


class Chunks(NamedTuple):
    """Where the tokens of several ranks stand in a whole piece: ``places`` (ranks, chunks) of chunks of ``size``
    tokens."""

    places: Tensor
    size: int


def copy_parts(pairs: Pairs) -> None:
    """Copy tokens of several ranks."""
    if pairs and (fused := fused_on(pairs[0][0].device)) is not None:
        fused.rearrange(pairs, None, False)
        return
    for target, source in pairs:
        target.copy_(source)


def join_tokens(pairs: Pairs, chunks: Chunks) -> None:
    """Copy the tokens of all ranks to their places in whole pieces, of the same dtype."""
    if pairs and (fused := fused_on(pairs[0][0].device)) is not None:
        fused.rearrange(pairs, chunks, True)
        return
    for whole, parts in pairs:
        _by_place(whole, chunks)[chunks.places] = _by_rank(parts, chunks)


def split_tokens(pairs: Pairs, chunks: Chunks) -> None:
    """The inverse of ``join_tokens``, into any dtype."""
    if pairs and (fused := fused_on(pairs[0][0].device)) is not None:
        fused.rearrange(pairs, chunks, False)
        return
    for parts, whole in pairs:
        by_rank = _by_place(whole, chunks).index_select(0, chunks.places.flatten())
        _by_rank(parts, chunks).copy_(by_rank.view(*chunks.places.shape, *by_rank.shape[1:]))


def _by_place(whole: Tensor, chunks: Chunks) -> Tensor:
    """(chunks, batch, heads, tokens, ...) of a whole piece."""
    batch, heads, tokens, *rest = whole.shape
    order = (2, 0, 1, 3, 4) if rest else (2, 0, 1, 3)
    return whole.view(batch, heads, tokens // chunks.size, chunks.size, *rest).permute(order)


def _by_rank(parts: Tensor, chunks: Chunks) -> Tensor:
    """(ranks, chunks, batch, heads, tokens, ...) of the tokens of several ranks."""
    ranks, batch, heads, tokens, *rest = parts.shape
    order = (0, 3, 1, 2, 4, 5) if rest else (0, 3, 1, 2, 4)
    return parts.view(ranks, batch, heads, tokens // chunks.size, chunks.size, *rest).permute(order)

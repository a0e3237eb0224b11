"""Layers other than attention over a split sequence: halos and convolutions. They are methods of ``Sequence``.

>>> from startrail import SequenceParallel
>>> sequence = SequenceParallel("1x1").sequence(5, documents=[0, 2, 5])
>>> x = torch.tensor([[[1.0], [2.0], [3.0], [4.0], [5.0]]])                # (batch, tokens, channels)
>>> sequence.document_runs
((0, 2), (2, 3))
>>> sequence.conv1d(x, torch.tensor([[10.0, 1.0]]), dim=1).flatten().tolist()      # 3 begins a document
[1.0, 12.0, 3.0, 34.0, 45.0]
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from startrail.engine.arguments import is_int
from startrail.engine.halo import prepared_halo
from startrail.geometry.layout import Runs, cut_at_documents
from startrail.kernels.convolution import causal_conv1d

if TYPE_CHECKING:
    from startrail.sequence import Sequence

Checked = TypeVar("Checked")


def held_runs(sequence: Sequence) -> Runs:
    """This rank's runs of one document each, in the order in which it holds them, padding included."""
    return cut_at_documents(sequence.padded_runs, sequence._state.batch.boundaries.documents)


def on_all_ranks(sequence: Sequence, check: Callable[[], Checked]) -> Checked:
    """The result of ``check``. Its ``ValueError`` is raised on all ranks."""
    try:
        return check()
    except ValueError as error:
        sequence.sp._session.refuse(str(error), sequence._state.op_key)


def halo(sequence: Sequence, x: Tensor, before: int, dim: int) -> Tensor:
    """The halo of each real run, as ``Sequence.halo`` returns it."""
    dim = on_all_ranks(sequence, lambda: _checked_dim(sequence, x, before, dim))
    found = _halo_rows(sequence, x.movedim(dim, 0), before)
    real = [start < sequence.length for start, _ in held_runs(sequence)]
    found = found if all(real) else found[torch.tensor(real, device=x.device)]
    return found.movedim((0, 1), (dim, dim + 1))


def conv1d(
    sequence: Sequence, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dim: int
) -> Tensor:
    """Runs lie one after the other, each with its halo before it, so that one convolution computes all of them."""

    def check() -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or dim not in (1, 2, -1, -2):
            raise ValueError(f"conv1d takes a tensor of three dimensions with its tokens in 1 or 2, got dim={dim}")
        channels = x.shape[1 if dim in (2, -1) else 2]
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] != channels:
            raise ValueError(f"weight {_shape(weight)} is not (channels, width) for {channels} channels")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} does not have one number for each of {channels} channels")
        _checked_dim(sequence, x, weight.shape[1], dim)
        causal_conv1d(x.new_zeros(0, channels, 0), weight, bias, activation)

    on_all_ranks(sequence, check)
    x = x if dim in (2, -1) else x.mT
    before, runs = weight.shape[1] - 1, held_runs(sequence)
    if before:
        rows = _halo_rows(sequence, x.movedim(2, 0), before).flatten(0, 1).movedim(0, 2)
        tokens, counts = torch.arange(x.shape[2]), torch.tensor([count for _, count in runs], dtype=torch.int64)
        run = torch.repeat_interleave(torch.arange(len(runs)), counts)
        places = (tokens + (run + 1) * before).to(x.device)  # of the tokens, with the halos before them
        is_halo = torch.ones(len(tokens) + len(runs) * before, dtype=torch.bool, device=x.device)
        is_halo[places] = False
        order = torch.empty_like(is_halo, dtype=torch.int64)
        order[is_halo] = torch.arange(rows.shape[2], device=x.device)
        order[places] = tokens.to(x.device) + rows.shape[2]
        together = torch.cat((rows, x), 2).index_select(2, order)
        out = causal_conv1d(together, weight, bias, activation).index_select(2, places)
    else:
        out = causal_conv1d(x, weight, bias, activation)
    return out if dim in (2, -1) else out.mT


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _checked_dim(sequence: Sequence, x: Tensor, before: int, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"need a tensor, got {type(x).__name__}")
    if not is_int(before) or before < 1:
        raise ValueError(f"before={before!r} must be a whole number of tokens, at least 1")
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    if x.shape[dim] != sequence.local:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but this rank holds "
            f"{sequence.local} of the sequence"
        )
    return dim % x.dim()


def _halo_rows(sequence: Sequence, x: Tensor, before: int) -> Tensor:
    """The halos of all runs that this rank holds, (runs, before, ...), of x (tokens, ...)."""
    session, state, device = sequence.sp._session, sequence._state, x.device
    as_bytes = not (x.is_floating_point() or x.is_complex())
    gradients = torch.is_grad_enabled() and x.requires_grad

    features = prod(x.shape[1:])
    like = x.new_empty(0, features * x.itemsize, dtype=torch.uint8) if as_bytes else x.new_empty(0, features)
    prepared = prepared_halo(session, state.batch, like, before)
    held = x.index_select(0, prepared.held.to(device)).reshape(len(prepared.held), features)
    held = held.view(torch.uint8) if as_bytes else held
    fetched, _ = torch.ops.startrail.gather_halo(
        held, prepared.num_fetched, before, state.op_key, sequence.sp._name, gradients
    )
    known = torch.cat((held.new_zeros(1, held.shape[1]), held, fetched))
    found = known.index_select(0, prepared.sources.to(device).flatten())
    found = found.view(x.dtype) if as_bytes else found
    return found.view(-1, before, *x.shape[1:])

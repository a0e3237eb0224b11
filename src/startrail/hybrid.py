"""Layers other than attention over a split sequence: halos, convolutions and recurrences, as methods of ``Sequence``.

A recurrence takes the tensors of this rank's tokens, and its own options; whatever else is in the sequence, the result
is that of one process:

    out = sequence.scan(startrail.gated_delta_rule, q, k, v, g, beta, normalize=True)     # (batch, tokens, heads, dim)
    out = sequence.scan(startrail.kimi_delta_rule, q, k, v, g, beta, normalize=True)      # g per row of the state
    out = sequence.scan(startrail.decayed_attention, c, b, dt * x, dt * a)                # Mamba-2, lightning, RetNet
    out = sequence.scan(startrail.selective_scan, x, dt, a, b, c)                         # Mamba-1
    h = sequence.scan(startrail.linear_recurrence, a, b)                                  # RG-LRU

torch.compile calls these as they are: their sizes differ from batch to batch, and it would compile each anew.

With ``output_final_state=True`` the result is (out, state after each document), the same on every rank, and
``initial_state`` is the state before each document: both are (batch, documents, ...), such as (batch, documents, heads,
key dim, value dim). Their gradients are this rank's share, as those of `Sequence.shard` and `Sequence.unshard`.

The kernel may be any function ``kernel(*tensors, lengths=..., **options)`` that returns a
``startrail.kernels.runs.Recurrence`` of runs of these lengths.

>>> from startrail import SequenceParallel
>>> sequence = SequenceParallel("1x1").sequence(5, documents=[0, 2, 5])
>>> x = torch.tensor([[[1.0], [2.0], [3.0], [4.0], [5.0]]])                # (batch, tokens, channels)
>>> sequence.document_runs
((0, 2), (2, 3))
>>> sequence.conv1d(x, torch.tensor([[10.0, 1.0]]), dim=1).flatten().tolist()      # 3 begins a document
[1.0, 12.0, 3.0, 34.0, 45.0]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from startrail._compat import dtype_name, not_compiled
from startrail.compile.halo import HALO_FORWARD
from startrail.compile.scan import SCAN_FORWARD
from startrail.engine.arguments import check_tangents, describe_tensor, is_int
from startrail.engine.halo import HaloRequest
from startrail.engine.scan import ScanRequest, StateType
from startrail.engine.tensors import check_dense, read_dim
from startrail.geometry.layout import Runs, cut_at_documents
from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.runs import name_of, recurrence_of

if TYPE_CHECKING:
    from startrail.compile.scan import ScanPart
    from startrail.kernels.runs import Recurrence
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


@not_compiled
def halo(sequence: Sequence, x: Tensor, before: int, dim: int) -> Tensor:
    """The halo of each real run, as ``Sequence.halo`` returns it."""
    dim = on_all_ranks(sequence, lambda: _checked_dim(sequence, x, before, dim))
    found = _halo_rows(sequence, x.movedim(dim, 0), before)
    real = [run for run, (start, _) in enumerate(held_runs(sequence)) if start < sequence.length]
    if len(real) < len(found):
        found = found.index_select(0, torch.tensor(real, dtype=torch.int64, device=x.device))
    return found.movedim((0, 1), (dim, dim + 1))


@not_compiled
def conv1d(
    sequence: Sequence, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dim: int
) -> Tensor:
    """Runs lie one after the other, each with its halo before it, so that one convolution computes all of them."""

    def check() -> None:
        tokens_in = read_dim(x, dim)
        if x.dim() != 3 or tokens_in == 0 or not x.is_floating_point():
            raise ValueError(
                "conv1d takes floating-point numbers in three dimensions, with the tokens in 1 or 2, got "
                f"{describe_tensor(x)}, dim={dim}"
            )
        channels = x.shape[3 - tokens_in]
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] != channels:
            raise ValueError(f"weight {_shape(weight)} is not (channels, width) for {channels} channels")
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
            raise ValueError(f"bias {_shape(bias)} does not have one number for each of {channels} channels")
        given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
        for name, each in given.items():
            check_dense(each, name)
        alike = len({each.device for each in given.values()}) == 1 and (bias is None or bias.dtype == weight.dtype)
        if not (alike and weight.is_floating_point()):
            described = ", ".join(f"{name} {describe_tensor(each)}" for name, each in given.items())
            raise ValueError(
                "x, weight and bias must be floating-point numbers on one device, and bias of weight's dtype, got "
                f"{described}"
            )
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
        out = causal_conv1d(together, weight, bias, activation, places=places)
    else:
        out = causal_conv1d(x, weight, bias, activation)
    return out if dim in (2, -1) else out.mT


@not_compiled
def scan(
    sequence: Sequence, kernel: Callable[..., Recurrence], tensors: SequenceOf[Tensor], initial_state: Tensor | None,
    output_final_state: bool, options: Mapping[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """What `Sequence.scan` returns. Kernels choose the precision of their products, not autocast."""
    function: Any = kernel
    while isinstance(function, partial):  # so that all of its arguments are seen
        tensors, options = (*function.args, *tensors), {**function.keywords, **options}
        function = function.func
    devices = {x.device.type for x in _given(tensors, options)}
    with torch.autocast(min(devices - {"meta"}, default="cpu"), enabled=False):
        return _scan(sequence, function, tensors, initial_state, output_final_state, options)


def _scan(
    sequence: Sequence, kernel: Callable[..., Recurrence], tensors: SequenceOf[Tensor], initial_state: Tensor | None,
    output_final_state: bool, options: Mapping[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    name = name_of(kernel)
    lengths = [count for _, count in held_runs(sequence)] or [0]

    def prepare() -> Recurrence:
        if not tensors or not all(isinstance(x, Tensor) for x in tensors):
            raise ValueError(f"{name} needs tensors, got {', '.join(type(x).__name__ for x in tensors) or 'none'}")
        for x in given:
            check_dense(x)
        if len(devices := {str(x.device) for x in given if x.dim()}) > 1:
            raise ValueError(f"{name} needs tensors on one device, got {', '.join(sorted(devices))}")
        check_tangents(name, *given)
        _check_tokens(sequence, tensors[0], 1)
        recurrence = recurrence_of(kernel, tensors, lengths, options)
        batch, _, *shape = recurrence.shape
        expected = batch, documents, *shape
        if 0 in (batch, *shape):
            raise ValueError(f"{name} has states of shape {(batch, *shape)}: no dimension may be empty")
        if initial_state is not None and (not isinstance(initial_state, Tensor) or initial_state.shape != expected):
            text = f"initial_state {_shape(initial_state)} must hold a state for each of {documents} documents"
            raise ValueError(f"{text}, {expected}")
        if initial_state is not None and not initial_state.is_floating_point():
            raise ValueError(f"initial_state must have floating-point numbers, got {describe_tensor(initial_state)}")
        return recurrence

    given = _given((*tensors, initial_state), options)
    documents = len(sequence.documents) - 1
    flags = {"initial state": initial_state is not None, "final state": output_final_state}
    stated = [f"{key}={_stated(value)}" for key, value in sorted(options.items())]
    call = " ".join([name, *stated, *(key for key, value in flags.items() if value)])
    recurrence = on_all_ranks(sequence, prepare)
    batch, _, *shape = recurrence.shape
    state = StateType((batch, *shape), recurrence.dtype, tensors[0].device, recurrence.moves)
    request = ScanRequest(SCAN_FORWARD, state, call, False)
    part = sequence.sp._session.prepared(request, sequence._state.batch).part
    entering = None
    if initial_state is not None:
        first = torch.tensor(list(part.begins.items()), device=initial_state.device, dtype=torch.int64).view(-1, 2)
        zeros = initial_state.new_zeros(recurrence.shape, dtype=recurrence.dtype)
        entering = zeros.index_copy(1, first[:, 1], initial_state.to(recurrence.dtype)[:, first[:, 0]])
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    out, after = _carried(sequence, part, recurrence, given, entering, (call, gradients))
    if not output_final_state:
        return out
    last = torch.tensor(list(part.ends.items()), device=after.device, dtype=torch.int64).view(-1, 2)
    final = after.new_zeros(documents, *after.shape[1:]).index_copy(0, last[:, 0], after[last[:, 1]])
    return out, sequence._sum(final).transpose(0, 1)


def _given(tensors: SequenceOf[object], options: Mapping[str, object]) -> list[Tensor]:
    """The tensors of a call, those that are passed by name included."""
    return [x for x in (*tensors, *options.values()) if isinstance(x, Tensor)]


def _stated(value: object) -> str:
    """An option, for ranks to compare."""
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _carried(
    sequence: Sequence, part: ScanPart, recurrence: Recurrence, tensors: SequenceOf[Tensor], entering: Tensor | None,
    call: tuple[str, bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs, and the states after each run (runs, batch, ...). ``entering``: what documents begin with, in the
    runs where they do. If anything needs gradients, so do the states, on all ranks: none waits in vain for others'."""
    carry = partial(torch.ops.startrail.carry_states, op_key=sequence._state.op_key, session=sequence.sp._name)

    def begin() -> tuple[Tensor, Tensor]:
        return recurrence.run(entering) if part.is_alone else (recurrence.transition, recurrence.contribution)

    found, states = on_all_ranks(sequence, begin)
    has_gradients = states.requires_grad or (entering is not None and entering.requires_grad)
    if call[1] and not has_gradients:  # only outputs do, or there are no tokens
        states = _Tied.apply(states, *tensors)
    states = states.transpose(0, 1)
    if part.is_alone:
        # The rank has whole documents only, and no use for what others send. It takes part, so that all agree.
        nothing = states.new_zeros(()).expand(*states.shape[:3], *recurrence.moves)
        before, after, _ = carry(nothing, states, None, recurrence.matrix, kernel=call[0], gradients=call[1])
        return _Tied.apply(found, before), after
    transition = found.expand(*recurrence.shape[:3], *recurrence.moves).transpose(0, 1)
    entering = entering if entering is None else entering.transpose(0, 1)
    before, after, _ = carry(transition, states, entering, recurrence.matrix, kernel=call[0], gradients=call[1])
    return recurrence.outputs(before.transpose(0, 1)), after


class _Tied(torch.autograd.Function):
    """``out``. Its backward pass goes through ``others`` as well, with zeros: other ranks' may wait for theirs."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad,) = grads
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _checked_dim(sequence: Sequence, x: Tensor, before: int, dim: int) -> int:
    dim = read_dim(x, dim)
    if not is_int(before) or before < 1:
        raise ValueError(f"before={before!r} must be a whole number of tokens, at least 1")
    _check_tokens(sequence, x, dim)
    check_tangents("a halo", x)
    if x.requires_grad and x.itemsize == 1 and torch.is_grad_enabled():
        raise ValueError(f"a halo has no gradient in {dtype_name(x.dtype)}: convert the tensor first")
    return dim


def _check_tokens(sequence: Sequence, x: Tensor, dim: int) -> None:
    if x.dim() <= dim or x.shape[dim] != sequence.local:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} does not have the {sequence.local} tokens of this rank in dimension "
            f"{dim}"
        )


def _halo_rows(sequence: Sequence, x: Tensor, before: int) -> Tensor:
    """The halos of all runs that this rank holds, (runs, before, ...), of x (tokens, ...)."""
    session, state, device = sequence.sp._session, sequence._state, x.device
    as_bytes = x.itemsize == 1 or not (x.is_floating_point() or x.is_complex())
    gradients = torch.is_grad_enabled() and x.requires_grad

    features = prod(x.shape[1:])
    like = x.new_empty(0, features * x.itemsize, dtype=torch.uint8) if as_bytes else x.new_empty(0, features)
    prepared = session.prepared(HaloRequest(HALO_FORWARD, like, before, False), state.batch)
    held = x.index_select(0, prepared.held.to(device)).reshape(len(prepared.held), features)
    held = held.view(torch.uint8) if as_bytes else held
    fetched, _ = torch.ops.startrail.gather_halo(
        held, prepared.num_fetched, before, state.op_key, sequence.sp._name, gradients
    )
    known = torch.cat((held.new_zeros(1, held.shape[1]), held, fetched))
    found = known.index_select(0, prepared.sources.to(device).flatten())
    found = found.view(x.dtype) if as_bytes else found
    return found.view(len(prepared.sources), before, *x.shape[1:])

"""Scans behind their op: the state before and after each run, given what each run does to a state.

The op is linear in states, and so is its backward pass: gradients of states go the same way back, with each transition
transposed. States are (runs, batch, ...) here, so that those of one run are one row of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from startrail.agreement.consensus import rejoining
from startrail.compile.call import compile_call
from startrail.compile.scan import SCAN_BACKWARD, SCAN_FORWARD, Scan, ScanPart
from startrail.engine.batch import Batch
from startrail.engine.op import UNSAFE, find_session
from startrail.engine.runner import BlockKernel, PreparedPart, PreparedPass, Tensors
from startrail.engine.session import Session
from startrail.engine.wire import Wire
from startrail.kernels import Partial, Sums
from startrail.schedule.values import Block, Pass


@dataclass(frozen=True, eq=False)
class PreparedScan:
    detail: str
    part: ScanPart
    passes: dict[Pass, PreparedPass]

    @cached_property
    def entered(self) -> dict[Pass, dict[int, int]]:
        """The run that each message's state enters, by the message's number."""
        return {pass_: self.part.entered(pass_) for pass_ in self.passes}


class StateType(NamedTuple):
    """The states of one run. ``shape`` is (batch, ...)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: Tensor) -> StateType:
        """Those of states (runs, batch, ...)."""
        return cls(tuple(states.shape[1:]), states.dtype, states.device)


class ScanRequest:
    """One pass of a scan, as the op got it. ``kernel`` names what computes the states."""

    def __init__(
        self, pass_: Pass, state: StateType, kernel: str, gradients: bool, forward: Tensor | None = None
    ) -> None:
        self.pass_, self.kernel, self.gradients, self.forward = pass_, kernel, gradients, forward
        self.shape, self.dtype, self.device = state

    @property
    def key(self) -> object:
        return "scan", self.kernel, self.shape, self.dtype, self.device

    @property
    def kind(self) -> object:
        return "scan", self.kernel, self.shape, self.dtype, self.device.type

    def prepare(self, session: Session, batch: Batch) -> PreparedScan:
        batch_size, dtype = self.shape[0], str(self.dtype).removeprefix("torch.")
        sizes = prod(self.shape), self.dtype.itemsize
        problem = Scan(batch.boundaries, batch_size, dtype, "", *sizes, self.kernel)
        call = compile_call(problem, session.settings.split, session.rank, batch.layout)
        (part,) = call.parts
        assert isinstance(part, ScanPart)
        passes = {pass_: PreparedPass(call, pass_, [Wire(part, self.dtype, self.dtype)]) for pass_ in problem.passes}
        detail = f"{problem}, state {self.shape} on {self.device.type}, {session.settings}"
        return PreparedScan(detail, part, passes)


class CarryKernel(BlockKernel):
    """``before`` is what enters each run, ``after`` is ``moves`` x ``before`` + what the run adds. A state that arrives
    is added to one, and what the run makes of it to the other, from which messages are packed."""

    def __init__(
        self, prepared: PreparedScan, pass_: Pass, moves: Tensor, matrix: bool, before: Tensor, after: Tensor
    ) -> None:
        self.entered, self.moves, self.matrix = prepared.entered[pass_], moves, matrix
        self.before, self.after = before, after
        self.extra_results = (before, after)

    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        return tensors

    def new_result(self, kind: str, shapes: Sequence[Sequence[int]]) -> Sums:
        return Sums(shapes, self.after.dtype, self.after.device)

    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        if block.column == block.row:
            self.after += _moved(self.moves, self.before, self.matrix)
            return
        ((state,),) = inputs
        run, state = self.entered[block.column], state.view(self.after.shape[1:])
        self.before[run] += state
        self.after[run] += _moved(self.moves[run], state, self.matrix)

    def outputs(self, part: PreparedPart, kind: str) -> Tensors:
        return ()


def prepared_scan(session: Session, batch: Batch, state: StateType, kernel: str) -> PreparedScan:
    """What a scan with such states runs with."""
    request = ScanRequest(SCAN_FORWARD, state, kernel, False)
    prepared: PreparedScan | None = batch.prepared.get(request.key)
    if prepared is None:
        prepared = request.prepare(session, batch)
        batch.remember(request.key, prepared)
    return prepared


def _moved(moves: Tensor, states: Tensor, matrix: bool) -> Tensor:
    return moves @ states if matrix else moves * states


@rejoining
def _carry(
    session: Session, request: ScanRequest, moves: Tensor, adds: Tensor, entering: Tensor | None, matrix: bool,
    op_key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The states before and after each run in the direction of the pass, and the number of the call."""
    with session.call():
        started = session.start_pass(request, op_key)
        before = torch.zeros_like(adds) if entering is None else entering.clone()
        after = adds.clone(memory_format=torch.contiguous_format)
        kernel = CarryKernel(started.prepared, request.pass_, moves, matrix, before, after)
        kept = torch.empty(0, dtype=torch.uint8, device=adds.device)
        started.run(kernel, [{"state": (after.view(1, 1, len(after), -1),)}], kept)
        return before, after, torch.tensor(session.consensus.call_id, device="cpu")


@torch.library.custom_op("startrail::carry_states", mutates_args=(), tags=UNSAFE)
def carry_states(
    moves: Tensor, adds: Tensor, entering: Tensor | None, matrix: bool, op_key: Tensor, session: str, kernel: str,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The states before and after each of this rank's runs, and the call's number. A run makes ``moves`` S + ``adds``
    of a state S. All are (runs, batch, ...). ``entering`` is added to what enters each run; ``matrix``: ``moves`` are
    matrices, else they multiply elementwise."""
    request = ScanRequest(SCAN_FORWARD, StateType.of(adds), kernel, gradients)
    return _carry(find_session(session), request, moves, adds, entering, matrix, op_key)


@carry_states.register_fake
def _(moves: Tensor, adds: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    before, after = (torch.empty(adds.shape, dtype=adds.dtype, device=adds.device) for _ in range(2))
    return before, after, torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("startrail::carry_states_back", mutates_args=(), tags=UNSAFE)
def carry_states_back(
    moves: Tensor, grad_before: Tensor, grad_after: Tensor, matrix: bool, number: Tensor, op_key: Tensor, session: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The whole gradients of the states after and before each run."""
    request = ScanRequest(SCAN_BACKWARD, StateType.of(grad_before), kernel, False, number)
    moves = moves.mT if matrix else moves
    after, before, _ = _carry(find_session(session), request, moves, grad_before, grad_after, matrix, op_key)
    return after, before


@carry_states_back.register_fake
def _(moves: Tensor, grad_before: Tensor, grad_after: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    after, before = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (grad_after, grad_before))
    return after, before


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    moves, _, entering, ctx.matrix, op_key, ctx.session, ctx.kernel, _ = inputs
    before, _, number = output
    ctx.has_entering, ctx.owner = entering is not None, find_session(ctx.session)  # alive until the backward pass
    ctx.save_for_backward(moves, before, number, op_key)


def _backward(ctx: Any, grad_before: Tensor, grad_after: Tensor, _: None) -> tuple[Tensor | None, ...]:
    moves, before, number, op_key = ctx.saved_tensors
    of_after, of_before = torch.ops.startrail.carry_states_back(
        moves, grad_before, grad_after, ctx.matrix, number, op_key, ctx.session, ctx.kernel
    )
    of_moves = of_after @ before.mT if ctx.matrix else (of_after * before).sum_to_size(moves.shape)
    return of_moves, of_after, of_before if ctx.has_entering else None, *[None] * 5


carry_states.register_autograd(_backward, setup_context=_save)

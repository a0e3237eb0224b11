"""Scans behind their op: the state before and after each run, given what each run does to a state.

The op is linear in states, and so is its backward pass: gradients of states go the same way back, with each transition
transposed. States are (runs, batch, ...) here, so that those of one run are one row of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from startrail._compat import dtype_name
from startrail.agreement.consensus import rejoining
from startrail.compile.call import compile_call
from startrail.compile.scan import SCAN_BACKWARD, SCAN_FORWARD, Numbers, Scan, ScanPart, Visit
from startrail.engine.batch import Batch
from startrail.engine.op import UNSAFE, find_session
from startrail.engine.runner import BlockKernel, PreparedPart, PreparedPass
from startrail.engine.session import Session
from startrail.engine.wire import Tensors, Wire
from startrail.kernels import Partial, Sums
from startrail.kernels.device import current_stream_id, ints_on
from startrail.schedule.values import Block, Pass


@dataclass(frozen=True, eq=False)
class PreparedScan:
    detail: str
    part: ScanPart
    passes: dict[Pass, PreparedPass]
    _rows_on: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def rows_on(self, device: torch.device, rows: Sequence[int]) -> Tensor:
        """Rows as a tensor, copied to the device once."""
        key = *rows, current_stream_id(device)
        if key not in self._rows_on:
            self._rows_on[key] = ints_on(device, rows, torch.int64)
        return self._rows_on[key]

    @cached_property
    def messages(self) -> dict[Pass, dict[int, Numbers]]:
        """Those to this rank, by their numbers."""
        member = self.part.member
        return {
            pass_: {each.number: each for each in self.part.messages(pass_) if each.receiver == member}
            for pass_ in self.passes
        }

    @cached_property
    def rows(self) -> dict[tuple[int, int], int]:
        """Where the row of each run (rank, number) is."""
        return {run: row for row, run in enumerate(self.part.table.rows_of(self.part.member))}

    @cached_property
    def visits(self) -> dict[Pass, dict[Visit, list[int]]]:
        """The rows of each visit of this rank's node."""
        node = self.part.table.node_of(self.part.member)
        return {
            pass_: {
                visit: [self.rows[run[1:]] for run in visit.runs]
                for visits in self.part.table.visits(pass_)
                for visit in visits
                if visit.runs[0].rank in node and self.part.table.inner > 1
            }
            for pass_ in self.passes
        }


class StateType(NamedTuple):
    """The states of one run. ``shape`` is (batch, heads, ...), ``moves`` that of a head's transition."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    moves: tuple[int, ...]

    @classmethod
    def of(cls, moves: Tensor, states: Tensor) -> StateType:
        """Those of transitions and states (runs, batch, heads, ...)."""
        return cls(tuple(states.shape[1:]), states.dtype, states.device, tuple(moves.shape[3:]))

    @property
    def of_unit(self) -> tuple[int, ...]:
        """The shape of what belongs together: the state of a head of one sequence."""
        return self.shape[2:]

    @property
    def units(self) -> int:
        return prod(self.shape[:2])

    @property
    def effect_of_unit(self) -> tuple[int, int]:
        """Numbers of M and of B."""
        return prod(self.moves), prod(self.of_unit)


class ScanRequest:
    """One pass of a scan, as the op got it. ``kernel`` names what computes the states."""

    def __init__(
        self, pass_: Pass, state: StateType, kernel: str, gradients: bool, number: Tensor | None = None
    ) -> None:
        self.pass_, self.state, self.kernel, self.gradients = pass_, state, kernel, gradients
        self.forward_number, self.device = number, state.device

    @property
    def key(self) -> object:
        return "scan", self.kernel, self.state

    @property
    def kind(self) -> object:
        return "scan", self.kernel, self.state._replace(device=self.device.type)  # type: ignore[arg-type]

    def prepare(self, session: Session, batch: Batch) -> PreparedScan:
        state = self.state
        dtype, units = dtype_name(state.dtype), state.units
        sizes = prod(state.shape), state.dtype.itemsize, self.kernel, units, units * sum(state.effect_of_unit)
        problem = Scan(batch.boundaries, state.shape[0], dtype, "", *sizes)
        call = compile_call(problem, session.settings.split, session.rank, batch.layout)
        (part,) = call.parts
        assert isinstance(part, ScanPart)
        passes = {pass_: PreparedPass(call, pass_, [Wire(part, state.dtype, state.dtype)]) for pass_ in problem.passes}
        detail = f"{problem}, state {state.shape} on {self.device.type}, {session.settings}"
        return PreparedScan(detail, part, passes)


class CarryKernel(BlockKernel):
    """``before`` is what enters each run, ``after`` is ``moves`` x ``before`` + what the run adds. A state that arrives
    is added to one, and what the run makes of it to the other, from which messages are packed."""

    def __init__(
        self, prepared: PreparedScan, pass_: Pass, moves: Tensor, matrix: bool, before: Tensor, after: Tensor
    ) -> None:
        self.messages, self.rows = prepared.messages[pass_], prepared.rows
        self.moves, self.matrix, self.before, self.after = moves, matrix, before, after
        self.extra_results: Sequence[Tensor] = (before, after)

    @property
    def numbers(self) -> Tensor:
        """From which messages are packed."""
        return self.after.view(-1)

    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        return tensors

    def new_result(self, kind: str, shapes: Sequence[Sequence[int]]) -> Sums:
        return Sums(shapes, self.after.dtype, self.after.device)

    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        if block.column == block.row:
            self.begin()
        else:
            ((arrived,),) = inputs
            self.take(self.messages[block.column], arrived.flatten())

    def begin(self) -> None:
        """What other ranks of the node send at first has arrived."""

    def take(self, message: Numbers, arrived: Tensor) -> None:
        assert message.visit is not None
        (run,) = message.visit.runs
        row, state = self.rows[run[1:]], arrived.view(self.after.shape[1:])
        self.before[row] += state
        self.after[row] += _moved(self.moves[row], state, self.matrix)

    def finish(self) -> None:
        """Every message has arrived."""

    def outputs(self, part: PreparedPart, kind: str) -> Tensors:
        return ()


class SharedCarryKernel(CarryKernel):
    """The same for ranks that share the units of their node's states. ``row_moves`` and ``row_after`` are those of each
    row, from the beginning of its visit on, ``row_before`` the state before it: (rows, units, ...)."""

    def __init__(
        self, prepared: PreparedScan, pass_: Pass, moves: Tensor, matrix: bool, before: Tensor, after: Tensor
    ) -> None:
        super().__init__(prepared, pass_, moves, matrix, before, after)
        self.prepared = prepared
        self.table, self.member = prepared.part.table, prepared.part.member
        self.visits, self.unit = prepared.visits[pass_], StateType.of(moves, after)
        table, own = self.table, self.table.shared_runs(self.member)
        units, rows = len(table.units_of(self.member)), len(prepared.rows)
        self.flat = after.new_zeros(table.numbers_of(self.member))
        first, size = table.first_row(self.member), rows * table.row_numbers(self.member)
        shape, of_m = (rows, units, *self.unit.of_unit), self.unit.moves
        self.row_after = self.flat[first : first + size].view(shape)
        self.row_before = self.flat[first + size : first + 2 * size].view(shape)
        self.row_moves = after.new_empty(rows, units, *of_m)
        self.arrived = after.new_zeros(len(own), self.unit.units, *self.unit.of_unit)
        self.extra_results = (*self.extra_results, self.arrived, self.flat)
        self.own_moves = moves[own]
        of_units = self.own_moves.reshape(*self.arrived.shape[:2], *of_m), after[own].view(self.arrived.shape)
        for rank in table.node_of(self.member):
            sharer = table.units_of(rank)
            both = [x[:, sharer.start : sharer.stop].reshape(-1) for x in of_units]
            start = len(own) * table.states.effect * sharer.start
            torch.cat(both, out=self.flat[start : start + sum(map(len, both))])

    @property
    def numbers(self) -> Tensor:
        return self.flat

    def begin(self) -> None:
        """Each row's transition and state become those from the beginning of its visit on. No state has arrived yet."""
        units, effect = self.table.units_of(self.member), self.table.states.effect
        count = len(self.table.shared_runs(self.member)) * effect
        self._take_effects(self.member, self.flat[count * units.start : count * units.stop])
        longest = max((len(rows) for rows in self.visits.values()), default=0)
        for place in range(1, longest):
            several = [(visit, rows) for visit, rows in self.visits.items() if len(rows) > place]
            one, other = (self._on_device([rows[at] for _, rows in several]) for at in (place - 1, place))
            state, moves = self.row_after[one], self.row_moves[other]
            self.row_before[other] = state
            self.row_after[other] += _moved(moves, state, self.matrix)
            if any(visit.depth for visit, _ in several):
                self.row_moves[other] = _moved(moves, self.row_moves[one], self.matrix)

    def take(self, message: Numbers, arrived: Tensor) -> None:
        if message.visit is not None:
            listed = self.visits[message.visit]
            rows, state = self._on_device(listed), arrived.view(self.row_after.shape[1:])
            self.row_after[rows] += _moved(self.row_moves[rows], state, self.matrix)
            self.row_before[listed[0]] = state
            self.row_before[rows[1:]] = self.row_after[rows[:-1]]
        elif message.depth == 0:
            self._take_effects(message.sender, arrived)
        else:
            self._take_entries(message.sender, arrived)

    def _take_effects(self, rank: int, numbers: Tensor) -> None:
        rows = self._rows_of(rank)
        moves, adds = numbers.split([self.row_moves[rows].numel(), self.row_after[rows].numel()])
        self.row_moves[rows] = moves.view_as(self.row_moves[rows])
        self.row_after[rows] = adds.view_as(self.row_after[rows])

    def _take_entries(self, rank: int, numbers: Tensor) -> None:
        units = self.table.units_of(rank)
        part = self.arrived[:, units.start : units.stop]
        part.copy_(numbers.view(part.shape))

    def _rows_of(self, rank: int) -> slice:
        before = sum(len(self.table.shared_runs(other)) for other in self.table.node_of(rank) if other < rank)
        return slice(before, before + len(self.table.shared_runs(rank)))

    def _on_device(self, rows: list[int]) -> Tensor:
        return self.prepared.rows_on(self.after.device, rows)

    def finish(self) -> None:
        self._take_entries(self.member, self.row_before[self._rows_of(self.member)])
        own = self._on_device(self.table.shared_runs(self.member))
        state = self.arrived.view(len(own), *self.after.shape[1:])
        self.before.index_add_(0, own, state)
        self.after.index_add_(0, own, _moved(self.own_moves, state, self.matrix))


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
        if entering is not None:
            after += _moved(moves, entering, matrix)
        make = CarryKernel if started.prepared.part.table.inner == 1 else SharedCarryKernel
        kernel = make(started.prepared, request.pass_, moves, matrix, before, after)
        started.run(kernel, [{"state": (kernel.numbers.view(1, 1, -1, 1),)}])
        kernel.finish()
        return before, after, started.number


@torch.library.custom_op("startrail::carry_states", mutates_args=(), tags=UNSAFE)
def carry_states(
    moves: Tensor, adds: Tensor, entering: Tensor | None, matrix: bool, op_key: Tensor, session: str, kernel: str,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The states before and after each of this rank's runs, and the call's number. A run makes ``moves`` S + ``adds``
    of a state S. All are (runs, batch, ...). ``entering`` is added to what enters each run; ``matrix``: ``moves`` are
    matrices, else they multiply elementwise."""
    request = ScanRequest(SCAN_FORWARD, StateType.of(moves, adds), kernel, gradients)
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
    request = ScanRequest(SCAN_BACKWARD, StateType.of(moves, grad_before), kernel, False, number)
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
    of_moves = None
    if ctx.needs_input_grad[0]:
        of_moves = of_after @ before.mT if ctx.matrix else (of_after * before).sum_to_size(moves.shape)
    return of_moves, of_after, of_before if ctx.has_entering else None, *[None] * 5


carry_states.register_autograd(_backward, setup_context=_save)

"""Halos behind their op: the tokens before each run, in one tensor of rows with one row for each token.

``gather_halo`` takes the rows that this rank holds for halos, and returns those that it fetches from other ranks. Where
each halo finds its tokens among both is in ``HaloPlaces``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from startrail._compat import dtype_name
from startrail.agreement.consensus import rejoining
from startrail.compile.call import compile_call
from startrail.compile.halo import HALO_BACKWARD, HALO_FORWARD, Halo, HaloPart
from startrail.engine.batch import Batch, positions_of
from startrail.engine.op import UNSAFE, find_session
from startrail.engine.runner import BlockKernel, PreparedPart, PreparedPass
from startrail.engine.session import Session
from startrail.engine.wire import Tensors, Wire
from startrail.kernels import Partial, Sums, accumulator
from startrail.schedule.values import Block, Pass


@dataclass(frozen=True, eq=False)
class PreparedHalo:
    """``places`` gives the rows of each message among the fetched ones."""

    detail: str
    part: HaloPart
    passes: dict[Pass, PreparedPass]

    @cached_property
    def places(self) -> dict[int, slice]:
        at, places = 0, {}
        for number, runs in self.part.received.items():
            places[number] = slice(at, at := at + sum(count for _, count in runs))
        return places

    @cached_property
    def num_fetched(self) -> int:
        return sum(count for _, count in self.part.fetched)

    @cached_property
    def held(self) -> Tensor:
        """The places, among this rank's tokens, of those that it holds for halos."""
        values, order = positions_of(self.part.zone.runs[self.part.member]).sort()
        return order[torch.searchsorted(values, positions_of(self.part.held))]

    @cached_property
    def sources(self) -> Tensor:
        """For each run, padding included, where its halo's rows are: 0 if there is no such token, else one more than
        its place among the held tokens and then the fetched ones. (runs, before)"""
        part, documents = self.part, self.part.documents
        known = torch.cat((positions_of(part.held), positions_of(part.fetched)))
        starts = [start for start, _ in part.runs]
        # padding lies beyond the last document, and so begins one
        first = [start if start >= part.length else documents[bisect_right(documents, start) - 1] for start in starts]
        run_starts, first_tokens = torch.tensor([starts, first], dtype=torch.int64, device="cpu").unsqueeze(2)
        wanted = run_starts + torch.arange(-part.before, 0, device="cpu")
        is_there = wanted >= first_tokens
        if not len(known):
            return torch.zeros_like(wanted)
        values, order = known.sort()
        places = order[torch.searchsorted(values, wanted).clamp(max=len(known) - 1)] + 1
        return places.where(is_there, 0)


class HaloRequest:
    """One pass of a halo, as the op got it."""

    def __init__(self, pass_: Pass, rows: Tensor, before: int, gradients: bool, number: Tensor | None = None) -> None:
        self.pass_, self.before, self.gradients, self.forward_number = pass_, before, gradients, number
        self.features, self.dtype, self.device = rows.shape[1], rows.dtype, rows.device

    @property
    def key(self) -> object:
        return "halo", self.before, self.features, self.dtype, self.device

    @property
    def kind(self) -> object:
        return "halo", self.before, self.features, self.dtype, self.device.type

    def prepare(self, session: Session, batch: Batch) -> PreparedHalo:
        dtype = dtype_name(self.dtype)
        problem = Halo(batch.boundaries, 1, dtype, "", self.before, self.features, self.dtype.itemsize)
        call = compile_call(problem, session.settings.split, session.rank, batch.layout)
        (part,) = call.parts
        assert isinstance(part, HaloPart)
        wire = Wire(part, self.dtype, self.dtype)
        passes = {pass_: PreparedPass(call, pass_, [wire]) for pass_ in problem.passes}
        return PreparedHalo(f"{problem} on {self.device.type}, {session.settings}", part, passes)


class HaloKernel(BlockKernel):
    """Copies the rows of each message to their place among all that are ``fetched``. The backward pass adds the
    gradients of a message's rows to what other ranks return."""

    def __init__(self, prepared: PreparedHalo, held: Sequence[int], like: Tensor, fetched: Tensor) -> None:
        self.prepared, self.held, self.like, self.fetched = prepared, held, like, fetched
        if fetched.is_floating_point() or fetched.is_complex():  # no other dtype can be marked as invalid
            self.extra_results = (fetched,)

    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        return tensors

    def new_result(self, kind: str, shapes: Sequence[Sequence[int]]) -> Sums:
        return Sums(shapes, accumulator(self.like.dtype), self.like.device)

    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        if block.column == block.row:
            return  # the rank's own rows stay where they are
        rows = self.prepared.places[block.column]
        ((tensor,),), (result,) = inputs, results
        if part.program.pass_.is_forward:
            self.fetched[rows].copy_(tensor[0, 0])
        else:
            assert isinstance(result, Sums)
            result.sums[0].add(tensor[:, :, rows])

    def outputs(self, part: PreparedPart, kind: str) -> Tensors:
        if kind == "halo":
            return ()
        return (torch.empty(1, 1, *self.held, dtype=self.like.dtype, device=self.like.device),)


@rejoining
def _run(session: Session, request: HaloRequest, rows: Tensor, op_key: Tensor) -> tuple[Tensor, Tensor]:
    """What this pass brings, and the number of the call."""
    with session.call():
        started = session.start_pass(request, op_key)
        prepared = started.prepared
        (entering,) = request.pass_.enters
        is_forward = request.pass_.is_forward
        fetched = rows.new_empty(prepared.num_fetched if is_forward else 0, request.features)
        kernel = HaloKernel(prepared, (len(prepared.held), request.features), rows, fetched)
        (results,) = started.run(kernel, [{entering: (rows.unsqueeze(0).unsqueeze(0),)}])
        return fetched if is_forward else results["dedge"][0][0, 0], started.number


@torch.library.custom_op("startrail::gather_halo", mutates_args=(), tags=UNSAFE)
def gather_halo(
    held: Tensor, num_fetched: int, before: int, op_key: Tensor, session: str, gradients: bool
) -> tuple[Tensor, Tensor]:
    """The rows that this rank fetches, given those that it holds for halos; and the call's number. ``gradients``: a
    backward pass follows."""
    request = HaloRequest(HALO_FORWARD, held, before, gradients)
    return _run(find_session(session), request, held, op_key)


@gather_halo.register_fake
def _(held: Tensor, num_fetched: int, *others: object) -> tuple[Tensor, Tensor]:
    return held.new_empty(num_fetched, held.shape[1]), torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("startrail::return_halo", mutates_args=(), tags=UNSAFE)
def return_halo(grad: Tensor, num_held: int, before: int, number: Tensor, op_key: Tensor, session: str) -> Tensor:
    """The gradients of the held rows from those of the fetched ones."""
    request = HaloRequest(HALO_BACKWARD, grad, before, False, number)
    return _run(find_session(session), request, grad, op_key)[0]


@return_halo.register_fake
def _(grad: Tensor, num_held: int, *others: object) -> Tensor:
    return grad.new_empty(num_held, grad.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    held, _, ctx.before, op_key, ctx.session, _ = inputs
    ctx.num_held, ctx.owner = len(held), find_session(ctx.session)  # stays alive until the backward pass has run
    ctx.save_for_backward(op_key, output[1])


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    op_key, number = ctx.saved_tensors
    held = torch.ops.startrail.return_halo(grad, ctx.num_held, ctx.before, number, op_key, ctx.session)
    return held, None, None, None, None, None


gather_halo.register_autograd(_backward, setup_context=_save)

"""A second kind of call, in this file alone: every rank gets the sum of its two neighbours' pieces.

It needs no change in the session, the transport, the runner or the proof.
"""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

import startrail
from startrail.compile.call import Part, compile_call
from startrail.compile.problem import Boundaries, Problem, Split
from startrail.compile.proof import prove_call
from startrail.engine.runner import BlockKernel, PreparedPass
from startrail.engine.wire import Wire
from startrail.kernels import Sums
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program
from startrail.schedule.proof import ScheduleError
from startrail.schedule.sizes import Field, PieceSizes
from startrail.schedule.values import Block, Pass, Piece, Step, Transfer
from startrail.transport import process_groups as groups
from tests import like_nccl

FORWARD = Pass("forward", ("x",), ("x",), ("sum",), ("x",), True)
BACKWARD = Pass("backward", ("dsum",), ("dsum",), ("dx",), ("dsum",), False)
WIDTH = 3


@dataclass(frozen=True)
class Sizes(PieceSizes):
    plan: Plan
    local: int
    of_shard: tuple[int, ...] = ()
    batch: int = 1
    kinds = ("x", "sum", "dsum", "dx")

    def fields(self, kind, tokens):
        return (Field((self.batch, 1, tokens, WIDTH), False),)

    def bytes_of(self, field):
        return 4 * field.shape[2] * WIDTH


@dataclass(frozen=True, eq=False)
class NeighboursPart(Part):
    @cached_property
    def neighbours(self):
        world = self.zone.size
        return sorted({(self.member - 1) % world, (self.member + 1) % world})

    @property
    def place(self):
        return self.sizes.plan.place(self.zone.size, self.member)

    def program(self, pass_):
        ((given,), (made,)), own = (pass_.inputs, pass_.results), self.member
        posts = [Transfer(False, 0, Piece(given, peer, 0), peer) for peer in self.neighbours]
        posts += [Transfer(True, 0, Piece(given, own, 0), peer) for peer in self.neighbours]
        blocks = tuple(Block(own, peer, 0) for peer in self.neighbours)
        expected = {Piece(made, own, 0): sum(1 << peer for peer in self.neighbours)}
        steps, inputs = (Step(tuple(posts)), Step(blocks=blocks)), (Piece(given, own, 0),)
        return Program(self.sizes.plan, self.place, pass_, steps, inputs, (), expected=expected)

    def prove_tokens(self, rank):
        pass

    def prove_results(self, rank, results):
        pass


@dataclass(frozen=True)
class Neighbours(Problem):
    @property
    def passes(self):
        return FORWARD, BACKWARD

    def parts(self, split, layout, rank):
        (zone,) = layout.zones
        return (NeighboursPart(zone, 0, rank, layout.length, 1, Sizes(split.plan, zone.largest)),)


class AddPieces(BlockKernel):
    def prepare(self, kind, tensors):
        return tensors

    def new_result(self, kind, shapes):
        return Sums(shapes, torch.float32, torch.device("cpu"))

    def block(self, part, block, inputs, results):
        results[0].sums[0].add(inputs[0][0])

    def outputs(self, part, kind):
        return (torch.empty(1, 1, part.part.tokens, WIDTH),)


@dataclass
class Prepared:
    detail: str
    passes: dict


class Request:
    device, gradients, kind, key = torch.device("cpu"), True, "neighbours", "neighbours"

    def __init__(self, pass_, forward_number=None):
        self.pass_, self.forward_number = pass_, forward_number

    def prepare(self, session, batch):
        call = compile_call(Neighbours(batch.boundaries, 1), session.settings.split, session.rank, batch.layout)
        wires = [Wire(part, torch.float32, torch.float32) for part in call.parts]
        return Prepared(str(call), {pass_: PreparedPass(call, pass_, wires) for pass_ in call.problem.passes})


def run(session, request, op_key, x):
    with session.call():
        started = session.start_pass(request, op_key)
        (kind,), (made,) = request.pass_.inputs, request.pass_.results
        (results,) = started.run(AddPieces(), [{kind: (x,)}], torch.empty(0, dtype=torch.uint8))
        return results[made][0]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_its_programs_are_proven(world):
    prove_call(Neighbours(Boundaries((0, 40)), 1), Split(Plan.parse(f"1x{world}"), world, "contiguous"))


def test_a_neighbour_that_is_left_out_is_found(monkeypatch):
    whole = NeighboursPart.program

    def short(part, pass_):
        program = whole(part, pass_)
        steps = (program.steps[0], program.steps[1]._replace(blocks=program.steps[1].blocks[:1]))
        return Program(program.plan, program.place, pass_, steps, program.own_inputs, (), expected=program.expected)

    monkeypatch.setattr(NeighboursPart, "program", short)
    with pytest.raises(ScheduleError, match="lacking the blocks of shards"):
        prove_call(Neighbours(Boundaries((0, 40)), 1), Split(Plan.parse("1x4"), 4, "contiguous"))


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_the_sum_of_its_neighbours(world, backend, monkeypatch):
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    whole = torch.randn(2, 1, 1, 6 * world, WIDTH)

    def on_rank(rank):
        sp = startrail.SequenceParallel(f"1x{world}", layout="contiguous", timeout=30)
        sequence, results = sp.sequence(6 * world), []
        x, dout = (sequence.shard(each, 2) for each in whole)
        for _ in range(2):
            out = run(sp._session, Request(FORWARD), sequence._state.op_key, x)
            number = torch.tensor(sp._session.consensus.call_id)
            dx = run(sp._session, Request(BACKWARD, number), sequence._state.op_key, dout)
            results.append((out.tolist(), dx.tolist()))
        (part,) = compile_call(Neighbours(Boundaries((0, 6 * world)), 1), sp._session.settings.split, rank).parts
        return results, sp.traffic()["level 0"]["bytes"], 2 * sum(part.traffic(p)[0] for p in (FORWARD, BACKWARD))

    for rank, (results, sent, promised) in enumerate(run_local(on_rank, world, deadline=60)):
        neighbours = sorted({(rank - 1) % world, (rank + 1) % world})
        for out, dx in results:
            for given, found in zip(whole, (out, dx), strict=True):
                expected = sum(given[:, :, 6 * peer : 6 * peer + 6] for peer in neighbours)
                assert torch.equal(torch.tensor(found), expected)
        assert sent == promised

"""Halo: the tokens just before each of a rank's runs, from whichever ranks hold them. For convolutions.

Each rank offers those of its tokens that others need, and fetches what it needs of others. A token that several ranks
of a node need crosses the link to that node once (`schedule.demand`). Gradients take the same way back.

>>> from startrail.compile.call import compile_call
>>> from startrail.compile.problem import Boundaries
>>> from startrail.schedule.plan import Plan
>>> problem = Halo(Boundaries((0, 10, 16)), 1, "float32", before=3, features=8)
>>> call = compile_call(problem, Split(Plan.parse("1x4"), 4, "contiguous"), rank=2)
>>> (part,) = call.parts
>>> part.runs, part.fetched, part.held               # rank 2 has 8 to 11: 10 begins a document
(((8, 2), (10, 2)), ((5, 3),), ((10, 2),))
>>> call.traffic(HALO_FORWARD), call.traffic(HALO_BACKWARD)        # it sends 10 and 11 to rank 3, and returns 5 to 7
((64,), (96,))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from startrail.compile.call import ByLevel, Part
from startrail.compile.problem import Problem, Split
from startrail.geometry.layout import Layout, Runs, Zone, cut_at_documents
from startrail.geometry.needs import divide, tokens_before, union
from startrail.schedule.demand import Demand, fetch_steps, return_steps
from startrail.schedule.places import Place
from startrail.schedule.plan import on_demand
from startrail.schedule.program import Program
from startrail.schedule.proof import Contents, ScheduleError
from startrail.schedule.sizes import RowSizes
from startrail.schedule.values import Block, Pass, Piece, Step

HALO_FORWARD = Pass("halo forward", ("edge",), ("edge",), ("halo",), ("edge",), True)
HALO_BACKWARD = Pass("halo backward", ("dhalo",), ("dhalo",), ("dedge",), ("dedge",), False)


@dataclass(frozen=True)
class Halo(Problem):
    """The ``before`` tokens before each run, of ``features`` numbers of ``itemsize`` bytes each."""

    before: int = 1
    features: int = 1
    itemsize: int = 4

    @property
    def passes(self) -> tuple[Pass, Pass]:
        return HALO_FORWARD, HALO_BACKWARD

    def parts(self, split: Split, layout: Layout, rank: int) -> tuple[HaloPart, ...]:
        documents, local, needed = self.boundaries.documents, [], []
        owned = [layout.runs(member) for member in range(layout.world)]
        for own in owned:
            inside, outside = divide(tokens_before(cut_at_documents(own, documents), documents, self.before), own)
            local.append(inside)
            needed.append(outside)
        demand = Demand.of(owned, needed, split.plan.sizes(layout.world))
        held = [list(inside) for inside in local]
        for edge, pieces in demand.pieces.items():
            held[edge.sender] += [(start, count) for start, count, source in pieces if source is None]
        demand = replace(demand, owned=tuple(map(union, held)))
        counts = tuple(sum(count for _, count in runs) for runs in demand.owned)
        sizes = HaloSizes(on_demand(), max(1, *counts), counts, self.features, self.itemsize)
        zone, levels = Zone(0, 0, layout.table), len(split.plan.levels)
        return (HaloPart(zone, 0, rank, layout.length, levels, sizes, demand, documents, self.before),)

    def __str__(self) -> str:
        return f"{self.before} tokens before each run, {self.features} numbers each, {super().__str__()}"


class HaloSizes(RowSizes):
    """Those of the tokens that ranks hold for each other. Fetched ones go straight to where they are needed."""

    kinds = ("edge", "halo", "dhalo", "dedge")
    empty = ("halo",)


@dataclass(frozen=True, eq=False)
class HaloPart(Part):
    """``demand`` brings each rank the tokens that it needs; its ``owned`` are only those that a rank holds for halos,
    its own or others'."""

    sizes: HaloSizes
    demand: Demand
    documents: tuple[int, ...]
    before: int

    @property
    def runs(self) -> Runs:
        """The rank's runs of one document each, in the order in which it holds them, padding included."""
        return cut_at_documents(self.zone.runs[self.member], self.documents)

    @property
    def held(self) -> Runs:
        """This rank's tokens that some run's halo contains."""
        return self.demand.owned[self.member]

    @cached_property
    def received(self) -> dict[int, Runs]:
        """The tokens of each message to this rank, by its number."""
        return {
            number: bundle.runs
            for edge, (number, bundle) in self.demand.bundles(self.member).items()
            if edge.receiver == self.member
        }

    @property
    def fetched(self) -> Runs:
        """The same, one message after the other."""
        return tuple(run for runs in self.received.values() for run in runs)

    @cached_property
    def place(self) -> Place:
        return self.sizes.plan.family.place(self.sizes.plan, self.zone.size, self.member, self.demand)

    @property
    def demand_level(self) -> int | None:
        """The same on all ranks, which open lanes together."""
        return min((self.demand.level(edge) for edge in self.demand.pieces), default=None)

    @cached_property
    def _programs(self) -> dict[Pass, Program]:
        member, plan = self.member, self.sizes.plan
        bundles = plan.family.bundles(plan, self.place, self.demand)
        blocks = tuple(Block(member, column, 0) for column in (member, *self.received))
        got = {Piece("halo", member, 0): sum(1 << block.column for block in blocks)}
        forward = tuple(fetch_steps(self.demand, member, "edge"))
        backward = (Step(blocks=blocks), *return_steps(self.demand, member, "dedge"))
        programs = {}
        for pass_, steps, expected in ((HALO_FORWARD, forward, got), (HALO_BACKWARD, backward, {})):
            (entering,) = pass_.enters
            given = (Piece(entering, member, 0),)
            programs[pass_] = Program(plan, self.place, pass_, steps, given, (), 0, bundles, expected)
        return programs

    def program(self, pass_: Pass) -> Program:
        return self._programs[pass_]

    def traffic(self, pass_: Pass) -> ByLevel:
        """By closed form: tokens go from sender to receiver, and their gradients back."""
        end = "sender" if pass_.is_forward else "receiver"
        nbytes = self.sizes.features * self.sizes.itemsize
        return tuple(tokens * nbytes for tokens in self.demand.tokens_by_level(**{end: self.member}))

    # --- the proof, token by token

    def prove_tokens(self, rank: int) -> None:
        """What the rank holds and fetches contains every token before its runs, and fetches none twice."""
        own = {token for start, count in self.zone.runs[self.member] for token in range(start, start + count)}
        needed = set()
        for start, _ in self.runs:
            document = max(first for first in self.documents if first <= start)
            if start < self.length:
                needed |= set(range(max(document, start - self.before), start))
        fetched, held = _tokens(self.fetched), set(_tokens(self.held))
        if len(set(fetched)) != len(fetched) or set(fetched) != needed - own:
            wrong = sorted(set(fetched) ^ (needed - own))[:8]
            raise ScheduleError(f"rank {rank} fetches tokens twice, or not those before its runs: {wrong}")
        if not needed & own <= held <= own:
            raise ScheduleError(f"rank {rank} holds {sorted(held)[:8]}, but its runs need {sorted(needed & own)[:8]}")

    def prove_results(self, rank: int, results: Mapping[Pass, Mapping[Piece, Contents]]) -> None:
        """Every token that the rank holds for others got the gradients of all ranks that fetch it."""
        contents = results[HALO_BACKWARD][Piece("dedge", self.member, 0)]
        expected: dict[int | None, int] = {None: 1 << self.member}
        places = {token: index for index, token in enumerate(_tokens(self.held))}
        for edge, runs in self.demand.messages.items():
            for token in places.keys() & set(_tokens(runs)):
                expected[places[token]] = expected.get(places[token], 0) | 1 << edge.receiver
        if contents != expected:
            raise ScheduleError(f"rank {rank}: gradients of its tokens come from {contents}, expected {expected}")


def _tokens(runs: Runs) -> list[int]:
    return [token for start, count in runs for token in range(start, start + count)]

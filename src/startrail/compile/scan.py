"""Scan: the states of a linear recurrence go from run to run of each document, whichever ranks hold the runs.

A run turns the state before it into M S + B (`kernels.recurrences`). Each rank computes M and B of its runs first.
Then states travel along a chain, in the order of the runs: one message wherever a document goes on at another rank, and
none for a document that one rank holds. In the backward pass gradients of states take the same way back.

With zigzag, four ranks hold eight runs of a document, the fourth rank two neighbours:

>>> from startrail.compile.call import compile_call
>>> from startrail.compile.problem import Boundaries
>>> from startrail.schedule.plan import Plan
>>> problem = Scan(Boundaries((0, 16)), 1, "float32", features=10)
>>> call = compile_call(problem, Split(Plan.parse("1x2/1x2"), 4, "zigzag"), rank=1)
>>> (part,) = call.parts
>>> part.runs, [f"{hop.sender} to {hop.receiver}" for hop in part.hops]
(((2, 2), (12, 2)), ['0 to 1', '1 to 2', '2 to 3', '3 to 2', '2 to 1', '1 to 0'])
>>> for step in part.program(SCAN_FORWARD).steps: print(step)
1x1
post state4<0@3 | 1x4
post state5>2@2
post state8<2@2 | 1x8
post state9>0@3
>>> call.traffic(SCAN_FORWARD)                                     # one state to the other node, and one to rank 0
(40, 40)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from startrail.compile.call import ByLevel, Part
from startrail.compile.problem import Problem, Split
from startrail.geometry.layout import Layout, Runs, Zone, cut_at_documents
from startrail.schedule.places import Place
from startrail.schedule.plan import on_demand
from startrail.schedule.program import Program
from startrail.schedule.proof import Contents, ScheduleError
from startrail.schedule.sizes import RowSizes
from startrail.schedule.values import Block, Bundle, Pass, Piece, Source, Step, Transfer

SCAN_FORWARD = Pass("scan forward", ("state",), ("state",), ("carried",), ("state",), True)
SCAN_BACKWARD = Pass("scan backward", ("state",), ("state",), ("carried",), ("state",), False)


class Hop(NamedTuple):
    """A state that goes from run number ``source`` of the sender to run number ``target`` of the receiver, ``depth``
    hops after its document began."""

    depth: int
    document: int
    sender: int
    receiver: int
    source: int
    target: int


class RunPlace(NamedTuple):
    """Run number ``number`` of a rank; ``start`` is its first token."""

    start: int
    rank: int
    number: int


@dataclass(frozen=True)
class Scan(Problem):
    """``features``: the numbers of all states of one run. They are sent as they are, in ``dtype``."""

    features: int = 1
    itemsize: int = 4
    kernel: str = ""

    @property
    def passes(self) -> tuple[Pass, Pass]:
        return SCAN_FORWARD, SCAN_BACKWARD

    def parts(self, split: Split, layout: Layout, rank: int) -> tuple[ScanPart, ...]:
        runs = tuple(held_runs(layout, member, self.boundaries.documents) for member in range(layout.world))
        chains = chains_of(runs, self.boundaries.documents)
        counts = tuple(map(len, runs))
        sizes = ScanSizes(on_demand(), max(counts), counts, self.features, self.itemsize)
        zone, levels = Zone(0, 0, layout.table), split.plan.sizes(layout.world)
        return (ScanPart(zone, 0, rank, layout.length, len(levels), sizes, levels, chains, runs),)

    def __str__(self) -> str:
        return f"{self.kernel}, states of {self.features} numbers, {super().__str__()}"


def held_runs(layout: Layout, rank: int, documents: Sequence[int]) -> Runs:
    """A rank's runs of one document each, in the order in which it holds them, padding included; an empty run if it has
    no tokens."""
    return cut_at_documents(layout.table[rank], documents) or ((layout.length, 0),)


def chains_of(runs: Sequence[Runs], documents: Sequence[int]) -> list[list[RunPlace]]:
    """The runs of each document, in order. ``runs`` are those of every rank.

    >>> chains_of([((0, 2), (4, 1), (5, 1)), ((2, 2),)], documents=(0, 4, 5))
    [[RunPlace(start=0, rank=0, number=0), RunPlace(start=2, rank=1, number=0)], [RunPlace(start=4, rank=0, number=1)]]
    """
    chains: list[list[RunPlace]] = [[] for _ in documents[1:]]
    places = [
        RunPlace(start, rank, number) for rank, of_rank in enumerate(runs) for number, (start, _) in enumerate(of_rank)
    ]
    for place in sorted(place for place in places if place.start < documents[-1]):
        chains[bisect_right(documents, place.start) - 1].append(place)
    return chains


class ScanSizes(RowSizes):
    """Those of states, one for each run of a rank."""

    kinds = ("state", "carried")
    empty = ("carried",)


@dataclass(frozen=True, eq=False)
class ScanPart(Part):
    """``ranks`` are those at every level, ``chains`` the runs of every document, ``of_ranks`` those of every rank."""

    sizes: ScanSizes
    ranks: tuple[int, ...]
    chains: list[list[RunPlace]]
    of_ranks: tuple[Runs, ...]

    @property
    def runs(self) -> Runs:
        """This rank's."""
        return self.of_ranks[self.member]

    @cached_property
    def place(self) -> Place:
        """States use the lanes of `direct`, each of which connects all ranks of a subtree."""
        return Place(self.member, (1,) * len(self.ranks) + self.ranks, (False,) * 2 * len(self.ranks))

    @cached_property
    def hops(self) -> list[Hop]:
        """The messages of the forward pass, in an order that every rank can keep: each needs only earlier ones."""
        hops = []
        for document, chain in enumerate(self.chains):
            for depth, (run, after) in enumerate(pairwise(chain)):
                assert run.rank != after.rank, "a rank's neighbouring runs of a document are one"
                hops.append(Hop(depth, document, run.rank, after.rank, run.number, after.number))
        return sorted(hops)

    @cached_property
    def _hops_back(self) -> list[Hop]:
        lengths: dict[int, int] = {}
        for hop in self.hops:
            lengths[hop.document] = hop.depth
        return sorted(
            Hop(lengths[hop.document] - hop.depth, hop.document, hop.receiver, hop.sender, hop.target, hop.source)
            for hop in self.hops
        )

    def numbered_hops(self, pass_: Pass) -> list[tuple[int, Hop]]:
        """The hops that this rank sends or receives in a pass, with their numbers."""
        hops = self.hops if pass_.is_forward else self._hops_back
        return [
            (number, hop)
            for number, hop in enumerate(hops, self.zone.size)
            if self.member in (hop.sender, hop.receiver)
        ]

    def entered(self, pass_: Pass) -> dict[int, int]:
        """The run that each message's state enters, by the number of the message."""
        return {number: hop.target for number, hop in self.numbered_hops(pass_) if hop.receiver == self.member}

    @property
    def begins(self) -> dict[int, int]:
        """The documents that begin on this rank, each with the number of its run."""
        firsts = ((number, chain[0]) for number, chain in enumerate(self.chains))
        return {number: first.number for number, first in firsts if first.rank == self.member}

    @property
    def ends(self) -> dict[int, int]:
        """The documents that end on this rank, each with the number of its run."""
        lasts = ((number, chain[-1]) for number, chain in enumerate(self.chains))
        return {number: last.number for number, last in lasts if last.rank == self.member}

    @cached_property
    def demand_level(self) -> int | None:
        """The same on all ranks, which open lanes together."""
        lanes = [replace(self.place, rank=hop.sender).lane_to(hop.receiver) for hop in self.hops]
        return min(lanes) - self.levels if lanes else None

    @cached_property
    def _programs(self) -> dict[Pass, Program]:
        return {pass_: self._program(pass_) for pass_ in (SCAN_FORWARD, SCAN_BACKWARD)}

    def program(self, pass_: Pass) -> Program:
        return self._programs[pass_]

    def _program(self, pass_: Pass) -> Program:
        """Hops in their order, with those of one depth in one step: whatever a rank waits for has no need of it."""
        member, hops = self.member, self.numbered_hops(pass_)
        steps = [Step(blocks=(Block(member, member, 0),))]
        for depth in sorted({hop.depth for _, hop in hops}):
            received = [(number, hop.sender) for number, hop in hops if (hop.depth, hop.receiver) == (depth, member)]
            sent = [(number, hop.receiver) for number, hop in hops if (hop.depth, hop.sender) == (depth, member)]
            posts = tuple(
                Transfer(send, self.place.lane_to(peer), Piece("state", number, 0), peer)
                for send, messages in ((False, received), (True, sent))
                for number, peer in messages
            )
            steps.append(Step(posts, tuple(Block(member, number, 0) for number, _ in received)))
        bundles = {
            number: Bundle(((number, 1),), (Source(member, hop.source, 1),) if hop.sender == member else ())
            for number, hop in hops
        }
        got = sum(1 << block.column for step in steps for block in step.blocks)
        own, expected = (Piece("state", member, 0),), {Piece("carried", member, 0): got}
        return Program(self.sizes.plan, self.place, pass_, tuple(steps), own, (), 0, bundles, expected)

    def traffic(self, pass_: Pass) -> ByLevel:
        """By closed form: one state for each hop."""
        sent = [0] * self.levels
        for hop in self.hops:
            sender, receiver = (hop.sender, hop.receiver) if pass_.is_forward else (hop.receiver, hop.sender)
            if sender == self.member:
                sent[self.place.lane_to(receiver) - self.levels] += self.sizes.features * self.sizes.itemsize
        return tuple(sent)

    # --- the proof, run by run

    def prove_tokens(self, rank: int) -> None:
        """Play the programs of all ranks: each run gets the state of all runs before it in its document, in order."""
        parts = [replace(self, member=member) for member in range(self.zone.size)] if self.member == 0 else []
        for pass_ in (SCAN_FORWARD, SCAN_BACKWARD) if parts else ():
            found = _play(parts, pass_)
            for chain in self.chains:
                ordered = chain if pass_.is_forward else chain[::-1]
                for number, place in enumerate(ordered):
                    got, expected = found.get(place[1:]), [each.start for each in ordered[:number]]
                    if got != expected:
                        raise ScheduleError(f"{pass_}: run {place} gets the states of {got}, expected {expected}")

    def prove_results(self, rank: int, results: Mapping[Pass, Mapping[Piece, Contents]]) -> None:
        """``carried`` says that each message was used once; ``prove_tokens``, for which runs."""


def _play(parts: Sequence[ScanPart], pass_: Pass) -> dict[tuple[int, int], list[int]]:
    """The runs whose states entered each run (rank, number), as their first tokens in order, if every rank goes through
    its steps and a block waits for its message."""
    starts = {place[1:]: place.start for chain in parts[0].chains for place in chain}
    ends = (chain[0 if pass_.is_forward else -1] for chain in parts[0].chains)
    entered: dict[tuple[int, int], list[int]] = {end[1:]: [] for end in ends}
    messages: dict[int, list[int]] = {}
    left = {part.member: [(step, part) for step in part.program(pass_).steps] for part in parts}
    targets = {part.member: part.entered(pass_) for part in parts}
    waiting = True
    while waiting:
        waiting = False
        for member, steps in left.items():
            while steps:
                step, part = steps[0]
                for post in step.posts:
                    if post.send:
                        (source,) = part.program(pass_).bundles[post.piece.shard].sources
                        run = member, source.start
                        messages[post.piece.shard] = [*entered.get(run, ()), starts[run]]
                columns = [block.column for block in step.blocks if block.column != member]
                if any(column not in messages for column in columns):
                    break
                entered |= {(member, targets[member][column]): messages[column] for column in columns}
                del steps[0]
                waiting = True
    return entered

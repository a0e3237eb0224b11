"""Scan: the states of a linear recurrence go from run to run of each document, whichever ranks hold the runs.

A run turns the state before it into M S + B (`kernels.recurrences`). Each rank computes M and B of its runs first.
Then states travel along a chain, in the order of the runs: one message wherever a document goes on at another rank, and
none for a document that one rank holds. In the backward pass gradients of states take the same way back.

With zigzag, four ranks hold eight runs of a document, the fourth rank two neighbours:

>>> from startrail.compile.call import compile_call
>>> from startrail.compile.problem import Boundaries
>>> from startrail.schedule.plan import Plan
>>> problem = Scan(Boundaries((0, 16)), 1, "float32", features=10, units=2, effect=30, inner=1)
>>> split = Split(Plan.parse("1x2/1x2"), 4, "zigzag")
>>> (part,) = compile_call(problem, split, rank=1).parts
>>> part.runs, [f"{hop.sender} to {hop.receiver}" for hop in part.hops(SCAN_FORWARD)]
(((2, 2), (12, 2)), ['0 to 1', '1 to 2', '2 to 3', '3 to 2', '2 to 1', '1 to 0'])
>>> for step in part.program(SCAN_FORWARD).steps: print(step)
1x1
post state4<0@3 | 1x4
post state5>2@2
post state8<2@2 | 1x8
post state9>0@3
>>> part.traffic(SCAN_FORWARD)                                     # one state to the other node, and one to rank 0
(40, 40)

A long chain inside each node is slow. The ranks of a node then share the parts of states that do not mix, such as the
heads (``units``): each gets M and B of all runs of the node for its share, and takes part in a chain that stops once at
every node (a visit). In the end each returns the states before the others' runs.

>>> (part,) = compile_call(replace(problem, inner=2), split, rank=1).parts
>>> [f"{hop.sender} to {hop.receiver}" for hop in part.hops(SCAN_FORWARD)]      # there and back, for two heads
['0 to 2', '1 to 3', '2 to 0', '3 to 1']
>>> for step in part.program(SCAN_FORWARD).steps: print(step)
post state9<0@3 state10>0@3 | 1x9 1x1
post state5>3@2
post state7<3@2 | 1x7
post state17<0@3 state18>0@3 | 1x17
>>> part.traffic(SCAN_FORWARD)              # half a state to the other node; half of M, B and the state of two runs
(20, 160)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
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
HOPS_PER_PEER = 2  # inside nodes that take as long as two exchanges with one more rank, by the planner's prices


class RunPlace(NamedTuple):
    """Run number ``number`` of a rank; ``start`` is its first token."""

    start: int
    rank: int
    number: int


class Visit(NamedTuple):
    """Runs of a document that follow each other inside one node, after ``depth`` visits of other nodes."""

    depth: int
    runs: tuple[RunPlace, ...]


class Hop(NamedTuple):
    """A state, or a rank's share of one, that goes from one visit to the next."""

    source: Visit
    target: Visit
    sender: int
    receiver: int


class Numbers(NamedTuple):
    """A message: ``size`` numbers, from ``start`` on among those of the sender. ``depth`` orders messages. It carries a
    state to a visit, else, in a node, what runs do to states (``depth`` 0) or the states before them."""

    depth: int
    number: int
    sender: int
    receiver: int
    start: int
    size: int
    visit: Visit | None = None


@dataclass(frozen=True)
class Scan(Problem):
    """``features``: the numbers of all states of one run, sent as they are, in ``dtype``. They consist of ``units``
    that do not mix. ``effect``: the numbers of M and B of one run. ``inner``: the ranks of a node that share units (1:
    each hop of the chain carries a whole state); by default the plan's innermost ranks, if that saves enough hops."""

    features: int = 1
    itemsize: int = 4
    kernel: str = ""
    units: int = 1
    effect: int = 2
    inner: int | None = None

    @property
    def passes(self) -> tuple[Pass, Pass]:
        return SCAN_FORWARD, SCAN_BACKWARD

    @property
    def states(self) -> States:
        return States(self.units, self.features // self.units, self.effect // self.units)

    def parts(self, split: Split, layout: Layout, rank: int) -> tuple[ScanPart, ...]:
        runs = tuple(held_runs(layout, member, self.boundaries.documents) for member in range(layout.world))
        chains, levels = chains_of(runs, self.boundaries.documents), split.plan.sizes(layout.world)
        inner = self._ranks_of_node(split, levels, chains) if self.inner is None else self.inner
        table = RunTable(levels, inner, self.states, chains, runs)
        counts = tuple(table.numbers_of(member) for member in range(layout.world))
        sizes = ScanSizes(on_demand(), max(1, *counts), counts, 1, self.itemsize)
        return (ScanPart(Zone(0, 0, layout.table), 0, rank, layout.length, len(levels), sizes, table),)

    def _ranks_of_node(self, split: Split, levels: Sequence[int], chains: Sequence[Sequence[RunPlace]]) -> int:
        """The innermost ranks, if the longest chain has enough hops among them; else 1."""
        inner = levels[-1]
        if inner == 1 or all(size == 1 for size in levels[:-1]):
            return 1  # one level: its links may be those between nodes
        inside = max(sum(a.rank // inner == b.rank // inner for a, b in pairwise(chain)) for chain in chains)
        faster = inside >= HOPS_PER_PEER * (inner - 1)
        if faster and split.scan is not None:
            priced = split.scan(split, self)
            faster = faster if priced is None else priced
        return inner if faster else 1

    def __str__(self) -> str:
        states = f"states of {self.features} numbers in {self.units} parts, {self.effect} of M and B"
        return f"{self.kernel}, {states}, {super().__str__()}"


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


class States(NamedTuple):
    """``units`` per state; numbers of each, and of M and B together."""

    units: int
    numbers: int
    effect: int


class ScanSizes(RowSizes):
    """Those of single numbers."""

    kinds = ("state", "carried")
    empty = ("carried",)


@dataclass(frozen=True, eq=False)
class RunTable:
    """The runs of all ranks. ``levels``: ranks at every level; ``inner``: those of a node that share units; ``chains``:
    the runs of every document; ``of_ranks``: those of every rank.

    A rank's numbers are those of the states after its runs. If ranks share units, a rank has rows instead, one for each
    run of its node in a document that other ranks hold as well: first M and B of its own runs for each rank of the
    node, then its share of the states after all rows, and of those before them.
    """

    levels: tuple[int, ...]
    inner: int
    states: States
    chains: list[list[RunPlace]]
    of_ranks: tuple[Runs, ...]

    def node_of(self, rank: int) -> range:
        """The ranks of its node."""
        first = rank - rank % self.inner
        return range(first, first + self.inner)

    def units_of(self, rank: int) -> range:
        units, place = self.states.units, rank % self.inner
        return range(units * place // self.inner, units * (place + 1) // self.inner)

    @cached_property
    def _shared(self) -> dict[int, list[int]]:
        shared: dict[int, list[int]] = {}
        for chain in self.chains:
            for run in chain if len(chain) > 1 else ():
                shared.setdefault(run.rank, []).append(run.number)
        return {rank: sorted(numbers) for rank, numbers in shared.items()}

    def shared_runs(self, rank: int) -> list[int]:
        """The numbers of a rank's runs in documents that other ranks hold as well."""
        return self._shared.get(rank, [])

    def rows_of(self, rank: int) -> list[tuple[int, int]]:
        """The runs (rank, number) of which it has a row."""
        if self.inner == 1:
            return [(rank, number) for number in range(len(self.of_ranks[rank]))]
        return [(member, number) for member in self.node_of(rank) for number in self.shared_runs(member)]

    def row_numbers(self, rank: int) -> int:
        return len(self.units_of(rank)) * self.states.numbers

    def first_row(self, rank: int) -> int:
        """Where its rows begin among its numbers."""
        return 0 if self.inner == 1 else len(self.shared_runs(rank)) * self.states.units * self.states.effect

    def numbers_of(self, rank: int) -> int:
        rows = (1 if self.inner == 1 else 2) * len(self.rows_of(rank)) * self.row_numbers(rank)
        return max(1, self.first_row(rank) + rows)

    @cached_property
    def _visits(self) -> dict[bool, list[list[Visit]]]:
        shared = [chain for chain in self.chains if len(chain) > 1]
        return {True: self._in_nodes(shared), False: self._in_nodes([chain[::-1] for chain in shared])}

    def _in_nodes(self, chains: Sequence[Sequence[RunPlace]]) -> list[list[Visit]]:
        by_node = [[tuple(runs) for _, runs in groupby(chain, lambda run: run.rank // self.inner)] for chain in chains]
        return [[Visit(depth, runs) for depth, runs in enumerate(nodes)] for nodes in by_node]

    def visits(self, pass_: Pass) -> list[list[Visit]]:
        """Those of each document that several ranks hold, in the direction of the pass."""
        return self._visits[pass_.is_forward]

    def hops(self, pass_: Pass) -> list[Hop]:
        """In an order that every rank can keep: each needs only earlier ones."""
        between = sorted(pair for visits in self.visits(pass_) for pair in pairwise(visits))
        return [
            Hop(one, other, sender, receiver)
            for one, other in between
            for sender, receiver in zip(self.node_of(one.runs[0].rank), self.node_of(other.runs[0].rank), strict=True)
            if self.units_of(sender)
        ]

    def exchanges(self, member: int) -> Iterator[tuple[Numbers, Numbers]]:
        """What a rank exchanges with each other rank of its node in the beginning and in the end. Numbers and depths
        count from those of hops."""
        states, shared = self.states, {rank: self.shared_runs(rank) for rank in self.node_of(member)}
        for peer in shared if self.inner > 1 else ():
            for sender, receiver in ((peer, member), (member, peer)) if peer != member else ():
                units, number = self.units_of(receiver), sender * self.inner + receiver % self.inner
                start, size = (len(shared[sender]) * states.effect * n for n in (units.start, len(units)))
                effect = Numbers(0, number, sender, receiver, start, size)
                rows, before = self.rows_of(sender), sum(len(shared[rank]) for rank in shared if rank < receiver)
                size, number = self.row_numbers(sender), number + len(self.of_ranks) * self.inner
                start = self.first_row(sender) + (len(rows) + before) * size
                yield effect, Numbers(0, number, sender, receiver, start, len(shared[receiver]) * size)


@dataclass(frozen=True, eq=False)
class ScanPart(Part):
    sizes: ScanSizes
    table: RunTable

    @property
    def runs(self) -> Runs:
        """This rank's."""
        return self.table.of_ranks[self.member]

    @property
    def is_alone(self) -> bool:
        """True if other ranks hold none of this rank's documents."""
        return not self.table.shared_runs(self.member)

    @cached_property
    def place(self) -> Place:
        """States use the lanes of `direct`, each of which connects all ranks of a subtree."""
        ranks = self.table.levels
        return Place(self.member, (1,) * len(ranks) + ranks, (False,) * 2 * len(ranks))

    def hops(self, pass_: Pass) -> list[Hop]:
        """Those of all ranks."""
        return self.table.hops(pass_)

    @cached_property
    def _messages(self) -> dict[Pass, list[Numbers]]:
        return {pass_: list(self._messages_of(pass_)) for pass_ in (SCAN_FORWARD, SCAN_BACKWARD)}

    def messages(self, pass_: Pass) -> list[Numbers]:
        """Those that this rank sends or receives, in their order."""
        return self._messages[pass_]

    def _messages_of(self, pass_: Pass) -> Iterator[Numbers]:
        table, hops, exchanged = self.table, self.hops(pass_), []
        first = self.zone.size + len(hops)
        last = 1 + max((hop.target.depth for hop in hops), default=0)
        for effect, entry in table.exchanges(self.member):
            yield from [effect._replace(number=first + effect.number)] if effect.size else []
            exchanged += [entry._replace(number=first + entry.number, depth=last)] if entry.size else []
        size = table.row_numbers(self.member)
        rows = {row: table.first_row(self.member) + at * size for at, row in enumerate(table.rows_of(self.member))}
        for number, (source, target, sender, receiver) in enumerate(hops, self.zone.size):
            if self.member in (sender, receiver):
                start = rows[source.runs[-1][1:]] if sender == self.member else 0
                yield Numbers(target.depth, number, sender, receiver, start, size, target)
        yield from exchanged

    @property
    def begins(self) -> dict[int, int]:
        """The documents that begin on this rank, each with the number of its run."""
        firsts = ((number, chain[0]) for number, chain in enumerate(self.table.chains))
        return {number: first.number for number, first in firsts if first.rank == self.member}

    @property
    def ends(self) -> dict[int, int]:
        """The documents that end on this rank, each with the number of its run."""
        lasts = ((number, chain[-1]) for number, chain in enumerate(self.table.chains))
        return {number: last.number for number, last in lasts if last.rank == self.member}

    @cached_property
    def demand_level(self) -> int | None:
        """The same on all ranks, which open lanes together."""
        lanes = {
            replace(self.place, rank=a.rank).lane_to(b.rank) for chain in self.table.chains for a, b in pairwise(chain)
        }
        return min(lanes) - self.levels if lanes else None

    @cached_property
    def _programs(self) -> dict[Pass, Program]:
        return {pass_: self._program(pass_) for pass_ in (SCAN_FORWARD, SCAN_BACKWARD)}

    def program(self, pass_: Pass) -> Program:
        return self._programs[pass_]

    def _program(self, pass_: Pass) -> Program:
        """Messages in their order, with those of one depth in one step: whatever a rank waits for has no need of it."""
        member, messages, steps = self.member, self.messages(pass_), []
        for depth in sorted({0, *(message.depth for message in messages)}):
            at_once = [message for message in messages if message.depth == depth]
            received = [message for message in at_once if message.receiver == member]
            posts = tuple(
                Transfer(send, self.place.lane_to(peer), Piece("state", number, 0), peer)
                for send, number, peer in sorted(
                    (each.sender == member, each.number, each.receiver if each.sender == member else each.sender)
                    for each in at_once
                )
            )
            blocks = tuple(Block(member, each.number, 0) for each in received)
            steps.append(Step(posts, blocks if depth else (*blocks, Block(member, member, 0))))
        bundles = {
            each.number: Bundle(
                ((each.number, each.size),),
                (Source(member, each.start, each.size),) if each.sender == member else (),
            )
            for each in messages
        }
        got = sum(1 << block.column for step in steps for block in step.blocks)
        own, expected = (Piece("state", member, 0),), {Piece("carried", member, 0): got}
        return Program(self.sizes.plan, self.place, pass_, tuple(steps), own, (), 0, bundles, expected)

    def traffic(self, pass_: Pass) -> ByLevel:
        """By closed form: a state, or this rank's share of it, for each hop; in a node, M and B of the rank's runs for
        the others' units, and the states before the others' runs for its own."""
        table, member, sent = self.table, self.member, [0] * self.levels
        row = table.row_numbers(member)
        for hop in self.hops(pass_):
            if hop.sender == member:
                sent[self.place.lane_to(hop.receiver) - self.levels] += row
        if table.inner > 1:
            own, rows = len(table.shared_runs(member)), len(table.rows_of(member))
            sent[-1] += own * (table.states.units - len(table.units_of(member))) * table.states.effect
            sent[-1] += (rows - own) * row
        return tuple(numbers * self.sizes.itemsize for numbers in sent)

    # --- the proof, run by run

    def prove_tokens(self, rank: int) -> None:
        """Play the programs of all ranks: each run gets the state of all runs before it in its document, in order."""
        parts = [replace(self, member=member) for member in range(self.zone.size)] if self.member == 0 else []
        for pass_ in (SCAN_FORWARD, SCAN_BACKWARD) if parts else ():
            entered = Play(parts, pass_).entered()
            for chain in self.table.chains:
                ordered = chain if pass_.is_forward else chain[::-1]
                for at, place in enumerate(ordered if len(chain) > 1 else ()):
                    expected = [each.start for each in ordered[:at]]
                    for sharer in self.table.node_of(place.rank):
                        got = entered.get((place[1:], sharer))
                        if self.table.units_of(sharer) and got != expected:
                            raise ScheduleError(
                                f"{pass_}: run {place} gets the states of {got} from rank {sharer}, expected {expected}"
                            )

    def prove_results(self, rank: int, results: Mapping[Pass, Mapping[Piece, Contents]]) -> None:
        """``carried`` says that each message was used once; ``prove_tokens``, for which runs."""


class Play:
    """The programs of all ranks, each of which goes through its steps; a block waits for its message. A state is the
    list of the runs, by their first tokens, that made it."""

    def __init__(self, parts: Sequence[ScanPart], pass_: Pass) -> None:
        self.parts, self.pass_, self.table = parts, pass_, parts[0].table
        self.visit_of = {
            run[1:]: visit for visits in self.table.visits(pass_) for visit in visits for run in visit.runs
        }
        self.known: list[set[tuple[int, int]]] = [set() for _ in parts]  # runs (rank, number) whose effects a rank has
        self.arrived: list[dict[Visit, list[int]]] = [{} for _ in parts]
        self.in_flight: dict[int, dict[tuple[int, int], list[int]]] = {}  # states, or the effects of runs
        self.entries: dict[tuple[tuple[int, int], int], list[int]] = {}  # by run, and rank that shares units

    def entered(self) -> dict[tuple[tuple[int, int], int], list[int]]:
        left = [[(step, part) for step in part.program(self.pass_).steps] for part in self.parts]
        moving = True
        while moving:
            moving = False
            for steps in left:
                while steps and self._take(*steps[0]):
                    del steps[0]
                    moving = True
        for part in self.parts:
            for run in self.table.rows_of(part.member):
                if run[0] == part.member and run in self.visit_of:
                    self.entries[run, part.member] = self._state(part.member, run, before=True)
        return self.entries

    def _take(self, step: Step, part: ScanPart) -> bool:
        """Take a step, if all its messages have arrived."""
        program, messages = part.program(self.pass_), {each.number: each for each in part.messages(self.pass_)}
        for post in step.posts:
            if post.send:
                (source,) = program.bundles[post.piece.shard].sources
                self.in_flight[post.piece.shard] = self._sent(part.member, source)
        columns = [block.column for block in step.blocks]
        if any(column not in self.in_flight for column in columns if column != part.member):
            return False
        for column in columns:
            if column == part.member:
                self.known[part.member] |= {row for row in self.table.rows_of(column) if row[0] == column}
                continue
            message, brought = messages[column], self.in_flight[column]
            if message.visit is not None:
                states = list(brought.values())
                self.arrived[part.member][message.visit] = states[0] if len(states) == 1 else []
            elif message.depth == 0:
                self.known[part.member] |= set(brought)
            else:
                self.entries |= {(run, message.sender): state for run, state in brought.items()}
        return True

    def _sent(self, rank: int, source: Source) -> dict[tuple[int, int], list[int]]:
        """The runs whose numbers lie there, with the states that these are."""
        table, rows, size = self.table, self.table.rows_of(rank), self.table.row_numbers(rank)
        if source.start < table.first_row(rank):
            return {(rank, number): [] for number in table.shared_runs(rank)}
        first, count = (source.start - table.first_row(rank)) // size, source.tokens // size
        before = first >= len(rows)
        first -= len(rows) if before else 0
        return {run: self._state(rank, run, before) for run in rows[first : first + count]}

    def _state(self, rank: int, run: tuple[int, int], before: bool) -> list[int]:
        """The state before or after a run, with what the rank has now."""
        if (visit := self.visit_of.get(run)) is None:  # padding, or a document of this rank only
            return []
        at = [place[1:] for place in visit.runs].index(run) + (not before)
        inside = [place.start for place in visit.runs[:at] if place[1:] in self.known[rank]]
        return [*self.arrived[rank].get(visit, []), *inside]

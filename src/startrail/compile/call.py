"""``compile_call``: what one rank runs for a call, as one value. Everything about a call is computed here, once.

The engine executes this value, the planner prices it, `proof` proves it, `explain` and the drawings show it. It
consists of *parts*: one for each zone of the rank's tokens, with a program for each pass.

>>> from startrail.compile.attention import Attention
>>> from startrail.schedule.plan import Plan
>>> from startrail.schedule.values import FORWARD
>>> problem = Attention.of(16000, 1, 4, 4, 8, causal=True, documents=(0, 9000, 14000, 15000, 16000))
>>> call = compile_call(problem, Split(Plan.parse("1x2/1x2"), 4), rank=0)
>>> for part in call.parts: print(part.start, part.tokens, part.zone.size, part.program(FORWARD).plan)
0 3032 4 direct
3032 1003 1 u1/u1
>>> call.order(FORWARD)[:3], call.traffic(FORWARD)
([(0, 0), (1, 0), (0, 1)], (388096, 340736))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from startrail.compile.problem import Problem, Split
from startrail.geometry.layout import Layout, Runs, Zone
from startrail.schedule.parts import run_order
from startrail.schedule.places import Place
from startrail.schedule.program import Program, build_program
from startrail.schedule.proof import Contents
from startrail.schedule.sizes import ALIGN, PieceSizes, Sizes, aligned
from startrail.schedule.values import FORWARD, Pass, Piece
from startrail.schedule.walk import MAX_PARTS

ByLevel = tuple[int, ...]  # bytes sent over each level's links


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """What a rank runs for its tokens of one zone. They begin at index ``start`` of the rank's tokens; ``member`` is
    the rank's place among the zone's ranks, ``levels`` the number of the plan's levels, and ``sizes`` are those of the
    pieces."""

    zone: Zone
    start: int
    member: int
    length: int
    levels: int
    sizes: PieceSizes

    @abstractmethod
    def program(self, pass_: Pass) -> Program:
        """This rank's program."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """This rank's place among those of the zone."""

    @property
    def tokens(self) -> int:
        """This rank's tokens of the zone, padding included."""
        return self.zone.counts[self.member]

    @property
    def padded_tokens(self) -> int:
        """This rank's tokens with the padding that its programs need: ranks that exchange heads have equally many."""
        return self.sizes.tokens_of(self.place.shard) // self.sizes.plan.heads

    @cached_property
    def padded_zone(self) -> Zone:
        """The zone with the tokens that its programs see."""
        place, heads = self.place, self.sizes.plan.heads
        padded: list[Runs] = list(self.zone.runs)
        for shard in range(place.num_shards):
            for member in place.shard_ranks(shard):
                missing = self.sizes.tokens_of(shard) // heads - self.zone.counts[member]
                padded[member] += ((self.length, missing),) if missing else ()
        return replace(self.zone, runs=tuple(padded))

    def runs_of(self, shard: int) -> Runs:
        """The real tokens of a shard."""
        return self.zone.runs_of(self.place.shard_ranks(shard), self.length)

    @property
    def demand_level(self) -> int | None:
        """The outermost level at which this part uses lanes of its own, because it fetches keys on demand; or None."""
        return None

    def tokens_of(self, program: Program, piece: Piece) -> int:
        """Tokens of a piece: of a whole shard, or of a bundle."""
        bundle = program.bundles.get(piece.shard)
        return self.sizes.tokens_of(piece.shard) if bundle is None else bundle.tokens

    def traffic(self, pass_: Pass) -> ByLevel:
        """The bytes that this rank sends over each level's links, as the steps of its program add up."""
        program, sent = self.program(pass_), [0] * self.levels
        for step in program.steps:
            for post in step.posts:
                if post.send:
                    nbytes = self.sizes.nbytes_of(post.piece.kind, self.tokens_of(program, post.piece))
                    sent[post.lane % self.levels] += nbytes // (program.place.num_heads if program.is_part(post) else 1)
        return tuple(sent)

    # What `proof` checks beyond the programs themselves, because only the kind of call knows. Both raise
    # ``ScheduleError``.

    @abstractmethod
    def prove_tokens(self, rank: int) -> None:
        """Check that the programs move the tokens that the call needs."""

    @abstractmethod
    def prove_results(self, rank: int, results: Mapping[Pass, Mapping[Piece, Contents]]) -> None:
        """Check what this rank's results consist of in the end."""


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """Everything that ``rank`` does for a call."""

    problem: Problem
    split: Split
    rank: int
    layout: Layout
    parts: tuple[Part, ...]

    @cached_property
    def _orders(self) -> dict[Pass, list[tuple[int, int]]]:
        return {pass_: run_order([part.program(pass_) for part in self.parts]) for pass_ in self.problem.passes}

    def order(self, pass_: Pass) -> list[tuple[int, int]]:
        """(part, step) in the order in which the steps of all parts run."""
        return self._orders[pass_]

    @cached_property
    def kept(self) -> tuple[Mapping[Piece, slice], ...]:
        """Where each part's kept pieces lie in the bytes that the forward pass leaves for the backward pass."""
        start, slices = 0, []
        for part in self.parts:
            slices.append(part.sizes.kept_slices(part.program(self.problem.passes[0]).kept, start))
            start = max((aligned(place.stop) for place in slices[-1].values()), default=start)
        return tuple(slices)

    @property
    def kept_bytes(self) -> int:
        return max((place.stop for slices in self.kept for place in slices.values()), default=0)

    def traffic(self, pass_: Pass) -> ByLevel:
        """The bytes that the rank sends over each level's links in one pass."""
        return tuple(map(sum, zip(*(part.traffic(pass_) for part in self.parts), strict=True)))

    def __str__(self) -> str:
        """What all ranks must have in common."""
        return f"{self.problem}, {self.split}"


def most_kept_bytes(split: Split, rank: int, sizes: Sizes) -> int:
    """What a forward pass keeps at most, whatever the documents: what the plan keeps if all ranks share all tokens, and
    some room. ``sizes`` are the plan's for all tokens."""
    pieces = build_program(split.plan, split.world, rank, FORWARD).kept
    return sizes.kept_bytes(pieces) + MAX_PARTS * len(pieces) * ALIGN


def compile_call(problem: Problem, split: Split, rank: int, layout: Layout | None = None) -> CompiledCall:
    """What ``rank`` runs for ``problem``. ``layout`` is that of the sequence, if it is known already. Raises
    ``ValueError`` if the plan cannot run the problem."""
    layout = layout or split.layout_of(problem.boundaries)
    return CompiledCall(problem, split, rank, layout, problem.parts(split, layout, rank))

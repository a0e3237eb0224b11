"""Builds the program of one rank from a plan, without looking at other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from startrail.schedule.compose import compose, exchange_is_far
from startrail.schedule.demand import Demand
from startrail.schedule.families.base import ByKind
from startrail.schedule.places import Place
from startrail.schedule.plan import Plan
from startrail.schedule.values import FORWARD, Bundle, Pass, Piece, Step, Transfer


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, since each is built once
class Program:
    """The steps of one rank in one pass. ``own_inputs`` are the pieces made from the caller's own tokens. ``kept`` are
    those that the forward pass holds at its end and the backward pass has at its start.

    A program may run on some of the ranks only: ``place`` then counts from the ``first`` of them. ``bundles`` are the
    pieces that are not whole shards, by their number. ``expected`` says of which shards each own result consists in the
    end, as a set of bits; None: of all shards.
    """

    plan: Plan
    place: Place
    pass_: Pass
    steps: tuple[Step, ...]
    own_inputs: tuple[Piece, ...]
    kept: tuple[Piece, ...]
    first: int = 0
    bundles: Mapping[int, Bundle] = field(default_factory=dict)
    expected: Mapping[Piece, int] | None = None

    @property
    def given(self) -> tuple[Piece, ...]:
        """The input pieces that the rank has at the start."""
        return self.own_inputs if self.pass_.is_forward else self.own_inputs + self.kept

    def own(self, kinds: tuple[str, ...]) -> list[Piece]:
        """Pieces of the rank's own shard."""
        return _pieces_of(self.plan, self.place.shard, kinds)

    def is_part(self, post: Transfer) -> bool:
        """True if a transfer goes over heads, and so carries only part of a piece."""
        return self.place.by_heads[post.lane]

    def sends(self, sizes: ByKind) -> Iterator[tuple[Transfer, float]]:
        """Every send with its size; ``sizes`` are those of whole pieces by kind, or of tokens if there are bundles."""
        for step in self.steps:
            for post in step.posts:
                if post.send:
                    bundle = self.bundles.get(post.piece.shard)
                    share = 1 / self.place.num_heads if self.is_part(post) else 1.0
                    yield post, sizes[post.piece.kind] * (bundle.tokens if bundle else share)

    @cached_property
    def last_uses(self) -> tuple[tuple[Piece, ...], ...]:
        """For each step, the input pieces (received or own) that no later step uses."""
        last: dict[Piece, int] = {}
        for index, step in enumerate(self.steps):
            needed = [piece for block in step.blocks for piece in self.pass_.needs(block)]
            for post in step.posts:
                if post.piece.kind not in self.pass_.results:
                    bundle = self.bundles.get(post.piece.shard, Bundle(()))
                    needed += [post.piece, *(post.piece._replace(shard=source.shard) for source in bundle.sources)]
            for piece in needed:
                last[piece] = index
        done: list[list[Piece]] = [[] for _ in self.steps]
        for piece, index in last.items():
            if not self.pass_.is_forward or piece not in self.kept:
                done[index].append(piece)
        return tuple(map(tuple, done))

    def __str__(self) -> str:
        rank, world = self.place.rank, self.place.world
        inside = f" of ranks {self.first} to {self.first + world - 1}" if self.first else f" of {world}"
        return f"{self.plan} {self.pass_}, rank {self.first + rank}{inside}"


@lru_cache(maxsize=256)
def build_program(
    plan: Plan, world: int, rank: int, pass_: Pass, first: int = 0, keep_own: bool = False, demand: Demand | None = None
) -> Program:
    """The program of ``rank`` in one pass of attention. ``first`` is added to all ranks that it names. With
    ``keep_own`` the forward pass keeps its own inputs for the backward pass, as a plan with heads always does.
    ``demand``: the keys that each rank needs, for families whose programs follow from it; None is all keys.

    >>> program = build_program(Plan.parse("2x2"), 4, 0, FORWARD)
    >>> for step in program.steps: print(step)
    post q1<1@0 q0>1@0 kv2<2@0 kv0>2@0 | 0x0
    1x0
    1x2
    post out0<1@0 out1>1@0 | 0x2
    merge out0<1
    """
    place, groups = plan.family.place(plan, world, rank, demand), range(plan.groups)
    bodies = [plan.family.steps(plan, place, pass_, group, demand) for group in groups]
    kept = [piece for group in groups for piece in plan.family.kept(plan, place, group)]
    own = _pieces_of(plan, place.shard, FORWARD.enters)
    inputs = _pieces_of(plan, place.shard, plan.entering(pass_))
    if plan.keeps_exchanged or keep_own:  # exchanged pieces are kept too: the backward pass exchanges only gradients
        kept = own + kept
    elif not pass_.is_forward and plan.heads == 1:
        inputs += own
    steps = compose(place, pass_, bodies, plan.entering(pass_))
    if first:
        steps = tuple(step.shifted(first) for step in steps)
    bundles = plan.family.bundles(plan, place, demand)
    expected: dict[Piece, int] | None = {} if plan.family.by_demand else None
    return Program(plan, place, pass_, steps, tuple(inputs), tuple(kept), first, bundles, expected)


def programs_inside(plan: Plan, world: int, rank: int, pass_: Pass) -> Iterator[Program]:
    """The programs of ``rank`` for all tokens, and for those that it shares with the ranks inside each level."""
    for level, slots in plan.zone_levels(world):
        if not (inner := plan.inside(level)).family.by_demand:  # those have lanes of their own
            first = rank // len(slots) * len(slots)
            yield build_program(inner, len(slots), rank - first, pass_, first)


def _pieces_of(plan: Plan, shard: int, kinds: Sequence[str]) -> list[Piece]:
    """All pieces of a shard of these kinds."""
    return [Piece(kind, shard, group) for group in range(plan.groups) for kind in kinds]


def closed_form(
    plan: Plan, world: int, rank: int, pass_: Pass, sizes: ByKind, demand: Demand | None = None
) -> tuple[float, ...]:
    """Predict what a rank sends over each level's links, outermost first, without building its program. ``sizes`` are
    those of whole pieces (a shard of one group), so sums are exact for any head ratio, dtype and wire format; with a
    ``demand``, those of one token.

    >>> sizes = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)                     # MHA, in shards
    >>> closed_form(Plan.parse("1x16"), 16, 0, FORWARD, sizes)                # Ring Attention: 15 hops of K and V
    (30.0,)
    >>> closed_form(Plan.parse("2x2/u8"), 32, 0, FORWARD, sizes)              # 2 + 2, then the exchange
    (4.0, 3.5)
    >>> closed_form(Plan.parse("u4/u2"), 8, 0, FORWARD, sizes)                # 6 and 1 of 8 parts of 4 shards
    (3.0, 0.5)
    """
    return traffic_at(plan, plan.family.place(plan, world, rank, demand), pass_, sizes, demand)


def traffic_at(plan: Plan, place: Place, pass_: Pass, sizes: ByKind, demand: Demand | None = None) -> tuple[float, ...]:
    """The closed form for the rank at ``place``."""
    whole = {kind: size * plan.groups for kind, size in sizes.items()}
    of_shards = iter(plan.family.traffic(plan, place, pass_, whole, demand))
    exchanged = sum(whole[kind] for kind in plan.entering(pass_) + pass_.results)
    lanes, shared_by = [], 1  # parts for ranks that differ at an outer heads level use that level's lane
    for size, heads in zip(place.sizes, place.by_heads, strict=True):
        if heads:
            shared_by *= size
            lanes.append((size - 1) / shared_by * exchanged)
        else:
            lanes.append(next(of_shards))
    return tuple(map(float, lanes))


def lane_names(place: Place) -> list[str]:
    return [f"level {lane}" for lane in range(len(place.sizes))]


def groups_at_once(plan: Plan, world: int) -> int:
    """Groups whose inputs and running results a rank holds at the same time. If heads are exchanged over far links, a
    group's inputs are exchanged under the blocks of the one before it, and its results leave before the next begins.
    Kept pieces are those of all groups.

    >>> groups_at_once(Plan.parse("u8,groups=4"), 8), groups_at_once(Plan.parse("2x2/u2,groups=4"), 8)
    (1, 4)
    """
    one_by_one = plan.heads > 1 and plan.keep == "none" and exchange_is_far(plan.place(world, 0))
    return 1 if one_by_one else plan.groups


def stated_pieces(plan: Plan, pass_: Pass, world: int) -> dict[str, int]:
    """The most pieces of each kind that a rank holds at the same time besides its own, and under ``kind<`` the partial
    results in flight to it. The proof checks that a plan stays within this memory.

    >>> stated_pieces(Plan.parse("2x4"), FORWARD, 8)["kv"]           # double buffering
    2
    >>> stated_pieces(Plan.parse("2x4,keep=all"), FORWARD, 8)["kv"]  # all four columns except its own
    3
    """
    stated = plan.family.pieces(plan, pass_)
    kinds = (*pass_.inputs, *pass_.results, *(f"{kind}<" for kind in pass_.results))
    return {kind: stated.get(kind, 0) * groups_at_once(plan, world) for kind in kinds}

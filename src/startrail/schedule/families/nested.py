"""Nested concentric rings, ``CxT`` a level: rows Q(a', b) for all a' x columns KV(a, b') for all b', at every level.

>>> level = NESTED.read("2x3")
>>> level, str(level), level.size
(Rings(team=2, ring=3), '2x3', 6)

Within a level the members of a team are neighbours: digit = b * team + a, with a the place in the team and b the place
in the ring. One builder serves the forward pass and both backward forms, because they differ only in what is shared in
the team and what travels round the ring (``Flow``). Everything is written in *offsets* from the rank's own place, so
every rank runs the same program and each post is a permutation of the ranks of its lane.

What is shared in the team goes outermost level first, and is handed on at the inner levels. A ring piece of an outer
level is fetched while the inner ring turns. Results go the other way: innermost level first, merged at each level, so
that only one partial result a shard crosses an outer link.

A ring's results go straight from each rank to their owner, where levels, teams or heads are used: every rank of a level
is then as near as every other. Plain Ring Attention (``1xT``) is also run over several nodes, where it is not: there a
result goes round the ring from neighbour to neighbour, each adding its part, in as many hops (``is_plain_ring``).
`startrail.ring` is that ring alone, written out plainly: read it first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from startrail.schedule.families.base import ByKind, Family, Level
from startrail.schedule.places import Place, from_digits, to_digits
from startrail.schedule.timeline import Timeline
from startrail.schedule.values import FORWARD, Block, Merge, Pass, Piece, Step, Transfer

if TYPE_CHECKING:
    from startrail.schedule.plan import Plan

Offset = tuple[int, ...]
SHORTEST_RING = 4  # a shorter ring does not show how the time grows with its length


@dataclass(frozen=True)
class Rings(Level):
    """Teams of ``team`` ranks that share queries, rings of ``ring`` ranks that keys and values travel round."""

    team: int
    ring: int

    def __post_init__(self) -> None:
        if self.team < 1 or self.ring < 1:
            raise ValueError(f"level {self}: team and ring sizes must be at least 1")

    @property
    def size(self) -> int:
        return self.team * self.ring

    def __str__(self) -> str:
        return f"{self.team}x{self.ring}"

    def describe(self) -> str:
        teams, rings = [f"teams of {self.team}"] * (self.team > 1), [f"rings of {self.ring}"] * (self.ring > 1)
        return " and ".join(teams + rings) or "one rank"


@dataclass(frozen=True)
class Flow:
    """Kinds shared in the team and returned through it, kinds passed round the ring and returned from it."""

    team_in: tuple[str, ...]
    team_out: tuple[str, ...]
    ring_in: tuple[str, ...]
    ring_out: tuple[str, ...]
    rows_in_team: bool  # the team shares query shards (else key/value shards)


def flow_of(plan: Plan, pass_: Pass) -> Flow:
    """What a pass moves."""
    if pass_ is FORWARD:
        return Flow(("q",), ("out",), ("kv",), (), True)
    if plan.backward == "queries":
        return Flow(("kv",), ("dkv",), ("q", "do"), ("dq",), False)
    team_in = ("do",) if plan.keep != "none" else ("q", "do")
    return Flow(team_in, ("dq",), () if plan.keep == "all" else ("kv",), ("dkv",), True)


def rings_of(plan: Plan) -> tuple[Rings, ...]:
    return plan.shard_levels  # type: ignore[return-value]  # a nested plan has no others


def is_plain_ring(plan: Plan) -> bool:
    """Ring Attention: one ring of more than two ranks, no teams, no heads."""
    rings = rings_of(plan)
    return plan.heads == 1 and len(rings) == 1 and rings[0].team == 1 and rings[0].ring > 2


class Nested(Family):
    level = Rings
    backwards = ("keys", "queries")

    def read(self, text: str) -> Rings | None:
        found = re.fullmatch(r"(\d+)x(\d+)", text)
        return Rings(int(found[1]), int(found[2])) if found else None

    def sizes(self, plan: Plan, shards: int) -> tuple[int, ...] | None:
        return tuple(level.size for level in rings_of(plan)) if shards == self.unit(plan) else None

    def unit(self, plan: Plan) -> int:
        return prod(level.size for level in rings_of(plan))

    def equation(self, plan: Plan, world: int) -> str:
        factors = [
            f"teams {level.team} x ring {level.ring}" if isinstance(level, Rings) else f"heads {str(level)[1:]}"
            for level in plan.levels
        ]
        if not plan.head_levels:
            factors.append("heads 1")
        return f"world size {world} is not {' x '.join(factors)} = {self.unit(plan) * plan.heads}"

    def grids(self, shards: int, levels: int) -> Iterator[tuple[Rings, ...]]:
        if levels == 0:
            if shards == 1:
                yield ()
            return
        for outer in (size for size in range(2, shards + 1) if shards % size == 0):
            for rest in self.grids(shards // outer, levels - 1):
                for team in (size for size in range(1, outer + 1) if outer % size == 0):
                    yield (Rings(team, outer // team), *rest)

    def check(self, plan: Plan) -> None:
        if plan.keep != "none" and plan.backward != "keys":
            raise ValueError(
                f"plan {plan}: keep={plan.keep} needs backward=keys, since backward={plan.backward} "
                "uses other rows and columns than the forward pass received"
            )

    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        if not is_plain_ring(plan):
            return ()
        return ("dq",) if plan.backward == "queries" else ("dkv",)

    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int) -> list[Step]:
        return _NestedWalk(plan, place, flow_of(plan, pass_), group).steps()

    def kept(self, plan: Plan, place: Place, group: int) -> list[Piece]:
        walk = _NestedWalk(plan, place, flow_of(plan, FORWARD), group)
        rows = walk.members.values() if plan.keep != "none" else ()
        columns = walk.columns.values() if plan.keep == "all" else ()
        return [Piece("q", shard, group) for shard in rows if shard != place.shard] + [
            Piece("kv", shard, group) for shard in columns if shard != place.shard
        ]

    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind) -> list[float]:
        """An inner level pays its team part once for each outer team member, its ring part once for each outer ring
        step."""
        flow, rings = flow_of(plan, pass_), rings_of(plan)
        shared = sum(sizes[kind] for kind in flow.team_in + flow.team_out)
        passed = sum(sizes[kind] for kind in flow.ring_in + flow.ring_out)
        return [
            (level.team - 1) * prod(outer.team for outer in rings[:index]) * shared
            + (level.ring - 1) * prod(outer.ring for outer in rings[:index]) * passed
            for index, level in enumerate(rings)
        ]

    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        flow, rings = flow_of(plan, pass_), rings_of(plan)
        team, ring = prod(level.team for level in rings), prod(level.ring for level in rings)
        team_levels, ring_levels = sum(level.team > 1 for level in rings), sum(level.ring > 1 for level in rings)
        shared, passed = ("q", "kv") if flow.rows_in_team else ("kv", "q")
        buffers = sum(min(level.ring - 1, 2) for level in rings)  # one in use, one on its way, at every level
        stated = {shared: team - 1, passed: ring - 1 if plan.keep == "all" else buffers}
        if "do" in pass_.inputs:
            stated["do"] = stated["q"]
        for kinds, number, levels in (
            (flow.team_out, team, team_levels),
            (flow.ring_out, 2 * ring_levels, ring_levels),
        ):
            for kind in kinds:  # sums, and partial results that come in: two a level, three if they let a group pass
                stated[kind] = max(number, 1)
                stated[f"{kind}<"] = (3 if plan.groups > 1 else 2) * levels
        return stated

    def team(self, plan: Plan) -> int:
        return prod(level.team for level in rings_of(plan))

    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        queries = ("queries",) if self.team(plan) > 1 else ()
        columns = ("all",) if any(level.ring > 1 for level in rings_of(plan)) else ()
        return ("none", *queries, *columns)

    def hop_width(self, plan: Plan) -> int | None:
        return 1 if is_plain_ring(plan) else None

    def shorter(self, plan: Plan, factor: int) -> Plan | None:
        longest = max(rings_of(plan), key=lambda level: level.ring, default=None)
        if longest is None or longest.ring % factor or longest.ring // factor < SHORTEST_RING:
            return None
        levels = list(plan.levels)
        levels[levels.index(longest)] = Rings(longest.team, longest.ring // factor)
        return replace(plan, levels=tuple(levels))

    def grid(self, plan: Plan, place: Place) -> tuple[Collection[int], Collection[int]]:
        walk = _NestedWalk(plan, place, flow_of(plan, FORWARD), 0)
        return walk.members.values(), walk.columns.values()


NESTED = Nested()


class _NestedWalk:
    def __init__(self, plan: Plan, place: Place, flow: Flow, group: int) -> None:
        self.place, self.flow, self.group = place, flow, group
        self.plain = is_plain_ring(plan)
        rings = rings_of(plan)
        self.levels = range(len(rings))
        self.sizes = tuple(level.size for level in rings)
        self.teams, self.rings = tuple(level.team for level in rings), tuple(level.ring for level in rings)
        digits = to_digits(place.shard, self.sizes)
        self.team = tuple(digit % team for digit, team in zip(digits, self.teams, strict=True))
        self.ring = tuple(digit // team for digit, team in zip(digits, self.teams, strict=True))
        self.team_offsets = list(product(*map(range, self.teams)))
        self.ring_offsets = list(product(*map(range, self.rings)))
        self.members = {d: self.shard_at(_add(self.team, d, 1), self.ring) for d in self.team_offsets}
        self.columns = {s: self.shard_at(self.team, _add(self.ring, s, -1)) for s in self.ring_offsets}
        self.inner = max((level for level in self.levels if self.teams[level] > 1), default=-1)
        self.line = Timeline()

    # --- shards and peers, by offset from our own place

    def shard_at(self, team: Iterable[int], ring: Iterable[int]) -> int:
        pairs = zip(team, ring, self.teams, self.rings, strict=True)
        return from_digits([b % rings * teams + a % teams for a, b, teams, rings in pairs], self.sizes)

    def team_peer(self, level: int, offset: int) -> int:
        return self.place.rank_of(self.shard_at(_put(self.team, level, self.team[level] + offset), self.ring))

    def ring_peer(self, level: int, offset: int) -> int:
        return self.place.rank_of(self.shard_at(self.team, _put(self.ring, level, self.ring[level] + offset)))

    def block(self, d: Offset, s: Offset) -> Block:
        pair = (self.members[d], self.columns[s])
        return Block(*(pair if self.flow.rows_in_team else pair[::-1]), self.group)

    # --- transfers, by offset

    def share(self, level: int, e: Offset) -> list[Transfer]:
        """Give the member at offset e to our team at ``level``, and get theirs. e is zero from ``level`` inwards."""
        posts = []
        for x in range(1, self.teams[level]):
            theirs = self.members[_put(e, level, x)]
            for kind in self.flow.team_in:
                posts.append(self.receive(level, kind, theirs, self.team_peer(level, x)))
                posts.append(self.send(level, kind, self.members[e], self.team_peer(level, -x)))
        return posts

    def hop(self, s: Offset) -> list[Transfer]:
        """Start fetching the next column of every level whose inner rings are about to turn once."""
        posts = []
        for level in self.levels:
            if s[level] < self.rings[level] - 1 and not any(s[level + 1 :]):
                following = self.columns[_put(s, level, s[level] + 1)]
                for kind in self.flow.ring_in:
                    posts.append(self.receive(level, kind, following, self.ring_peer(level, -1)))
                    posts.append(self.send(level, kind, self.columns[s], self.ring_peer(level, 1)))
        return posts

    def return_row(self, d: Offset, due: int) -> None:
        """Send the result of the member at offset d towards its owner at the innermost level where they differ."""
        level = _innermost(d)
        ours = self.members[_put(d, level, 0)]
        to, source = self.team_peer(level, d[level]), self.team_peer(level, -d[level])
        self._return(level, self.flow.team_out, self.members[d], to, ours, source, due)

    def pass_column_on(self, s: Offset, due: int) -> None:
        """Ring Attention: hand the result of column s to the rank that has the column next (at last its owner), and add
        what the one before us hands on."""
        ours = self.columns[((s[0] + 1) % self.rings[0],)]
        to, source = self.ring_peer(0, 1), self.ring_peer(0, -1)
        self._return(0, self.flow.ring_out, self.columns[s], to, ours, source, due, rest=0)

    def return_column(self, s: Offset, due: int) -> None:
        level = _innermost(s)
        ours = self.columns[_put(s, level, 0)]
        to, source = self.ring_peer(level, -s[level]), self.ring_peer(level, s[level])
        self._return(level, self.flow.ring_out, self.columns[s], to, ours, source, due)

    def _return(
        self, level: int, kinds: Iterable[str], theirs: int, to: int, ours: int, source: int, due: int, rest: int = 1
    ) -> None:
        for kind in kinds:
            posts = [self.receive(level, kind, ours, source), self.send(level, kind, theirs, to)]
            self.line.later(due, posts, [Merge(Piece(kind, ours, self.group), source)], rest)

    def send(self, level: int, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(True, self.place.shard_lanes[level], Piece(kind, shard, self.group), peer)

    def receive(self, level: int, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(False, self.place.shard_lanes[level], Piece(kind, shard, self.group), peer)

    # --- the program

    def steps(self) -> list[Step]:
        """Own row first, while foreign rows arrive; in the last column foreign rows first, so that their results
        travel under the own row's block. Columns in the order in which they arrive, or, if all are here (kept), the own
        one last: its result need not travel."""
        own = (0,) * len(self.levels)
        first, *middle = self.ring_offsets if self.flow.ring_in else [*self.ring_offsets[1:], own]
        self.first_column(own, first)
        for s in middle[:-1]:
            foreign = [self.block(d, s) for d in self.team_offsets if d != own]
            self.line.emit(self.hop(s), [*foreign, self.block(own, s)])
            self.return_columns(s)
        for s in middle[-1:]:
            self.last_column(own, s)
            self.return_columns(s)
        return self.line.finish()

    def first_column(self, own: Offset, s: Offset) -> None:
        """Rows are computed as they arrive. With one column only, each row is then complete and returns."""
        single = len(self.ring_offsets) == 1
        posts = [post for level in self.levels for post in self.share(level, own)] + self.hop(own)
        self.line.emit(posts, [self.block(own, s)])
        for posts, rows in self.arrivals():
            if not single:
                self.line.emit(posts, [self.block(d, s) for d in rows])
                continue
            self.line.emit(posts)
            for d in rows:
                self.line.emit(blocks=[self.block(d, s)])
                if _innermost(d) == self.inner:
                    self.return_row(d, self.line.now + 1)
        if single:
            due = self.line.now + 3  # outer rows leave once the inner level's results have been merged into them
            for level in reversed(range(self.inner)):
                for d in self.rows_of(level):
                    self.return_row(d, due)
                    due += 1  # one at a time, so that two buffers suffice for what comes in
                due += 1
        self.return_columns(s)

    def arrivals(self) -> list[tuple[list[Transfer], list[Offset]]]:
        """Foreign rows in waves: straight from the innermost level, then outer ones, each handed on as it comes."""
        inner = self.inner
        if inner < 0:
            return []
        handed_on = [d for d in self.rows_of(inner) if any(d[:inner])]
        waves: list[tuple[list[Transfer], list[Offset]]] = [
            ([], [d for d in self.rows_of(inner) if d not in handed_on])
        ]
        for level in range(1, inner + 1):
            arrived = [e for e in self.team_offsets if any(e) and not any(e[level:])]
            waves.append(([post for e in arrived for post in self.share(level, e)], self.rows_of(level - 1)))
        return [*waves, ([], handed_on)]

    def last_column(self, own: Offset, last: Offset) -> None:
        """Rows in the order in which their results must leave: innermost level first, merged before the next."""
        due = 0
        for level in reversed(self.levels):
            for d in self.rows_of(level):
                self.line.emit(blocks=[self.block(d, last)])
                due = max(self.line.now + 1, due)
                self.return_row(d, due)
                due += 1  # one at a time, so that two buffers suffice for what comes in
            due += 1
        self.line.emit(blocks=[self.block(own, last)])

    def rows_of(self, level: int) -> list[Offset]:
        """Team offsets whose innermost difference from us is at ``level``."""
        return [d for d in self.team_offsets if _innermost(d) == level]

    def return_columns(self, s: Offset) -> None:
        """After column s is done: its result leaves, and so does that of every outer column whose inner turn ends."""
        due = self.line.now + 1
        if self.plain:
            if any(s):
                self.pass_column_on(s, due)
            return
        for level in reversed(self.levels):
            entry = s[: level + 1] + (0,) * (len(s) - level - 1)
            if self.rings[level] == 1:
                continue
            if s[level]:
                self.return_column(entry, due)
            if s[level] < self.rings[level] - 1:
                break  # this level's turn is not over, so neither is any outer one's
            due += 2


def _put(offset: Offset, level: int, value: int) -> Offset:
    return (*offset[:level], value, *offset[level + 1 :])


def _add(place: Offset, offset: Offset, sign: int) -> list[int]:
    return [x + sign * y for x, y in zip(place, offset, strict=True)]


def _innermost(offset: Offset) -> int:
    """The innermost level at which an offset is not zero; -1 for our own place."""
    return max((level for level, x in enumerate(offset) if x), default=-1)

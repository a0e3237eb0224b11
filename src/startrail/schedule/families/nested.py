"""Nested concentric rings: at every level ``CxT``, rows Q(a', b) for all a' x columns KV(a, b') for all b'.

>>> level = NESTED.read("2x3")
>>> level, str(level), level.size
(Rings(team=2, ring=3), '2x3', 6)

Within a level the members of a team are adjacent: digit = b * team + a, where a is the position in the team and b the
position in the ring. One builder serves the forward pass and both backward forms: they differ only in the kinds shared
in the team and passed round the ring (``Flow``). All peers are *offsets* from the rank's own position, so every rank
runs the same program and each post is a permutation of the ranks of its lane.

Team pieces are shared at the outermost level first, then forwarded at the inner levels. The next ring piece of an outer
level is fetched during a full turn of the inner rings. Results take the reverse path: they are merged at each level,
innermost first, so that only one partial result per shard crosses an outer link.

With several levels, teams or heads, all ranks of a level are equally close, and each rank sends a ring's results
directly to their owner. Plain Ring Attention (``1xT``) also runs over several nodes, where they are not: a result then
travels round the ring, and every rank adds its part (``is_plain_ring``; same number of hops). `startrail.ring` is that
ring alone in plain code: read it first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from startrail.schedule.families.base import ByKind, Family, Level
from startrail.schedule.places import Place, divisors, factorizations, from_digits, to_digits
from startrail.schedule.timeline import Timeline
from startrail.schedule.values import BACKWARD, FORWARD, Block, Merge, Pass, Piece, Step, Transfer

if TYPE_CHECKING:
    from startrail.schedule.demand import Demand
    from startrail.schedule.plan import Plan

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Rings(Level):
    """Teams of ``team`` ranks that share queries, and rings of ``ring`` ranks that pass keys and values round."""

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
    """The kinds that a pass shares in the team, returns through it, passes round the ring and returns from it."""

    team_in: tuple[str, ...]
    team_out: tuple[str, ...]
    ring_in: tuple[str, ...]
    ring_out: tuple[str, ...]
    rows_in_team: bool  # the team shares query shards (else key/value shards)


def flow_of(plan: Plan, pass_: Pass) -> Flow:
    if pass_.is_forward:
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
    level, form = Rings, "TEAMxRING"
    backwards = ("keys", "queries")

    def read(self, text: str) -> Rings | None:
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        return Rings(int(match[1]), int(match[2])) if match else None

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
        for sizes in factorizations(shards, levels):
            for teams in product(*map(divisors, reversed(sizes))):
                yield tuple(Rings(team, size // team) for size, team in zip(sizes, reversed(teams), strict=True))

    def check(self, plan: Plan) -> None:
        if plan.keep != "none" and plan.backward != "keys":
            raise ValueError(
                f"plan {plan}: keep={plan.keep} needs backward=keys, since backward={plan.backward} "
                "uses other rows and columns than the forward pass received"
            )

    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        return flow_of(plan, BACKWARD).ring_out if is_plain_ring(plan) else ()

    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int, demand: Demand | None) -> list[Step]:
        return _NestedBuilder(plan, place, flow_of(plan, pass_), group).steps()

    def keepable(self, plan: Plan, place: Place) -> tuple[Collection[int], Collection[int]]:
        builder = _NestedBuilder(plan, place, flow_of(plan, FORWARD), 0)
        return builder.members.values(), builder.columns.values()

    def num_kept(self, plan: Plan, place: Place) -> dict[str, int]:
        columns = prod(level.ring for level in rings_of(plan))  # counted, because long rings would be listed for long
        kept = {"q": self.team(plan) - 1, "kv": columns - 1}
        return {kind: kept[kind] for kind in {"none": (), "queries": ("q",), "all": ("q", "kv")}[plan.keep]}

    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind, demand: Demand | None) -> list[float]:
        """An inner level repeats its team traffic for each outer team member and its ring traffic for each outer ring
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
        buffers = sum(min(level.ring - 1, 2) for level in rings)  # one in use and one in flight at every level
        stated = {shared: team - 1, passed: ring - 1 if plan.keep == "all" else buffers}
        if "do" in pass_.inputs:
            stated["do"] = stated["q"]
        for kinds, number, levels in (
            (flow.team_out, team, team_levels),
            (flow.ring_out, 2 * ring_levels, ring_levels),
        ):
            for kind in kinds:  # accumulators, and incoming partials: two per level, three with groups
                stated[kind] = max(number, 1)
                stated[f"{kind}<"] = (3 if plan.groups > 1 else 2) * levels
        return stated

    def team(self, plan: Plan) -> int:
        return prod(level.team for level in rings_of(plan))

    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        queries = ("queries",) if self.team(plan) > 1 else ()
        columns = ("all",) if any(level.ring > 1 for level in rings_of(plan)) else ()
        return ("none", *queries, *columns)

    def drawing(self, level: Level, size: int) -> tuple[int, int, int]:
        assert isinstance(level, Rings)
        return level.team, level.ring, level.team

    def hop_width(self, plan: Plan) -> int | None:
        return 1 if is_plain_ring(plan) else None

    def shorter(self, plan: Plan, shards: int, part: int, whole: int, least: int) -> Plan | None:
        outermost = plan.shard_levels[0]
        assert isinstance(outermost, Rings)
        at = plan.levels.index(outermost)
        ring, rest = divmod(outermost.ring * part, whole)
        inside_a_node = part < 2 * prod(heads.size for heads in plan.head_levels[:at])
        if rest or ring < least or inside_a_node:
            return None
        return replace(plan, levels=(*plan.levels[:at], Rings(outermost.team, ring), *plan.levels[at + 1 :]))

    def grid(self, plan: Plan, place: Place) -> tuple[Collection[int], Collection[int]]:
        return self.keepable(plan, place)


NESTED = Nested()


class _NestedBuilder:
    def __init__(self, plan: Plan, place: Place, flow: Flow, group: int) -> None:
        self.place, self.flow, self.group = place, flow, group
        self.plain, self.one_group = is_plain_ring(plan), plan.groups == 1
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
        self.timeline = Timeline()

    # --- shards and peers, by offset from the rank's own position

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
        """Exchange the member at offset e with the team at ``level``. e is zero from ``level`` inwards."""
        posts = []
        for x in range(1, self.teams[level]):
            received, source, to = self.members[_put(e, level, x)], self.team_peer(level, x), self.team_peer(level, -x)
            for kind in self.flow.team_in:
                posts += self.exchange(level, kind, received, source, self.members[e], to)
        return posts

    def hop(self, s: Offset) -> list[Transfer]:
        """Start fetching the next column of every level whose inner rings start a turn."""
        posts = []
        for level in self.levels:
            if s[level] < self.rings[level] - 1 and not any(s[level + 1 :]):
                received, source = self.columns[_put(s, level, s[level] + 1)], self.ring_peer(level, -1)
                for kind in self.flow.ring_in:
                    posts += self.exchange(level, kind, received, source, self.columns[s], self.ring_peer(level, 1))
        return posts

    def return_row(self, d: Offset, due: int) -> None:
        """Send the result of the member at offset d towards its owner at the innermost level where they differ."""
        level = _innermost(d)
        received, source = self.members[_put(d, level, 0)], self.team_peer(level, -d[level])
        to = self.team_peer(level, d[level])
        self._return(level, self.flow.team_out, received, source, self.members[d], to, due)

    def pass_column_on(self, s: Offset, due: int) -> None:
        """Ring Attention: send the result of column s to the rank that gets the column next (in the end its owner), and
        add the result that the previous rank sends."""
        received, source = self.columns[((s[0] + 1) % self.rings[0],)], self.ring_peer(0, -1)
        self._return(0, self.flow.ring_out, received, source, self.columns[s], self.ring_peer(0, 1), due, 0)

    def return_column(self, s: Offset, due: int) -> None:
        level = _innermost(s)
        received, source = self.columns[_put(s, level, 0)], self.ring_peer(level, s[level])
        to = self.ring_peer(level, -s[level])
        self._return(level, self.flow.ring_out, received, source, self.columns[s], to, due)

    def _return(
        self, level: int, kinds: Iterable[str], received: int, source: int, sent: int, to: int, due: int, delay: int = 1
    ) -> None:
        for kind in kinds:
            posts = self.exchange(level, kind, received, source, sent, to)
            self.timeline.defer(due, posts, [Merge(posts[0].piece, source)], delay)

    def exchange(self, level: int, kind: str, received: int, source: int, sent: int, to: int) -> list[Transfer]:
        lane = self.place.shard_lanes[level]
        pairs = ((False, received, source), (True, sent, to))
        return [Transfer(send, lane, Piece(kind, shard, self.group), peer) for send, shard, peer in pairs]

    # --- the program

    def steps(self) -> list[Step]:
        """Compute the own row first, while remote rows arrive. In the last column compute remote rows first, so that
        their results are sent during the own row's block. Take columns in order of arrival; if all are kept, take the
        own column last, since its result stays here: all of its blocks hide what is still on its way."""
        own = (0,) * len(self.levels)
        first, *middle = self.ring_offsets if self.flow.ring_in else [*self.ring_offsets[1:], own]
        self.first_column(own, first)
        for s in middle[:-1]:
            remote = [self.block(d, s) for d in self.team_offsets if d != own]
            self.timeline.add(self.hop(s), [*remote, self.block(own, s)])
            self.return_columns(s)
        for s in middle[-1:]:
            if s == own and self.one_group:  # several groups wait for their own results at the very end
                self.timeline.postpone(self.place.shard)
            self.last_column(own, s)
            self.return_columns(s)
        return self.timeline.finish()

    def first_column(self, own: Offset, s: Offset) -> None:
        """Compute rows as they arrive. If this is the only column, each row is then complete and is returned."""
        single = len(self.ring_offsets) == 1
        posts = [post for level in self.levels for post in self.share(level, own)] + self.hop(own)
        self.timeline.add(posts, [self.block(own, s)])
        for posts, rows in self.arrivals():
            if not single:
                self.timeline.add(posts, [self.block(d, s) for d in rows])
                continue
            self.timeline.add(posts)
            for d in rows:
                self.timeline.add(blocks=[self.block(d, s)])
                if _innermost(d) == self.inner:
                    self.return_row(d, self.timeline.next_index)
        if single:
            due = self.timeline.next_index + 2  # outer rows wait until the inner level's results are merged into them
            for level in reversed(range(self.inner)):
                for d in self.rows_of(level):
                    self.return_row(d, due)
                    due += 1  # one at a time, so that two receive buffers suffice
                due += 1
        self.return_columns(s)

    def arrivals(self) -> list[tuple[list[Transfer], list[Offset]]]:
        """Remote rows in order of arrival: from the innermost level first, then outer ones, forwarded as they come."""
        inner = self.inner
        if inner < 0:
            return []
        forwarded = [d for d in self.rows_of(inner) if any(d[:inner])]
        direct = [d for d in self.rows_of(inner) if d not in forwarded]
        waves: list[tuple[list[Transfer], list[Offset]]] = [([], direct)]
        for level in range(1, inner + 1):
            arrived = [e for e in self.team_offsets if any(e) and not any(e[level:])]
            waves.append(([post for e in arrived for post in self.share(level, e)], self.rows_of(level - 1)))
        return [*waves, ([], forwarded)]

    def last_column(self, own: Offset, last: Offset) -> None:
        """Compute rows in the order in which their results are returned: innermost level first."""
        due = 0
        for level in reversed(self.levels):
            for d in self.rows_of(level):
                self.timeline.add(blocks=[self.block(d, last)])
                due = max(self.timeline.next_index, due)
                self.return_row(d, due)
                due += 1  # one at a time, so that two receive buffers suffice
            due += 1
        self.timeline.add(blocks=[self.block(own, last)])

    def rows_of(self, level: int) -> list[Offset]:
        """Team offsets whose innermost nonzero digit is at ``level``."""
        return [d for d in self.team_offsets if _innermost(d) == level]

    def return_columns(self, s: Offset) -> None:
        """Return the result of column s, and that of every outer column whose inner rings end a turn with it."""
        due = self.timeline.next_index
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
                break  # this level's turn goes on, and so do the outer ones
            due += 2


def _put(offset: Offset, level: int, value: int) -> Offset:
    return (*offset[:level], value, *offset[level + 1 :])


def _add(place: Offset, offset: Offset, sign: int) -> list[int]:
    return [x + sign * y for x, y in zip(place, offset, strict=True)]


def _innermost(offset: Offset) -> int:
    """The innermost level at which an offset is not zero; -1 for the zero offset."""
    return max((level for level, x in enumerate(offset) if x), default=-1)

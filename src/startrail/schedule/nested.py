"""Nested concentric rings: rows Q(a', b) for all a' x columns KV(a, b') for all b', at every level.

One builder serves the forward pass and both backward forms, because they differ only in what is shared in the team and
what travels round the ring (``Flow``). Everything is written in *offsets* from the rank's own place, so every rank
runs the same program and each post is a permutation of the ranks of its lane.

What is shared in the team goes outermost level first, and is handed on at the inner levels. A ring piece of an outer
level is fetched while the inner ring turns. Results go the other way: innermost level first, merged at each level, so
that only one partial result a shard crosses an outer link.

A ring's results go straight from each rank to their owner, where levels and teams are used: every rank of a level is
then as near as every other. Plain Ring Attention (``1xT``) is also run over several nodes, where it is not: there a
result goes round the ring from neighbour to neighbour, each adding its part, in as many hops (``Plan.is_ring``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from startrail.schedule.places import Place
from startrail.schedule.timeline import Timeline
from startrail.schedule.values import Block, Merge, Piece, Step, Transfer

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Flow:
    """Kinds shared in the team and returned through it, kinds passed round the ring and returned from it."""

    team_in: tuple[str, ...]
    team_out: tuple[str, ...]
    ring_in: tuple[str, ...]
    ring_out: tuple[str, ...]
    rows_in_team: bool  # the team shares query shards (else key/value shards)


def nested_flow(direction: str, backward: str, keep: str) -> Flow:
    """What a pass moves.

    >>> nested_flow("backward", "keys", "none").ring_out
    ('dkv',)
    """
    if direction == "forward":
        return Flow(("q",), ("out",), ("kv",), (), True)
    if backward == "queries":
        return Flow(("kv",), ("dkv",), ("q", "do"), ("dq",), False)
    team_in = ("do",) if keep != "none" else ("q", "do")
    return Flow(team_in, ("dq",), () if keep == "all" else ("kv",), ("dkv",), True)


def nested_kept(place: Place, keep: str, group: int) -> list[Piece]:
    """What the forward pass keeps of what it received."""
    walk = _Walk(place, Flow((), (), (), (), True), group)
    rows = walk.members.values() if keep != "none" else ()
    columns = walk.columns.values() if keep == "all" else ()
    own = place.shard
    return [Piece("q", shard, group) for shard in rows if shard != own] + [
        Piece("kv", shard, group) for shard in columns if shard != own
    ]


def nested_steps(place: Place, flow: Flow, group: int) -> list[Step]:
    """The steps of one group on one rank, without the Ulysses exchange."""
    return _Walk(place, flow, group).steps()


class _Walk:
    def __init__(self, place: Place, flow: Flow, group: int) -> None:
        self.place, self.flow, self.group = place, flow, group
        self.levels = range(len(place.levels))
        self.teams = tuple(level.team for level in place.levels)
        self.rings = tuple(level.ring for level in place.levels)
        self.team_offsets = list(product(*map(range, self.teams)))
        self.ring_offsets = list(product(*map(range, self.rings)))
        self.members = {d: place.shard_at(_add(place.team, d, 1), place.ring) for d in self.team_offsets}
        self.columns = {s: place.shard_at(place.team, _add(place.ring, s, -1)) for s in self.ring_offsets}
        self.inner = max((level for level in self.levels if self.teams[level] > 1), default=-1)
        self.line = Timeline()

    # --- shards, by offset from our own place

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
                posts.append(self.receive(level, kind, theirs, self.place.team_peer(level, x)))
                posts.append(self.send(level, kind, self.members[e], self.place.team_peer(level, -x)))
        return posts

    def hop(self, s: Offset) -> list[Transfer]:
        """Start fetching the next column of every level whose inner rings are about to turn once."""
        posts = []
        for level in self.levels:
            if s[level] < self.rings[level] - 1 and not any(s[level + 1 :]):
                following = self.columns[_put(s, level, s[level] + 1)]
                for kind in self.flow.ring_in:
                    posts.append(self.receive(level, kind, following, self.place.ring_peer(level, -1)))
                    posts.append(self.send(level, kind, self.columns[s], self.place.ring_peer(level, 1)))
        return posts

    def return_row(self, d: Offset, due: int) -> None:
        """Send the result of the member at offset d towards its owner at the innermost level where they differ."""
        level = _innermost(d)
        ours = self.members[_put(d, level, 0)]
        to, source = self.place.team_peer(level, d[level]), self.place.team_peer(level, -d[level])
        self._return(level, self.flow.team_out, self.members[d], to, ours, source, due)

    def pass_column_on(self, s: Offset, due: int) -> None:
        """Ring Attention: hand the result of column s to the rank that has the column next (at last its owner), and add
        what the one before us hands on."""
        ours = self.columns[((s[0] + 1) % self.rings[0],)]
        to, source = self.place.ring_peer(0, 1), self.place.ring_peer(0, -1)
        self._return(0, self.flow.ring_out, self.columns[s], to, ours, source, due, rest=0)

    def return_column(self, s: Offset, due: int) -> None:
        level = _innermost(s)
        ours = self.columns[_put(s, level, 0)]
        to, source = self.place.ring_peer(level, -s[level]), self.place.ring_peer(level, s[level])
        self._return(level, self.flow.ring_out, self.columns[s], to, ours, source, due)

    def _return(
        self, level: int, kinds: Iterable[str], theirs: int, to: int, ours: int, source: int, due: int, rest: int = 1
    ) -> None:
        for kind in kinds:
            posts = [self.receive(level, kind, ours, source), self.send(level, kind, theirs, to)]
            self.line.later(due, posts, [Merge(Piece(kind, ours, self.group), source)], rest)

    def send(self, lane: int, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(True, lane, Piece(kind, shard, self.group), peer)

    def receive(self, lane: int, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(False, lane, Piece(kind, shard, self.group), peer)

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
        if self.place.plan.is_ring:
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

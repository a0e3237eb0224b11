"""The paper's schedule, ``starC``: team gather, placement, sub-rings of P/C² ranks, combine.

Teams are C consecutive shards; g = P/C² teams make a team group. Shard r stands in team t = r // C at place p = r % C.

>>> place = Place(rank=5, sizes=(16,), by_heads=(False,))        # star2 on 16 ranks: team 2, place 1
>>> spot = _Spot(place, size=2)
>>> spot.placed_to, spot.placed_from                             # both are team 5, place 0
(10, 10)
>>> [spot.column_team(hop) for hop in range(spot.hops)]
[5, 3, 1, 7]
>>> spot.next, spot.previous
(7, 3)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from startrail.schedule.families.base import ByKind, Family, Level
from startrail.schedule.places import Place
from startrail.schedule.timeline import Timeline
from startrail.schedule.values import FORWARD, Block, Merge, Pass, Piece, Step, Transfer

if TYPE_CHECKING:
    from startrail.schedule.plan import Plan


@dataclass(frozen=True)
class Star(Level):
    """Teams of ``team`` ranks over all shards that there are."""

    team: int

    def __post_init__(self) -> None:
        if self.team < 1:
            raise ValueError(f"level {self}: teams must have at least 1 rank")

    def __str__(self) -> str:
        return f"star{self.team}"

    def describe(self) -> str:
        return f"the paper's teams of {self.team}"


def team_of(plan: Plan) -> int:
    (level,) = plan.shard_levels
    assert isinstance(level, Star)
    return level.team


class StarFamily(Family):
    """One level over all shards, whose ring length follows from their number. The backward pass moves queries."""

    level = Star
    backwards = ("queries",)
    open_ended = True

    def read(self, text: str) -> Star | None:
        found = re.fullmatch(r"star(\d+)", text)
        return Star(int(found[1])) if found and int(found[1]) else None

    def sizes(self, plan: Plan, shards: int) -> tuple[int, ...] | None:
        return None if shards < 1 or shards % self.unit(plan) else (shards,)

    def unit(self, plan: Plan) -> int:
        return team_of(plan) ** 2

    def equation(self, plan: Plan, world: int) -> str:
        team, unit = team_of(plan), self.unit(plan) * plan.heads
        return f"world size {world} is not a multiple of team² {team}² x heads {plan.heads} = {unit}"

    def grids(self, shards: int, levels: int) -> Iterator[tuple[Star, ...]]:
        if levels == 1:
            yield from ((Star(team),) for team in range(2, shards) if shards % (team * team) == 0)

    def check(self, plan: Plan) -> None:
        if len(plan.shard_levels) > 1:
            raise ValueError(f"plan {plan}: {plan.shard_levels[0]} cannot be combined with levels other than uU")

    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        return ("dq",)

    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int) -> list[Step]:
        return _StarWalk(place, team_of(plan), group).steps(pass_, plan.keep)

    def kept(self, plan: Plan, place: Place, group: int) -> list[Piece]:
        """The team's queries, and the keys and values that placement brought."""
        spot = _Spot(place, team_of(plan))
        rows = spot.shards(spot.team) if plan.keep != "none" else ()
        columns = spot.shards(spot.column_team(0)) if plan.keep == "all" else ()
        return [Piece("q", shard, group) for shard in rows if shard != place.shard] + [
            Piece("kv", shard, group) for shard in columns if shard != place.shard
        ]

    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind) -> list[float]:
        """Collectives in the team, placement and its inverse, hops of the sub-ring."""
        team = team_of(plan)
        spot = _Spot(place, team)
        collectives, placed, hopped = (
            (("q", "kv", "out"), ("kv",), ("kv",))
            if pass_ is FORWARD
            else (
                (*_gathered(plan.keep), "dq", "dkv"),
                ("dkv",) if plan.keep == "all" else ("kv", "dkv"),
                ("q", "do", "dq"),
            )
        )
        moved = spot.placed_to != place.rank
        return [
            (team - 1) * sum(sizes[kind] for kind in collectives)
            + team * moved * sum(sizes[kind] for kind in placed)
            + team * (spot.hops - 1) * sum(sizes[kind] for kind in hopped)
        ]

    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        team, keep = team_of(plan), plan.keep
        if pass_ is FORWARD:  # the gathered team's keys, the placed ones, and the next hop's
            kept = team if keep == "all" else 0
            return {"q": team - 1, "kv": 3 * team - 1 + kept, "out": team, "out<": team - 1}
        columns = team if keep == "all" else 2 * team - 1
        rows = dict.fromkeys(("q", "do", "dq", "dq<"), 2 * team)
        return {**rows, "kv": columns, "dkv": team, "dkv<": team}

    def team(self, plan: Plan) -> int:
        return team_of(plan)

    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        return ("none", "queries", "all") if team_of(plan) > 1 else ("none", "all")

    def hop_width(self, plan: Plan) -> int | None:
        return team_of(plan)


STAR = StarFamily()


def _gathered(keep: str) -> tuple[str, ...]:
    """What the backward pass gathers in the team: all that the forward pass did not keep."""
    return {"none": ("q", "do", "kv"), "queries": ("do", "kv"), "all": ("do",)}[keep]


class _Spot:
    """Where the pieces of one rank come from and go to; teams count from 0, hops are the steps of the sub-ring."""

    def __init__(self, place: Place, size: int) -> None:
        self.place, self.size = place, size
        self.team, self.seat = divmod(place.shard, self.size)
        self.hops = place.num_shards // self.size**2
        self.mates = [place.rank_of(self.team * self.size + (self.seat + x) % self.size) for x in range(1, self.size)]
        self.placed_to = self.rank_in(self.seat * self.hops + self.team // self.size, self.team % self.size)
        self.placed_from = self.rank_in(self.column_team(0), self.team // self.hops)
        self.next = self.rank_in(self.row_team(-1), self.seat)
        self.previous = self.rank_in(self.row_team(1), self.seat)

    def rank_in(self, team: int, seat: int) -> int:
        return self.place.rank_of(team * self.size + seat)

    def row_team(self, hop: int) -> int:
        """Teams of our own group, going back one a hop."""
        group, index = divmod(self.team, self.hops)
        return group * self.hops + (index - hop) % self.hops

    def column_team(self, hop: int) -> int:
        """The team whose keys and values are here at a hop of the forward ring; placement leaves those of hop 0."""
        return (self.team - hop) % self.hops * self.size + self.seat

    def shards(self, team: int) -> range:
        return range(team * self.size, (team + 1) * self.size)


class _StarWalk:
    def __init__(self, place: Place, size: int, group: int) -> None:
        self.place, self.group, self.spot = place, group, _Spot(place, size)
        (self.lane,) = place.shard_lanes
        self.line = Timeline()

    def send(self, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(True, self.lane, Piece(kind, shard, self.group), peer)

    def receive(self, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(False, self.lane, Piece(kind, shard, self.group), peer)

    def steps(self, pass_: Pass, keep: str) -> list[Step]:
        spot = self.spot
        if pass_ is FORWARD:
            self.gather(("q", "kv"))
            self.place_keys()
            self.forward_ring()
        else:
            self.gather(_gathered(keep))
            if keep != "all":
                self.place_keys()
            self.backward_ring()
            self.unplace_keys()
            self.combine("dkv", spot.mates, self.line.now + 1)
        return self.line.finish()

    def gather(self, kinds: tuple[str, ...]) -> None:
        """All-gather in the team."""
        own, mates = self.place.shard, self.spot.mates
        posts = []
        for x in range(len(mates)):
            theirs = self.spot.team * self.spot.size + (self.spot.seat + 1 + x) % self.spot.size
            for kind in kinds:
                posts.append(self.receive(kind, theirs, mates[x]))
                posts.append(self.send(kind, own, mates[-1 - x]))
        self.line.emit(posts)

    def place_keys(self) -> None:
        spot = self.spot
        if spot.placed_to == self.place.rank:
            self.line.emit()  # nothing to move, but stay in step with the others
            return
        self.line.emit(
            [self.receive("kv", shard, spot.placed_from) for shard in spot.shards(spot.column_team(0))]
            + [self.send("kv", shard, spot.placed_to) for shard in spot.shards(spot.team)]
        )

    def pass_on(self, kinds: tuple[str, ...], here: int, following: int) -> list[Transfer]:
        """One hop of a whole team's pieces."""
        spot = self.spot
        return [self.receive(kind, shard, spot.previous) for kind in kinds for shard in spot.shards(following)] + [
            self.send(kind, shard, spot.next) for kind in kinds for shard in spot.shards(here)
        ]

    def forward_ring(self) -> None:
        spot, own = self.spot, self.place.shard
        rows = [shard for shard in spot.shards(spot.team) if shard != own] + [own]  # foreign rows leave first
        for hop in range(spot.hops):
            last = hop == spot.hops - 1
            posts = [] if last else self.pass_on(("kv",), spot.column_team(hop), spot.column_team(hop + 1))
            blocks = [Block(r, c, self.group) for r in rows for c in spot.shards(spot.column_team(hop))]
            if not last:
                self.line.emit(posts, blocks)
                continue
            self.line.emit(posts, blocks[: -spot.size])
            self.combine("out", spot.mates, self.line.now + 1)
            self.line.emit(blocks=blocks[-spot.size :])

    def backward_ring(self) -> None:
        """Keys stay; queries, output gradients and, one hop behind, dQ travel. A rank adds its part to the dQ of rows
        that it has just used; after the last hop they are back where they came from, and the team combines them."""
        spot = self.spot
        columns = spot.shards(spot.column_team(0))
        for hop in range(spot.hops):
            rows, following = spot.row_team(hop), spot.row_team(hop + 1)
            last = hop == spot.hops - 1
            posts = [] if last else self.pass_on(("q", "do"), rows, following)
            self.line.emit(posts, [Block(r, c, self.group) for r in spot.shards(rows) for c in columns])
            if hop:  # our own part of our own team's rows stays here
                merges = [Merge(Piece("dq", shard, self.group), spot.previous) for shard in spot.shards(following)]
                self.line.later(self.line.now + 1, self.pass_on(("dq",), rows, following), merges, rest=0)
        self.combine("dq", spot.mates, self.line.now + (2 if spot.hops > 1 else 1))

    def unplace_keys(self) -> None:
        """dK, dV partials return through the inverse of the placement."""
        spot = self.spot
        if spot.placed_to == self.place.rank:
            self.line.emit()
            return
        ours = spot.shards(spot.team)
        self.line.emit(
            [self.receive("dkv", shard, spot.placed_to) for shard in ours]
            + [self.send("dkv", shard, spot.placed_from) for shard in spot.shards(spot.column_team(0))],
            merges=[Merge(Piece("dkv", shard, self.group), spot.placed_to) for shard in ours],
        )

    def combine(self, kind: str, mates: list[int], due: int) -> None:
        """Every mate gets our partial of its row; we merge theirs of ours."""
        own, spot = self.place.shard, self.spot
        for x in range(len(mates)):
            theirs = spot.team * spot.size + (spot.seat + 1 + x) % spot.size
            source = mates[-1 - x]
            self.line.later(
                due,
                [self.receive(kind, own, source), self.send(kind, theirs, mates[x])],
                [Merge(Piece(kind, own, self.group), source)],
            )

"""The paper's schedule, ``starC``: team gather, placement, sub-rings of P/C² ranks, combine.

A team is C consecutive shards; P/C² teams form a team group. Shard r has seat r % C in team r // C.

>>> place = Place(rank=5, sizes=(16,), by_heads=(False,))        # star2 on 16 ranks: team 2, seat 1
>>> spot = _Spot(place, size=2)
>>> spot.placed_to, spot.placed_from                             # both are team 5, seat 0
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
from startrail.schedule.values import Block, Merge, Pass, Piece, Step, Transfer

if TYPE_CHECKING:
    from startrail.schedule.demand import Demand
    from startrail.schedule.plan import Plan

KNOWN_TEAMS = (2, 4, 8)


@dataclass(frozen=True)
class Star(Level):
    """Teams of ``team`` ranks over all shards."""

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
    """One level over all shards; its ring length follows from their number. The backward pass moves queries."""

    level, form = Star, "starC"
    backwards = ("queries",)
    open_ended = True
    by_rank = True  # some ranks need not move their keys
    is_papers = True

    def read(self, text: str) -> Star | None:
        match = re.fullmatch(r"star(\d+)", text)
        return Star(int(match[1])) if match and int(match[1]) else None

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

    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int, demand: Demand | None) -> list[Step]:
        return _StarBuilder(place, team_of(plan), group).steps(pass_, plan.keep)

    def keepable(self, plan: Plan, place: Place) -> tuple[range, range]:
        """The team's queries, and the keys and values that placement brings."""
        spot = _Spot(place, team_of(plan))
        return spot.shards(spot.team), spot.shards(spot.column_team(0))

    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind, demand: Demand | None) -> list[float]:
        """Collectives in the team, placement and its inverse, hops of the sub-ring."""
        team = team_of(plan)
        spot = _Spot(place, team)
        kinds: tuple[tuple[str, ...], ...] = (("q", "kv", "out"), ("kv",), ("kv",))
        if not pass_.is_forward:
            placed = ("dkv",) if plan.keep == "all" else ("kv", "dkv")
            kinds = ((*_gathered(plan.keep), "dq", "dkv"), placed, ("q", "do", "dq"))
        moved = spot.placed_to != place.rank
        counts = (team - 1, team * moved, team * (spot.hops - 1))
        return [sum(count * sum(sizes[kind] for kind in of) for count, of in zip(counts, kinds, strict=True))]

    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        team, keep = team_of(plan), plan.keep
        if pass_.is_forward:  # the keys of the own team, those placed here, and those of the next hop
            kept = team if keep == "all" else 0
            return {"q": team - 1, "kv": 3 * team - 1 + kept, "out": team, "out<": team - 1}
        columns = team if keep == "all" else 2 * team - 1
        rows = dict.fromkeys(("q", "do", "dq", "dq<"), 2 * team)
        return {**rows, "kv": columns, "dkv": team, "dkv<": team}

    def team(self, plan: Plan) -> int:
        return team_of(plan)

    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        return ("none", "queries", "all") if team_of(plan) > 1 else ("none", "all")

    def known_levels(self, shards: int) -> Iterator[tuple[Star, str]]:
        ranks = f"{shards} rank{'s' if shards > 1 else ''}"
        yield from ((Star(team), "") for team in KNOWN_TEAMS if shards % team**2 == 0)
        for team in (2, 4):  # nobody misses a larger one
            if shards % team**2:
                yield Star(team), f"{team}² = {team**2} does not divide {ranks}"

    def drawing(self, level: Level, size: int) -> tuple[int, int, int]:
        assert isinstance(level, Star)
        return level.team**2, size // level.team**2, level.team

    def hop_width(self, plan: Plan) -> int | None:
        return team_of(plan)

    def shorter(self, plan: Plan, shards: int, part: int, whole: int, least: int) -> Plan | None:
        hops, rest = divmod(shards * part, whole * self.unit(plan))
        # each of the C team groups keeps several of the nodes, so that most hops stay inside one
        return None if rest or min(hops, part // team_of(plan)) < least else plan


STAR = StarFamily()


def _gathered(keep: str) -> tuple[str, ...]:
    """The kinds that the backward pass gathers in the team: those that the forward pass did not keep."""
    return {"none": ("q", "do", "kv"), "queries": ("do", "kv"), "all": ("do",)}[keep]


class _Spot:
    """The peers of one rank. Teams count from 0; hops are the steps of the sub-ring."""

    def __init__(self, place: Place, size: int) -> None:
        self.place, self.size = place, size
        self.team, self.seat = divmod(place.shard, self.size)
        self.hops = place.num_shards // self.size**2
        shards = [self.team * self.size + (self.seat + x) % self.size for x in range(1, self.size)]
        ranks = [place.rank_of(shard) for shard in shards]
        self.mates = list(zip(shards, ranks, reversed(ranks), strict=True))  # shard and rank x seats ahead, rank x back
        self.placed_to = self.rank_in(self.seat * self.hops + self.team // self.size, self.team % self.size)
        self.placed_from = self.rank_in(self.column_team(0), self.team // self.hops)
        self.next = self.rank_in(self.row_team(-1), self.seat)
        self.previous = self.rank_in(self.row_team(1), self.seat)

    def rank_in(self, team: int, seat: int) -> int:
        return self.place.rank_of(team * self.size + seat)

    def row_team(self, hop: int) -> int:
        """The team of the own team group that is ``hop`` teams back."""
        group, index = divmod(self.team, self.hops)
        return group * self.hops + (index - hop) % self.hops

    def column_team(self, hop: int) -> int:
        """The team whose keys and values are here at a hop of the forward ring; placement brings those of hop 0."""
        return (self.team - hop) % self.hops * self.size + self.seat

    def shards(self, team: int) -> range:
        return range(team * self.size, (team + 1) * self.size)


class _StarBuilder:
    def __init__(self, place: Place, size: int, group: int) -> None:
        self.place, self.group, self.spot = place, group, _Spot(place, size)
        (self.lane,) = place.shard_lanes
        self.timeline = Timeline()

    def transfer(self, send: bool, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(send, self.lane, Piece(kind, shard, self.group), peer)

    def merges(self, kind: str, team: int, peer: int) -> list[Merge]:
        return [Merge(Piece(kind, shard, self.group), peer) for shard in self.spot.shards(team)]

    def steps(self, pass_: Pass, keep: str) -> list[Step]:
        if pass_.is_forward:
            self.gather(("q", "kv"))
            self.place_keys()
            self.forward_ring()
        else:
            self.gather(_gathered(keep))
            if keep != "all":
                self.place_keys()
            self.backward_ring()
            self.unplace_keys()
            self.combine("dkv", self.timeline.next_index)
        return self.timeline.finish()

    def gather(self, kinds: tuple[str, ...]) -> None:
        """All-gather in the team."""
        posts = []
        for shard, ahead, back in self.spot.mates:
            for kind in kinds:
                posts.append(self.transfer(False, kind, shard, ahead))
                posts.append(self.transfer(True, kind, self.place.shard, back))
        self.timeline.add(posts)

    def move(self, kinds: tuple[str, ...], received: int, source: int, sent: int, to: int) -> list[Transfer]:
        """Receive one team's pieces and send another's; nothing if the rank would send to itself."""
        ways = ((False, received, source), (True, sent, to)) if to != self.place.rank else ()
        return [
            self.transfer(send, kind, shard, peer)
            for send, team, peer in ways
            for kind in kinds
            for shard in self.spot.shards(team)
        ]

    def place_keys(self) -> None:
        """Move keys and values to their sub-ring. Ranks that move nothing add an empty step, to stay in step."""
        spot = self.spot
        self.timeline.add(self.move(("kv",), spot.column_team(0), spot.placed_from, spot.team, spot.placed_to))

    def pass_on(self, kinds: tuple[str, ...], here: int, following: int) -> list[Transfer]:
        """One hop of a whole team's pieces."""
        return self.move(kinds, following, self.spot.previous, here, self.spot.next)

    def forward_ring(self) -> None:
        spot, own = self.spot, self.place.shard
        rows = [shard for shard in spot.shards(spot.team) if shard != own] + [own]  # remote rows are returned first
        for hop in range(spot.hops):
            blocks = [Block(r, c, self.group) for r in rows for c in spot.shards(spot.column_team(hop))]
            if hop < spot.hops - 1:
                self.timeline.add(self.pass_on(("kv",), spot.column_team(hop), spot.column_team(hop + 1)), blocks)
        self.timeline.add(blocks=blocks[: -spot.size])
        self.combine("out", self.timeline.next_index)
        self.timeline.add(blocks=blocks[-spot.size :])

    def backward_ring(self) -> None:
        """Keys stay; queries, output gradients and, one hop later, dQ travel. A rank adds its part to the dQ of the
        rows that it has just used. After the last hop dQ is back in its team, which combines it."""
        spot = self.spot
        columns = spot.shards(spot.column_team(0))
        for hop in range(spot.hops):
            rows, following = spot.row_team(hop), spot.row_team(hop + 1)
            posts = self.pass_on(("q", "do"), rows, following) if hop < spot.hops - 1 else []
            self.timeline.add(posts, [Block(r, c, self.group) for r in spot.shards(rows) for c in columns])
            if hop:  # the own part of the own team's rows stays here
                merges = self.merges("dq", following, spot.previous)
                self.timeline.defer(self.timeline.next_index, self.pass_on(("dq",), rows, following), merges, 0)
        self.combine("dq", self.timeline.next_index + (spot.hops > 1))

    def unplace_keys(self) -> None:
        """Return partial dK and dV by the inverse of the placement."""
        spot = self.spot
        posts = self.move(("dkv",), spot.team, spot.placed_to, spot.column_team(0), spot.placed_from)
        self.timeline.add(posts, merges=self.merges("dkv", spot.team, spot.placed_to) if posts else ())

    def combine(self, kind: str, due: int) -> None:
        """Send each team mate the partial result of its row, and merge those of the own row."""
        for shard, ahead, back in self.spot.mates:
            posts = [self.transfer(False, kind, self.place.shard, back), self.transfer(True, kind, shard, ahead)]
            self.timeline.defer(due, posts, [Merge(posts[0].piece, back)])

"""The paper's schedule, ``starC``: team gather, placement, sub-rings of P/C² ranks, combine.

Teams are C consecutive shards; g = P/C² teams make a team group. Shard r stands in team t = r // C at place p = r % C.

>>> from startrail.plan import Plan
>>> place = Place.of(Plan.parse("star2"), world=16, rank=5)      # team 2, place 1
>>> star = Star(place)
>>> star.placed_to, star.placed_from                             # both are team 5, place 0
(10, 10)
>>> [star.column_team(hop) for hop in range(star.hops)]
[5, 3, 1, 7]
>>> star.next, star.previous
(7, 3)
"""

from __future__ import annotations

from startrail.schedule.places import Place
from startrail.schedule.timeline import Timeline
from startrail.schedule.values import Block, Merge, Piece, Step, Transfer


class Star:
    """Where the pieces of one rank come from and go to; teams count from 0, hops are the steps of the sub-ring."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.size = place.plan.star
        self.team, self.spot = divmod(place.shard, self.size)
        self.hops = place.num_shards // self.size**2
        self.mates = [place.rank_of(self.team * self.size + (self.spot + x) % self.size) for x in range(1, self.size)]
        self.placed_to = self.rank_in(self.spot * self.hops + self.team // self.size, self.team % self.size)
        self.placed_from = self.rank_in(self.column_team(0), self.team // self.hops)
        self.next = self.rank_in(self.row_team(-1), self.spot)
        self.previous = self.rank_in(self.row_team(1), self.spot)

    def rank_in(self, team: int, spot: int) -> int:
        return self.place.rank_of(team * self.size + spot)

    def row_team(self, hop: int) -> int:
        """Teams of our own group, going back one a hop."""
        group, index = divmod(self.team, self.hops)
        return group * self.hops + (index - hop) % self.hops

    def column_team(self, hop: int) -> int:
        """The team whose keys and values are here at a hop of the forward ring; placement leaves those of hop 0."""
        return (self.team - hop) % self.hops * self.size + self.spot

    def shards(self, team: int) -> range:
        return range(team * self.size, (team + 1) * self.size)


def star_kept(place: Place, keep: str, group: int) -> list[Piece]:
    """The team's queries, and the keys and values that placement brought."""
    star, own = Star(place), place.shard
    rows = star.shards(star.team) if keep != "none" else ()
    columns = star.shards(star.column_team(0)) if keep == "all" else ()
    return [Piece("q", shard, group) for shard in rows if shard != own] + [
        Piece("kv", shard, group) for shard in columns if shard != own
    ]


def star_steps(place: Place, direction: str, keep: str, group: int) -> list[Step]:
    return _Walk(place, group).steps(direction, keep)


class _Walk:
    def __init__(self, place: Place, group: int) -> None:
        self.place, self.group, self.star = place, group, Star(place)
        self.line = Timeline()

    def send(self, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(True, 0, Piece(kind, shard, self.group), peer)

    def receive(self, kind: str, shard: int, peer: int) -> Transfer:
        return Transfer(False, 0, Piece(kind, shard, self.group), peer)

    def steps(self, direction: str, keep: str) -> list[Step]:
        star = self.star
        if direction == "forward":
            self.gather(("q", "kv"))
            self.place_keys()
            self.forward_ring()
        else:
            self.gather(("do",) if keep == "all" else ("do", "kv") if keep == "queries" else ("q", "do", "kv"))
            if keep != "all":
                self.place_keys()
            self.backward_ring()
            self.unplace_keys()
            self.combine("dkv", star.mates, self.line.now + 1)
        return self.line.finish()

    def gather(self, kinds: tuple[str, ...]) -> None:
        """All-gather in the team."""
        own, mates = self.place.shard, self.star.mates
        posts = []
        for x in range(len(mates)):
            theirs = self.star.team * self.star.size + (self.star.spot + 1 + x) % self.star.size
            for kind in kinds:
                posts.append(self.receive(kind, theirs, mates[x]))
                posts.append(self.send(kind, own, mates[-1 - x]))
        self.line.emit(posts)

    def place_keys(self) -> None:
        star = self.star
        if star.placed_to == self.place.rank:
            self.line.emit()  # nothing to move, but stay in step with the others
            return
        self.line.emit(
            [self.receive("kv", shard, star.placed_from) for shard in star.shards(star.column_team(0))]
            + [self.send("kv", shard, star.placed_to) for shard in star.shards(star.team)]
        )

    def pass_on(self, kinds: tuple[str, ...], here: int, following: int) -> list[Transfer]:
        """One hop of a whole team's pieces."""
        star = self.star
        return [self.receive(kind, shard, star.previous) for kind in kinds for shard in star.shards(following)] + [
            self.send(kind, shard, star.next) for kind in kinds for shard in star.shards(here)
        ]

    def forward_ring(self) -> None:
        star, own = self.star, self.place.shard
        rows = [shard for shard in star.shards(star.team) if shard != own] + [own]  # foreign rows leave first
        for hop in range(star.hops):
            last = hop == star.hops - 1
            posts = [] if last else self.pass_on(("kv",), star.column_team(hop), star.column_team(hop + 1))
            blocks = [Block(r, c, self.group) for r in rows for c in star.shards(star.column_team(hop))]
            if not last:
                self.line.emit(posts, blocks)
                continue
            self.line.emit(posts, blocks[: -star.size])
            self.combine("out", star.mates, self.line.now + 1)
            self.line.emit(blocks=blocks[-star.size :])

    def backward_ring(self) -> None:
        """Keys stay; queries, output gradients and, one hop behind, dQ travel. A rank adds its part to the dQ of rows
        that it has just used; after the last hop they are back where they came from, and the team combines them."""
        star = self.star
        columns = star.shards(star.column_team(0))
        for hop in range(star.hops):
            rows, following = star.row_team(hop), star.row_team(hop + 1)
            last = hop == star.hops - 1
            posts = [] if last else self.pass_on(("q", "do"), rows, following)
            self.line.emit(posts, [Block(r, c, self.group) for r in star.shards(rows) for c in columns])
            if hop:  # our own part of our own team's rows stays here
                merges = [Merge(Piece("dq", shard, self.group), star.previous) for shard in star.shards(following)]
                self.line.later(self.line.now + 1, self.pass_on(("dq",), rows, following), merges, rest=0)
        self.combine("dq", star.mates, self.line.now + (2 if star.hops > 1 else 1))

    def unplace_keys(self) -> None:
        """dK, dV partials return through the inverse of the placement."""
        star = self.star
        if star.placed_to == self.place.rank:
            self.line.emit()
            return
        ours = star.shards(star.team)
        self.line.emit(
            [self.receive("dkv", shard, star.placed_to) for shard in ours]
            + [self.send("dkv", shard, star.placed_from) for shard in star.shards(star.column_team(0))],
            merges=[Merge(Piece("dkv", shard, self.group), star.placed_to) for shard in ours],
        )

    def combine(self, kind: str, mates: list[int], due: int) -> None:
        """Every mate gets our partial of its row; we merge theirs of ours."""
        own, star = self.place.shard, self.star
        for x in range(len(mates)):
            theirs = star.team * star.size + (star.spot + 1 + x) % star.size
            source = mates[-1 - x]
            self.line.later(
                due,
                [self.receive(kind, own, source), self.send(kind, theirs, mates[x])],
                [Merge(Piece(kind, own, self.group), source)],
            )

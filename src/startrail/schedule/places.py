"""Where a rank stands: the only place where ranks are taken apart and put together.

Ranks are numbered outermost level first, heads innermost. Within a level the members of a team are neighbours:
index = b * team + a, with a the place in the team and b the place in the ring. The ranks that differ only in their
heads index hold one *shard* together (after the Ulysses exchange), so ``shard = rank // heads``.

>>> place = Place.of(Plan.parse("2x2/u2"), world=8, rank=5)
>>> place.shard, place.team, place.ring, place.head
(2, (0,), (1,), 1)
>>> place.team_peer(0, 1), place.ring_peer(0, 1), place.head_peer(1)
(7, 1, 4)
>>> place.lane_ranks(0), place.lane_ranks(1)
((1, 3, 5, 7), (4, 5))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail.plan import Level, Plan


@dataclass(frozen=True)
class Place:
    """``levels`` are the plan's; a star plan has one lane over all shards and is seen as one level."""

    plan: Plan
    world: int
    rank: int
    levels: tuple[Level, ...]
    team: tuple[int, ...]
    ring: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, world: int, rank: int) -> Place:
        plan.check_world(world)
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a world of {world}")
        levels = plan.levels
        if plan.star:
            levels = (Level(plan.star, world // plan.heads // plan.star),)
        team, ring, index = [], [], rank // plan.heads
        for level in reversed(levels):
            index, here = divmod(index, level.size)
            team.append(here % level.team)
            ring.append(here // level.team)
        return cls(plan, world, rank, levels, tuple(reversed(team)), tuple(reversed(ring)))

    @property
    def head(self) -> int:
        return self.rank % self.plan.heads

    @property
    def shard(self) -> int:
        return self.rank // self.plan.heads

    @property
    def num_shards(self) -> int:
        return self.world // self.plan.heads

    @property
    def heads_lane(self) -> int:
        return len(self.levels)

    def shard_at(self, team: Sequence[int], ring: Sequence[int]) -> int:
        shard = 0
        for level, a, b in zip(self.levels, team, ring, strict=True):
            shard = shard * level.size + (b % level.ring) * level.team + a % level.team
        return shard

    def rank_of(self, shard: int) -> int:
        """The rank that holds ``shard`` for the same heads as this one."""
        return shard * self.plan.heads + self.head

    def team_peer(self, level: int, offset: int) -> int:
        team = list(self.team)
        team[level] += offset
        return self.rank_of(self.shard_at(team, self.ring))

    def ring_peer(self, level: int, offset: int) -> int:
        ring = list(self.ring)
        ring[level] += offset
        return self.rank_of(self.shard_at(self.team, ring))

    def head_peer(self, offset: int) -> int:
        return self.shard * self.plan.heads + (self.head + offset) % self.plan.heads

    def lane_ranks(self, lane: int) -> tuple[int, ...]:
        """The ranks that this one talks to over a lane, itself included, in order."""
        if lane == self.heads_lane:
            first = self.shard * self.plan.heads
            return tuple(range(first, first + self.plan.heads))
        stride = self.plan.heads
        for level in self.levels[lane + 1 :]:
            stride *= level.size
        size = self.levels[lane].size
        first = self.rank - (self.rank // stride % size) * stride
        return tuple(range(first, first + size * stride, stride))

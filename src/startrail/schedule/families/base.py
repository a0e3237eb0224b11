"""The interface of a schedule family. Each family is one file, registered in ``families.FAMILIES``.

A plan is a list of levels. Heads levels (``uU``) belong to no family: ``compose`` adds the exchange over heads around
any family's steps. All other levels of a plan belong to one family. A family sees only the *shards* of the sequence:
``plan.shard_levels`` and the shard digits of a ``Place``.

Planner, engine and views know no family by name. They ask the methods below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from startrail.schedule.places import Place
from startrail.schedule.values import Bundle, Pass, Piece, Step

if TYPE_CHECKING:
    from startrail.schedule.demand import Demand
    from startrail.schedule.plan import Plan

ByKind = Mapping[str, float]  # the size of a whole piece (a shard of one group) by kind


@dataclass(frozen=True)
class Level(ABC):
    """How a plan uses one layer of the machine. ``str(level)`` is its text form."""

    @abstractmethod
    def describe(self) -> str:
        """The level in words, for the planner's answer."""


@dataclass(frozen=True)
class Heads(Level):
    """The heads are split over ``size`` ranks (Ulysses)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"u{self.size}: heads must be split over at least 1 rank")

    def __str__(self) -> str:
        return f"u{self.size}"

    def describe(self) -> str:
        return f"heads over {self.size} ranks"


class Family(ABC):
    """One way to build schedules.

    ``level`` is the class of its levels, ``form`` how their text reads, and ``backwards`` lists its backward forms, the
    default first. An ``open_ended`` family fits several world sizes. The programs of a ``by_demand`` family follow from
    the ``demand`` of each rank for keys, and use lanes of their own; without a demand, every rank needs all keys. All
    other families move everything, whatever the demand. In a ``by_rank`` family not all ranks send the same number of
    bytes. ``is_papers``: the schedule of the StarTrail paper.
    """

    level: ClassVar[type[Level]]
    form: ClassVar[str]
    backwards: ClassVar[tuple[str, ...]]
    open_ended: ClassVar[bool] = False
    by_demand: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    is_papers: ClassVar[bool] = False

    @abstractmethod
    def read(self, text: str) -> Level | None:
        """Parse a level. Returns None if ``text`` is not a level of this family."""

    @abstractmethod
    def sizes(self, plan: Plan, shards: int) -> tuple[int, ...] | None:
        """Ranks at each of the plan's shard levels for ``shards`` shards, or None if the plan does not fit them."""

    @abstractmethod
    def unit(self, plan: Plan) -> int:
        """The number of shards that the plan's levels make; for an ``open_ended`` family, a divisor of it."""

    @abstractmethod
    def equation(self, plan: Plan, world: int) -> str:
        """The equation that fails, with its values, if the plan does not fit ``world`` ranks."""

    @abstractmethod
    def grids(self, shards: int, levels: int) -> Iterator[tuple[Level, ...]]:
        """Every way to arrange ``shards`` shards in exactly ``levels`` levels of more than one rank."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises ``ValueError`` if the plan's levels or options cannot be combined."""

    @abstractmethod
    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        """Kinds that are summed hop by hop as they travel, and would be rounded at each hop in a narrow dtype."""

    def place(self, plan: Plan, world: int, rank: int, demand: Demand | None) -> Place:
        """The coordinates of a rank."""
        return plan.place(world, rank)

    @abstractmethod
    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int, demand: Demand | None) -> list[Step]:
        """One rank's steps for one group, without the exchange over heads."""

    def bundles(self, plan: Plan, place: Place, demand: Demand | None) -> Mapping[int, Bundle]:
        """The pieces of these steps that are not whole shards, by their number."""
        return {}

    @abstractmethod
    def keepable(self, plan: Plan, place: Place) -> tuple[Collection[int], Collection[int]]:
        """The query shards and the key/value shards that a rank can keep for the backward pass, its own included."""

    def kept(self, plan: Plan, place: Place, group: int) -> list[Piece]:
        """Pieces received in the forward pass that ``plan.keep`` keeps for the backward pass."""
        if plan.keep == "none":
            return []
        pairs = zip(("q", "kv") if plan.keep == "all" else ("q",), self.keepable(plan, place), strict=False)
        return [Piece(kind, shard, group) for kind, shards in pairs for shard in shards if shard != place.shard]

    def num_kept(self, plan: Plan, place: Place) -> dict[str, int]:
        """How many pieces of each kind ``kept`` lists."""
        return Counter(piece.kind for piece in self.kept(plan, place, 0))

    @abstractmethod
    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind, demand: Demand | None) -> list[float]:
        """The closed form of what a rank sends over each shard level for one group."""

    @abstractmethod
    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        """The closed form of a plan's memory: for one group, the most pieces of each kind that a rank holds at the
        same time besides its own, and under ``kind<`` the partial results in flight to it."""

    @abstractmethod
    def team(self, plan: Plan) -> int:
        """Ranks that share queries."""

    def drawing(self, level: Level, size: int) -> tuple[int, int, int]:
        """How to draw the ``size`` members of a level: concentric rings, places on each ring, ranks of a team."""
        return 1, size, 1

    @abstractmethod
    def useful_keeps(self, plan: Plan) -> tuple[str, ...]:
        """The values of ``keep`` that differ in what they keep."""

    @abstractmethod
    def hop_width(self, plan: Plan) -> int | None:
        """How many consecutive ranks hop together to the ranks after them: 1 in Ring Attention, a team in ``starC``.
        None if pieces do not travel along the line of ranks."""

    def shorter(self, plan: Plan, shards: int, part: int, whole: int, least: int) -> Plan | None:
        """The plan on ``part`` of ``whole`` nodes, and as small a part of its ``shards``, with a shorter ring over
        them, for extrapolation. None if the ring would have fewer than ``least`` hops, or cross other links."""
        return None

    def known_levels(self, shards: int) -> Iterator[tuple[Level, str]]:
        """The levels by which people know this family, each with the reason why it does not fit ``shards`` shards, or
        ``""``."""
        return iter(())

    def grid(self, plan: Plan, place: Place) -> tuple[Collection[int], Collection[int]] | None:
        """The rows and columns whose blocks a rank computes, if they tell which rank has the most work."""
        return None

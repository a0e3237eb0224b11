"""What a family of schedules must say about itself. A family is one file, found through ``families.FAMILIES``.

A plan is a list of levels. Levels of heads (``uU``) belong to every family: the exchange over heads is put around
whatever a family builds. All other levels of a plan belong to one family, which sees the *shards* of the sequence only:
``plan.shard_levels`` and the shard digits of a ``Place``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from startrail.schedule.places import Place
from startrail.schedule.values import Pass, Piece, Step

if TYPE_CHECKING:
    from startrail.schedule.plan import Plan

ByKind = Mapping[str, float]  # a size by kind: that of a whole piece, a shard of one group


@dataclass(frozen=True)
class Level:
    """One layer of the machine, as a plan uses it; its text form is ``str(level)``."""


@dataclass(frozen=True)
class Heads(Level):
    """``size`` ranks split the heads: the Ulysses exchange."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"u{self.size}: the ranks that split heads must be at least 1")

    def __str__(self) -> str:
        return f"u{self.size}"


class Family(ABC):
    """``backwards`` are its backward forms, the default first; ``level`` is the class of its levels."""

    level: ClassVar[type[Level]]
    backwards: ClassVar[tuple[str, ...]]
    open_ended: ClassVar[bool] = False

    @abstractmethod
    def read(self, text: str) -> Level | None:
        """The level that ``text`` spells, or None if it is not one of this family's."""

    @abstractmethod
    def sizes(self, plan: Plan, shards: int) -> tuple[int, ...] | None:
        """Ranks at each of the plan's shard levels if there are ``shards`` shards; None if they do not fit."""

    @abstractmethod
    def unit(self, plan: Plan) -> int:
        """The number of shards that the plan's levels make; where they fit several (``open_ended``), what divides
        it."""

    @abstractmethod
    def equation(self, plan: Plan, world: int) -> str:
        """Why the plan does not fit ``world`` ranks, as an equation with its values."""

    @abstractmethod
    def grids(self, shards: int, levels: int) -> Iterator[tuple[Level, ...]]:
        """Every way to arrange ``shards`` shards in exactly ``levels`` levels, none of which is trivial."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """``ValueError`` if levels or options do not go together."""

    @abstractmethod
    def running_sums(self, plan: Plan) -> tuple[str, ...]:
        """Kinds that are added up from rank to rank while they travel, and so are rounded at each hop if at all."""

    @abstractmethod
    def steps(self, plan: Plan, place: Place, pass_: Pass, group: int) -> list[Step]:
        """What one rank does for one group, without the exchange over heads."""

    @abstractmethod
    def kept(self, plan: Plan, place: Place, group: int) -> list[Piece]:
        """What ``plan.keep`` keeps of what the forward pass received."""

    @abstractmethod
    def traffic(self, plan: Plan, place: Place, pass_: Pass, sizes: ByKind) -> list[float]:
        """What a rank sends over each shard level for one group: the closed form."""

    @abstractmethod
    def pieces(self, plan: Plan, pass_: Pass) -> dict[str, int]:
        """The most pieces of each kind that a rank holds at once for one group, beside its own, and under ``kind<`` the
        partial results on their way in: the closed form of a plan's memory."""

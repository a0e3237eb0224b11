"""``Problem``: one call without its tensors. ``Split``: how a ``SequenceParallel`` splits its sequences.

Together with a rank they determine everything that a call does: see `call`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from startrail.geometry.layout import Layout, Zone
from startrail.geometry.mask import Mask
from startrail.geometry.pieces import LinkCost
from startrail.geometry.zones import NEIGHBOURS, ZoneLevel, make_layout, predicted
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, closed_form, programs_inside
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import PASSES, Pass

if TYPE_CHECKING:
    from startrail.compile.call import Part

SHARES = dict(
    q=1, kv=2, out=1, do=1, dq=1, dkv=2
)  # sizes of pieces, in those of a token's queries, with as many kv heads

Links = tuple[tuple[int, float], ...]
# Given a zone, a mask and the sizes of the zone's plan: is fetching on demand better? None: bytes decide.
Rule = Callable[[Zone, Mask, Sizes], bool | None]
# Given how a sequence is split, and a scan: do ranks of a node share units of states? None: hops decide.
ScanRule = Callable[["Split", "Problem"], bool | None]


@dataclass(frozen=True)
class Boundaries:
    """``documents`` are the cu_seqlens of a sequence, (0, length) if it is not packed. ``blocks`` are runs
    (start, stop) of tokens that see each other. ``placement`` are the documents that the layout was made for, if they
    are others: these may be cut further, but not joined. ``shares`` are the ranks' shares of the tokens as whole
    numbers (``geometry.layout.weights_of``); none if they are equal.

    >>> boundaries = Boundaries((0, 5, 9), ((1, 3),), shares=(2, 1))
    >>> print(boundaries)
    9 tokens, documents (0, 5, 9), blocks ((1, 3),), shares (1, 0.5)
    >>> Boundaries.decode(boundaries.encode()) == boundaries
    True
    """

    documents: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    placement: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.documents[-1]

    def encode(self) -> tuple[int, ...]:
        """All of it as whole numbers."""
        sizes = len(self.documents), len(self.placement), len(self.shares)
        ends = (end for block in self.blocks for end in block)
        return (*sizes, *self.documents, *self.placement, *self.shares, *ends)

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Boundaries:
        *sizes, rest = *numbers[:3], iter(numbers[3:])
        documents, placement, shares = (tuple(itertools.islice(rest, size)) for size in sizes)
        return cls(documents, tuple(zip(rest, rest, strict=True)), placement, shares)

    def apply(self, mask: Mask) -> Mask:
        """``mask``, within these documents and with these blocks."""
        return replace(mask, documents=self.documents if len(self.documents) > 2 else None, blocks=self.blocks)

    def __str__(self) -> str:
        packed = f", documents {self.documents}" if len(self.documents) > 2 else ""
        placed = f", placed by {self.placement}" if self.placement else ""
        blocks = f", blocks {self.blocks}" if self.blocks else ""
        parts = ", ".join(f"{share / max(self.shares):.6g}" for share in self.shares)
        return f"{self.length} tokens{packed}{placed}{blocks}" + (f", shares ({parts})" if self.shares else "")


@dataclass(frozen=True)
class Split:
    """How ``world`` ranks split every sequence. ``layout`` names the rule that gives tokens to ranks, and
    ``in_rank_order`` keeps neighbouring tokens on neighbouring ranks. ``sparse``: whether parts may fetch keys on
    demand instead of running the plan, or the rule that decides. ``scan`` decides how states travel.
    ``shortest_piece``: documents are not cut into shorter pieces, if that can be helped. ``links``: of each level of
    the machine, outermost first, the ranks of a member, and what a token costs to enter one (``LinkCost.fetch``); by
    default those of `zone_levels`.

    >>> split = Split(Plan.parse("1x2"), 2)
    >>> split.layout_of(Boundaries((0, 7))).table
    (((0, 2), (6, 2)), ((2, 2), (4, 2)))
    """

    plan: Plan
    world: int
    layout: str = "zones"
    sparse: bool | Rule = True
    in_rank_order: bool = False
    scan: ScanRule | None = None
    shortest_piece: int | None = None
    links: Links = ()

    @cached_property
    def _levels(self) -> list[ZoneLevel]:
        levels = zone_levels(self.plan, self.world, self.links)
        return [level.in_rank_order() for level in levels] if self.in_rank_order else levels

    def layout_of(self, boundaries: Boundaries) -> Layout:
        documents = boundaries.placement or boundaries.documents
        return make_layout(self.layout, self._levels, documents, boundaries.shares or None, self.shortest_piece)

    def predicted(self, boundaries: Boundaries) -> str:
        """What the layout of packed documents costs, and the next best."""
        documents = boundaries.placement or boundaries.documents
        if self.layout != "zones":
            return ""
        return predicted(self._levels, documents, boundaries.shares or None, self.shortest_piece)

    def programs(self, rank: int) -> list[Program]:
        """All programs that the rank may run, except those that follow from a demand for keys."""
        return [p for pass_ in PASSES for p in programs_inside(self.plan, self.world, rank, pass_)]

    def __str__(self) -> str:
        """What all ranks must have in common."""
        text = f"plan {self.plan}, {self.layout}"
        if self.sparse is not True:
            text += f", direct {self.sparse}" if self.sparse else ", sparse=False"
        text += f", pieces of at least {self.shortest_piece}" if self.shortest_piece else ""
        if self.links:
            text += f", links {', '.join(f'{ranks}: {fetch:g}' for ranks, fetch in self.links)}"
        return text + (", windows=True" if self.in_rank_order else "")


def zone_levels(plan: Plan, world: int, links: Links = ()) -> list[ZoneLevel]:
    """The levels at which ranks can share tokens, with what transfers cost there. Without ``links`` the outermost level
    of a plan with several joins nodes, as fast as those of H100 with a 400 Gbit/s adapter for each GPU.

    >>> for level in zone_levels(Plan.parse("u4/1x8"), 32): print(level.level, len(level.slots), level.link)
    0 32 LinkCost(fetch=1000.0, spread=0.25, near=250.0)
    1 8 LinkCost(fetch=250.0, spread=0.875, near=250.0)
    2 1 LinkCost(fetch=250.0, spread=0.0, near=250.0)
    >>> for level in zone_levels(Plan.parse("u2/1x8"), 16, links=((4, 9000.0), (1, 70.0))): print(level.link)
    LinkCost(fetch=4500.0, spread=0.3333333333333333, near=9000.0)
    LinkCost(fetch=9000.0, spread=0.875, near=9000.0)
    LinkCost(fetch=0.0, spread=0.0, near=0.0)
    """
    found = []
    outside = plan.zone_levels(world)
    for number, (level, slots) in enumerate(outside):
        parts = len(slots) // len(outside[number + 1][1]) if number + 1 < len(outside) else 1
        inner = plan.inside(level)
        spread = (parts - 1) / parts
        if parts > 1 and not inner.family.by_demand:
            sent = sum(closed_form(inner, len(slots), 0, pass_, SHARES)[level] for pass_ in PASSES)
            spread = sent / parts / (2 * SHARES["kv"] + SHARES["dkv"])
        fetch, near = 1000.0 if number == 0 and len(outside) > 2 else 250.0, 250.0
        if links:
            fetch, near = _fetch(links, len(slots), len(slots) // parts), _fetch(links, min(len(slots), NEIGHBOURS), 1)
        found.append(ZoneLevel(level, slots, LinkCost(fetch, spread, near)))
    return found


def _fetch(links: Links, ranks: int, inner: int) -> float:
    """What a token costs to enter a part with ``inner`` of these ranks. Several members have as many links."""
    for members, fetch in links:
        if members < ranks:
            return fetch * members / max(inner, members)
    return 0.0


@dataclass(frozen=True)
class Problem(ABC):
    """One call of some kind on a sequence with these ``boundaries``: all that its compiled form depends on, apart from
    how the sequence is split. Each kind of call is a subclass in a file of its own, which says what it compiles to;
    `attention` is the first.

    ``dtype`` is that of the tensors, ``wire`` that of messages, as torch names them.
    """

    boundaries: Boundaries
    batch: int
    dtype: str = "float32"
    wire: str = ""

    @property
    def length(self) -> int:
        return self.boundaries.length

    @property
    @abstractmethod
    def passes(self) -> tuple[Pass, Pass]:
        """The forward and the backward pass."""

    @abstractmethod
    def parts(self, split: Split, layout: Layout, rank: int) -> tuple[Part, ...]:
        """What the call runs on one rank: programs with their sizes, from the outermost zone inwards. Raises
        ``ValueError`` if the plan cannot run it."""

    def __str__(self) -> str:
        return f"{self.dtype}, wire {self.wire or self.dtype}, {self.boundaries}"

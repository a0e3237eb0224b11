"""Plans: which ranks share queries, which pass keys and values around a ring, and which levels split heads.

The text form lists levels, outermost first, separated by ``/``, then options. A level is ``CxT`` (teams of C, rings of
T) or ``uU`` (heads over U ranks):

>>> plan = Plan.parse("u4/2x4")
>>> plan.levels, plan.heads
((Heads(size=4), Rings(team=2, ring=4)), 4)
>>> str(plan), plan.size
('u4/2x4', 32)
>>> str(Plan.parse("1x4, keep=all, groups=2"))
'1x4,keep=all,groups=2'
>>> Plan.parse("1x4/1x8, channels=8/16").channels_at(1), Plan.parse("1x8, channels=16").channels_at(0)
(16, 16)

``1x16`` is Ring Attention, ``u8`` is Ulysses, ``1x4/u8`` is USP, ``1x4/1x8`` is a double ring and ``star2`` is the
schedule of the StarTrail paper with teams of 2; its ring length follows from the number of ranks. Any levels can split
heads: ``u4/1x8``, ``u2/2x2/u4``, ``u4/star2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import prod

from startrail.schedule.families import FAMILIES
from startrail.schedule.families.base import Family, Heads, Level
from startrail.schedule.places import Place, divisors, factorizations
from startrail.schedule.values import FORWARD, Pass

BACKWARDS = ("keys", "queries")
KEEPS = ("none", "queries", "all")
EXCHANGES = ("once", "twice")
OPTIONS = ("backward", "keep", "groups", "exchange", "channels")
CHANNELS, MOST_CHANNELS = 8, 24  # of each level's lane; more would leave attention too little of a GPU


class PlanError(ValueError):
    """A plan cannot be used. ``problem`` says why, ``remedy`` what to use instead."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class Plan:
    """Levels and options; see the module's docstring for the text form.

    ``backward`` selects the payload of the ring in the backward pass. ``keep`` selects the received pieces that the
    forward pass keeps, so that the backward pass need not receive them again. ``groups`` is the number of parts that
    the heads (or the batch) are split into; they run one after the other. ``exchange``: what heads levels exchange in
    the forward pass is kept for the backward pass (``once``), or exchanged again (``twice``), which keeps nothing.
    ``channels``, of each level or of all: how many of NCCL's channels, and so of a GPU's multiprocessors, its transfers
    take while blocks are computed.
    """

    levels: tuple[Level, ...] = (Heads(1),)
    backward: str = ""
    keep: str = "none"
    groups: int = 1
    exchange: str = "once"
    channels: tuple[int, ...] = (CHANNELS,)

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("a plan has at least one level; u1 is one rank alone")
        if len({type(level) for level in self.shard_levels}) > 1:
            raise ValueError(f"plan {self.body}: {' and '.join(map(str, self.shard_levels))} cannot be combined")
        if not self.backward:
            object.__setattr__(self, "backward", self.family.backwards[0])
        if self.groups < 1:
            raise ValueError(f"plan {self}: groups={self.groups} must be at least 1")
        if self.backward not in BACKWARDS:
            raise ValueError(f"backward={self.backward!r} is not one of {', '.join(BACKWARDS)}")
        if self.keep not in KEEPS:
            raise ValueError(f"keep={self.keep!r} is not one of {', '.join(KEEPS)}")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r} is not one of {', '.join(EXCHANGES)}")
        if len(self.channels) not in (1, len(self.levels)) or not all(1 <= n <= MOST_CHANNELS for n in self.channels):
            raise ValueError(
                f"plan {self.body}: channels={_slashed(self.channels)} must be one number from 1 to {MOST_CHANNELS}, "
                f"or {len(self.levels)} of them, for each level"
            )
        if len(set(self.channels)) == 1:
            object.__setattr__(self, "channels", self.channels[:1])
        if self.exchange == "twice" and (self.heads == 1 or self.keep != "none"):
            reason = f"keep={self.keep} keeps more" if self.heads > 1 else "there are no heads to exchange"
            raise ValueError(f"plan {self}: exchange=twice keeps nothing, but {reason}")
        if self.backward not in self.family.backwards:
            forms = " or ".join(f"backward={form}" for form in self.family.backwards)
            raise ValueError(f"plan {self}: {self.shard_levels[0]} has one backward form, {forms}")
        self.family.check(self)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse the text form. Raises ``ValueError`` with the part that cannot be read."""
        body, *options = (part.strip() for part in text.split(","))
        levels = tuple(_level(part, text) for part in body.split("/"))
        chosen: dict[str, str | int | tuple[int, ...]] = {}
        for option in options:
            name, equals, value = (piece.strip() for piece in option.partition("="))
            if not equals or name not in OPTIONS or name in chosen:
                raise ValueError(f"plan {text!r}: cannot read option {option!r}; options are {'=, '.join(OPTIONS)}=")
            if name not in ("groups", "channels"):
                chosen[name] = value
                continue
            numbers = value.split("/") if name == "channels" else [value]
            if not all(number.isdecimal() for number in numbers):
                raise ValueError(f"plan {text!r}: {name}={value!r} is not a whole number")
            chosen[name] = tuple(map(int, numbers)) if name == "channels" else int(value)
        return cls(levels, **chosen)  # type: ignore[arg-type]

    @property
    def body(self) -> str:
        """The levels without the options."""
        return "/".join(map(str, self.levels))

    def __str__(self) -> str:
        default = {"backward": self.family.backwards[0], "keep": "none", "groups": 1, "exchange": "once"}
        options = [f"{name}={getattr(self, name)}" for name, usual in default.items() if getattr(self, name) != usual]
        if self.channels != (CHANNELS,):
            options.append(f"channels={_slashed(self.channels)}")
        return ",".join([self.body, *options])

    @property
    def hidden_levels(self) -> list[int]:
        """The levels whose transfers run while blocks are computed.

        >>> Plan.parse("u4/1x8").hidden_levels, Plan.parse("u4/1x8,groups=2").hidden_levels
        ([1], [0, 1])
        """
        return [at for at, level in enumerate(self.levels) if self.groups > 1 or not isinstance(level, Heads)]

    def channels_at(self, level: int) -> int:
        """Those of a level's lane while blocks are computed."""
        return self.channels[level if len(self.channels) > 1 else 0]

    @cached_property
    def shard_levels(self) -> tuple[Level, ...]:
        """The levels that split the sequence, without heads levels."""
        return tuple(level for level in self.levels if not isinstance(level, Heads))

    @cached_property
    def head_levels(self) -> tuple[Heads, ...]:
        return tuple(level for level in self.levels if isinstance(level, Heads))

    @cached_property
    def heads(self) -> int:
        """The number of ranks that the heads are split over."""
        return prod(level.size for level in self.head_levels)

    @property
    def keeps_exchanged(self) -> bool:
        """True if the forward pass keeps its own inputs as heads levels exchanged them."""
        return self.heads > 1 and self.exchange == "once"

    def entering(self, pass_: Pass) -> tuple[str, ...]:
        """The kinds that heads levels exchange before the blocks of a pass.

        >>> from startrail.schedule.values import BACKWARD
        >>> Plan.parse("u4/1x8").entering(BACKWARD), Plan.parse("u4/1x8,exchange=twice").entering(BACKWARD)
        (('do',), ('q', 'kv', 'do'))
        """
        again = self.exchange == "twice" and not pass_.is_forward
        return FORWARD.enters + pass_.enters if again else pass_.enters

    @cached_property
    def family(self) -> Family:
        if not self.shard_levels:
            return FAMILIES[0]
        return next(family for family in FAMILIES if isinstance(self.shard_levels[0], family.level))

    @property
    def running_sums(self) -> tuple[str, ...]:
        """Gradients that are summed hop by hop as they travel, and would be rounded at each hop in a narrow dtype.

        >>> Plan.parse("1x8").running_sums, Plan.parse("star2").running_sums, Plan.parse("2x4").running_sums
        (('dkv',), ('dq',), ())
        """
        return self.family.running_sums(self)

    @property
    def size(self) -> int:
        """The world size of the plan. Raises ``ValueError`` for a star plan, which fits several world sizes."""
        unit = self.family.unit(self) * self.heads
        if self.family.open_ended:
            raise ValueError(f"plan {self} has no size of its own: it fits any multiple of {unit} ranks")
        return unit

    def check_world(self, world: int) -> None:
        """Raise an error with the failing equation and the plans that fit, unless the plan fits ``world`` ranks."""
        if world % self.heads == 0 and self.family.sizes(self, world // self.heads) is not None:
            return
        fits = [str(plan) for plan in plans_for(world, max_levels=2)]
        shown = ", ".join(fits[:12]) + (f", ... ({len(fits)} of up to two levels)" if len(fits) > 12 else "")
        raise PlanError(f"plan {self}: {self.family.equation(self, world)}", f"plans that fit {world} ranks: {shown}")

    def place(self, world: int, rank: int) -> Place:
        """The coordinates of ``rank``.

        >>> Plan.parse("2x2/u2").place(8, 5).shard
        2
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a world of {world}")
        return Place(rank, self.sizes(world), tuple(isinstance(level, Heads) for level in self.levels))

    def sizes(self, world: int) -> tuple[int, ...]:
        """Ranks at every level, outermost first."""
        self.check_world(world)
        of_shards = iter(self.family.sizes(self, world // self.heads) or ())
        return tuple(level.size if isinstance(level, Heads) else next(of_shards) for level in self.levels)

    def slots(self, world: int) -> tuple[int, ...]:
        """Every rank's position in the order of tokens: ranks that split the heads of a shard are adjacent.

        >>> Plan.parse("u2/1x2").slots(4)                        # ranks 0 and 2 share one shard, 1 and 3 the other
        (0, 2, 1, 3)
        """
        pairs = [(0, 0)]  # shard and head
        for size, level in zip(self.sizes(world), self.levels, strict=True):
            if isinstance(level, Heads):
                pairs = [(shard, head * size + digit) for shard, head in pairs for digit in range(size)]
            else:
                pairs = [(shard * size + digit, head) for shard, head in pairs for digit in range(size)]
        return tuple(shard * self.heads + head for shard, head in pairs)

    def inside(self, level: int) -> Plan:
        """The plan of the ranks that differ only at ``level`` and further in. It has the same levels, so that it uses
        the same lanes; those outside have one rank. Groups hide slow links, which are outside.

        >>> str(Plan.parse("u4/2x4,keep=all,groups=2").inside(1)), str(Plan.parse("star2/u4").inside(2))
        ('u1/2x4,keep=all', 'u1/u1')
        """
        if level == 0:
            return self
        inner = Plan((Heads(1),) * level + self.levels[level:])
        backward = self.backward if inner.shard_levels else inner.backward
        exchange = self.exchange if inner.heads > 1 else inner.exchange
        return replace(inner, backward=backward, keep=self.keep, exchange=exchange, channels=self.channels)

    def zone_levels(self, world: int) -> list[tuple[int, tuple[int, ...]]]:
        """Every level at which ranks can share tokens, from all ranks to single ones: the number of levels outside, and
        the slots of the ranks inside.

        >>> Plan.parse("u2/1x2").zone_levels(4)
        [(0, (0, 2, 1, 3)), (1, (0, 1)), (2, (0,))]
        """
        levels, size = [(0, self.slots(world))], world
        for level, ranks in enumerate(self.sizes(world), start=1):
            size //= ranks
            if ranks > 1:
                levels.append((level, self.inside(level).slots(size)))
        return levels


def on_demand() -> Plan:
    """The plan of ranks that fetch only the keys that they need.

    >>> str(on_demand())
    'direct'
    """
    (family,) = (family for family in FAMILIES if family.by_demand)
    return Plan((family.level(),))


def _slashed(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers))


def _level(part: str, text: str) -> Level:
    if part.startswith("u") and part[1:].isdecimal():
        return Heads(int(part[1:]))
    for family in FAMILIES:
        if (level := family.read(part)) is not None:
            return level
    forms = ", ".join(family.form for family in FAMILIES)
    raise ValueError(
        f"plan {text!r}: cannot read {part!r}; write heads as uN and other levels as {forms}: "
        "for example 2x2/u8, u4/1x8, 1x16, u8"
    )


def plans_for(world: int, max_levels: int = 1) -> Iterator[Plan]:
    """Every plan of at most ``max_levels`` levels on ``world`` ranks with default options; any level can split heads.

    >>> [str(plan) for plan in plans_for(4)]
    ['1x4', '2x2', '4x1', 'star2', 'u4']
    >>> [str(plan) for plan in plans_for(4, max_levels=2)][5:]
    ['1x2/1x2', '2x1/1x2', '1x2/2x1', '2x1/2x1', 'u2/1x2', '1x2/u2', 'u2/2x1', '2x1/u2', 'u2/u2']
    """
    if world < 1:
        raise ValueError(f"world size {world} must be at least 1")
    if world == 1:
        yield Plan()
    for num_levels in range(1, max_levels + 1):
        for num_heads in range(num_levels + 1):
            yield from _plans(world, num_levels, num_heads)


def _plans(world: int, num_levels: int, num_heads: int) -> Iterator[Plan]:
    """Plans with ``num_levels`` levels, ``num_heads`` of which split heads."""
    for heads in divisors(world)[1:] if num_heads else (1,):
        for sizes in factorizations(heads, num_heads):
            for family in FAMILIES:
                if num_levels == num_heads and family is not FAMILIES[0]:
                    continue  # plans with heads levels only belong to the first family
                for grid in family.grids(world // heads, num_levels - num_heads):
                    for positions in combinations(range(num_levels), num_heads):
                        levels: list[Level] = list(grid)
                        for position, size in zip(positions, sizes, strict=True):
                            levels.insert(position, Heads(size))
                        yield Plan(tuple(levels))


def variants_of(plan: Plan) -> Iterator[Plan]:
    """``plan`` with every backward form and every ``keep`` that it allows, and with heads exchanged twice."""
    if plan.heads > 1:
        yield replace(plan, exchange="twice")
    for keep in KEEPS:
        yield replace(plan, keep=keep)
    for backward in plan.family.backwards[1:] if plan.shard_levels else ():
        yield replace(plan, backward=backward, keep="none")

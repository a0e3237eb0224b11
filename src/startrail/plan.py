"""Plan: which ranks share queries, which pass keys and values round, and how heads are split.

The text form reads outermost level first, ``CxT`` a level, ``/`` between them, ``uU`` last, then options:

>>> plan = Plan.parse("2x2/u8")
>>> plan.levels, plan.heads
((Level(team=2, ring=2),), 8)
>>> str(plan), plan.size
('2x2/u8', 32)
>>> str(Plan.parse("1x4, keep=all, groups=2"))
'1x4,keep=all,groups=2'

``1x16`` is Ring Attention, ``u8`` is Ulysses, ``1x4/u8`` is USP, ``1x4/1x8`` is a double ring and ``star2`` is the
schedule of the StarTrail paper with teams of 2, whose ring length follows from the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

BACKWARDS = ("keys", "queries")
KEEPS = ("none", "queries", "all")
_LEVEL = re.compile(r"(\d+)x(\d+)")
_HEADS = re.compile(r"u(\d+)")
_STAR = re.compile(r"star(\d+)")


@dataclass(frozen=True)
class Level:
    """One layer of the machine: teams of ``team`` ranks that share queries, rings of ``ring`` ranks."""

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


@dataclass(frozen=True)
class Plan:
    """A choice of levels, Ulysses factor and backward form; see the module's text for its written form.

    ``star`` holds the paper's team size C, and is 0 for nested rings. ``backward`` says what travels round the ring in
    the backward pass. ``keep`` says what the forward pass keeps of what it received, so that the backward pass need not
    receive it again. ``groups`` runs the heads (or the batch) in that many parts, one behind the other.
    """

    levels: tuple[Level, ...] = ()
    heads: int = 1
    star: int = 0
    backward: str = ""
    keep: str = "none"
    groups: int = 1

    def __post_init__(self) -> None:
        if not self.backward:  # the paper's backward moves queries; nested rings move keys unless told otherwise
            object.__setattr__(self, "backward", "queries" if self.star else "keys")
        if self.heads < 1 or self.groups < 1:
            raise ValueError(f"plan {self}: u{self.heads} and groups={self.groups} must be at least 1")
        if self.backward not in BACKWARDS:
            raise ValueError(f"backward={self.backward!r} is not one of {', '.join(BACKWARDS)}")
        if self.keep not in KEEPS:
            raise ValueError(f"keep={self.keep!r} is not one of {', '.join(KEEPS)}")
        if self.star < 0 or (self.star and self.levels):
            raise ValueError(f"plan {self}: star{self.star} cannot be combined with levels")
        if self.star and self.backward != "queries":
            raise ValueError(f"plan {self}: star{self.star} has one backward form, backward=queries")
        if not self.star and self.keep != "none" and self.backward != "keys":
            raise ValueError(
                f"plan {self}: keep={self.keep} needs backward=keys, since backward={self.backward} "
                "uses other rows and columns than the forward pass received"
            )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that ``text`` spells; ``ValueError`` says which part cannot be read."""
        body, *options = (part.strip() for part in text.split(","))
        chosen: dict[str, object] = {}
        levels: list[Level] = []
        for part in body.split("/"):
            if "heads" in chosen:
                raise ValueError(f"plan {text!r}: u{chosen['heads']} must come last, found {part!r} after it")
            if found := _LEVEL.fullmatch(part):
                levels.append(Level(int(found[1]), int(found[2])))
            elif found := _HEADS.fullmatch(part):
                chosen["heads"] = int(found[1])
            elif (found := _STAR.fullmatch(part)) and not levels and "star" not in chosen and int(found[1]):
                chosen["star"] = int(found[1])
            else:
                raise ValueError(
                    f"plan {text!r}: cannot read {part!r}; write levels as TEAMxRING, heads as uN, or starC: "
                    "for example 2x2/u8, 1x16, u8, star4"
                )
        for option in options:
            name, equals, value = (piece.strip() for piece in option.partition("="))
            if not equals or name not in ("backward", "keep", "groups") or name in chosen:
                raise ValueError(f"plan {text!r}: cannot read option {option!r}; options are backward=, keep=, groups=")
            if name == "groups" and not value.isdecimal():
                raise ValueError(f"plan {text!r}: groups={value!r} is not a whole number")
            chosen[name] = int(value) if name == "groups" else value
        return cls(levels=tuple(levels), **chosen)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"star{self.star}"] if self.star else [str(level) for level in self.levels]
        if self.heads > 1 or not parts:
            parts.append(f"u{self.heads}")
        default = {field.name: field.default for field in fields(self)}
        default["backward"] = "queries" if self.star else "keys"
        options = [
            f"{name}={value}"
            for name in ("backward", "keep", "groups")
            if (value := getattr(self, name)) != default[name]
        ]
        return ",".join(["/".join(parts), *options])

    @property
    def is_ring(self) -> bool:
        """Plain Ring Attention: one ring of more than two ranks, no teams, no heads."""
        return len(self.levels) == 1 and self.levels[0].team == 1 and self.levels[0].ring > 2 and self.heads == 1

    @property
    def running_sums(self) -> tuple[str, ...]:
        """Gradients that are added up from rank to rank while they travel, and so are rounded at each hop if at all.

        >>> Plan.parse("1x8").running_sums, Plan.parse("star2").running_sums, Plan.parse("2x4").running_sums
        (('dkv',), ('dq',), ())
        """
        if self.star or self.is_ring:
            return ("dq",) if self.backward == "queries" else ("dkv",)
        return ()

    @property
    def size(self) -> int:
        """Ranks that the plan needs; a star plan fits several world sizes and has none of its own."""
        if self.star:
            raise ValueError(f"plan {self} fits any world size that {self.star * self.star * self.heads} divides")
        size = self.heads
        for level in self.levels:
            size *= level.size
        return size

    def check_world(self, world: int) -> None:
        """Raise the equation that fails, and the plans that would fit, unless the plan fits ``world`` ranks."""
        if self.star:
            unit = self.star * self.star * self.heads
            if world % unit == 0:
                return
            equation = f"world size {world} is not a multiple of team² {self.star}² x heads {self.heads} = {unit}"
        else:
            if world == self.size:
                return
            factors = [f"teams {level.team} x ring {level.ring}" for level in self.levels] + [f"heads {self.heads}"]
            equation = f"world size {world} is not {' x '.join(factors)} = {self.size}"
        fits = [str(plan) for plan in plans_for(world)]
        shown = ", ".join(fits[:12]) + (f", ... ({len(fits)} in all)" if len(fits) > 12 else "")
        raise ValueError(f"plan {self}: {equation}; plans that fit {world} ranks: {shown}")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def plans_for(world: int, max_levels: int = 1) -> Iterator[Plan]:
    """Every nested plan of at most ``max_levels`` levels and every star plan on ``world`` ranks, default options.

    >>> [str(plan) for plan in plans_for(4)]
    ['1x4', '2x2', '4x1', 'star2', '1x2/u2', '2x1/u2', 'u4']
    """
    if world < 1:
        raise ValueError(f"world size {world} must be at least 1")
    for heads in divisors(world):
        shards = world // heads
        for levels in _levels_of(shards, max_levels):
            yield Plan(levels, heads=heads)
        for team in divisors(shards):
            if team > 1 and shards % (team * team) == 0:
                yield Plan(star=team, heads=heads)


def _levels_of(size: int, max_levels: int) -> Iterator[tuple[Level, ...]]:
    if size == 1:
        yield ()
    elif max_levels > 0:
        for outer in divisors(size)[1:]:
            for rest in _levels_of(size // outer, max_levels - 1):
                for team in divisors(outer):
                    yield (Level(team, outer // team), *rest)


def variants_of(plan: Plan) -> Iterator[Plan]:
    """``plan`` with every backward form and every ``keep`` that it allows."""
    for keep in KEEPS:
        yield replace(plan, keep=keep)
    if not plan.star and plan.levels:
        yield replace(plan, backward="queries", keep="none")

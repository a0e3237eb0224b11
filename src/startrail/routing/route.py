"""The route of a call: for each zone of the batch, the plan's program or ``direct``, whichever sends fewer bytes.

Bytes are compared level by level, outermost first, summed over the ranks of the zone and over both passes. A rule may
decide instead (`planner.sparse.rule` simulates both on a described cluster). All ranks compute the same numbers, so
they decide alike without talking. ``direct`` is considered only if the mask is narrow: no
rank sees more than half of the zone's other tokens, or more than ``NARROW`` times as many as it owns, since it holds
all that it fetches at once.

>>> from startrail.geometry.layout import zigzag
>>> plan = Plan.parse("1x2/1x2")
>>> sizes = Sizes(plan, local=64, batch=1, q_heads=4, kv_heads=4, head_dim=8)
>>> layout = zigzag(plan.slots(4), 256)
>>> for mask in (Mask(causal=True), Mask(causal=True, window=8)):
...     (part,) = route_of(plan, layout, 0, mask, sizes)
...     print(part.chosen, part.plan_bytes, part.direct_bytes)
1x2/1x2 (196608, 393216) None
direct (196608, 393216) (10752, 21504)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from startrail.geometry.layout import Layout, Zone
from startrail.geometry.mask import Mask
from startrail.geometry.needs import needed_keys
from startrail.schedule.families.direct import NARROW, DirectLevel, Fetches
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_direct_program, build_program, closed_form
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import FORWARD, PASSES, Pass

ByLevel = tuple[int, ...]  # bytes sent over each level's links
# Given a zone, a mask and the sizes of the zone's plan: is direct better? None: bytes decide.
Rule = Callable[[Zone, Mask, Sizes], bool | None]


@dataclass(frozen=True, eq=False)
class ZoneRoute:
    """How the tokens of one zone are attended. ``start`` is the index of this rank's first token of the zone,
    ``member`` the rank's place among the zone's ranks. ``plan_bytes`` and ``direct_bytes`` are what all ranks of the
    zone send over each level in both passes; ``direct_bytes`` is None if that was not considered. ``by_rule`` is True
    if a rule has chosen between them."""

    zone: Zone
    start: int
    member: int
    plan: Plan  # the plan of the zone's ranks
    sizes: Sizes  # of the chosen one, for the zone's tokens
    fetches: Fetches | None  # if it is direct
    keep_own: bool  # the forward pass keeps its own inputs for the backward pass
    plan_bytes: ByLevel
    direct_bytes: ByLevel | None
    by_rule: bool = False

    @property
    def chosen(self) -> Plan:
        return self.sizes.plan

    def program(self, pass_: Pass) -> Program:
        """This rank's program."""
        zone = self.zone
        if self.fetches is None:
            return build_program(self.chosen, zone.size, self.member, pass_, zone.first, self.keep_own)
        return self._direct[pass_]

    @cached_property
    def _direct(self) -> dict[Pass, Program]:
        assert self.fetches is not None
        first = self.zone.first
        return {p: build_direct_program(self.fetches, self.member, p, first, self.keep_own) for p in PASSES}

    def traffic(self, pass_: Pass) -> ByLevel:
        """The bytes that this rank sends over each level's links, by closed form."""
        if self.fetches is None:
            return tuple(map(round, closed_form(self.chosen, self.zone.size, self.member, pass_, self.sizes.by_kind)))
        keys, gradients = (_bytes_per_token(self.sizes, kind) for kind in ("kv", "dkv"))
        sent, got = (self.fetches.tokens_by_level(**{end: self.member}) for end in ("sender", "receiver"))
        return tuple(a * keys + (0 if pass_ is FORWARD else b * gradients) for a, b in zip(sent, got, strict=True))


def route_of(
    plan: Plan, layout: Layout, rank: int, mask: Mask, sizes: Sizes, sparse: bool | Rule = True
) -> tuple[ZoneRoute, ...]:  # fmt: skip
    """The routes of a rank's zones, outermost first. ``mask`` includes documents and blocks. ``sizes`` are those of the
    plan for the whole batch. With ``sparse=False`` every zone uses the plan; a rule decides where it can."""
    return tuple(
        replace(zone_route(plan, zone, layout.length, mask, sizes, sparse), start=start, member=rank - zone.first)
        for zone, start in layout.zones_of(rank)
    )


def zone_route(
    plan: Plan, zone: Zone, length: int, mask: Mask, sizes: Sizes, sparse: bool | Rule = True
) -> ZoneRoute:  # fmt: skip
    """The route of a zone, as its first rank has it if it has no larger zone."""
    inner = plan.inside(zone.level)
    of_zone = replace(sizes, plan=inner, local=zone.largest)
    plan_bytes = direct_bytes = None
    if not inner.family.by_mask:
        plan_bytes = _plan_bytes(of_zone, zone.size)
    fetches, answer = None, None
    if inner.family.by_mask or (zone.size > 1 and sparse and is_narrow(zone, length, mask)):
        fetches = fetches_in(inner, zone, length, mask)
        direct = replace(of_zone, plan=Plan((DirectLevel(),)))
        per_token = 2 * _bytes_per_token(direct, "kv") + _bytes_per_token(direct, "dkv")  # keys in both passes
        direct_bytes = tuple(count * per_token for count in fetches.tokens_by_level())
        if plan_bytes is not None and callable(sparse):
            answer = sparse(zone, mask, of_zone)
        if plan_bytes is None or (direct_bytes < plan_bytes if answer is None else answer):
            of_zone = direct
        else:
            fetches = None
    sent = plan_bytes or (), direct_bytes
    return ZoneRoute(zone, 0, 0, inner, of_zone, fetches, plan.keeps_exchanged, *sent, answer is not None)


def _bytes_per_token(sizes: Sizes, kind: str) -> int:
    return sizes.by_kind[kind] // sizes.tokens


@lru_cache(maxsize=1024)
def _plan_bytes(sizes: Sizes, ranks: int) -> ByLevel:
    """What all ranks of a zone send over each level in both passes."""
    plan = sizes.plan
    members = range(ranks) if plan.family.by_rank else (0,)
    sent = [closed_form(plan, ranks, member, pass_, sizes.by_kind) for member in members for pass_ in PASSES]
    return tuple(round(sum(level) * ranks / len(members)) for level in zip(*sent, strict=True))


def fetches_in(plan: Plan, zone: Zone, length: int, mask: Mask) -> Fetches:
    """What the ranks of a zone fetch from each other under this mask. ``plan`` says which of them are close."""
    owned = [zone.runs_of((member,), length) for member in range(zone.size)]
    return Fetches.of(owned, [needed_keys(mask, own, length) for own in owned], plan.sizes(zone.size))


def is_narrow(zone: Zone, length: int, mask: Mask) -> bool:
    """True if no rank of the zone sees more than half of the other ranks' tokens, or ``NARROW`` times its own."""
    inside = sum(zone.counts)
    for member, own in enumerate(zone.counts):
        needed = needed_keys(mask, zone.runs_of((member,), length), length)
        if sum(count for _, count in needed) > min(NARROW * own, (inside - own) / 2):
            return False
    return True

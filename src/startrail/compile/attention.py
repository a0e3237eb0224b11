"""Attention: the first kind of call. It runs the plan, or fetches only the keys that its queries see.

For each zone of the batch, the plan's program or that of keys on demand is chosen, whichever sends fewer bytes. Bytes
are compared level by level, outermost first, summed over the ranks of the zone and over both passes. A rule may decide
instead (`planner.sparse.rule` simulates both on a described cluster). All ranks compute the same numbers, so they
decide alike without talking. Fetching is considered only if the mask is narrow: no rank sees more than half of the
zone's other tokens, or more than ``NARROW`` times as many as it owns, since it holds all that it fetches at once. It is
also considered for documents that are cut over some of a zone's ranks (``Zone.fills``).

>>> from startrail.compile.problem import Boundaries
>>> problem = Attention(Boundaries((0, 256)), 1, heads=4, kv_heads=4, head_dim=8)
>>> split = Split(Plan.parse("1x2/1x2"), 4)
>>> for mask in (Mask(causal=True), Mask(causal=True, window=8)):
...     (part,) = replace(problem, mask=mask).parts(split, split.layout_of(problem.boundaries), 0)
...     print(part.chosen, part.plan_bytes, part.demand_bytes)
1x2/1x2 (196608, 393216) None
direct (196608, 393216) (10752, 21504)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from startrail.compile.call import ByLevel, Part
from startrail.compile.problem import Boundaries, Problem, Split
from startrail.geometry.blocks import BlockTiles
from startrail.geometry.layout import Layout, Runs, Zone
from startrail.geometry.mask import Mask
from startrail.geometry.needs import needed_keys
from startrail.schedule.demand import NARROW, Demand
from startrail.schedule.plan import Plan, on_demand
from startrail.schedule.program import Program, build_program, closed_form
from startrail.schedule.proof import Contents, ScheduleError, check_memory
from startrail.schedule.sizes import ITEMSIZES, Sizes
from startrail.schedule.values import BACKWARD, PASSES, Pass, Piece

if TYPE_CHECKING:
    from startrail.geometry.tiles import Costs
    from startrail.schedule.places import Place


@dataclass(frozen=True)
class Attention(Problem):
    """``mask`` has no documents or blocks: those belong to the sequence. ``value_dim`` is the width of values and
    outputs if it differs from ``head_dim``."""

    mask: Mask = field(default_factory=Mask)
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None

    @classmethod
    def of(
        cls, length: int, batch: int, heads: int, kv_heads: int, head_dim: int, causal: bool,
        dtype: str = "bfloat16", window: int | None = None, documents: tuple[int, ...] = (),
    ) -> Attention:  # fmt: skip
        """A call of one layer, as planners describe it; ``documents`` are cu_seqlens, () for a single one."""
        boundaries = Boundaries(documents or (0, length))
        return cls(boundaries, batch, dtype, "", Mask(causal, window), heads, kv_heads, head_dim)

    @property
    def passes(self) -> tuple[Pass, Pass]:
        return PASSES

    @property
    def visible(self) -> Mask:
        """The mask, with the documents and blocks of the sequence. Raises ``ValueError`` if it does not fit it."""
        mask = self.boundaries.apply(self.mask)
        mask.check_length(self.length)
        return mask

    @property
    def pairs(self) -> int:
        """Pairs of tokens of one sequence that see each other, for causal masks, windows and documents.

        >>> Attention.of(4, 1, 1, 1, 1, causal=True).pairs, Attention.of(4, 1, 1, 1, 1, causal=True, window=2).pairs
        (10, 7)
        """
        causal_pairs = 0
        for start, stop in pairwise(self.boundaries.documents):
            window = min(self.mask.window or self.length, stop - start)
            causal_pairs += window * (stop - start) - window * (window - 1) // 2  # itself and the window - 1 before it
        return causal_pairs if self.mask.causal else 2 * causal_pairs - self.length

    @property
    def documents(self) -> tuple[int, ...]:
        """cu_seqlens, () for a single document."""
        return self.boundaries.documents if len(self.boundaries.documents) > 2 else ()

    @property
    def is_sparse(self) -> bool:
        """True if other programs than the plan's may run: those of zones, or of keys on demand."""
        return bool(self.documents) or self.mask.window is not None

    @property
    def undivided(self) -> Attention:
        """The same call if all tokens belonged to one document."""
        return replace(self, boundaries=Boundaries((0, self.length)))

    def tokens_per_rank(self, world: int) -> int:
        """The most tokens of a rank, if all share all tokens equally."""
        return -(-self.length // world)

    def sizes_on(self, plan: Plan, world: int) -> Sizes:
        """The sizes of the pieces if ``world`` ranks share all tokens equally."""
        return self.sizes(plan, self.tokens_per_rank(world))

    def sizes(self, plan: Plan, local: int) -> Sizes:
        """The sizes of the pieces if all ranks share all tokens, ``local`` for each rank."""
        itemsize, wire = ITEMSIZES[self.dtype], ITEMSIZES[self.wire or self.dtype]
        shape = self.batch, self.heads, self.kv_heads, self.head_dim
        return Sizes(plan, local, *shape, itemsize, wire, self.value_dim)

    def parts(self, split: Split, layout: Layout, rank: int) -> tuple[AttentionPart, ...]:
        return tuple(
            replace(self.part(split, layout, zone), start=start, member=rank - zone.first)
            for zone, start in layout.zones_of(rank)
        )

    def part(self, split: Split, layout: Layout, zone: Zone) -> AttentionPart:
        """What a zone runs on its first rank, if its tokens are the first of that rank's."""
        inner, levels, mask = split.plan.inside(zone.level), len(split.plan.levels), self.visible
        sizes, keep_own = self.sizes(split.plan, layout.largest), split.plan.keeps_exchanged
        of_zone = _for_zone(sizes, inner, zone, None)
        plan_bytes = () if inner.family.by_demand else _plan_bytes(of_zone, zone.size)
        whole = AttentionPart(
            zone, 0, 0, layout.length, levels, of_zone, mask, inner, None, keep_own, plan_bytes, None
        )  # fmt: skip
        if not inner.family.by_demand and (zone.size == 1 or not split.sparse):
            return whole
        owned = [zone.runs_of((member,), layout.length) for member in range(zone.size)]
        needed = [needed_keys(mask, own, layout.length) for own in owned]
        if not inner.family.by_demand and not _is_narrow(zone, needed):
            return whole
        demand = Demand.of(owned, needed, inner.sizes(zone.size))
        fetching = _for_zone(sizes, on_demand(), zone, demand)
        demand_bytes = _demand_bytes(fetching, demand)
        answer = split.sparse(zone, mask, of_zone) if plan_bytes and callable(split.sparse) else None
        by_rule = answer is not None
        if not plan_bytes or (answer if answer is not None else demand_bytes < plan_bytes):
            return replace(whole, sizes=fetching, demand=demand, demand_bytes=demand_bytes, by_rule=by_rule)
        return replace(whole, demand_bytes=demand_bytes, by_rule=by_rule)

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f", {self.kv_heads} kv" if self.kv_heads != self.heads else "")
        return f"{self.mask}, {heads}, {self.head_dim} wide, {super().__str__()}"


def _for_zone(sizes: Sizes, plan: Plan, zone: Zone, demand: Demand | None) -> Sizes:
    """The sizes of a zone's pieces. Ranks that exchange the heads of a shard are padded to equally many tokens."""
    place = plan.family.place(plan, zone.size, 0, demand)
    of_shard = [max(zone.counts[rank] for rank in place.shard_ranks(shard)) for shard in range(place.num_shards)]
    local = max(of_shard)
    return replace(sizes, plan=plan, local=local, of_shard=tuple(of_shard) if min(of_shard) < local else ())


def _demand_bytes(sizes: Sizes, demand: Demand) -> ByLevel:
    """What all ranks of a zone send over each level in both passes: keys in both, gradients in the backward pass."""
    per_token = 2 * sizes.nbytes_of("kv", 1) + sizes.nbytes_of("dkv", 1)
    return tuple(count * per_token for count in demand.tokens_by_level())


@lru_cache(maxsize=1024)
def _plan_bytes(sizes: Sizes, ranks: int) -> ByLevel:
    """What all ranks of a zone send over each level in both passes."""
    plan = sizes.plan
    members = range(ranks) if plan.family.by_rank else (0,)
    sent = [closed_form(plan, ranks, member, pass_, sizes.by_kind) for member in members for pass_ in PASSES]
    return tuple(round(sum(level) * ranks / len(members)) for level in zip(*sent, strict=True))


def _is_narrow(zone: Zone, needed: Sequence[Runs]) -> bool:
    """True if no rank of the zone sees more than half of the other ranks' tokens, or ``NARROW`` times its own; or if
    documents are cut over some ranks each, in which case the placement has seen to it."""
    if not zone.fills:
        return True
    most = min(NARROW, (zone.size - 1) / 2) * zone.largest
    return all(sum(count for _, count in runs) <= most for runs in needed)


@dataclass(frozen=True, eq=False)
class AttentionPart(Part):
    """``plan`` is the plan of the zone's ranks; ``demand`` says which keys they fetch instead, if they do.
    ``plan_bytes`` and ``demand_bytes`` are what all ranks of the zone would send over each level in both passes;
    ``demand_bytes`` is None if that was not considered. ``by_rule`` is True if a rule has chosen between them."""

    sizes: Sizes
    mask: Mask
    plan: Plan
    demand: Demand | None
    keep_own: bool  # the forward pass keeps its own inputs for the backward pass
    plan_bytes: ByLevel
    demand_bytes: ByLevel | None
    by_rule: bool = False

    @property
    def chosen(self) -> Plan:
        return self.sizes.plan

    @property
    def demand_level(self) -> int | None:
        return None if self.demand is None or self.zone.size == 1 else self.zone.level

    @cached_property
    def _programs(self) -> dict[Pass, Program]:
        build = build_program if self.demand is None else build_program.__wrapped__  # no other call has this demand
        where = self.zone.first, self.keep_own, self.demand
        return {pass_: build(self.chosen, self.zone.size, self.member, pass_, *where) for pass_ in PASSES}

    def program(self, pass_: Pass) -> Program:
        return self._programs[pass_]

    @cached_property
    def place(self) -> Place:
        return self.chosen.family.place(self.chosen, self.zone.size, self.member, self.demand)

    def traffic(self, pass_: Pass) -> ByLevel:
        """By closed form, if all shards have equally many tokens."""
        if self.demand is None and self.sizes.of_shard:
            return super().traffic(pass_)
        sizes: Mapping[str, int] = self.sizes.by_kind
        if self.demand is not None:
            sizes = {kind: self.sizes.nbytes_of(kind, 1) for kind in sizes}
        sent = closed_form(self.chosen, self.zone.size, self.member, pass_, sizes, self.demand)
        return tuple(round(sum(sent[level :: self.levels])) for level in range(self.levels))

    def runs_of(self, shard: int) -> Runs:
        """The real tokens of a shard, or of a bundle."""
        if self.demand is not None and shard >= self.zone.size:
            return self._bundle_runs[shard - self.zone.size]
        return super().runs_of(shard)

    @cached_property
    def _bundle_runs(self) -> list[Runs]:
        return list(self.demand.messages.values()) if self.demand is not None else []

    @cached_property
    def _tiles(self) -> dict[Costs, BlockTiles]:
        return {}

    def tiles(self, costs: Costs) -> BlockTiles:
        """The tiles of the blocks, as a kernel with these costs computes them."""
        if costs not in self._tiles:
            self._tiles[costs] = BlockTiles(self.runs_of, self.mask, costs)
        return self._tiles[costs]

    # --- the proof, token by token

    def prove_tokens(self, rank: int) -> None:
        """The rank's queries see keys of their zone only, and of what they fetch on demand each key once."""
        own, seen = _tokens(self.zone.runs_of((self.member,), self.length)), self._seen(self.member)
        if outside := seen - set(_tokens(self.zone.runs_of(range(self.zone.size), self.length))):
            raise ScheduleError(f"rank {rank} sees keys outside of its zone: {sorted(outside)[:8]}")
        if self.demand is None:
            return
        messages = self.demand.messages.items()
        fetched = [token for edge, runs in messages if edge.receiver == self.member for token in _tokens(runs)]
        if len(set(fetched)) != len(fetched) or set(fetched) & set(own):
            raise ScheduleError(f"rank {rank} fetches a key twice, or one of its own: {sorted(fetched)[:8]} ...")
        if wrong := set(fetched) ^ (seen - set(own)):
            raise ScheduleError(f"rank {rank} fetches a key that it does not see, or misses one: {sorted(wrong)[:8]}")

    def prove_results(self, rank: int, results: Mapping[Pass, Mapping[Piece, Contents]]) -> None:
        """Every own key got the gradients of all members that see it; a plan holds no more pieces than it states."""
        if self.demand is None:
            for pass_ in results:
                check_memory(self.program(pass_))
            return
        own = _tokens(self.zone.runs_of((self.member,), self.length))
        expected = dict.fromkeys(range(len(own)), 0)
        places = {key: index for index, key in enumerate(own)}
        for member in range(self.zone.size):
            if member != self.member:
                for key in self._seen(member) & places.keys():
                    expected[places[key]] |= 1 << member
        contents = results[BACKWARD][Piece("dkv", self.member, 0)]
        returned = {index: contents.get(index, 0) for index in expected}
        if contents.get(None) != 1 << self.member or returned != expected:
            wrong = [own[index] for index in expected if returned[index] != expected[index]]
            raise ScheduleError(f"rank {rank}: the gradients of keys {wrong[:8]} are incomplete")

    def _seen(self, member: int) -> set[int]:
        """The keys that a member's queries see."""
        queries = sorted(_tokens(self.zone.runs_of((member,), self.length)))
        seen: set[int] = set()
        for staircase in self.mask.staircases:
            end = 0
            for query in queries:  # neither end of what a query sees ever decreases: only what is new is added
                first, stop = staircase.visible(query, self.length)
                seen.update(range(max(first, end), stop))
                end = max(end, stop)
        return seen


def _tokens(runs: Runs) -> list[int]:
    return [token for start, count in runs for token in range(start, start + count)]

"""Random masks and documents on random plans: every program is proven, token by token."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

import pytest

from startrail.compile.attention import Attention
from startrail.compile.problem import Boundaries, Split
from startrail.compile.proof import prove_call
from startrail.geometry.distributions import document_lengths
from startrail.geometry.mask import Mask
from startrail.geometry.needs import needed_keys
from startrail.schedule.demand import Demand
from startrail.schedule.plan import Plan
from startrail.schedule.proof import ScheduleError
from startrail.schedule.values import Source
from tests.helpers import FULL, any_slices, random_slices

PLANS = ["1x4", "u2/1x2", "2x2/u2", "1x2/1x4", "u2/2x2/u2", "star2", "u4/star2", "direct", "1x4/1x4", "u2/2x2,groups=2"]
LARGE = ["u4/1x8", "1x8/u8", "8x8", "2x2/2x2/1x4"]


def world_of(plan: Plan) -> int:
    return 8 if plan.family.by_demand else plan.family.unit(plan) * plan.heads * (2 if plan.family.open_ended else 1)


def prove(plan: Plan, mask: Mask, length: int, layout: str = "zones", shares: tuple[int, ...] = ()) -> list[str]:
    """Prove a call with few heads under this mask, which includes documents."""
    boundaries = Boundaries(mask.documents or (0, length), mask.blocks, shares=shares)
    own, heads = replace(mask, documents=None, blocks=()), 2 * plan.heads * plan.groups
    problem = Attention(boundaries, 1, mask=own, heads=heads, kv_heads=heads, head_dim=3)
    return prove_call(problem, Split(plan, world_of(plan), layout))


def random_documents(chance: random.Random, length: int) -> tuple[int, ...]:
    kind = chance.choice(["none", "ones", "giant", "some", "many"])
    if kind == "none":
        return (0, length)
    if kind == "ones":
        return tuple(range(length + 1))
    if kind == "giant":  # and many tiny ones
        return (0, *range(length * 3 // 4, length + 1))
    return tuple(sorted({0, length, *chance.choices(range(1, length + 1), k=3 if kind == "some" else length // 6)}))


def random_mask(chance: random.Random, documents: tuple[int, ...], length: int) -> Mask:
    window = chance.choice([None, None, 1, 2, 5, length // 4 + 1])
    chunk = chance.choice([None, None, None, 3, length // 3 + 1])
    if chance.random() < 0.2:
        own = documents if len(documents) > 2 else None
        slices = chance.choice([random_slices, any_slices])(chance, length)
        return replace(Mask.from_slices(slices), documents=own)
    start = chance.randrange(length)
    blocks = ((start, min(start + 7, length)),) if chance.random() < 0.2 else ()
    return Mask(chance.random() < 0.7, window, documents if len(documents) > 2 else None, chunk, blocks)


@pytest.mark.parametrize("text", PLANS)
def test_random_batches_are_proven(text):
    plan, chosen = Plan.parse(text), set()
    for seed in range(40 if FULL else 8):
        chance = random.Random(f"{text} {seed}")
        length = chance.choice([1, 7, 40, 101, 160])
        documents = random_documents(chance, length)
        layout = chance.choice(["zones", "zones", "zigzag", "contiguous"])
        shares = tuple(chance.choices([2, 3, 7], k=world_of(plan))) if chance.random() < 0.4 else ()
        chosen |= set(prove(plan, random_mask(chance, documents, length), length, layout, shares))
    assert "direct" in chosen


@pytest.mark.parametrize("text", LARGE)
def test_large_worlds_are_proven(text):
    plan = Plan.parse(text)
    prove(plan, Mask(causal=True, window=20), 1024)
    documents = tuple(sorted({0, 1024, *random.Random(text).choices(range(1, 700), k=60)}))
    prove(plan, Mask(causal=True, documents=documents), 1024)


@pytest.mark.parametrize("text", ["u4/1x8", "1x4/1x8", "1x32", "u4/u8"])
def test_placed_batches_are_proven(text):
    for kind in ("agents", "books"):
        ends = (0, *accumulate(document_lengths(kind, 2048, seed=1, scale=1 / 128)))
        problem = Attention.of(2048, 1, 32, 32, 3, causal=True, documents=ends)
        split = Split(Plan.parse(text), 32)
        prove_call(problem, split)
        zones = split.layout_of(problem.boundaries).zones
        assert any(problem.part(split, split.layout_of(problem.boundaries), zone).demand for zone in zones)


def entering(owned, needed, size):
    """Tokens that enter a subtree of ``size`` ranks from outside, each counted once per subtree, summed over all."""
    total = 0
    for first in range(0, len(owned), size):
        inside = slice(first, first + size)
        held, wanted = (
            {t for runs in of_ranks[inside] for start, count in runs for t in range(start, start + count)}
            for of_ranks in (owned, needed)
        )
        total += len(wanted - held)
    return total


def check_each_token_crosses_once(demand, owned, needed, sizes):
    """The closed form by sets: a subtree gets each token that its ranks need from outside exactly once, and its parts
    get from each other what they need and did not get from outside."""
    inside = [entering(owned, needed, prod(sizes[level:])) for level in range(len(sizes) + 1)]
    assert demand.tokens_by_level() == tuple(b - a for a, b in pairwise(inside))


def test_tokens_cross_a_link_once():
    for text in ("1x2/1x4", "u2/2x2/u2", "1x4/1x4"):
        plan = Plan.parse(text)
        problem, split = Attention.of(300, 1, 16, 16, 4, causal=True, window=60), Split(plan, world_of(plan))
        layout, sizes = split.layout_of(problem.boundaries), plan.sizes(world_of(plan))
        owned = [layout.runs(rank) for rank in range(layout.world)]
        needed = [needed_keys(problem.mask, own, 300) for own in owned]
        check_each_token_crosses_once(Demand.of(owned, needed, sizes), owned, needed, sizes)


@pytest.mark.parametrize("text", ["u4/1x8", "1x4/1x8"])
def test_keys_of_a_document_cut_between_nodes_enter_a_node_once(text):
    """The bytes of its zone: keys in both passes, and their gradients back, of each token once per node."""
    between = 0
    for seed in range(6):
        ends = (0, *accumulate(document_lengths("agents", 2048, seed=seed, scale=1 / 128)))
        problem, split = Attention.of(2048, 1, 32, 32, 3, causal=True, documents=ends), Split(Plan.parse(text), 32)
        layout = split.layout_of(problem.boundaries)
        for zone in layout.zones:
            part = problem.part(split, layout, zone)
            if part.demand is None or zone.size < 32:
                continue
            owned = [zone.runs_of((rank,), 2048) for rank in range(32)]
            needed = [needed_keys(problem.visible, own, 2048) for own in owned]
            check_each_token_crosses_once(part.demand, owned, needed, (4, 8))
            token = 2 * 32 * 3 * 2  # keys and values of 32 heads of 3 numbers in bfloat16
            assert part.demand_bytes[0] == 3 * token * entering(owned, needed, 8)
            between += part.demand_bytes[0]
    assert between


def _drop(demand):
    """One message fewer."""
    del demand.pieces[max(demand.pieces)]
    return demand


def _shift_sources(demand):
    """Gradients of relayed tokens are added one token further on."""
    bundles = type(demand).bundles

    def moved(rank):
        return {
            edge: (n, b._replace(sources=tuple(Source(s.shard, s.start + 1, s.tokens) for s in b.sources)))
            for edge, (n, b) in bundles(demand, rank).items()
        }

    object.__setattr__(demand, "bundles", moved)
    return demand


@pytest.mark.parametrize(
    "change, message",
    [
        (_drop, "misses one"),
        (_shift_sources, "incomplete|second time"),
    ],
)
def test_a_wrong_program_is_found(monkeypatch, change, message):
    plan = Plan.parse("1x2/1x4")
    right = Demand.of
    monkeypatch.setattr(Demand, "of", lambda *arguments: change(right(*arguments)))
    with pytest.raises(ScheduleError, match=message):
        prove(plan, Mask(causal=True, window=30), 160)

"""Random masks and documents on random plans: every program is proven, token by token."""

import random
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.geometry.needs import needed_keys
from startrail.geometry.zones import ZoneLevel, make_layout
from startrail.routing.proof import prove_batch
from startrail.routing.route import fetches_in
from startrail.schedule.plan import Plan
from startrail.schedule.proof import ScheduleError
from startrail.schedule.values import Source
from tests.helpers import FULL, any_slices, random_slices

PLANS = ["1x4", "u2/1x2", "2x2/u2", "1x2/1x4", "u2/2x2/u2", "star2", "u4/star2", "direct", "1x4/1x4", "u2/2x2,groups=2"]
LARGE = ["u4/1x8", "1x8/u8", "8x8", "2x2/2x2/1x4"]


def world_of(plan: Plan) -> int:
    return 8 if plan.family.by_mask else plan.family.unit(plan) * plan.heads * (2 if plan.family.open_ended else 1)


def layout_of(plan: Plan, documents: tuple[int, ...], name: str = "zones") -> Layout:
    return make_layout(name, [ZoneLevel(*level) for level in plan.zone_levels(world_of(plan))], documents)


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
        layout = layout_of(plan, documents, chance.choice(["zones", "zones", "zigzag", "contiguous"]))
        mask = random_mask(chance, documents, length)
        chosen |= set(prove_batch(plan, layout, mask))
    assert "direct" in chosen


@pytest.mark.parametrize("text", LARGE)
def test_large_worlds_are_proven(text):
    plan = Plan.parse(text)
    prove_batch(plan, layout_of(plan, (0, 1024)), Mask(causal=True, window=20))
    documents = tuple(sorted({0, 1024, *random.Random(text).choices(range(1, 700), k=60)}))
    prove_batch(plan, layout_of(plan, documents), Mask(causal=True, documents=documents))


def test_tokens_cross_a_link_once():
    """The closed form by sets: a subtree gets each token that its ranks need from outside exactly once, and its parts
    get from each other what they need and did not get from outside."""
    for text in ("1x2/1x4", "u2/2x2/u2", "1x4/1x4"):
        plan = Plan.parse(text)
        layout, sizes = layout_of(plan, (0, 300)), plan.sizes(world_of(plan))
        mask = Mask(causal=True, window=60)
        fetches = fetches_in(plan, layout.zones[0], 300, mask)

        def entering(size, layout=layout, mask=mask):
            """Tokens that enter a subtree of ``size`` ranks, summed over all."""
            total = 0
            for first in range(0, layout.world, size):
                own = [layout.runs(rank) for rank in range(first, first + size)]
                held = {t for runs in own for start, count in runs for t in range(start, start + count)}
                needed = {
                    t
                    for runs in own
                    for start, count in needed_keys(mask, runs, 300)
                    for t in range(start, start + count)
                }
                total += len(needed - held)
            return total

        inside = [entering(prod(sizes[level:])) for level in range(len(sizes) + 1)]
        assert fetches.tokens_by_level() == tuple(b - a for a, b in pairwise(inside))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda fetches: _drop(fetches), "misses one"),
        (lambda fetches: _shift_sources(fetches), "incomplete|second time"),
    ],
)
def test_a_wrong_program_is_found(monkeypatch, change, message):
    plan = Plan.parse("1x2/1x4")
    layout = layout_of(plan, (0, 160))
    monkeypatch.setattr("startrail.routing.route.fetches_in", lambda *arguments: change(fetches_in(*arguments)))
    with pytest.raises(ScheduleError, match=message):
        prove_batch(plan, layout, Mask(causal=True, window=30))


def _drop(fetches):
    """One message fewer."""
    del fetches.pieces[max(fetches.pieces)]
    return fetches


def _shift_sources(fetches):
    """Gradients of relayed tokens are added one token further on."""
    bundles = type(fetches).bundles

    def moved(rank):
        return {
            edge: (n, b._replace(sources=tuple(Source(s.shard, s.start + 1, s.tokens) for s in b.sources)))
            for edge, (n, b) in bundles(fetches, rank).items()
        }

    object.__setattr__(fetches, "bundles", moved)
    return fetches

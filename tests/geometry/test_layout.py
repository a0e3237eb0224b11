import random
import time
from bisect import bisect_right
from itertools import pairwise

import pytest

from startrail.geometry.distributions import document_lengths
from startrail.geometry.layout import LAYOUTS, Layout, contiguous, zigzag
from startrail.geometry.zones import ZoneLevel, check_layout, make_layout
from startrail.schedule.plan import Plan
from tests.helpers import FULL

PLANS = [("u1", 1), ("1x2", 2), ("u3", 3), ("2x1/u2", 4), ("u2/1x2", 4), ("u2/1x2/u2", 8), ("star2/u2", 16)]


def layout_of(name, text, world, documents):
    return make_layout(name, [ZoneLevel(*level) for level in Plan.parse(text).zone_levels(world)], documents)


def check_ownership(layout, plan, world):
    """Every token has one owner, all ranks hold equally many, and the tokens of shards can be sorted by position."""
    assert all(sum(count for _, count in runs) == layout.local for runs in layout.table)
    owned = [p for rank in range(world) for start, count in layout.runs(rank) for p in range(start, start + count)]
    assert sorted(owned) == list(range(layout.length))
    for zone in layout.zones:
        inside = plan.inside(zone.level).place(zone.size, 0)
        for shard in range(inside.num_shards):
            members = inside.shard_ranks(shard)
            chunk, places = zone.places(members)
            tokens = [None] * (zone.tokens * len(members))
            for member, at in zip(members, places, strict=True):
                own = [p for start, count in zone.runs[member] for p in range(start, start + count)]
                for index, place in enumerate(at):
                    tokens[place * chunk : (place + 1) * chunk] = own[index * chunk : (index + 1) * chunk]
            assert tokens == sorted(tokens), f"the tokens of shard {shard} are not sorted"
            runs = zone.runs_of(members, layout.length)
            real = [p for start, count in runs for p in range(start, start + count)]
            assert real == [p for p in tokens if p < layout.length]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("text, world", PLANS)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 1001])
def test_every_token_has_one_owner_and_shards_are_sorted(name, text, world, length):
    layout, plan = layout_of(name, text, world, (0, length)), Plan.parse(text)
    check_ownership(layout, plan, world)
    (zone,) = layout.zones
    inside = plan.place(world, 0)
    for shard in range(inside.num_shards):
        runs = zone.runs_of(inside.shard_ranks(shard), length)
        assert len(runs) <= len(layout.table[0]), f"shard {shard} has more runs than a single rank"


def test_a_single_document_is_cut_zigzag():
    assert layout_of("zones", "u2/1x2", 4, (0, 30)) == zigzag(Plan.parse("u2/1x2").slots(4), 30)


@pytest.mark.parametrize("text, world", PLANS)
def test_zones_own_every_token_once(text, world):
    for seed in range(20 if FULL else 5):
        chance = random.Random(seed)
        length = chance.choice([3, 17, 100, 500])
        documents = tuple(sorted({0, length, *chance.choices(range(1, length), k=chance.choice([1, 4, length // 3]))}))
        layout = layout_of("zones", text, world, documents)
        check_ownership(layout, Plan.parse(text), world)
        assert layout == layout_of("zones", text, world, documents), "the same documents have the same layout"
        for zone in layout.zones:  # whole documents
            for start, count in zone.runs_of(range(zone.size), length):
                assert start in documents and start + count in documents
        padding = layout.local * world - length
        assert padding <= max(0.02 * length, sum(map(len, layout.table)))


def works(layout, documents):
    """Visible pairs under a causal mask, by rank."""
    found = [0] * layout.world
    for rank in range(layout.world):
        for start, count in layout.runs(rank):
            while count:
                document = bisect_right(documents, start) - 1
                tokens = min(count, documents[document + 1] - start)
                found[rank] += tokens * (start - documents[document]) + tokens * (tokens + 1) // 2
                start, count = start + tokens, count - tokens
    return found


@pytest.mark.parametrize("kind", ["pretraining", "agents"])
@pytest.mark.parametrize("text, world", [("1x8", 8), ("u4/1x8", 32), ("u8/1x8", 64), ("1x64", 64)])
def test_zones_balance_work_and_tokens(kind, text, world):
    for per_rank in (8192, 32768):
        lengths = document_lengths(kind, world * per_rank, seed=1)
        documents = (0, *(sum(lengths[: i + 1]) for i in range(len(lengths))))
        layout = layout_of("zones", text, world, documents)
        work = works(layout, documents)
        assert sum(work) == sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(documents))
        assert max(work) <= 1.05 * sum(work) / world
        assert layout.local <= 1.02 * per_rank


def test_placing_4000_documents_on_64_ranks_takes_less_than_20_ms_of_cpu():
    lengths = document_lengths("pretraining", 64 * 106496, seed=2)
    documents = [0]
    for length in lengths:
        documents.append(documents[-1] + length)
    levels = [ZoneLevel(*level) for level in Plan.parse("u8/1x8").zone_levels(64)]
    times = []
    for _ in range(5):
        start = time.process_time()
        make_layout("zones", levels, documents)
        times.append(time.process_time() - start)
    assert len(lengths) > 4000 and min(times) < 0.02, times


def test_positions_stay_inside_the_sequence():
    assert zigzag(range(4), 5).positions(3) == [3, 4]
    assert zigzag(range(4), 5).positions(0) == [0, 4]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: check_layout("spiral"), "layout 'spiral' is not one of zones, zigzag, contiguous"),
        (lambda: zigzag(range(4), 0), "length >= 1"),
        (lambda: contiguous((), 8), "at least one rank, got 8 on 0 ranks"),
        (lambda: Layout(8, ()), "on 0 ranks"),
    ],
)
def test_invalid_layouts_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()

import random
import time
from itertools import accumulate, pairwise

import pytest

from startrail.compile.explain import work_by_rank
from startrail.compile.problem import zone_levels
from startrail.geometry.distributions import document_lengths
from startrail.geometry.layout import LAYOUTS, Layout, contiguous, zigzag, zigzag_runs
from startrail.geometry.zones import ROUNDING, check_layout, make_layout
from startrail.schedule.plan import Plan
from tests.helpers import FULL

PLANS = [("u1", 1), ("1x2", 2), ("u3", 3), ("2x1/u2", 4), ("u2/1x2", 4), ("u2/1x2/u2", 8), ("star2/u2", 16)]


def layout_of(name, text, world, documents, shares=None):
    return make_layout(name, zone_levels(Plan.parse(text), world), documents, shares)


def check_ownership(layout, plan, world):
    """Every token has one owner, and the tokens of shards can be sorted by position."""
    assert layout.world == world
    owned = [p for rank in range(world) for start, count in layout.runs(rank) for p in range(start, start + count)]
    assert sorted(owned) == list(range(layout.length))
    for zone in layout.zones:
        inside = plan.inside(zone.level).place(zone.size, 0)
        for shard in range(inside.num_shards):
            members = inside.shard_ranks(shard)
            chunk, places = zone.places(members)
            tokens = [None] * sum(zone.counts[member] for member in members)
            for member, at in zip(members, places, strict=True):
                own = [p for start, count in zone.runs[member] for p in range(start, start + count)]
                for index, place in enumerate(at):
                    tokens[place * chunk : (place + 1) * chunk] = own[index * chunk : (index + 1) * chunk]
            runs = zone.runs_of(members, layout.length)
            real = [p for start, count in runs for p in range(start, start + count)]
            assert real == tokens[: len(real)], f"the tokens of shard {shard} are not sorted"
            assert all(p >= layout.length for p in tokens[len(real) :]), "padding comes last"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("text, world", PLANS)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 1001])
def test_every_token_has_one_owner_and_shards_are_sorted(name, text, world, length):
    layout, plan = layout_of(name, text, world, (0, length)), Plan.parse(text)
    check_ownership(layout, plan, world)
    assert set(layout.counts) == {layout.largest}
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
        assert set(layout.counts) == {layout.largest}
        assert layout == layout_of("zones", text, world, documents), "the same documents have the same layout"
        for zone in layout.zones:  # whole documents
            for start, count in zone.runs_of(range(zone.size), length):
                assert start in documents and start + count in documents
        padding = layout.largest * world - length
        assert padding <= max(0.1 * length, 2 * world)


def random_shares(chance, world):
    kind = chance.choice(["slow node", "any", "extreme"])
    if kind == "slow node":
        return [1.0] * (world // 2) + [0.5] * (world - world // 2)
    if kind == "any":
        return [chance.uniform(0.3, 3) for _ in range(world)]
    return [10.0 ** chance.uniform(-300, 300) for _ in range(world)]


@pytest.mark.parametrize("text, world", PLANS)
def test_shares_divide_tokens_in_proportion(text, world):
    slots = Plan.parse(text).slots(world)
    for seed in range(60 if FULL else 20):
        chance = random.Random(seed)
        length, shares = chance.choice([1, 3, 17, 1001]), random_shares(chance, world)
        if len(set(shares)) == 1:
            continue
        exact = [length * share / sum(shares) for share in shares]
        for name in LAYOUTS:
            layout = layout_of(name, text, world, (0, length), shares)
            check_ownership(layout, Plan.parse(text), world)
            assert sum(layout.counts) == length, "nothing is padded"
            assert all(abs(count - share) < 1.001 for count, share in zip(layout.counts, exact, strict=True))
        zigzag_layout = layout_of("zigzag", text, world, (0, length), shares)
        in_order = [layout_runs for _, layout_runs in sorted(zip(slots, zigzag_layout.table, strict=True))]
        first, second = 0, length  # where the tokens of outer slots end and begin
        for runs in in_order:
            tokens = sum(count for _, count in runs)
            early, late = -(-tokens // 2), tokens // 2
            second -= late
            assert runs == tuple((start, count) for start, count in ((first, early), (second, late)) if count)
            first += early


@pytest.mark.parametrize("text, world", PLANS)
def test_zones_divide_tokens_and_work_in_proportion_to_shares(text, world):
    for seed in range(20 if FULL else 5):
        chance = random.Random(seed)
        length, shares = chance.choice([3, 17, 100, 500]), random_shares(chance, world)
        documents = tuple(sorted({0, length, *chance.choices(range(1, length), k=chance.choice([1, 4, length // 3]))}))
        layout = layout_of("zones", text, world, documents, shares)
        check_ownership(layout, Plan.parse(text), world)
        for zone in layout.zones:  # whole documents
            for start, count in zone.runs_of(range(zone.size), length):
                assert start in documents and start + count in documents
            weight = sum(shares[zone.first : zone.first + zone.size])
            for share, count in zip(shares[zone.first :], zone.counts, strict=False):
                assert zone.size == 1 or not zone.fills or abs(count - sum(zone.counts) * share / weight) <= 2


@pytest.mark.parametrize("kind", ["pretraining", "agents"])
@pytest.mark.parametrize("text, world", [("1x8", 8), ("u4/1x8", 32), ("u8/1x8", 64)])
def test_zones_balance_work_in_proportion_to_shares(kind, text, world):
    shares = [1.0] * (world - 8) + [0.5] * 4 + [0.9] * 4
    lengths = document_lengths(kind, world * 16384, seed=1)
    documents = (0, *(sum(lengths[: i + 1]) for i in range(len(lengths))))
    layout = layout_of("zones", text, world, documents, shares)
    work = work_by_rank(layout, documents)
    for rank, share in enumerate(shares):
        assert work[rank] <= 1.1 * sum(work) * share / sum(shares)
        assert layout.counts[rank] <= 1.02 * documents[-1] * share / sum(shares)


@pytest.mark.parametrize("text, world", PLANS)
def test_equal_shares_change_nothing(text, world):
    for seed in range(10):
        chance = random.Random(seed)
        length = chance.choice([3, 17, 100, 500])
        documents = tuple(sorted({0, length, *chance.choices(range(1, length), k=chance.choice([1, 4, length // 3]))}))
        for name in ("zones", *LAYOUTS):
            given = layout_of(name, text, world, documents, [chance.uniform(0.1, 9)] * world)
            assert given == layout_of(name, text, world, documents)


def test_tokens_that_cannot_be_divided_are_dealt_in_turn():
    for seed in range(100):
        chance = random.Random(seed)
        weights = [chance.choice([1, 1, 2, 5, 1000]) for _ in range(chance.randint(1, 9))]
        documents, length = [], 0
        for _ in range(chance.randint(1, 40)):
            documents.append((length, chance.choice([1, 2, 3, chance.randint(1, 200)])))
            length += documents[-1][1]
            held = [sum(count for _, count in runs) for runs in zigzag_runs(documents, weights)]
            assert sum(held) == length
            for own, weight in zip(held, weights, strict=True):
                assert abs(own - length * weight / sum(weights)) < 2


@pytest.mark.parametrize(
    "shares, message",
    [
        ((1, 1), "got 2 shares for 4 ranks"),
        ((1, 1, 0, 1), "the share of rank 2 is 0.0"),
        ((1, 1, 1, -2), "the share of rank 3 is -2.0"),
        ((1, float("nan"), 1, 1), "the share of rank 1 is nan"),
        ((float("inf"), 1, 1, 1), "the share of rank 0 is inf"),
        ((10**400, 1, 1, 1), "shares must be numbers"),
        ("fast", "got 'fast'"),
        (7, "got 7"),
    ],
)
def test_invalid_shares_raise(shares, message):
    for name in ("zones", *LAYOUTS):
        for documents in ((0, 9), (0, 4, 9)):
            with pytest.raises(ValueError, match=message):
                layout_of(name, "u2/1x2", 4, documents, shares)


@pytest.mark.parametrize("kind", ["pretraining", "agents"])
@pytest.mark.parametrize("text, world", [("1x8", 8), ("u4/1x8", 32), ("u8/1x8", 64), ("1x64", 64)])
def test_zones_balance_work_and_tokens(kind, text, world):
    for per_rank in (8192, 32768):
        lengths = document_lengths(kind, world * per_rank, seed=1)
        documents = (0, *(sum(lengths[: i + 1]) for i in range(len(lengths))))
        layout = layout_of("zones", text, world, documents)
        work = work_by_rank(layout, documents)
        assert sum(work) == sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(documents))
        few = len(lengths) < 2 * world // 8 or text == "1x64"  # fewer than two documents per node, or no nodes
        assert max(work) <= (1.2 if few else 1.08) * sum(work) / world
        assert layout.largest <= 1.02 * per_rank


@pytest.mark.parametrize("text, world", [("1x8", 8), ("u4/1x8", 32)])
@pytest.mark.parametrize("longest", [1, 30, 4000])
def test_documents_far_shorter_than_a_rank_are_placed_several_at_a_time(text, world, longest):
    """However many there are, ranks hold few runs, of whole documents."""
    chance = random.Random(longest)
    lengths = [chance.randint(1, longest) for _ in range(100_000)]
    documents = (0, *accumulate(lengths))
    layout = layout_of("zones", text, world, documents)
    work, ends = work_by_rank(layout, documents), set(documents)
    assert max(work) <= 1.08 * sum(work) / world
    assert layout.largest <= 1.02 * documents[-1] / world
    assert sum(map(len, layout.table)) <= 3 * ROUNDING * world
    for zone in layout.zones:
        for start, count in zone.runs_of(range(zone.size), documents[-1]):
            assert start in ends and start + count in ends


def test_placing_1000_documents_on_64_ranks_takes_little_cpu():
    lengths = document_lengths("pretraining", 64 * 27_000, seed=2)
    documents = (0, *accumulate(lengths))
    levels, times = zone_levels(Plan.parse("u8/1x8"), 64), []
    for _ in range(5):
        start = time.process_time()
        make_layout("zones", levels, documents)
        times.append(time.process_time() - start)
    assert len(lengths) >= 1000 and min(times) < 0.03, times  # 10 ms on a quiet machine


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

from collections import Counter

import pytest

from startrail.schedule.families.nested import Rings
from startrail.schedule.plan import Plan, plans_for, variants_of
from startrail.schedule.program import build_program, closed_form
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import FORWARD, PASSES


@pytest.mark.parametrize(
    "text",
    ["1x16", "u8", "star4", "2x2/u8", "2x2/1x2/u4", "1x4/1x8", "star2/u4", "1x1", "u1", "u4/1x8", "u4/u8"]
    + [
        "u2/2x2/u4",
        "u4/star2",
        "u4/1x8,exchange=twice",
        "u8,groups=2,exchange=twice",
        "1x2/u4/2x1,keep=all",
        "u2/star2/u2,groups=2",
    ]
    + ["1x8,channels=16", "u4/1x8,groups=2,channels=8/24", "2x4,channels=24"]
    + ["2x2/u8,keep=all", "4x4,backward=queries", "2x2,keep=queries,groups=2", "star2,keep=all,groups=3"],
)
def test_text_form_round_trips(text):
    assert str(Plan.parse(text)) == text


def test_every_plan_round_trips():
    for world in (1, 4, 12, 16):
        for plan in plans_for(world, max_levels=3):
            for variant in variants_of(plan):
                assert Plan.parse(str(variant)) == variant
                variant.check_world(world)


def test_the_pieces_that_a_plan_keeps_are_counted_as_listed():
    for world in (8, 12, 16):
        for plan in plans_for(world, max_levels=2):
            for variant in variants_of(plan):
                place = variant.place(world, world - 1)
                listed = Counter(piece.kind for piece in variant.family.kept(variant, place, 0))
                assert Counter(variant.family.num_kept(variant, place)) == listed, str(variant)


def test_defaults_are_not_written():
    assert str(Plan.parse(" 2x2 , keep=none,backward=keys, groups=1")) == "2x2"
    assert str(Plan.parse("star2,backward=queries")) == "star2"
    assert str(Plan.parse("1x4/1x8,channels=8/8")) == "1x4/1x8"
    assert Plan.parse("1x4/1x8,channels=16/16") == Plan.parse("1x4/1x8,channels=16")
    assert str(Plan.parse("u4/1x8,keep=all,channels=8/16").inside(1)) == "u1/1x8,keep=all,channels=8/16"


@pytest.mark.parametrize(
    "text, message",
    [
        ("1x8,exchange=twice", "exchange=twice keeps nothing, but there are no heads to exchange"),
        ("u4/1x8,keep=all,exchange=twice", "exchange=twice keeps nothing, but keep=all keeps more"),
        ("u4,exchange=thrice", "exchange='thrice' is not one of once, twice"),
        ("1x8,channels=0", "plan 1x8: channels=0 must be one number from 1 to 24, or 1 of them, for each level"),
        ("1x4/1x8,channels=8/16/8", "channels=8/16/8 must be one number from 1 to 24, or 2 of them, for each level"),
        ("1x8,channels=25", "channels=25 must be one number from 1 to 24"),
        ("1x8,channels=many", "channels='many' is not a whole number"),
        ("", "cannot read ''"),
        ("2x", "cannot read '2x'"),
        ("2x2/", "cannot read ''"),
        ("u8/", "cannot read ''"),
        ("u", "cannot read 'u'"),
        ("0x4", "must be at least 1"),
        ("u0", "at least 1 rank"),
        ("star0", "cannot read 'star0'"),
        ("2x2/star2", "2x2 and star2 cannot be combined"),
        ("star2/u2/2x2", "star2 and 2x2 cannot be combined"),
        ("star2/star2", "star2 cannot be combined with levels other than uU"),
        ("2x2,fast", "cannot read option 'fast'"),
        ("2x2,keep=some", "keep='some' is not one of none, queries, all"),
        ("2x2,backward=values", "backward='values' is not one of"),
        ("2x2,groups=two", "groups='two' is not a whole number"),
        ("2x2,groups=0", "must be at least 1"),
        ("2x2,keep=all,keep=all", "cannot read option"),
        ("2x2,keep=all,backward=queries", "keep=all needs backward=keys"),
        ("star2,backward=keys", "one backward form"),
        ("-2x2", "cannot read '-2x2'"),
    ],
)
def test_invalid_plans_are_rejected_with_the_reason(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Plan.parse(text)


def test_an_unfitting_plan_raises_its_equation_and_the_plans_that_fit():
    with pytest.raises(ValueError) as error:
        Plan.parse("2x4/u2").check_world(12)
    text = str(error.value)
    assert "world size 12 is not teams 2 x ring 4 x heads 2 = 16" in text
    assert "plans that fit 12 ranks: 1x12, 2x6, 3x4" in text
    with pytest.raises(ValueError, match="world size 12 is not heads 2 x teams 2 x ring 4 x heads 3 = 48"):
        Plan.parse("u2/2x4/u3").check_world(12)
    with pytest.raises(ValueError, match="world size 12 is not a multiple of team² 4² x heads 1 = 16"):
        Plan.parse("star4").check_world(12)


def test_sizes():
    assert Plan.parse("2x2/1x2/u4").size == 32
    assert Plan.parse("2x3").levels == (Rings(2, 3),)
    assert Plan.parse("u4/2x2").heads == 4
    with pytest.raises(ValueError, match="it fits any multiple of 16 ranks"):
        _ = Plan.parse("star4").size


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("1x4", 0),
        ("1x4,keep=all", 3),  # keys and values of the three other ranks
        ("2x2,keep=queries", 1),  # queries of the other rank of the team
        ("2x2,keep=all", 2),
        ("u4", 2),  # this rank's heads of all tokens: q, and k with v
        ("u2/1x2,keep=all", 3),
    ],
)
def test_bytes_kept_for_the_backward_pass(text, pieces):
    plan = Plan.parse(text)
    sizes = Sizes(plan, local=16, batch=1, q_heads=8, kv_heads=4, head_dim=8)
    piece = 16 * 8 * 8 * 4  # bytes of q, and as many of k and v, which have half as many heads
    assert sizes.kept_bytes(build_program(plan, 4, 0, FORWARD).kept) == pieces * piece


def test_every_plan_is_enumerated_once():
    """Compare with an independent search for all products of levels that equal the number of ranks."""
    for world, max_levels in ((8, 3), (12, 2)):
        texts = [str(plan) for plan in plans_for(world, max_levels)]
        assert len(set(texts)) == len(texts)
        counts = range(1, max_levels + 1)
        assert set(texts) == {"/".join(levels) for count in counts for levels in _all_levels(world, count)}


def _all_levels(world, count):
    if count == 0:
        return [()] if world == 1 else []
    all_levels = []
    for size in (d for d in range(2, world + 1) if world % d == 0):
        here = [f"u{size}", *(f"{team}x{size // team}" for team in range(1, size + 1) if size % team == 0)]
        here += [f"star{team}" for team in range(2, size) if size % team**2 == 0]
        for rest in _all_levels(world // size, count - 1):
            for level in here:
                others = [other for other in rest if not other.startswith("u")]
                if not (level.startswith("u") or not others) and ("star" in level or "star" in "".join(others)):
                    continue  # a star level can only be combined with heads
                all_levels.append((level, *rest))
    return all_levels


def test_ranks_that_share_a_shard_are_adjacent_in_the_order_of_tokens():
    for text, world in (("u4/1x8", 32), ("u2/2x2/u4", 32), ("u2/star2", 8)):
        plan = Plan.parse(text)
        places = [plan.place(world, rank) for rank in range(world)]
        assert plan.slots(world) == tuple(place.slot for place in places)
        assert sorted(plan.slots(world)) == list(range(world))
        for place in places:
            slots = [places[rank].slot for rank in place.shard_ranks(place.shard)]
            assert slots == list(range(slots[0], slots[0] + plan.heads))
            assert place.rank_of(place.shard) == place.head_rank(place.head) == place.rank


def test_exchanging_again_sends_three_shards_more_and_keeps_nothing():
    """Over K nodes, in shards of a node: 11(K-1)/K instead of 8(K-1)/K, and q, k and v of every layer are not kept."""
    shards = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)
    for nodes in (2, 4, 8):
        once, twice = (Plan.parse(f"u{nodes}{option}") for option in ("", ",exchange=twice"))
        sent = [sum(sum(closed_form(plan, nodes, 0, pass_, shards)) for pass_ in PASSES) for plan in (once, twice)]
        assert sent == pytest.approx([8 * (nodes - 1) / nodes, 11 * (nodes - 1) / nodes])
        kept = [build_program(plan, nodes, 0, FORWARD).kept for plan in (once, twice)]
        assert [len(pieces) for pieces in kept] == [2, 0]

import pytest

from startrail.geometry.layout import LAYOUTS, Layout, check_layout, contiguous, zigzag
from startrail.schedule.plan import Plan


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    "text, world", [("u1", 1), ("1x2", 2), ("u3", 3), ("2x1/u2", 4), ("u2/1x2", 4), ("u2/1x2/u2", 8)]
)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 1001])
def test_every_token_has_one_owner_and_shards_are_sorted(name, text, world, length):
    plan = Plan.parse(text)
    layout = LAYOUTS[name](plan.slots(world), length)
    assert sorted(layout.order()) == list(range(layout.local * world))
    owned = [p for rank in range(world) for start, count in layout.runs(rank) for p in range(start, start + count)]
    assert sorted(owned) == list(range(length))
    place, size = plan.place(world, 0), layout.chunk
    for shard in range(place.num_shards):
        ranks = place.shard_ranks(shard)
        tokens = [None] * (layout.local * len(ranks))
        for rank, places in zip(ranks, layout.places(ranks), strict=True):
            local = layout.order()[rank * layout.local :][: layout.local]
            for index, at in enumerate(places):
                tokens[at * size : (at + 1) * size] = local[index * size : (index + 1) * size]
        assert tokens == sorted(tokens), f"the tokens of shard {shard} are not sorted"
        runs = layout.runs(*ranks)
        assert [p for start, count in runs for p in range(start, start + count)] == [p for p in tokens if p < length]
        assert len(runs) <= len(layout.chunks[0]), f"shard {shard} has more runs than a single rank"


def test_positions_stay_inside_the_sequence():
    assert zigzag(range(4), 5).positions(3) == [3, 4]
    assert zigzag(range(4), 5).positions(0) == [0, 4]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: check_layout("spiral"), "layout 'spiral' is not one of zigzag, contiguous"),
        (lambda: zigzag(range(4), 0), "length >= 1"),
        (lambda: contiguous((), 8), "at least one rank, got 8 on 0 ranks"),
        (lambda: Layout(8, 8, ()), "on 0 ranks"),
    ],
)
def test_invalid_layouts_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()

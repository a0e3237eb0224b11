import pytest

from startrail.layout import Layout, layout_of_local


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 1001])
def test_every_token_has_one_owner_and_neighbours_sort(kind, world, length):
    layout = Layout(kind, world, length)
    assert sorted(layout.order()) == list(range(layout.local * world))
    owned = [p for rank in range(world) for start, count in layout.runs(rank) for p in range(start, start + count)]
    assert sorted(owned) == list(range(length))
    for ranks in (d for d in (1, 2, 4) if world % d == 0):
        for shard in range(world // ranks):
            place = [None] * (layout.local * ranks)
            for member in range(ranks):
                mine = layout.order()[(shard * ranks + member) * layout.local :][: layout.local]
                for chunk, slot in enumerate(layout.slots(ranks)[member]):
                    size = layout.chunk
                    place[slot * size : (slot + 1) * size] = mine[chunk * size : (chunk + 1) * size]
            assert place == sorted(place), "neighbours' tokens come out sorted"
            runs = [p for start, count in layout.runs(shard, ranks) for p in range(start, start + count)]
            assert runs == [p for p in place if p < length] == place[: len(runs)]


def test_positions_stay_inside_the_sequence():
    assert Layout("zigzag", 4, 5).positions(3) == [3, 4]
    assert Layout("zigzag", 4, 5).positions(0) == [0, 4]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("zigzag", 4, 7, None), "zigzag shards hold 2 equal chunks, but this rank has 7 local tokens"),
        (("zigzag", 4, 8, 40), "length 40 on 4 ranks gives 10 local tokens a rank .* but this rank has 8"),
        (("spiral", 4, 8, None), "layout 'spiral' is not one of zigzag, contiguous|"),
        (("zigzag", 4, 8, 0), "length >= 1"),
    ],
)
def test_shards_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        layout_of_local(*arguments)

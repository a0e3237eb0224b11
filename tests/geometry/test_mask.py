"""Tiles cover exactly the visible pairs, each once, for every mask and every pair of shards."""

import itertools
import random
import re
import sys
from collections import Counter

import pytest

from startrail.geometry.bands import bands_of
from startrail.geometry.layout import LAYOUTS, contiguous, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.needs import needed_keys
from startrail.geometry.tiles import Tile, segments_of, tiles_of
from tests.helpers import FULL, any_slices, random_slices


def fa2_window(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    """The window that FlashAttention 2 applies, forward and backward, in torch and in its own package: mha_fwd and
    mha_varlen_fwd convert it, then set_params_fprop. ``rows`` and ``keys`` are maxima over the call's rectangles."""
    left, right = (-1 if end >= keys else end for end in (left, right))
    if left < 0 and right < 0:
        return left, right
    return (keys if left < 0 else left), (keys if right < 0 else right)


def fa3_window(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    """The same for FlashAttention 3 (hopper/flash_api.cpp). FlashAttention 4 applies the window as it is."""
    left, right = -1 if left >= keys - 1 else left, -1 if right >= rows - 1 else right
    if left < 0 and right < 0:
        return left, right
    return (keys - 1 if left < 0 else left), (rows - 1 if right < 0 else right)


def exact_window(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    return left, right


SEEDS = range(400 if FULL else 150)
GENERATIONS = (exact_window, fa2_window, fa3_window)


def covered(tile: Tile, window_of=exact_window) -> list[tuple[int, int]]:
    pairs = []
    if tile.form == "bands":  # windows are aligned at the last row and the last key
        q0, k0 = tile.q0, tile.k0
        left, right = window_of(*tile.window, *(max(side) for side in zip(*tile.packs, strict=True)))
        for rows, keys in tile.packs:
            for t in range(rows):
                first = 0 if left < 0 else max(0, t + keys - rows - left)
                last = keys if right < 0 else min(keys, t + keys - rows + right + 1)
                pairs += [(q0 + t, k0 + j) for j in range(first, last)]
            q0, k0 = q0 + rows, k0 + keys
        assert (q0, k0) == (tile.q1, tile.k1)
        return pairs
    for i in range(tile.q0, tile.q1):
        for j in range(tile.k0, tile.k1):
            row, key = i - tile.q0, j - tile.k0
            if tile.form == "masked":
                s = next(s for s in tile.bounds if s.q0 <= i < s.q1)
                seen = s.low + (i - s.q0) * s.dlow <= j < s.high + (i - s.q0) * s.dhigh
            else:
                seen = {"full": True, "causal": key <= row, "anticausal": key >= row}[tile.form]
            if seen:
                pairs.append((i, j))
    return pairs


def sees(mask: Mask, i: int, j: int) -> bool:
    """The definition of a mask, pair by pair."""
    seen = (
        any(s.q0 <= i < s.q1 and s.low + (i - s.q0) * s.dlow <= j < s.high + (i - s.q0) * s.dhigh for s in mask.steps)
        or not mask.steps
    )
    seen &= not (mask.causal and j > i)
    seen &= mask.window is None or abs(i - j) < mask.window
    seen &= mask.chunk is None or i // mask.chunk == j // mask.chunk
    seen |= any(start <= min(i, j) and max(i, j) < stop for start, stop in mask.blocks)
    return seen and not any(min(i, j) < edge <= max(i, j) for edge in mask.documents or ())


def positions(runs) -> list[int]:
    return [start + i for start, count in runs for i in range(count)]


def random_case(seed: int):
    """A random mask and the runs of two shards."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2, 3])
    world = ranks * rng.choice([1, 2, 3, 4])
    length = rng.choice([1, 2, 17, 40, 150, 300])
    layout = LAYOUTS[rng.choice(["zigzag", "contiguous"])](range(world), length)
    documents = None
    if rng.random() < 0.5:
        documents = (0, *sorted(rng.choices(range(1, length + 1), k=rng.choice([0, 1, 3, 20]))), length)
    window = rng.choice([None, None, 1, 2, 7, 20, 130, 500])
    shards = world // ranks
    mask = Mask(rng.random() < 0.5, window, documents, rng.choice([None, None, 1, 3, 50]), **random_steps(rng, length))
    queries, keys = (
        layout.runs(*range(shard * ranks, (shard + 1) * ranks))
        for shard in (rng.randrange(shards), rng.randrange(shards))
    )
    return mask, queries, keys


def random_steps(rng: random.Random, length: int) -> dict:
    """Blocks, or the steps of random slices, or neither."""
    kind = rng.choice(["blocks", "slices", None])
    ends = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.choice([1, 2, 3])) // 2 * 2))
    if kind == "blocks":
        return dict(blocks=tuple(zip(ends[::2], ends[1::2], strict=True)))
    if kind is None:
        return {}
    return dict(steps=Mask.from_slices(random_slices(rng, length)).steps)


@pytest.mark.parametrize("short", [4, 128])
def test_tiles_cover_exactly_the_visible_pairs(short, monkeypatch):
    monkeypatch.setattr("startrail.geometry.tiles.SHORT", short)  # a small limit exercises the paths of long sequences
    for seed in SEEDS:
        mask, queries, keys = random_case(seed)
        check_cover(tiles_of(mask, queries, keys, call_cost=short * short), mask, queries, keys, case=f"seed {seed}")


def test_bands_cover_exactly_the_visible_pairs():
    for seed in SEEDS:
        mask, queries, keys = random_case(seed)
        bands = bands_of(segments_of(mask, queries, keys))
        check_cover(bands, mask, queries, keys, GENERATIONS, case=f"seed {seed}")


def test_every_generation_is_exact_where_a_window_spans_a_whole_shard():
    """Chunks of 64 in a window of 100, shards 3 and 2. In one band of 99 rows and 64 keys, FlashAttention 2 would get
    595 pairs wrong and give some rows an lse of +inf."""
    layout = zigzag(range(4), 8 * 64)
    mask = Mask(causal=True, window=100)
    queries, keys = layout.runs(3), layout.runs(2)
    tiles = bands_of(segments_of(mask, queries, keys))
    check_cover(tiles, mask, queries, keys, GENERATIONS)
    alone = Tile(0, 99, 0, 64, "bands", window=(0, -1), packs=((99, 64),))
    assert len(set(covered(alone)) ^ set(covered(alone, fa2_window))) == 595, "the test must detect the error"
    assert covered(alone) == covered(alone, fa3_window)


@pytest.mark.parametrize("seed", range(60 if FULL else 20))
def test_slices_that_leave_queries_without_keys(seed):
    rng = random.Random(seed)
    for _ in range(20):
        length, world = rng.choice([5, 12, 40]), rng.choice([1, 2, 3])
        slices = random_slices(rng, length)
        pairs = pairs_of((*each, 0) for each in slices)
        mask, layout = Mask.from_slices(slices), LAYOUTS[rng.choice(["zigzag", "contiguous"])](range(world), length)
        for queries, keys in itertools.product(map(layout.runs, range(world)), repeat=2):
            check_slices(mask, queries, keys, pairs, length)


def check_slices(mask, queries, keys, pairs, length):
    """Tiles and needed keys of two shards are those of the pairs that a mask of slices should show."""
    own, others = positions(queries), positions(keys)
    seen = pairs & set(itertools.product(own, others))
    for tiles in (tiles_of(mask, queries, keys), bands_of(segments_of(mask, queries, keys))):
        check_cover(tiles, mask, queries, keys, GENERATIONS, seen=seen)
    assert positions(needed_keys(mask, queries, length)) == sorted({j for i, j in pairs if i in own} - {*own})


def pairs_of(slices) -> set[tuple[int, int]]:
    """The pairs that slices cover, by definition."""
    return {
        (i, j)
        for q0, q1, k0, k1, causal, inverse in slices
        for i in range(q0, q1)
        for j in range(k0 + (i - q0 if inverse else 0), k1 - (q1 - 1 - i if causal else 0))
    }


@pytest.mark.parametrize("seed", range(60 if FULL else 20))
def test_any_slices_are_a_sum_of_staircases(seed):
    rng = random.Random(seed)
    for _ in range(20):
        length, world = rng.choice([5, 12, 40]), rng.choice([1, 2, 3])
        slices = any_slices(rng, length)
        pairs, mask = pairs_of(slices), Mask.from_slices(slices)
        counted = Counter(
            (i, j) for each in mask.staircases for i in range(length) for j in range(*each.visible(i, length))
        )
        assert counted == Counter(pairs), slices
        for each in mask.staircases:
            assert each.staircases == (each,)
            shown = [each.visible(i, length) for i in range(length) if len(range(*each.visible(i, length)))]
            assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(shown))
        layout = LAYOUTS[rng.choice(["zigzag", "contiguous"])](range(world), length)
        for queries, keys in itertools.product(map(layout.runs, range(world)), repeat=2):
            check_slices(mask, queries, keys, pairs, length)


def test_few_slices_need_few_staircases():
    sinks = [(4, 100, 0, 4), (0, 20, 0, 20, True), (20, 100, 1, 100, True, True)]
    assert len(Mask.from_slices(sinks).staircases) == 2
    assert len(Mask.from_slices([(0, 9, 0, 9, True), (9, 20, 9, 20, True), (20, 30, 0, 30, True)]).staircases) == 2
    shuffled = random.Random(0).sample(sinks, 3)
    assert Mask.from_slices(shuffled) == Mask.from_slices(sinks)


def random_tree(rng: random.Random) -> tuple[list[int], list[int]]:
    """Parents and lengths, depth first."""
    parents, path = [-1], [0]
    for number in range(1, rng.choice([1, 2, 5, 12])):
        del path[rng.randint(0 if rng.random() < 0.1 else 1, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(number)
    return parents, [rng.randint(1, 6) for _ in parents]


@pytest.mark.parametrize("seed", range(100 if FULL else 30))
def test_tokens_of_a_tree_see_their_ancestors(seed):
    parents, lengths = random_tree(random.Random(seed))
    ways = [[number] for number in range(len(parents))]  # from the root to each node
    for number, parent in enumerate(parents):
        ways[number] = [*(ways[parent] if parent >= 0 else []), number]
    starts = [0, *itertools.accumulate(lengths)]
    tokens = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    pairs, positions_by_depth = set(), []
    for number, way in enumerate(ways):
        for i in tokens[number]:
            before = [j for node in way for j in tokens[node] if j <= i]
            pairs |= {(i, j) for j in before}
            positions_by_depth.append(len(before) - 1)
    mask = Mask.tree(parents, lengths)
    assert {
        (i, j) for each in mask.staircases for i in range(starts[-1]) for j in range(*each.visible(i, starts[-1]))
    } == pairs
    assert Mask.tree_positions(parents, lengths) == positions_by_depth
    assert len(mask.staircases) <= max(map(len, ways)), "at most one staircase per depth"
    layout = zigzag(range(2), starts[-1])
    for queries, keys in itertools.product(map(layout.runs, range(2)), repeat=2):
        check_slices(mask, queries, keys, pairs, starts[-1])


@pytest.mark.parametrize(
    "parents, lengths, message",
    [
        ([], [], "one parent and one length per node, got 0 and 0"),
        ([-1, 0], [3], "got 2 and 1"),
        ([-1, 0], [3, 0], "node 1 of the tree has 0 tokens"),
        ([-1, 0, 0, 1], [1, 1, 1, 1], "node 3 of the tree comes after node 2, but its parent 1 is neither"),
        ([0], [1], "its parent 0"),
        ([-1, 7], [1, 1], "its parent 7"),
    ],
)
def test_invalid_trees_raise(parents, lengths, message):
    for function in (Mask.tree, Mask.tree_positions):
        with pytest.raises(ValueError, match=message):
            function(parents, lengths)


def check_cover(tiles, mask, queries, keys, generations=(exact_window,), case="", seen=None):
    case += f" {mask} {queries} {keys}"
    qpos, kpos = positions(queries), positions(keys)
    expected = [
        (i, j)
        for i, p in enumerate(qpos)
        for j, k in enumerate(kpos)
        if (sees(mask, p, k) if seen is None else (p, k) in seen)
    ]
    for window_of in generations:
        pairs = sorted(pair for tile in tiles for pair in covered(tile, window_of))
        assert pairs == expected, f"{case}: {window_of.__name__}"
    assert sum(tile.area for tile in tiles) == len(expected), case
    for tile in tiles:
        assert tile.q0 < tile.q1, case
        assert tile.k0 < tile.k1, case
        rows = {i for i, _ in covered(tile)}
        assert rows == set(range(tile.q0, tile.q1)), f"{case}: a row of {tile} sees nothing"


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_zigzag_gives_every_causal_block_equal_work_in_one_call(world):
    layout = zigzag(range(world), world * 64)
    blocks = [tiles_of(Mask(causal=True), layout.runs(i), layout.runs(j)) for i in range(world) for j in range(world)]
    assert {len(tiles) for tiles in blocks} == {1}
    diagonal = {tiles_of(Mask(causal=True), layout.runs(i), layout.runs(i))[0].area for i in range(world)}
    off = {tiles[0].area for tiles in blocks} - diagonal
    assert off == {64 * 64 // 2}
    assert diagonal == {64 * 65 // 2}


def test_windows_and_documents_need_few_calls_as_bands():
    """8192 tokens per rank on 4 ranks. Without bands, these blocks need tens of tiles."""
    layout = zigzag(range(4), 4 * 8192)
    documents = tuple(range(0, 4 * 8192 + 1, 128))
    for mask, max_calls in (
        (Mask(causal=True, window=1024), 3),
        (Mask(causal=True, documents=documents), 1),
        (Mask(causal=True, window=100, documents=documents), 1),
        (Mask(window=1024), 3),
    ):
        for other in range(4):
            assert len(bands_of(segments_of(mask, layout.runs(1), layout.runs(other)))) <= max_calls


def test_tiling_takes_work_in_proportion_to_the_documents():
    """Counted in function calls, each step of a generator included."""

    def calls(documents):
        cuts = tuple(range(0, 16 * documents + 1, 16))
        runs = tuple((cut, 8) for cut in cuts[:-1])  # half of each document
        counted = 0

        def count(frame, event, value):
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            segments = segments_of(Mask(causal=True, documents=cuts), runs, runs)
        finally:
            sys.setprofile(None)
        assert len(segments) == documents
        return counted

    assert calls(400) < 2.5 * calls(200)


def test_long_windows_and_many_documents_need_few_calls():
    runs = contiguous([0], 8192).runs(0)
    assert len(tiles_of(Mask(causal=True, window=1024), runs, runs)) <= 3 * 9
    many = Mask(causal=True, documents=tuple(range(0, 8193, 8)))
    assert len(tiles_of(many, runs, runs)) <= 8192 // 256 + 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(window=0), "window=0 must be at least 1"),
        (dict(documents=(0, 5, 3)), "never decrease"),
        (dict(documents=(1, 5)), "start at 0"),
        (dict(documents=(0,)), "cu_seqlens"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
        (dict(blocks=((3, 5), (4, 6))), "in order, got (4, 6) after 5"),
        (
            dict(blocks=((0, 2),), steps=Mask.from_slices([(0, 2, 0, 2)]).steps),
            "pass either blocks= or slices, not both",
        ),
    ],
)
def test_invalid_masks_raise(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mask(**arguments)


@pytest.mark.parametrize(
    "slices, message",
    [
        ([], "at least one slice"),
        ([(2, 2, 0, 4)], "must be (q0, q1, k0, k1), not empty"),
        ([(-1, 2, 0, 4)], "must be (q0, q1, k0, k1), not empty"),
        ([(0, 5, 0, 4, True, True)], "causal and inverse together need k1 - k0 >= q1 - q0"),
        ([(i, i + 1, 69 - i, 70 - i) for i in range(70)], "more than 64 staircases, .* query 64 begins number 65"),
    ],
)
def test_slices_that_cannot_be_computed_raise(slices, message):
    with pytest.raises(ValueError, match=message if "*" in message else re.escape(message)):
        Mask.from_slices(slices)


def test_documents_must_end_at_the_length_of_the_sequence():
    with pytest.raises(ValueError, match="documents end at 9, but the sequence has 10 tokens"):
        Mask(documents=(0, 4, 9)).check_length(10)


@pytest.mark.parametrize("chunk", [1, 4, 16, 10**9])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_far_wider_than_the_sequence_costs_no_more_than_one_of_its_length(chunk, causal):
    wide, as_wide = (Mask(causal, window, chunk=chunk) for window in (10**8, 16))
    for start, stop in ((0, 16), (3, 9)):
        assert wide.breakpoints(start, stop, (4, 12), 16) <= as_wide.breakpoints(start, stop, (4, 12), 16)
    runs = ((0, 4), (12, 4))
    assert segments_of(wide, runs, runs) == segments_of(Mask(causal, chunk=chunk), runs, runs)

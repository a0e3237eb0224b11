"""Tiles must cover exactly the visible pairs, each once, for every mask and every pair of shards."""

import itertools
import random
import re

import pytest

from startrail.geometry.bands import bands_of
from startrail.geometry.layout import LAYOUTS, contiguous, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Tile, segments_of, tiles_of


def as_fa2_reads(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    """The window by which FlashAttention 2 masks, in torch and in its own package, forward and backward: what
    mha_fwd and mha_varlen_fwd, and then set_params_fprop, make of it in a call whose longest rectangles have so many
    rows and keys."""
    left, right = (-1 if end >= keys else end for end in (left, right))
    if left < 0 and right < 0:
        return left, right
    return (keys if left < 0 else left), (keys if right < 0 else right)


def as_fa3_reads(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    """The same of FlashAttention 3 (hopper/flash_api.cpp). FlashAttention 4 takes it as it is."""
    left, right = -1 if left >= keys - 1 else left, -1 if right >= rows - 1 else right
    if left < 0 and right < 0:
        return left, right
    return (keys - 1 if left < 0 else left), (rows - 1 if right < 0 else right)


def as_it_is(left: int, right: int, rows: int, keys: int) -> tuple[int, int]:
    return left, right


GENERATIONS = (as_it_is, as_fa2_reads, as_fa3_reads)


def covered(tile: Tile, reads=as_it_is) -> list[tuple[int, int]]:
    pairs = []
    if tile.form == "bands":  # as kernels with windows define them: aligned at the last row and the last key
        q0, k0 = tile.q0, tile.k0
        left, right = reads(*tile.window, *(max(side) for side in zip(*tile.packs, strict=True)))
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
    """The definition, token by token."""
    seen = any(s.q0 <= i < s.q1 and s.low <= j < s.high + (i - s.q0) * s.dhigh for s in mask.steps) or not mask.steps
    seen &= not (mask.causal and j > i)
    seen &= mask.window is None or abs(i - j) < mask.window
    seen &= mask.chunk is None or i // mask.chunk == j // mask.chunk
    seen |= any(start <= min(i, j) and max(i, j) < stop for start, stop in mask.blocks)
    return seen and not any(min(i, j) < edge <= max(i, j) for edge in mask.documents or ())


def positions(runs) -> list[int]:
    return [start + i for start, count in runs for i in range(count)]


def random_case(seed: int):
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
    mask = Mask(rng.random() < 0.5, window, documents, rng.choice([None, None, 1, 3, 50]), **random_stairs(rng, length))
    return layout, ranks, mask, rng.randrange(shards), rng.randrange(shards)


def random_stairs(rng: random.Random, length: int) -> dict:
    """Blocks, or the steps of random slices, or neither."""
    kind = rng.choice(["blocks", "slices", None])
    ends = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.choice([1, 2, 3])) // 2 * 2))
    if kind == "blocks":
        return dict(blocks=tuple(zip(ends[::2], ends[1::2], strict=True)))
    if kind is None:
        return {}
    slices, low, high = [], 0, 1
    for q0, q1 in itertools.pairwise([0, *ends, length]):
        if q0 == q1:
            continue
        low = rng.randint(low, high - 1)
        high, before = rng.randint(high, length), high
        causal = high - low >= q1 - q0 and high - (q1 - q0) + 1 >= before
        slices.append((q0, q1, low, high, causal and rng.random() < 0.5))
    return dict(steps=Mask.from_slices(slices).steps)


@pytest.mark.parametrize("seed", range(400))
@pytest.mark.parametrize("short", [4, 128])
def test_tiles_cover_exactly_what_is_visible(seed, short, monkeypatch):
    monkeypatch.setattr("startrail.geometry.tiles.SHORT", short)  # small limits take the paths that long sequences take
    layout, ranks, mask, row, column = random_case(seed)
    queries, keys = (layout.runs(*range(shard * ranks, (shard + 1) * ranks)) for shard in (row, column))
    check_cover(tiles_of(mask, queries, keys, call_cost=short * short), mask, queries, keys)


@pytest.mark.parametrize("seed", range(400))
def test_bands_cover_exactly_what_is_visible(seed):
    layout, ranks, mask, row, column = random_case(seed)
    queries, keys = (layout.runs(*range(shard * ranks, (shard + 1) * ranks)) for shard in (row, column))
    check_cover(bands_of(segments_of(mask, queries, keys)), mask, queries, keys, GENERATIONS)


def test_a_window_that_reaches_over_a_whole_neighbour_is_what_every_generation_sees():
    """Chunks of 64 in a window of 100, shard 3 with shard 2: as one band of 99 rows and 64 keys FlashAttention 2 would
    see 595 pairs wrongly, and give rows an lse of +inf."""
    layout = zigzag(range(4), 8 * 64)
    mask = Mask(causal=True, window=100)
    queries, keys = layout.runs(3), layout.runs(2)
    tiles = bands_of(segments_of(mask, queries, keys))
    check_cover(tiles, mask, queries, keys, GENERATIONS)
    alone = Tile(0, 99, 0, 64, "bands", window=(0, -1), packs=((99, 64),))
    assert len(set(covered(alone)) ^ set(covered(alone, as_fa2_reads))) == 595, "what it would do is what is checked"
    assert covered(alone) == covered(alone, as_fa3_reads)


def check_cover(tiles, mask, queries, keys, generations=(as_it_is,)):
    qpos, kpos = positions(queries), positions(keys)
    expected = [(i, j) for i, p in enumerate(qpos) for j, k in enumerate(kpos) if sees(mask, p, k)]
    for reads in generations:
        assert sorted(pair for tile in tiles for pair in covered(tile, reads)) == expected, reads.__name__
    assert sum(tile.area for tile in tiles) == len(expected)
    for tile in tiles:
        assert tile.q0 < tile.q1
        assert tile.k0 < tile.k1
        assert {i for i, _ in covered(tile)} == set(range(tile.q0, tile.q1)), "a row of a tile sees nothing"


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_zigzag_gives_every_causal_block_the_same_work_in_one_call(world):
    layout = zigzag(range(world), world * 64)
    blocks = [tiles_of(Mask(causal=True), layout.runs(i), layout.runs(j)) for i in range(world) for j in range(world)]
    assert {len(tiles) for tiles in blocks} == {1}
    diagonal = {tiles_of(Mask(causal=True), layout.runs(i), layout.runs(i))[0].area for i in range(world)}
    off = {tiles[0].area for tiles in blocks} - diagonal
    assert off == {64 * 64 // 2}
    assert diagonal == {64 * 65 // 2}


def test_as_bands_windows_and_documents_are_a_call_or_two():
    """Of a rank's own block and of one with another's, where tiles are tens: 8192 tokens a rank on 4 ranks."""
    layout = zigzag(range(4), 4 * 8192)
    documents = tuple(range(0, 4 * 8192 + 1, 128))
    for mask, most in (
        (Mask(causal=True, window=1024), 3),
        (Mask(causal=True, documents=documents), 1),
        (Mask(causal=True, window=100, documents=documents), 1),
        (Mask(window=1024), 3),
    ):
        for other in range(4):
            assert len(bands_of(segments_of(mask, layout.runs(1), layout.runs(other)))) <= most


def test_long_windows_and_many_documents_need_few_calls():
    runs = contiguous([0], 8192).runs(0)
    assert len(tiles_of(Mask(causal=True, window=1024), runs, runs)) <= 3 * 9
    many = Mask(causal=True, documents=tuple(range(0, 8193, 8)))
    assert len(tiles_of(many, runs, runs)) <= 8192 // 256 + 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(window=0), "window=0 must be at least 1"),
        (dict(documents=(0, 5, 3)), "never fall"),
        (dict(documents=(1, 5)), "start at 0"),
        (dict(documents=(0,)), "cu_seqlens"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
        (dict(blocks=((3, 5), (4, 6))), "in order, got (4, 6) after 5"),
        (dict(blocks=((0, 2),), steps=Mask.from_slices([(0, 2, 0, 2)]).steps), "make them slices too"),
    ],
)
def test_bad_masks_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mask(**arguments)


@pytest.mark.parametrize(
    "slices, message",
    [
        ([(0, 4, 0, 4), (2, 4, 6, 8)], "query 2 sees keys [0, 4) and [6, 8), which are not one interval"),
        ([(0, 4, 2, 4), (4, 6, 0, 6)], "query 4 sees keys [0, 6), but query 3 sees [2, 4): neither end may fall"),
        ([(0, 4, 0, 8), (4, 6, 0, 6)], "query 4 sees keys [0, 6), but query 3 sees [0, 8): neither end may fall"),
        ([(2, 2, 0, 4)], "must be (q0, q1, k0, k1), not empty"),
        ([(0, 5, 0, 4, True)], "a causal one has a key a query"),
    ],
)
def test_slices_that_are_no_staircase_name_the_query(slices, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mask.from_slices(slices)


def test_documents_must_add_up():
    with pytest.raises(ValueError, match="documents end at 9, but the sequence has 10 tokens"):
        Mask(documents=(0, 4, 9)).check_length(10)

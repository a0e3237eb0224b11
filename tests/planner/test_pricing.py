"""Prices: what is launched after a block, counted by hand, and other people's rings next to ours."""

from dataclasses import replace

import pytest

from startrail.compile.attention import Attention
from startrail.planner.candidates import with_more_channels
from startrail.planner.cluster import find_cluster
from startrail.planner.kernels import find_kernel, occupancy
from startrail.planner.peers import RING_FLASH_ATTENTION, STARTRAIL, TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_GATHERED
from startrail.planner.predict import predict
from startrail.planner.pricing import plan_prices
from startrail.planner.search import search_attention
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import BACKWARD, FORWARD, PASSES
from startrail.transport.process_groups import hidden_lanes
from tests.planner.shapes import altered
from validation.hardware.gathered import predict_gathered

H100 = find_cluster("h100-8x8@1x8")
ALL_CHANNELS = replace(H100, levels=(H100.levels[0], replace(H100.levels[1], under_compute=0.0)))
GROUPED = Attention.of(length=65536, batch=1, heads=64, kv_heads=8, head_dim=128, causal=True)
TOKENS, HEADS, KV_HEADS, DIM = 8192, 64, 8, 128


def prices(call=GROUPED, plan="1x8", engine=STARTRAIL):
    return plan_prices(H100, Plan.parse(plan), call, engine)


@pytest.mark.parametrize("row, column, rows, keys", [(3, 3, 1, 1), (5, 2, 1, 0.5), (2, 5, 0.5, 1)])
def test_a_block_reads_its_result_and_reads_and_writes_the_sum(row, column, rows, keys):
    """In a zigzag, all rows see half of an earlier shard, and half of the rows a later one."""
    device, ours = H100.device, prices()
    forward = rows * TOKENS * HEADS * DIM * (2 + 4 + 4)
    backward = forward + 2 * keys * TOKENS * KV_HEADS * DIM * (2 + 4 + 4)
    area = TOKENS**2 / 2
    for pass_, nbytes, launches in ((FORWARD, forward, 1), (BACKWARD, backward, 3)):
        kernel = ours.kernel(pass_, area, rows * TOKENS, causal=row == column)
        expected = kernel + nbytes / device.copy + launches * device.call
        assert ours.block(pass_, row, column) == pytest.approx(expected)


def test_a_first_result_is_converted_or_begins_with_zeros():
    ours, copy = prices(), H100.device.copy
    merged, converted = ours.block(FORWARD, 3, 3), ours.block(FORWARD, 3, 3, new_row=True)
    assert merged - converted == pytest.approx(TOKENS * HEADS * DIM * (10 - 6) / copy)
    merged, zeroed = ours.block(FORWARD, 2, 5), ours.block(FORWARD, 2, 5, new_row=True)
    assert zeroed - merged == pytest.approx(TOKENS * HEADS * DIM * 4 / copy)


def test_heads_per_rank_and_head_dim_enter_the_rate():
    few, many = (prices(replace(GROUPED, heads=heads, kv_heads=1)) for heads in (1, 64))
    block = (FORWARD, 512**2, 512)
    assert 64 * few.kernel(*block) > 1.5 * many.kernel(*block)  # too few programs to fill the GPU
    narrow = prices(replace(GROUPED, head_dim=64, heads=128))  # as many FLOPs, but slower ones
    assert narrow.kernel(FORWARD, 4096**2, 4096) > 1.2 * prices().kernel(FORWARD, 4096**2, 4096)


def test_a_kernel_without_causal_speeds_is_as_much_slower_as_in_the_forward_pass():
    kernel = find_kernel("fa3", "H100")
    ratio = kernel.speed("forward", True, 128, 1024) / kernel.speed("forward", False, 128, 1024)
    assert kernel.speed("backward", True, 128, 1024) == pytest.approx(ratio * 424e12)
    assert occupancy(100) < 0.7 < occupancy(1000) < occupancy(10_000)


def test_other_ring_implementations_are_slower_and_ulysses_is_faster_inside_a_node():
    """As measured on H100: a ring is not limited by bytes there, but by what follows each block."""
    seconds = {
        name: predict(H100, Plan.parse(plan), GROUPED, engine=engine).forward.seconds
        for name, plan, engine in (
            ("ours", "1x8", STARTRAIL),
            ("engine", "1x8", TRANSFORMER_ENGINE),
            ("flash", "1x8", RING_FLASH_ATTENTION),
            ("Ulysses", "u8", STARTRAIL),
        )
    }
    seconds["gathered"] = predict_gathered(H100, GROUPED, TRANSFORMER_ENGINE_GATHERED).forward.seconds
    assert seconds["gathered"] < seconds["Ulysses"] < seconds["ours"] < seconds["engine"] < seconds["flash"]


@pytest.mark.parametrize(
    "plan", ["1x8", "u8", "u4/1x2", "1x2/u4", "2x4", "8x1", "star2", "u8,groups=2", "u4/2x1,groups=2"]
)
def test_lanes_under_compute_have_the_rate_of_few_channels(plan):
    """The lanes to which the engine gives few channels, and ours only."""
    made, call = Plan.parse(plan), replace(GROUPED, kv_heads=16)
    hidden = hidden_lanes([build_program(made, 8, 0, pass_) for pass_ in PASSES])
    assert set(hidden.values()) <= {8} and sorted(hidden) == made.hidden_levels
    assert prices(call, plan).lanes_with_few_channels() == {lane: {1: 3.6} for lane in hidden}
    assert not prices(call, plan, TRANSFORMER_ENGINE).lanes_with_few_channels()
    ours, free = (predict(cluster, made, call).seconds for cluster in (H100, ALL_CHANNELS))
    assert ours > free if hidden else ours == free


def test_more_channels_are_faster_and_take_multiprocessors_from_attention():
    call, found = replace(GROUPED, kv_heads=16), {}
    for number in (4, 8, 16, 24):
        plan = f"1x8,channels={number}"
        assert hidden_lanes([build_program(Plan.parse(plan), 8, 0, FORWARD)]) == {0: number}
        found[number] = prices(call, plan).lanes_with_few_channels()[0][1], prices(call, plan).left
    assert found == {4: (7.2, 1), 8: (3.6, 1), 16: (1.8, 124 / 132), 24: (1.2, 116 / 132)}
    one_block, plain = (prices(call, f"1x8,channels={n}").kernel(FORWARD, 2**40, 8192) for n in (24, 8))
    assert one_block == pytest.approx(plain * 132 / 116, rel=1e-4), "but for the launch"


@pytest.mark.parametrize(
    "kv_heads, length, channels", [(16, 32768, 16), (16, 65536, 16), (16, 1 << 20, 8), (2, 32768, 8), (2, 65536, 8)]
)
def test_the_planner_chooses_channels_for_rings_inside_a_node(kv_heads, length, channels):
    """More where a hop takes longer than its block: not with few KV heads, nor if each block has many tokens."""
    call = altered(GROUPED, length=length, heads=16, kv_heads=kv_heads)
    plans = [Plan.parse("1x8"), *with_more_channels(Plan.parse("1x8"), H100)]
    assert [plan.channels_at(0) for plan in plans] == [8, 16, 24]
    best = min(plans, key=lambda plan: predict(H100, plan, call).seconds)
    assert best.channels_at(0) == channels


@pytest.mark.parametrize("length, is_limited", [(32768, True), (1 << 20, False)])
def test_the_search_gives_plans_the_channels_that_are_fastest(length, is_limited):
    """7 heads, which 8 GPUs cannot share, leave only rings and teams."""
    call, chosen = altered(GROUPED, length=length, heads=7, kv_heads=7), []
    for row in search_attention(H100, call, layers=1).rows:
        if not row.role:
            others = [predict(H100, plan, call).seconds for plan in with_more_channels(row.plan, H100)]
            assert row.seconds < 1.02 * min(others)
            chosen.append(row.plan.channels_at(0))
    assert (max(chosen) > 8) == is_limited


def test_only_lanes_inside_a_node_get_more_channels():
    nodes = find_cluster("h100-8x8")
    found = {
        plan: [str(each) for each in with_more_channels(Plan.parse(plan), nodes)]
        for plan in ("1x64", "u8/1x8", "1x8/1x8", "1x8/u8", "u8/u2/1x4,groups=2", "u64")
    }
    assert found == {
        "1x64": [], "1x8/u8": [], "u64": [],
        "u8/1x8": ["u8/1x8,channels=8/16", "u8/1x8,channels=8/24"],
        "1x8/1x8": ["1x8/1x8,channels=8/16", "1x8/1x8,channels=8/24"],
        "u8/u2/1x4,groups=2": [f"u8/u2/1x4,groups=2,channels=8/{n}/{n}" for n in (16, 24)],
    }  # fmt: skip
    assert not list(with_more_channels(Plan.parse("1x8"), find_cluster("pcie-8"))), "no known link is limited"


def test_a_ring_that_few_channels_cannot_feed_is_slower():
    """With all heads of 4k tokens, a hop takes 34 MB: 0.34 ms over 8 channels, more than its block."""
    call = altered(GROUPED, length=32768, heads=16, kv_heads=16)
    slow, fast = (predict(cluster, Plan.parse("1x8"), call).seconds for cluster in (H100, ALL_CHANNELS))
    assert 1.4 < slow / fast < 3.6

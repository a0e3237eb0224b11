"""Prices: what is launched after a block, counted by hand, and other people's rings next to ours."""

from dataclasses import replace

import pytest

from startrail.compile.attention import Attention
from startrail.planner.cluster import find_cluster
from startrail.planner.kernels import find_kernel, occupancy
from startrail.planner.peers import RING_FLASH_ATTENTION, STARTRAIL, TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_GATHERED
from startrail.planner.predict import predict
from startrail.planner.pricing import plan_prices
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
    assert prices(call, plan).lanes_with_few_channels() == {lane: {1: 3.6} for lane in hidden}
    assert not prices(call, plan, TRANSFORMER_ENGINE).lanes_with_few_channels()
    ours, free = (predict(cluster, made, call).seconds for cluster in (H100, ALL_CHANNELS))
    assert ours > free if hidden else ours == free


def test_a_ring_that_few_channels_cannot_feed_is_slower():
    """With all heads of 4k tokens, a hop takes 34 MB: 0.34 ms over 8 channels, more than its block."""
    call = altered(GROUPED, length=32768, heads=16, kv_heads=16)
    slow, fast = (predict(cluster, Plan.parse("1x8"), call).seconds for cluster in (H100, ALL_CHANNELS))
    assert 1.4 < slow / fast < 3.6

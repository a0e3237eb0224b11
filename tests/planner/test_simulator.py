"""The simulated clock: worked out by hand, against closed forms, and one rank against all ranks."""

from dataclasses import replace

import pytest

from startrail.compile.attention import Attention
from startrail.planner import predict as attention
from startrail.planner.cluster import SlowMember, find_cluster
from startrail.planner.kernels import find_kernel, occupancy
from startrail.planner.predict import predict
from startrail.planner.pricing import PostTask, PricedMessage, Task, WaitTask
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form
from startrail.schedule.values import PASSES
from tests.planner.shapes import CALL, PEERS, SMALL, altered
from workshop.trials.links import bytes_between_nodes

PLANS = "1x16 star2 star4 1x4/u4 2x2/u4 2x2/u4,keep=all u4/1x4 u4/2x2,groups=2 u2/1x2/2x2 1x4/1x4 4x1/u2/1x2 2x8 u8/2x1"


def bare(cluster, **changes):
    """A cluster on which nothing costs time but bytes and arithmetic."""
    device = replace(cluster.device, call=0.0, post=0.0, start=0.0, handle=0.0, copy=1e30)
    levels = tuple(replace(level, latency=0.0, socket=0.0) for level in cluster.levels)
    return replace(cluster, device=device, levels=levels, **changes)


def test_two_ranks_that_exchange_keys_take_the_time_computed_by_hand():
    """1x2 forward: each computes its own block while the other's keys come, then theirs."""
    cluster = bare(find_cluster("a100-4x8@2x1"))
    call = replace(CALL, batch=1)
    forward = predict(cluster, Plan.parse("1x2"), call).forward
    tokens = call.length // 2
    kernel, flops = find_kernel("fa2", "A100"), 4 * tokens**2 / 2 * call.head_dim * call.heads
    own = flops / (kernel.speed("forward", True, 64, tokens) * occupancy(call.heads * tokens / 128))
    full = kernel.speed("forward", False, 64, (tokens**2 / 2) ** 0.5)
    other = flops / (full * occupancy(call.heads * tokens / 256))  # rank 0: half the rows see the later shard
    transfer = 2 * tokens * call.heads * call.head_dim * 2 / cluster.levels[0].bandwidth
    assert forward.seconds == pytest.approx(max(own, transfer) + other, rel=1e-6)
    assert forward.waiting == pytest.approx(max(0.0, transfer - own), rel=1e-6, abs=1e-12)
    assert forward.busy == pytest.approx((transfer, 0.0))


def test_a_transfer_that_becomes_faster_ends_the_pass_when_it_ends():
    """Node 0 sends 1 and 3 bytes over a link of 1 byte/s: at half the rate for 2 s, then 2 bytes alone: 4 s."""
    cluster = bare(find_cluster("lab@2x2"), cores=0)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], bandwidth=1.0), cluster.levels[1]))
    tasks: list[list[Task]] = []
    for rank, peer, nbytes in ((0, 2, 1), (1, 3, 3), (2, 0, 1), (3, 1, 3)):
        tasks.append([PostTask([PricedMessage(rank < 2, 0, peer, nbytes, 0)]), WaitTask([0])])
    assert attention.simulate_tasks(cluster, tasks).seconds == pytest.approx(4.0)


@pytest.mark.parametrize("peer, seconds", [(2, 1 + 2 / 0.5), (1, 1 + 2 / 4)])
def test_bytes_cost_a_core_by_the_level_that_they_cross(peer, seconds):
    """2 bytes at 2 bytes/s, after a core of each side has handled them: 0.5 bytes/s between nodes, 4 inside."""
    cluster = bare(find_cluster("lab@2x2"), cores=0)
    levels = (
        replace(level, bandwidth=2.0, socket=socket) for level, socket in zip(cluster.levels, (0.5, 4.0), strict=True)
    )
    tasks: list[list[Task]] = [[] for _ in range(4)]
    for rank, other in ((0, peer), (peer, 0)):
        tasks[rank] = [PostTask([PricedMessage(rank == 0, 0, other, 2, 0)]), WaitTask([0])]
    assert attention.simulate_tasks(replace(cluster, levels=tuple(levels)), tasks).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("cluster", [SMALL, replace(SMALL, transport="gloo"), PEERS], ids=["nccl", "gloo", "peers"])
@pytest.mark.parametrize("text", PLANS.split())
def test_one_rank_stands_for_all(text, cluster):
    """Simulating all ranks and simulating one agree: exactly where lanes follow the nodes, else closely."""
    plan = Plan.parse(text)
    one, all_ = predict(cluster, plan, CALL), predict(cluster, plan, CALL, all_ranks=True)
    loose = text in ("star2", "star4", "2x8", "u8/2x1", "4x1/u2/1x2")
    # where heads lie over the nodes, ranks whose blocks end early start their exchange while the link is free
    assert one.seconds == pytest.approx(all_.seconds, rel=0.05 if loose else 0.03 if text.startswith("u4") else 0.02)
    if cluster is not PEERS or not loose:  # of their messages some cross an adapter at each time, not all
        assert one.busy[0] == pytest.approx(all_.busy[0], rel=0.01)


@pytest.mark.parametrize("cluster", [SMALL, find_cluster("h100-8x8@4x4"), PEERS], ids=str)
def test_one_rank_represents_all_where_an_exchange_spans_nodes(cluster):
    """Of the messages of u16 over nodes of 4, each device's own adapter carries 12 of 15, not all."""
    call = replace(CALL, heads=16, kv_heads=16)
    one, all_ = predict(cluster, Plan.parse("u16"), call), predict(cluster, Plan.parse("u16"), call, all_ranks=True)
    assert one.seconds == pytest.approx(all_.seconds, rel=0.01)
    assert one.busy[0] == pytest.approx(all_.busy[0], rel=0.01)
    nested = predict(cluster, Plan.parse("u4/u4"), call)
    assert one.seconds == pytest.approx(nested.seconds, rel=0.05)


@pytest.mark.parametrize("text", ["1x64", "star2", "star4"])
def test_few_ranks_of_a_large_node_are_enough_to_look_at(text, monkeypatch):
    cluster, plan, call = find_cluster("h100-8x8@4x16"), Plan.parse(text), altered(CALL, length=2**16)
    whole = predict(cluster, plan, call)
    monkeypatch.setattr(attention, "MAX_UNSAMPLED", 1)
    few = predict(cluster, plan, call)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.001)
    # star4: 15 ranks of the node place their keys elsewhere, 12 in other nodes; the ranks read stand for 12 of 16
    assert few.sent == pytest.approx(whole.sent, rel=0.07 if text == "star4" else 1e-6)


@pytest.mark.parametrize("cluster", [SMALL, SMALL.faster(0, 100.0)], ids=["links", "arithmetic"])  # that decide
@pytest.mark.parametrize("window", [300, 3000])
@pytest.mark.parametrize("text", ["1x16", "1x4/u4", "u4/2x2", "2x2/2x2,keep=all"])
def test_one_rank_stands_for_all_under_a_window(text, window, cluster):
    call, plan = altered(CALL, length=2**14, window=window), Plan.parse(text)
    one, all_ = predict(cluster, plan, call), predict(cluster, plan, call, all_ranks=True)
    assert one.seconds == pytest.approx(all_.seconds, rel=0.15)  # the slowest rank differs from hop to hop
    assert one.sent == pytest.approx(all_.sent, rel=1e-6)


def test_an_exchange_over_heads_uses_the_links_to_all_peers_and_a_ring_one():
    one_link = replace(PEERS, levels=(PEERS.levels[0], replace(PEERS.levels[1], peer=False)))
    for text, times in (("1x4/u4", 3.0), ("1x4/1x4", 1.0)):
        shared, own = (predict(cluster, Plan.parse(text), CALL).forward.busy[1] for cluster in (one_link, PEERS))
        assert shared == pytest.approx(times * own, rel=1e-6), text


def test_one_rank_stands_for_all_on_shared_cores():
    cluster = find_cluster("lab@4x4")
    call = Attention.of(1024, 2, 16, 16, 32, True, "float32")
    for text in ("2x2/u4", "u4/1x4", "1x4/1x4"):
        one, all_ = predict(cluster, Plan.parse(text), call), predict(cluster, Plan.parse(text), call, all_ranks=True)
        assert one.seconds == pytest.approx(all_.seconds, rel=0.1), text


LONG = [
    *((text, None) for text in ("1x512", "1x64/1x8", "2x32/1x8", "2x32/u8", "u2/1x256", "u2/2x128", "star2", "star4")),
    *((text, window) for text in ("1x512", "1x64/1x8") for window in (2000, 40000)),
]


@pytest.mark.parametrize("text, window", LONG)
def test_a_long_ring_goes_on_as_it_begins(text, window, monkeypatch):
    cluster, plan = find_cluster("h100-8x8@64x8"), Plan.parse(text)
    call = altered(CALL, length=2**19, window=window)
    monkeypatch.setattr(attention, "MAX_SHARDS", 512)
    whole = predict(cluster, plan, call)
    monkeypatch.setattr(attention, "MAX_SHARDS", 16)
    monkeypatch.setattr(attention, "LEAST_HOPS", 2)
    assert attention.shorter_rings(cluster, plan, call) is not None
    short = predict(cluster, plan, call)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01 if window is None else 0.05)
    assert short.sent == pytest.approx(whole.sent, rel=1e-6)


@pytest.mark.parametrize("nodes", [1021, 2047, 2048])
@pytest.mark.parametrize("text", ["1x{ranks}", "1x{nodes}/1x8", "1x{nodes}/u8", "star2"])
def test_rings_of_any_number_of_nodes_are_shortened(nodes, text):
    """Also where that number is a prime. Each of a ring's hops takes as long, whatever the length."""
    predictions = []
    for number in (nodes, 4 * nodes):
        cluster = find_cluster(f"h100-8x8@{number}x8")
        plan, call = Plan.parse(text.format(nodes=number, ranks=8 * number)), altered(CALL, length=1024 * cluster.world)
        assert max(attention.shorter_rings(cluster, plan, call)) <= 512
        predictions.append(predict(cluster, plan, call))
    assert predictions[1].seconds == pytest.approx(4 * predictions[0].seconds, rel=0.02)


@pytest.mark.parametrize("text", PLANS.split())
def test_the_clock_sends_what_the_closed_form_says(text):
    plan = Plan.parse(text)
    sizes = CALL.sizes_on(plan, 16)
    links = bytes_between_nodes(plan, Machine(4, 4), sizes.by_kind, range(16))
    predicted = predict(SMALL, plan, CALL, all_ranks=True)
    assert predicted.sent[0] * 16 == pytest.approx(sum(link.sent for link in links), rel=1e-9)
    busiest = max(max(link) for link in links) / SMALL.levels[0].bandwidth
    assert predicted.busy[0] == pytest.approx(busiest, rel=1e-9)
    every = sum(sum(closed_form(plan, 16, rank, pass_, sizes.by_kind)) for rank in range(16) for pass_ in PASSES)
    assert sum(predicted.sent) * 16 == pytest.approx(every, rel=1e-9)


def test_a_slow_node_slows_every_plan_that_uses_its_link():
    slow = replace(SMALL, slow=(SlowMember(0, 0, bandwidth=0.5),))
    ring, heads = Plan.parse("1x16"), Plan.parse("u4/1x4")
    for plan in (ring, heads):
        before, after = predict(SMALL, plan, CALL, all_ranks=True), predict(slow, plan, CALL, all_ranks=True)
        assert after.busy[0] == pytest.approx(2 * before.busy[0], rel=1e-6)
        assert 1.2 * before.seconds < after.seconds < 2.1 * before.seconds
        assert predict(slow, plan, CALL).seconds == pytest.approx(after.seconds, rel=0.1)
    half = replace(SMALL, slow=(SlowMember(1, 5, compute=0.5),))
    assert predict(half, heads, CALL, all_ranks=True).seconds > predict(SMALL, heads, CALL).seconds


def test_links_that_are_not_duplex_carry_both_ways_in_turn():
    one_way = replace(SMALL, levels=(replace(SMALL.levels[0], duplex=False), SMALL.levels[1]))
    plan = Plan.parse("1x4/u4")
    assert predict(one_way, plan, CALL).busy[0] == pytest.approx(2 * predict(SMALL, plan, CALL).busy[0])
    assert predict(one_way, plan, CALL).seconds == pytest.approx(
        predict(one_way, plan, CALL, all_ranks=True).seconds, rel=0.01
    )

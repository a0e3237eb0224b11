"""Descriptions, the clock, the bounds and the search: worked by hand, against each other, and against closed forms."""

import json
import re
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import startrail
from startrail.cli import main
from startrail.planner import predict as attention
from startrail.planner.answer import plan as ask
from startrail.planner.auto import fit_cluster, plan_for_heads, plan_for_job
from startrail.planner.bounds import Bounds
from startrail.planner.candidates import options_of, plans_on
from startrail.planner.cluster import Slow, cluster_text, find_cluster, read_cluster
from startrail.planner.memory import LIBRARY_BYTES, estimate_memory
from startrail.planner.predict import AttentionShape, predict
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.topology import Machine, link_bytes
from startrail.planner.units import count, parse_text, read_file, shipped
from startrail.planner.workload import Job, Model, Run, find_model, from_hugging_face, read_model, read_run
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan, plans_for
from startrail.schedule.program import closed_form
from startrail.schedule.values import PASSES
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS, GPTConfig
from startrail.training.recipes import find
from tests.helpers import refusal

CALL = AttentionShape(length=8192, batch=2, heads=8, kv_heads=8, head_dim=64, causal=True, dtype="bfloat16")
SMALL = find_cluster("a100-4x8@4x4")
PEERS = find_cluster("mi300x@4x4")
PLANS = "1x16 star2 star4 1x4/u4 2x2/u4 2x2/u4,keep=all u4/1x4 u4/2x2,groups=2 u2/1x2/2x2 1x4/1x4 4x1/u2/1x2 2x8 u8/2x1"


# --- descriptions


def test_every_cluster_that_comes_along_can_be_read_and_written():
    """Of the paper, of today, and the lab; what is written reads the same."""
    paper = {"h100-8x8", "a100-2x16", "a100-4x8", "a100-8x4"}
    today = {"h200", "b200", "nvl72", "mi300x", "a100-cloud", "pcie-8", "boxes-10gbe"}
    assert set(shipped("clusters")) == paper | today | {"lab"}
    for name in shipped("clusters"):
        cluster = replace(find_cluster(name), slow=(Slow(0, 1, 0.5, 0.75),))
        assert cluster.world >= 8, name
        text = cluster_text(replace(cluster, device=replace(cluster.device, name='a "quoted" name')), "two\nlines")
        read = read_cluster(parse_text(text, Path("mine.toml")), name, "mine.toml")
        assert read.device.name == 'a "quoted" name'
        for ours, theirs in zip(read.levels, cluster.levels, strict=True):
            assert (ours.bandwidth, ours.latency) == pytest.approx((theirs.bandwidth, theirs.latency), rel=1e-3)
            assert replace(ours, bandwidth=0.0, latency=0.0) == replace(theirs, bandwidth=0.0, latency=0.0)
        assert (read.slow, read.cores, read.transport) == (cluster.slow, cluster.cores, cluster.transport)
        for dtype, rates in cluster.device.rates.items():
            for curve in ("forward", "backward"):
                ours, theirs = getattr(read.device.of(dtype), curve), getattr(rates, curve)
                assert ours.at(128) == pytest.approx(theirs.at(128), rel=1e-3)


GOOD = read_file(shipped("clusters")["a100-4x8"])


def changed(path: str, value: object) -> dict:
    """The A100 cluster's table with one key changed, added or (None) removed."""
    table = json.loads(json.dumps(GOOD))
    *outer, last = path.split(".")
    at = table
    for key in outer:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return table


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("levels.0.bandwith", "1 GB/s", "levels[0]: no key 'bandwith'; did you mean 'bandwidth'?"),
        ("levels.0.bandwidth", "100 Gbit", "levels[0]: bandwidth = '100 Gbit' is not a rate"),
        ("levels.0.bandwidth", "0 GB/s", "bandwidth = '0 GB/s' is not between 1 kB/s and 1000 PB/s"),
        ("levels.0.bandwidth", 100, "bandwidth = 100 is not a rate"),
        ("levels.0.size", 0, "levels[0]: size = 0 is not a whole number of at least 1"),
        ("levels.0.size", -4, "size = -4"),
        ("levels.1.name", "node", "there is a level 'node' already"),
        ("levels.0.links", "gpu", "links = 'gpu' is not one of device, member, peer"),
        ("levels.0.links", "peer", "levels[0]: links = 'peer' is for the innermost level"),
        ("levels.0.latency", "5 parsecs", "latency = '5 parsecs' is not a time"),
        ("levels", [], "levels must be a list of tables"),
        ("levels", None, "'levels' is missing"),
        ("device", None, "'device' is missing"),
        ("device.memory", "lots", "device: memory = 'lots' is not an amount of memory"),
        ("device.reserved", "50 GB", "reserved = '50 GB' leaves nothing of memory = '40 GB'"),
        ("device.bfloat16", None, "device: no rates"),
        ("device.bfloat16.matmul", "fast", "device.bfloat16: matmul = 'fast' is not a speed"),
        (
            "device.bfloat16.forward",
            [[512, "1 TFLOP/s"], [128, "2 TFLOP/s"]],
            "128 is not a number of tokens",
        ),
        ("accuracy", 2.0, "accuracy = 2.0 is not a number between 0 and 0.9"),
        ("transport", "tcp", "transport = 'tcp' is not one of nccl, gloo"),
        ("slow", [{"level": "rack", "member": 0}], "slow[0]: level = 'rack' is not one of node, gpu"),
        ("slow", [{"level": "node", "member": 4}], "slow[0]: member = 4 is not one of 0 to 3"),
        ("slow", [{"level": "node", "member": 0, "bandwidth": 0}], "bandwidth = 0 is not a number between 0.001 and 1"),
    ],
)
def test_a_mistake_in_a_cluster_file_names_the_key(path, value, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_cluster(changed(path, value), "a", "a.toml")
    assert str(refused.value).startswith("a.toml: ")
    assert "\n" not in str(refused.value)


def test_recipes_and_planner_share_the_shapes_of_models():
    assert {
        "gpt-3b": GPTConfig(vocab=50_304, width=2560, layers=32, heads=32, kv_heads=32, hidden=6912),
        "gpt-7b": GPTConfig(vocab=50_304, width=4096, layers=32, heads=32, kv_heads=32, hidden=11_008),
        "gpt-tiny": GPTConfig(vocab=256, width=128, layers=4, heads=8, kv_heads=4, hidden=512, tied=True),
    } == GPT_CONFIGS
    assert {name: (c.width, c.layers, c.heads) for name, c in DIT_CONFIGS.items()} == {
        "dit-1b": (1536, 24, 24),
        "dit-tiny": (128, 4, 8),
    }
    for name, config in DIT_CONFIGS.items():
        assert find_model(name).hidden == 4 * config.width  # which a DiT has by definition


LLAMA = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=100,
)  # fmt: skip


@pytest.mark.parametrize(
    "extra, kinds",
    [
        ({}, {None: 4}),
        ({"sliding_window": 16}, {16: 4}),
        ({"sliding_window": 16, "use_sliding_window": False}, {None: 4}),
        ({"sliding_window": 16, "sliding_window_pattern": 4}, {16: 3, None: 1}),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, {None: 3, 16: 1}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, {8: 2, None: 2}),
    ],
)
def test_a_hugging_face_config_tells_sliding_layers_from_full_ones(extra, kinds):
    model = from_hugging_face(LLAMA | extra, "mine", "config.json")
    assert model.layer_kinds == kinds
    assert (model.heads, model.kv_heads, model.head_dim, model.matrices) == (4, 2, 16, 3)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads 3"),
        ({"num_local_experts": 8}, "mixtures of experts are not modelled"),
        ({"kv_lora_rank": 512}, "latent attention is not modelled"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention' are not modelled"),
        ({"layer_types": ["full_attention"]}, "layer_types must name each of the 4 layers"),
    ],
)
def test_what_a_config_has_and_we_do_not_model_is_refused(extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hugging_face(LLAMA | extra, "mine", "config.json")


@pytest.mark.parametrize(
    "table, message",
    [
        ({"length": "128k", "bach": 2}, "no key 'bach'; did you mean 'batch'?"),
        ({"batch": 2}, "'length' is missing"),
        ({"length": 0}, "length = 0 is not a whole number of at least 1"),
        ({"length": 8, "zero": 1}, "zero = 1 is not one of 0, 2, 3"),
        ({"length": 8, "dtype": "fp8"}, "dtype = 'fp8' is not one of float32, bfloat16, float16"),
        ({"length": 8, "recompute": "yes"}, "recompute = 'yes' is not true or false"),
    ],
)
def test_a_mistake_in_a_run_names_the_key(table, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_run(table, "run.toml")


def test_a_model_whose_heads_do_not_fit_is_refused():
    table = dict(kind="gpt", vocab=9, width=10, layers=1, heads=4, hidden=8)
    with pytest.raises(ValueError, match=re.escape("m.toml: width = 10 is not a multiple of heads = 4")):
        read_model(table, "m", "m.toml")


# --- the clock


def bare(cluster, **changes):
    """A cluster on which nothing costs time but bytes and arithmetic."""
    device = replace(cluster.device, call=0.0, post=0.0, start=0.0, handle=0.0, socket=0.0, copy=1e30)
    levels = tuple(replace(level, latency=0.0) for level in cluster.levels)
    return replace(cluster, device=device, levels=levels, **changes)


def test_two_ranks_that_exchange_keys_take_what_one_counts_by_hand():
    """1x2 forward: each computes its own block while the other's keys come, then theirs."""
    cluster = bare(find_cluster("a100-4x8@2x1"))
    call = replace(CALL, batch=1)
    forward = predict(cluster, Plan.parse("1x2"), call).forward
    tokens = call.length // 2
    speed = cluster.device.of("bfloat16").forward.at((tokens**2 / 2) ** 0.5)
    block = 4 * tokens**2 / 2 * call.head_dim * call.heads / speed
    transfer = 2 * tokens * call.heads * call.head_dim * 2 / cluster.levels[0].bandwidth
    assert forward.seconds == pytest.approx(max(block, transfer) + block, rel=1e-6)
    assert forward.waiting == pytest.approx(max(0.0, transfer - block), rel=1e-6, abs=1e-12)
    assert forward.busy == pytest.approx((transfer, 0.0))


@pytest.mark.parametrize("cluster", [SMALL, replace(SMALL, transport="gloo"), PEERS], ids=["nccl", "gloo", "peers"])
@pytest.mark.parametrize("text", PLANS.split())
def test_one_rank_stands_for_all(text, cluster):
    """Playing everybody and playing one agree: exactly where lanes follow the nodes, else closely."""
    plan = Plan.parse(text)
    one, all_ = predict(cluster, plan, CALL), predict(cluster, plan, CALL, everybody=True)
    within = 0.05 if text in ("star2", "star4", "2x8", "u8/2x1") else 0.01
    assert one.seconds == pytest.approx(all_.seconds, rel=within)
    if cluster is not PEERS or text != "u8/2x1":  # of whose messages some cross an adapter at each time, not all
        assert one.busy[0] == pytest.approx(all_.busy[0], rel=within)


@pytest.mark.parametrize("text", ["1x64", "star2", "star4"])
def test_few_ranks_of_a_large_node_are_enough_to_look_at(text, monkeypatch):
    cluster, plan, call = find_cluster("h100-8x8@4x16"), Plan.parse(text), replace(CALL, length=2**16)
    whole = predict(cluster, plan, call)
    monkeypatch.setattr(attention, "ALL_LOOKED_AT", 1)
    few = predict(cluster, plan, call)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert few.sent == pytest.approx(whole.sent, rel=0.01 if text == "1x64" else 0.3)


@pytest.mark.parametrize("cluster", [SMALL, SMALL.faster(0, 100.0)], ids=["links", "arithmetic"])  # that decide
@pytest.mark.parametrize("window", [300, 3000])
@pytest.mark.parametrize("text", ["1x16", "1x4/u4", "u4/2x2", "2x2/2x2,keep=all"])
def test_one_rank_stands_for_all_under_a_window(text, window, cluster):
    call, plan = replace(CALL, length=2**14, window=window), Plan.parse(text)
    one, all_ = predict(cluster, plan, call), predict(cluster, plan, call, everybody=True)
    assert one.seconds == pytest.approx(all_.seconds, rel=0.1)
    assert one.sent == pytest.approx(all_.sent, rel=1e-6)


def test_an_exchange_over_heads_uses_the_links_to_all_peers_and_a_ring_one():
    one_link = replace(PEERS, levels=(PEERS.levels[0], replace(PEERS.levels[1], peer=False)))
    for text, times in (("1x4/u4", 3.0), ("1x4/1x4", 1.0)):
        shared, own = (predict(cluster, Plan.parse(text), CALL).forward.busy[1] for cluster in (one_link, PEERS))
        assert shared == pytest.approx(times * own, rel=1e-6), text


def test_one_rank_stands_for_all_on_shared_cores():
    cluster = find_cluster("lab@4x4")
    call = AttentionShape(1024, 2, 16, 16, 32, True, "float32")
    for text in ("2x2/u4", "u4/1x4", "1x4/1x4"):
        one, all_ = predict(cluster, Plan.parse(text), call), predict(cluster, Plan.parse(text), call, everybody=True)
        assert one.seconds == pytest.approx(all_.seconds, rel=0.1), text


@pytest.mark.parametrize("window", [None, 2000, 40000])
@pytest.mark.parametrize("text", ["1x64", "1x8/1x8", "2x4/1x8", "4x2/u8"])
def test_a_long_ring_goes_on_as_it_begins(text, window, monkeypatch):
    cluster, plan, call = find_cluster("h100-8x8"), Plan.parse(text), replace(CALL, length=2**16, window=window)
    whole = predict(cluster, plan, call)
    monkeypatch.setattr(attention, "MANY", 16)
    short = predict(cluster, plan, call)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01 if window is None else 0.05)
    assert short.sent == pytest.approx(whole.sent, rel=1e-6)


@pytest.mark.parametrize("text", PLANS.split())
def test_the_clock_sends_what_the_closed_form_says(text):
    plan = Plan.parse(text)
    sizes = CALL.sizes(plan, 16)
    links = link_bytes(plan, Machine(4, 4), sizes.by_kind)
    played = predict(SMALL, plan, CALL, everybody=True)
    assert played.sent[0] * 16 == pytest.approx(sum(link.sent for link in links), rel=1e-9)
    busiest = max(max(link) for link in links) / SMALL.levels[0].bandwidth
    assert played.busy[0] == pytest.approx(busiest, rel=1e-9)
    every = sum(sum(closed_form(plan, 16, rank, pass_, sizes.by_kind)) for rank in range(16) for pass_ in PASSES)
    assert sum(played.sent) * 16 == pytest.approx(every, rel=1e-9)


@pytest.mark.parametrize(
    "cluster, window", [(SMALL, None), (SMALL, 1000), (PEERS, None), (PEERS.faster(1, 0.02), None)], ids=str
)
def test_no_plan_beats_its_bound(cluster, window):
    call = replace(CALL, window=window)
    bounds = Bounds(cluster, call)
    checked = seen = 0
    for plan in plans_on(cluster, call.heads):
        if isinstance(plan, str):
            continue
        for variant in options_of(plan):
            seen += 1
            if seen % 17:
                continue
            try:
                forward, backward = bounds.of_plan(variant)
            except ValueError:
                continue
            played = predict(cluster, variant, call)
            assert forward.seconds <= played.forward.seconds * (1 + 1e-9), variant
            assert backward.seconds <= played.backward.seconds * (1 + 1e-9), variant
            checked += 1
    assert checked > 25


def test_two_levels_over_the_same_links_send_what_one_of_their_product_sends():
    """So the search need not try them."""
    shards = {"q": 1.0, "kv": 2.0, "out": 1.0, "do": 1.0, "dq": 1.0, "dkv": 2.0}
    pairs = [plan for plan in plans_for(12, 2) if len(plan.levels) == 2 and len({*map(type, plan.levels)}) == 1]
    assert len(pairs) > 20
    for plan in pairs:
        heads = isinstance(plan.levels[0], Heads)
        names = ("size",) if heads else ("team", "ring")
        sizes = [prod(getattr(level, name) for level in plan.levels) for name in names]
        one = Plan.parse(f"u{sizes[0]}" if heads else "x".join(map(str, sizes)))
        for pass_ in PASSES:
            ours, theirs = (sum(closed_form(some, 12, 0, pass_, shards)) for some in (plan, one))
            assert ours == pytest.approx(theirs), plan


def test_a_slow_node_slows_whoever_uses_its_link():
    slow = replace(SMALL, slow=(Slow(0, 0, bandwidth=0.5),))
    ring, heads = Plan.parse("1x16"), Plan.parse("u4/1x4")
    for plan in (ring, heads):
        before, after = predict(SMALL, plan, CALL, everybody=True), predict(slow, plan, CALL, everybody=True)
        assert after.busy[0] == pytest.approx(2 * before.busy[0], rel=1e-6)
        assert 1.2 * before.seconds < after.seconds < 2.1 * before.seconds
        assert predict(slow, plan, CALL).seconds == pytest.approx(after.seconds, rel=0.1)
    half = replace(SMALL, slow=(Slow(1, 5, compute=0.5),))
    assert predict(half, heads, CALL, everybody=True).seconds > predict(SMALL, heads, CALL).seconds


@pytest.mark.parametrize(
    "slow, ranks, local",
    [
        (Slow(0, 3, bandwidth=0.5), 16, Slow(0, 1, bandwidth=0.5)),
        (Slow(0, 3, compute=0.5), 8, Slow(0, 0, compute=0.5)),
        (Slow(1, 29, compute=0.5), 16, Slow(1, 13, compute=0.5)),
        (Slow(1, 29, compute=0.5), 4, Slow(1, 1, compute=0.5)),
        (Slow(0, 3, bandwidth=0.5), 4, Slow(0, 0, bandwidth=0.5)),
    ],
)
def test_a_slow_member_is_slow_in_its_group_whichever_that_is(slow, ranks, local):
    assert replace(find_cluster("a100-4x8"), slow=(slow,)).part(ranks).slow == (local,)


def test_groups_wait_for_the_slowest_of_them():
    cluster = find_cluster("a100-4x8")
    slow = replace(cluster, slow=(Slow(0, 3, bandwidth=0.1), Slow(0, 1, bandwidth=0.4, compute=0.5)))
    assert slow.part(16).slow == (Slow(0, 1, bandwidth=0.1, compute=0.5),)
    model, run = find_model("gpt-3b"), Run(length=65536, batch=2)
    before, after = (search(some, model, run, data_parallel=2, known=False).best for some in (cluster, slow))
    assert after.seconds > 1.5 * before.seconds


def test_a_slow_member_that_other_sizes_do_not_have_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(cluster_text(replace(find_cluster("a100-4x8"), slow=(Slow(0, 3, 0.5), Slow(1, 9, 0.5))), "mine"))
    assert find_cluster(f"{file}@8x8").slow == (Slow(0, 3, 0.5), Slow(1, 9, 0.5))
    with pytest.raises(ValueError, match="with sizes 2x8 has no node 3, which its description calls slow"):
        find_cluster(f"{file}@2x8")
    with pytest.raises(ValueError, match="with sizes 4x16 has no gpu 9, which its description calls slow"):
        find_cluster(f"{file}@4x16")  # another one has that number then


def test_links_that_are_not_duplex_carry_both_ways_in_turn():
    one_way = replace(SMALL, levels=(replace(SMALL.levels[0], duplex=False), SMALL.levels[1]))
    plan = Plan.parse("1x4/u4")
    assert predict(one_way, plan, CALL).busy[0] == pytest.approx(2 * predict(SMALL, plan, CALL).busy[0])
    assert predict(one_way, plan, CALL).seconds == pytest.approx(
        predict(one_way, plan, CALL, everybody=True).seconds, rel=0.01
    )


# --- memory: what `make bench-memory` measured (docs/results.md), less what a process has anyway

NARROW = Model("narrow", 256, 32, 2, 1, 1, 32, 256, 3, True, True, (None, None))


@pytest.mark.parametrize(
    "length, text, recompute, mib",
    [
        (32768, "2x2", True, 107.9),
        (65536, "2x2", True, 172.9),
        (131072, "2x2", True, 319.7),
        (32768, "2x1", True, 159.5),
        (131072, "2x4", True, 182.8),
        (32768, "2x2", False, 130.3),
        (65536, "2x2", False, 237.7),
    ],
)
def test_memory_is_what_was_measured_within_a_tenth(length, text, recompute, mib):
    plan, run = Plan.parse(text), Run(length, dtype="float32", recompute=recompute)
    memory = estimate_memory(Job(NARROW, run), plan, plan.size, libraries=LIBRARY_BYTES)
    assert memory.total / 2**20 == pytest.approx(mib, rel=0.1)
    on_cluster = Training(find_cluster(f"lab@1x{plan.size}"), NARROW, run).memory(plan)
    assert on_cluster.total == memory.total - LIBRARY_BYTES and on_cluster.limit == 1e9


@pytest.mark.parametrize(
    "name, changes, ranks, mib",
    [
        ("gpt-tiny", dict(plan="2x2", length=16384), 4, 272.7),
        ("gpt-tiny", dict(plan="2x1", length=8192, data_parallel=2), 4, 267.6),
        ("gpt-tiny", dict(recompute=True), 8, 48.3),
        ("dit-tiny", dict(plan="2x2", batch=64), 4, 172.0),
        ("dit-tiny", dict(plan="2x2", recompute=True, zero=3), 4, 59.8),
        ("dit-tiny", dict(), 8, 55.8),
    ],
)
def test_memory_of_recipes_is_what_was_measured_within_a_tenth(name, changes, ranks, mib):
    """Peaks of one step, or of a few with a checkpoint, on CPU ranks: ``Trainer`` prints this estimate."""
    recipe = find(name).with_(changes)
    memory = estimate_memory(recipe.job("float32"), Plan.parse(recipe.plan), ranks, libraries=LIBRARY_BYTES)
    assert memory.total / 2**20 == pytest.approx(mib, rel=0.1)


# --- arithmetic


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_model_flops_count_every_visible_pair_once(causal, window):
    """Two products forward and four backward, each a multiplication and an addition; nothing is recomputed."""
    length, model = 16, replace(NARROW, heads=2, kv_heads=1, head_dim=8, causal=causal, windows=(window, None))
    training = Training(find_cluster("lab@1x2"), model, Run(length, batch=3, dtype="float32"))
    reach = window or length
    seen = [(q, k) for q in range(length) for k in range(length) if abs(q - k) < reach and (k <= q or not causal)]
    full = [(q, k) for q in range(length) for k in range(length) if k <= q or not causal]
    products = 6 * 2 * model.heads * model.head_dim * (len(seen) + len(full))
    dense = 6 * length * (2 * (model.projections + model.mlp) + model.vocab * model.width)
    assert training.flops == 3 * (products + dense)


# --- the search


def test_well_known_plans_are_always_among_the_rows():
    found = search(SMALL, find_model("gpt-3b"), Run(length=65536))
    assert {row.role for row in found.rows} >= {"ring", "star2", "star4", "USP", "double ring", "Ulysses"}
    assert found.missing == ()
    assert found.best.seconds <= 1.005 * min(row.seconds for row in found.rows)  # of those alike, the simplest


@pytest.mark.parametrize(
    "cluster, model, reasons",
    [
        ("pcie-8", "gpt-tiny", {"USP": "and here are 8 gpus", "double ring": "for two levels", "star4": "4² = 16"}),
        ("a100-4x8", "dit-1b", {"Ulysses": "24 query heads cannot be split over u32"}),
        ("a100-4x8@4x7", "gpt-tiny", {"USP": "4 key/value heads cannot be split inside a node of 7", "star4": "16"}),
    ],
)
def test_a_well_known_plan_that_cannot_be_used_is_a_row_with_its_reason(cluster, model, reasons):
    answer = ask(cluster, model, 65536)
    rows = {row["role"]: row for row in answer.rows if row["why_not"] is not None}
    for role, reason in reasons.items():
        assert reason in rows[role]["why_not"]
        assert rows[role]["seconds"] is None and rows[role]["memory"] is None
        assert re.search(rf"{re.escape(rows[role]['plan'])} +{role} +cannot be used: ", answer.table)
    assert {row["role"] for row in answer.rows} >= {"ring", "star2", "star4", "USP", "double ring", "Ulysses"}
    assert set(answer.rows[0]) == set(answer.rows[-1])
    assert answer.rows[0]["why_not"] is None


def test_the_search_finds_what_brute_force_finds():
    cluster, run = find_cluster("a100-4x8@2x4"), Run(length=65536)
    model = replace(find_model("gpt-tiny"), width=1024, hidden=2816, heads=8, kv_heads=2, head_dim=128)
    found = search(cluster, model, run)
    training, best = Training(cluster, model, run), float("inf")
    for plan in plans_on(cluster, model.heads):
        for variant in options_of(plan) if isinstance(plan, Plan) else ():
            try:
                training.sizes(variant)
            except ValueError:
                continue
            seconds = training.step(variant, lambda call, variant=variant: predict(cluster, variant, call)).seconds
            best = min(best, seconds)
    assert found.best.seconds <= best * 1.011


def test_what_does_not_fit_is_dropped_with_its_reason_and_count():
    answer = ask("a100-4x8", "gpt-7b", "512k")
    assert sum(answer.found.dropped.values()) > 100
    (star4,) = (row for row in answer.rows if row["role"] == "star4")
    assert re.search(r"needs \d+\.\d GB, a device has 37.0 GB", star4["why_not"])
    assert "dropped: " in str(answer)


def test_a_batch_may_be_split_over_groups():
    answer = ask("a100-4x8", "gpt-3b", "32k", batch=8)
    assert answer.rows[0]["data_parallel"] > 1


def test_half_the_bandwidth_is_never_faster_and_less_memory_never_either():
    model, run = find_model("gpt-3b"), Run(length=2**17)
    cluster = find_cluster("a100-4x8")
    best = search(cluster, model, run).best.seconds
    assert search(cluster.faster(0, 0.5), model, run).best.seconds >= best
    assert search(cluster, model, run, memory=11e9).best.seconds >= best * 0.999


def test_sliding_layers_compute_less():
    long = replace(CALL, length=2**16)
    for text in ("1x16", "u4/2x2"):
        calls = long, replace(long, window=2048)
        whole, sliding = (predict(SMALL, Plan.parse(text), call, everybody=True) for call in calls)
        assert sliding.seconds - sliding.waiting < 0.7 * (whole.seconds - whole.waiting), text
        assert sliding.sent == whole.sent


@pytest.mark.parametrize("share, advice", [(0.95, "keep it"), (0.02, "leave it out")])
def test_a_slow_node_is_named_and_advised_on(share, advice):
    cluster = replace(find_cluster("a100-4x8"), slow=(Slow(0, 2, bandwidth=share),))
    why = ask(cluster, "gpt-3b", "128k").why
    assert f"node 2 (bandwidth {share:.0%}, compute 100%)" in why
    assert "the other 3 nodes alone take" in why
    assert advice in why


def test_what_would_change_the_answer_is_searched_anew():
    """Not only among the rows that are shown."""
    cluster, model, run = find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**17)
    why = ask(cluster, model, run.length, top=1, memory="30 GB").why
    half = search(cluster, model, run, top=1, memory=15e9, known=False).best
    assert f"with half the memory then {half.name} (" in why
    twice = search(cluster.faster(0, 2.0), model, run, top=1, memory=30e9, known=False).best
    assert f"with twice the nodes' bandwidth then {twice.name} (" in why
    assert "with half the memory nothing fits: " in ask(cluster, model, 2 * run.length, top=1).why


def test_a_batch_that_does_not_fit_says_which_would():
    with pytest.raises(ValueError, match=r"does not fit cluster a100-4x8.*; a batch of \d+ would; "):
        search(find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**17, batch=64), data_parallel=1)


# --- auto


def test_auto_for_heads_alone_keeps_nothing_and_what_it_chooses_fits():
    cluster = find_cluster("a100-4x8")
    plan, why = plan_for_heads(cluster, 32, 32, 128, 2**19)
    memory = Training(cluster, find_model("gpt-7b"), Run(2**19)).memory(plan)
    assert plan.keep == "none"
    assert memory.total < memory.limit, f"{plan} needs {memory.total / 1e9:.0f} GB"
    assert "assuming 32 layers whose attention uses at most half of the memory and keeps nothing" in why


def test_auto_for_a_job_is_what_plan_says():
    cluster = find_cluster("a100-4x8")
    for name, length, batch in (("gpt-7b", 2**19, 1), ("dit-1b", 2**17, 1), ("gpt-3b", 2**15, 4)):
        model, run = find_model(name), Run(length, batch)
        plan, why = plan_for_job(cluster, Job(model, run, data_parallel=batch))
        best = search(cluster, model, run, data_parallel=batch).best
        assert plan == best.plan
        assert best.step.memory.total <= best.step.memory.limit
        assert f"a step of {name} with {batch} x {length} tokens" in why
        assert ("full mask" if name == "dit-1b" else "causal mask") in why


def test_auto_for_a_job_that_will_hardly_fit_says_so_and_lets_it_try():
    plan, why = plan_for_job(find_cluster("a100-4x8"), Job(find_model("gpt-7b"), Run(2**24)))
    plan.check_world(32)
    assert plan.keep == "none"
    assert re.search(r"may not fit, and this plan needs the least memory \(\S+ needs \d+\.\d GB a device", why)
    _, why = plan_for_heads(find_cluster("a100-4x8"), 32, 32, 128, 2**24)
    assert "may not fit" in why


def test_a_recipe_knows_its_job():
    for name in ("gpt-tiny", "dit-tiny"):
        recipe = find(name).with_({"data_parallel": 2, "batch": 3, "loss_chunk": 77})
        job = recipe.job("float32")
        ours, theirs = replace(job.model, layers=1, windows=()), replace(find_model(name), layers=1, windows=())
        assert ours == theirs
        assert (job.run.batch, job.run.length, job.run.loss_chunk) == (6, recipe.tokens, 77)
        assert (job.data_parallel, job.run.zero, job.run.recompute) == (2, recipe.zero, recipe.recompute)


def test_show_auto_says_what_a_job_on_that_cluster_would_get(capsys, monkeypatch):
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    argv = ["show", "auto", "--ranks", "16", "--nodes", "2", "--heads", "32", "--kv-heads", "8", "--length", "65536"]
    assert main([*argv, "--cluster", "a100-4x8"]) == 0
    described = capsys.readouterr().out
    _, why = plan_for_heads(fit_cluster(find_cluster("a100-4x8"), Machine(2, 8)), 32, 8, None, 65536)
    assert described.startswith(f"{why}; cluster described by a100-4x8\n")
    assert main(argv) == 0
    assumed = capsys.readouterr().out
    _, reason = plan_for_heads(fit_cluster(find_cluster("h100-8x8"), Machine(2, 8)), 32, 8, None, 65536)
    assert assumed.startswith(f"{reason}; cluster assumed to be like h100-8x8 (pass --cluster to plan for yours)\n")
    monkeypatch.setenv("STARTRAIL_CLUSTER", "a100-4x8")
    assert main(argv) == 0
    assert capsys.readouterr().out == described
    assert "no cluster 'a100-4x9'" in refusal([*argv, "--cluster", "a100-4x9"], capsys)


def test_rows_as_json(capsys):
    argv = ["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "64k", "--json", "--top", "2"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        for key in ("plan", "seconds", "low", "high", "tokens_per_second", "exposed", "bytes", "memory"):
            assert key in row
        assert row["low"] < row["seconds"] < row["high"]
        assert row["why_not"] is None
        assert set(row["bytes"]) == {"node", "gpu"}
        Plan.parse(row["plan"]).check_world(32)


def test_the_call_is_the_command(capsys):
    answer = startrail.plan("a100-4x8", "gpt-3b", "64k")
    assert main(["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "65536"]) == 0
    text = capsys.readouterr().out
    assert text == f"{answer}\n"
    for part in ("tokens/s", "MFU", "exposed", "GB/node", " wins: ", "The runner-up", "twice the nodes' bandwidth"):
        assert part in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--cluster", "a100-4x9"], "no cluster 'a100-4x9'; did you mean 'a100-4x8'?"),
        (["--cluster", "a100-4x8@4"], "'4' is not NODExGPU"),
        (["--cluster", "none.toml"], "none.toml: No such file or directory"),
        (["--model", "gpt-8b"], "no model 'gpt-8b'; did you mean 'gpt-"),
        (["--length", "-5"], "length = '-5' is not a whole number of at least 1"),
        (["--length", "9" * 320], "length = '99999"),
        (["--length", "16"], "length 16 has fewer tokens than cluster a100-4x8 has ranks, 32"),
        (["--length", "16M"], "tokens would"),
        (["--batch", "0"], "batch = '0' is not a whole number"),
        (["--memory", "much"], "memory = 'much' is not an amount of memory"),
        (["--memory", "0 GB"], "memory = '0 GB' is not between 1 MB and"),
        (["--top", "x"], "argument --top: 'x' is not a whole number"),
        (["--zero", "x"], "argument --zero: 'x' is not a whole number"),
        (["--zero", "1"], "zero = 1 is not one of 0, 2, 3"),
        (["--dtype", "float32"], "has no rates in float32; it has bfloat16"),
        (["--dtype", "int8"], "dtype = 'int8' is not one of"),
        (["--top", "0"], "top = 0 is not a whole number of at least 1"),
        (["--memory", "2 GB"], "does not fit cluster a100-4x8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    whole = ["plan", "--cluster", "a100-4x8", "--model", "gpt-7b", f"--length={64 * 1024}"]
    if argv[0] == "--length":
        argv = [f"--length={argv[1]}"]
    assert message in refusal([*whole, *argv], capsys)


SLIDING = LLAMA | dict(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256, sliding_window=4096, sliding_window_pattern=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "cluster, model, length, limit",
    [
        ("h100-8x8", "gpt-7b", "512k", 1.0),
        ("h100-8x8", "sliding", "512k", 1.0),
        ("nvl72", "llama3-8b", "1M", 2.0),  # 288 GPUs, and many ways to divide 72
        ("h100-8x8@2048x8", "llama3-70b", "1M", 10.0),
        ("h100-8x8@2048x8", "sliding", "1M", 10.0),
        ("nvl72@228x72", "llama3-70b", "1M", 10.0),
    ],
)
def test_planning_is_fast(cluster, model, length, limit):
    """On one core; the better of two, because other tests share it."""
    described = from_hugging_face(SLIDING, "mine", "config.json") if model == "sliding" else find_model(model)
    times = []
    for _ in range(2):
        start = time.process_time()
        search(find_cluster(cluster), described, Run(length=count(length)))
        times.append(time.process_time() - start)
        if times[-1] < limit:
            break
    assert min(times) < limit

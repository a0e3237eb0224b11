"""A whole training step: memory against measurements, FLOPs, and groups that wait for each other."""

from dataclasses import replace

import pytest

from startrail.planner.cluster import SlowMember, find_cluster
from startrail.planner.memory import LIBRARY_BYTES, estimate_memory
from startrail.planner.predict import predict
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.workload import Job, Model, Run, find_model, from_hugging_face
from startrail.schedule.plan import Plan
from startrail.training.recipes import find

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
def test_memory_is_within_a_tenth_of_the_measurement(length, text, recompute, mib):
    plan, run = Plan.parse(text), Run(length, dtype="float32", recompute=recompute)
    memory = estimate_memory(Job(NARROW, run), plan, plan.size, libraries=LIBRARY_BYTES)
    assert memory.total / 2**20 == pytest.approx(mib, rel=0.1)
    on_cluster = Training(find_cluster(f"lab@1x{plan.size}"), NARROW, run).memory(plan)
    assert on_cluster.total == memory.total - LIBRARY_BYTES and on_cluster.limit == 0.9e9


LARGER_DIT = dict(layers=3, rows=16, columns=16, batch=16, zero=2, plan="2x2/u2")


@pytest.mark.parametrize(
    "name, changes, ranks, mib",
    [
        ("gpt-tiny", dict(plan="2x2", length=16384), 4, 272.7),
        ("gpt-tiny", dict(plan="2x1", length=8192, data_parallel=2), 4, 267.6),
        ("gpt-tiny", dict(recompute=True), 8, 48.3),
        ("gpt-hybrid-tiny", {}, 8, 83.7),
        ("gpt-hybrid-tiny", dict(recompute=True, length=8192, plan="1x2"), 2, 215.7),
        ("gpt-hybrid-tiny", dict(length=4096, plan="2x2"), 4, 179.9),
        ("dit-tiny", {**LARGER_DIT, "plan": "2x2", "batch": 64}, 4, 172.0),
        ("dit-tiny", {**LARGER_DIT, "plan": "2x2", "recompute": True, "zero": 3}, 4, 59.8),
        ("dit-tiny", LARGER_DIT, 8, 55.8),
        ("dit-tiny", dict(), 4, 51.1),
    ],
)
def test_memory_of_recipes_is_within_a_tenth_of_the_measurement(name, changes, ranks, mib):
    """Peaks of one step, or of a few with a checkpoint, on CPU ranks: ``Trainer`` prints this estimate."""
    recipe = find(name).with_(changes)
    memory = estimate_memory(recipe.job("float32"), Plan.parse(recipe.plan), ranks, libraries=LIBRARY_BYTES)
    assert memory.total / 2**20 == pytest.approx(mib, rel=0.1)


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


def test_groups_wait_for_the_slowest_group():
    cluster = find_cluster("a100-4x8")
    slow = replace(cluster, slow=(SlowMember(0, 3, bandwidth=0.1), SlowMember(0, 1, bandwidth=0.4, compute=0.5)))
    assert slow.part(16).slow == (SlowMember(0, 1, bandwidth=0.1, compute=0.5),)
    model, run = find_model("gpt-3b"), Run(length=65536, batch=2)
    before, after = (search(some, model, run, data_parallel=2, known=False).best for some in (cluster, slow))
    assert after.seconds > 1.5 * before.seconds


LLAMA = find_model("llama3-8b")
H100 = find_cluster("h100-8x8@1x8")


def step(run, plan="u8", model=LLAMA, data_parallel=1):
    training, parsed = Training(H100, model, run, data_parallel), Plan.parse(plan)
    return training.step(parsed, lambda call: predict(training.group, parsed, call))


def test_full_recomputation_repeats_the_forward_pass_of_attention():
    run = Run(2**17)
    ours, theirs = step(run), step(replace(run, repeat_attention=True))
    call = Training(H100, LLAMA, run).call(None)
    forward = predict(H100, Plan.parse("u8"), call).forward.seconds
    assert theirs.seconds - ours.seconds == pytest.approx(LLAMA.layers * forward, rel=1e-3)
    assert theirs.memory.kept == 0 and theirs.memory.activations < ours.memory.activations
    with pytest.raises(ValueError, match="repeat_attention = true needs recompute = true"):
        Run(1, recompute=False, repeat_attention=True)


def test_offload_and_narrow_states_save_memory_and_take_time():
    run = Run(2**17, repeat_attention=True, residual="bfloat16")
    plain, inputs = step(run), step(replace(run, offload=True))
    per_layer = 2 * LLAMA.width * 2**17 / 8
    assert plain.memory.total - inputs.memory.total == pytest.approx((LLAMA.layers - 2) * per_layer)
    states = step(replace(run, offload_states=True))
    assert states.memory.states == 0 and states.seconds > plain.seconds
    assert step(replace(run, states="bfloat16")).memory.states == plain.memory.states / 2


def test_a_batch_in_parts_needs_less_memory_and_gathers_more_often():
    whole, parts = step(Run(2**14, batch=4)), step(Run(2**14, batch=4, accumulate=4))
    assert parts.memory.activations < 0.3 * whole.memory.activations and parts.sent > whole.sent
    assert whole.seconds < parts.seconds < 1.2 * whole.seconds
    with pytest.raises(ValueError, match="a batch of 4 cannot be split over 1 group in 3 parts"):
        step(Run(2**14, batch=4, accumulate=3))


def test_tensor_parallelism_splits_heads_first():
    run = Run(2**16, tensor=4)
    training = Training(H100, LLAMA, run)
    call = training.call(None)
    assert (call.heads, call.kv_heads, training.group.world) == (8, 2, 2)
    assert training.local_tokens == 2**15
    assert training.flops == Training(H100, LLAMA, replace(run, tensor=1)).flops
    assert step(run, "1x2").seconds == pytest.approx(step(replace(run, tensor=1), "u8").seconds, rel=0.3)
    with pytest.raises(ValueError, match="tensor = 3 must divide 32 query and 8 key/value heads and 8 GPUs"):
        Training(H100, LLAMA, Run(2**16, tensor=3))


def test_fp8_speeds_up_matrix_products_where_its_speed_is_known():
    assert step(Run(2**15, fp8=True)).seconds < step(Run(2**15)).seconds
    with pytest.raises(ValueError, match="fp8 = true: device A100-SXM4-40GB has no fp8 rate"):
        Training(find_cluster("a100-4x8"), LLAMA, Run(2**15, fp8=True))


def test_a_mixture_of_experts_computes_with_some_of_its_parameters():
    config = dict(
        model_type="mixtral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    mixtral = from_hugging_face(config, "mixtral", "config.json")
    assert mixtral.parameters / 1e9 == pytest.approx(46.7, abs=0.1)  # as its paper states them
    assert mixtral.active_parameters / 1e9 == pytest.approx(12.9, abs=0.1)
    plain = replace(mixtral, experts=0, active_experts=0, hidden=2 * mixtral.hidden)
    assert Training(H100, mixtral, Run(2**15)).flops == Training(H100, plain, Run(2**15)).flops
    with pytest.raises(ValueError, match="'num_local_experts' is missing"):
        from_hugging_face({key: value for key, value in config.items() if "local" not in key}, "m", "config.json")


def test_exchanging_again_saves_what_heads_keep():
    cluster, model, run = find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**19)
    once, twice = (Training(cluster, model, run).memory(Plan.parse(f"u4/1x8{o}")) for o in ("", ",exchange=twice"))
    assert twice.kept == 0 and once.kept == 32 * 3 * 2**14 * 4096 * 2  # q, k and v of every layer
    best = search(cluster, model, run, known=False).best  # every plan with heads would need too much otherwise
    assert best.plan.exchange == "twice" and best.step.memory.total <= best.step.memory.limit == 0.9 * 37e9

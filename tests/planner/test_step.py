"""A whole training step: memory against measurements, FLOPs, and groups that wait for each other."""

from dataclasses import replace

import pytest

from startrail.planner.cluster import SlowMember, find_cluster
from startrail.planner.memory import LIBRARY_BYTES, estimate_memory
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.workload import Job, Model, Run, find_model
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

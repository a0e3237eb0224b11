"""Forward and backward passes on 1 to 16 ranks against float64, with random cotangents and exact byte counts."""

from collections import defaultdict
from itertools import product
from math import lcm

import pytest
import torch

import startrail
from startrail.diagnostics.reference import Case, Error, make_data
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from tests.engine.plans import PLANS, VARIED, features, on_nccl_only, pairwise, run, variants
from tests.helpers import FULL

# A minimal set with every mask, head ratio, dtype and awkward length. Without ``kv``, there are as many KV heads.
SHAPES = [
    dict(length=256, causal=False),
    dict(length=1001, causal=True, kv=2),
    dict(length=17, causal=True, batch=2, scale=0.7),
    dict(length=1, causal=False),
    dict(length=330, causal=True, window=37, kv=1),
    dict(length=200, causal=False, window=64, documents=(0, 3, 90, 91, 200)),
    dict(length=513, causal=True, documents=(0, 130, 131, 260, 500, 513), kv=2, batch=2),
    dict(length=300, causal=True, dtype=torch.bfloat16, kv=2),
    dict(length=256, causal=False, dtype=torch.float16, layout="contiguous", head_dim=40),
]


def case_for(text: str, world: int, shape: dict, seed: int) -> Case:
    plan, shape = Plan.parse("1x1" if text == "auto" else text), dict(shape)
    heads = lcm(4, plan.heads)
    kv_heads = shape.pop("kv", heads)
    if plan.groups > 1 and kv_heads < plan.groups * plan.heads:
        heads = kv_heads = max(heads, plan.groups * plan.heads)
    return Case(text, world, q_heads=heads, kv_heads=kv_heads, seed=seed, **{"head_dim": 16, **shape})


def selected() -> list[tuple[str, int, int]]:
    """(plan, world, index of a shape) of all cases: pairs in ``make test``, the product in ``make test-all``."""
    plans = [(plan, world) for world in PLANS for plan in PLANS[world]]
    if FULL:
        return [(plan, world, shape) for plan, world in plans for shape in range(len(SHAPES))]
    return pairwise(plans, len(SHAPES))


@pytest.mark.parametrize("world", sorted(PLANS))
def test_every_plan_is_exact(world):
    run([case_for(plan, world, SHAPES[shape], shape) for plan, size, shape in selected() if size == world])


def test_ranks_of_different_speed_and_ranks_without_tokens():
    shares, inner = ((1.0, 0.5, 0.9, 0.25), (1.0, 0.001, 1.0, 1.0)), (0, 30, 31, 90)
    options = [dict(), dict(documents=inner), dict(documents=(*inner[:2], 50, 90), packed_from=(0, 30, 90))]
    run([
        Case(plan, 4, 90, kv_heads=2, causal=True, shares=given, seed=seed, **option)
        for plan in ("1x4", "2x2", "u2/1x2", "star2")
        for seed, (given, option) in enumerate(product(shares, options))
    ])  # fmt: skip


def test_pairs_cover_every_shape_with_every_common_feature():
    shapes_met, plans_with = defaultdict(set), defaultdict(set)
    for plan, world, shape in selected():
        for feature in features(plan, world):
            shapes_met[feature].add(shape)
            plans_with[feature].add((plan, world))
    common = [feature for feature, plans in plans_with.items() if len(plans) >= 6]
    assert len(common) > 15
    assert all(len(shapes_met[feature]) == len(SHAPES) for feature in common), shapes_met


@pytest.mark.parametrize("world", sorted(VARIED))
def test_variants_of_plans_are_exact(world):
    shapes = [{**SHAPES[1], "length": 401}, {**SHAPES[5], "batch": 2}, SHAPES[7]]
    cases = []
    for number, plan in enumerate(variants(world)):
        if on_nccl_only(plan, world):
            continue
        seeds = range(3) if FULL else [number % 3]  # each variant has several plans, each plan several variants
        cases += [case_for(plan, world, shapes[seed], seed) for seed in seeds]
    run(cases)


def test_heads_over_more_and_fewer_ranks_than_kv_heads():
    """KV heads are split, one per rank, or replicated; 6 on 4 ranks and 3 on 2 divide neither way."""
    plans = ("u4", "u2/u2")
    cases = [Case(plan, 4, q_heads=8, kv_heads=kv, length=100, causal=True) for plan in plans for kv in (8, 4, 2, 1)]
    cases += [
        Case("1x1/u4", 4, q_heads=12, kv_heads=6, length=100),
        Case("1x2/u2", 4, q_heads=6, kv_heads=3, length=64),
    ]
    run(cases)


def test_head_dims_up_to_256_and_a_bfloat16_wire():
    dims = [Case("2x2", 4, head_dim=dim, length=130, causal=True) for dim in (1, 3, 128, 256)]
    narrow = Case("2x2", 4, wire_dtype=torch.bfloat16, length=256)  # compared with SDPA in bfloat16
    # In rows that see one key, dq and dk are zero only if delta is computed from the dout that was sent.
    one_key = dict(length=64, window=1, wire_dtype=torch.bfloat16)
    cases = [Case(plan, 4, **one_key) for plan in ("u2/u2", "u2/1x2,keep=all", "1x2/u2,groups=2")]
    report, *_ = run([narrow, *dims, *cases])
    assert 1e-5 < report.errors["out"].rms < 1e-2, "a bfloat16 wire must show, within its precision"
    run([Case("u2", 2, **one_key)])


def test_float64_inputs_are_computed_in_float64():
    (report,) = run([Case("2x2", 4, dtype=torch.float64, causal=True)])
    assert max(error.worst for error in report.errors.values()) < 1e-13


def test_a_float32_wire_rounds_only_the_result():
    """With bfloat16 inputs and a float32 wire, sums, merges, delta and repeated heads are all float32. The error
    is then that of rounding the exact result once."""
    shape = dict(length=512, q_heads=8, kv_heads=2, dtype=torch.bfloat16, wire_dtype=torch.float32, causal=True)
    plans = ("1x8", "4x2", "1x2/u4", "star2")
    exact = make_data(Case("", 2, **shape)).exact
    for plan, report in zip(plans, run([Case(plan, 8, **shape) for plan in plans]), strict=True):
        for name, error in report.errors.items():
            rounding = Error.of(exact[name].bfloat16(), exact[name])
            # dq and dk start from the rounded output, as in every flash attention
            assert error.rms < (1.2 if name in ("dq", "dk") else 1.01) * rounding.rms, (plan, name)


def test_every_pair_of_input_and_wire_dtype_is_exact():
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    cases = [Case("2x2", 4, dtype=d, wire_dtype=w, length=64, causal=True) for d in dtypes for w in dtypes]
    run(cases)


def test_tiny_and_huge_cotangents():
    """delta is sent instead of out: the surrogate output must neither underflow nor overflow."""

    def on_rank(rank):
        sequence = startrail.SequenceParallel("2x1").sequence(32)
        torch.manual_seed(0)
        q, k, v, dout = torch.randn(4, 1, 2, 32, 8)
        worst = 0.0
        qkv = [sequence.shard(x, 2).requires_grad_() for x in (q, k, v)]
        base = torch.autograd.grad(sequence.attention(*qkv), qkv, sequence.shard(dout, 2))
        for size in (1e-22, 1e19):
            grads = torch.autograd.grad(sequence.attention(*qkv), qkv, sequence.shard(dout * size, 2))
            worst = max(worst, *((g / size - b).abs().max().item() for g, b in zip(grads, base, strict=True)))
        return worst

    assert max(run_local(on_rank, 2)) < 2e-6


def test_wire_dtypes_are_exact_within_their_bounds_at_large_logits():
    """With large logits, forward and backward passes must round them in the same way."""
    plans = ("1x4,backward=queries", "2x2,backward=queries", "u2/1x2", "star2", "1x4")
    cases = [
        Case(plan, 4, length, q_heads=4, kv_heads=2, head_dim=33, causal=causal, wire_dtype=wire, scale=1.0)
        for plan in plans
        for length, causal in ((64, False), (37, True))
        for wire in (torch.bfloat16, torch.float64)
    ]
    run(cases)

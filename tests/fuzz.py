"""Random plans x shapes x masks against float64: ``make fuzz``, or ``python -m tests.fuzz --cases 500 --seed 0``.

Cases of one world size share a set of forked ranks. Everything about a case follows from its seed, so a failure is
repeated with ``--seed N --cases 1``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from functools import cache
from math import lcm

import torch
from torch import Tensor

from startrail.check import check_cases
from startrail.cluster import Machine
from startrail.local import run_local
from startrail.plan import Plan, plans_for, variants_of
from startrail.planner import auto_plan
from startrail.schedule.family import Heads
from startrail.schedule.star import STAR
from startrail.truth import USES, Case, visible_pairs
from startrail.wire import DTYPES

WORLDS = (1, 2, 3, 4, 5, 6, 8, 9, 12)
BATCH = 25  # cases on one set of ranks


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    world = rng.choice(WORLDS)
    plans = _variants(world, rng.choice([2, 3]))
    stars = [plan for plan in plans if plan.family is STAR]  # few among so many
    plan = rng.choice(stars if stars and rng.random() < 0.2 else plans)
    plan = replace(plan, groups=rng.choice([1, 1, 1, 2, 3]))
    unit = lcm(plan.heads, rng.choice([1, 2, 3]))
    q_heads = unit * rng.choice([1, 2, 4])
    kv_heads = rng.choice([h for h in range(1, q_heads + 1) if q_heads % h == 0])
    batch = plan.groups * rng.choice([1, 2])  # groups can always fall back on the batch
    length = rng.choice([1, 2, rng.randint(3, 40), rng.randint(41, 400), 64 * world])
    documents = None
    if rng.random() < 0.4:
        documents = (0, *sorted(rng.choices(range(length + 1), k=rng.choice([0, 1, 4, 15]))), length)
    layer = random_layer(rng, length)
    return Case(
        plan=str(plan),
        world=world,
        length=length,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([1, 8, 16, 33, 64]),
        dtype=rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64]),
        wire_dtype=rng.choice([None] * 5 + list(DTYPES)),
        causal=rng.random() < 0.6,
        window=rng.choice([None, None, 1, rng.randint(2, 50), rng.randint(51, 500)]),
        documents=documents,
        layout=rng.choice(["zigzag", "zigzag", "contiguous"]),
        scale=rng.choice([None, None, 0.05, 0.7, 1.0]),
        value_dim=rng.choice([None, None, None, 1, 24]),
        sinks=rng.random() < 0.2,
        lse=rng.random() < 0.2,
        seed=seed,
        use=rng.choice([*USES, "plain"]),
        **layer,
    )


def random_layer(rng: random.Random, length: int) -> dict:
    """What not every model has: chunks, blocks, or slices."""
    kind = rng.choice(["plain"] * 5 + ["chunk", "blocks", "slices"])
    if kind == "chunk":
        return dict(chunk=rng.choice([1, rng.randint(2, 40), rng.randint(41, 400)]))
    ends = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randint(1, 3)) // 2 * 2))
    if kind == "blocks":
        return dict(blocks=tuple(zip(ends[::2], ends[1::2], strict=True)))
    if kind == "slices":  # a prefix, then causal from there: and what lies between two ends sees the whole prefix only
        prefix, gap = ends[0] or 1, ends[-1]
        slices = [(0, prefix, 0, prefix)]
        if gap > prefix:
            slices.append((prefix, gap, 0, prefix))
        if gap < length and prefix < length:
            slices.append((max(gap, prefix), length, 0, length, 1))
        return dict(slices=tuple(slices))
    return {}


@cache
def _variants(world: int, max_levels: int) -> list[Plan]:
    return [variant for plan in plans_for(world, max_levels) for variant in variants_of(plan)]


def run(first_seed: int, count: int, progress: bool = False) -> list[str]:
    """Texts of what went wrong, with the seed and the case."""
    cases = [random_case(seed) for seed in range(first_seed, first_seed + count)]
    wrong, done, start = [], 0, time.monotonic()
    for world in WORLDS:
        mine = [case for case in cases if case.world == world]
        for index in range(0, len(mine), BATCH):
            part = mine[index : index + BATCH]
            for case, report in zip(part, check_cases(part), strict=True):
                wrong += [f"seed {case.seed}: {case}\n    {text}" for text in report.verdict()]
            done += len(part)
            if progress:
                print(
                    f"\r{done}/{count} cases, {len(wrong)} wrong, {time.monotonic() - start:.0f} s", end="", flush=True
                )
    if progress:
        print()
    return wrong


def not_finite(first_seed: int, count: int) -> list[str]:
    """The same for keys and queries with NaN and infinities: they come out where they do in one process."""
    plain = dict(dtype=torch.float32, wire_dtype=None, chunk=None, blocks=(), slices=())
    cases = [replace(random_case(seed), **plain) for seed in range(first_seed, first_seed + count)]
    wrong = []
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        data = [_spoilt(case) for case in mine]

        def on_rank(rank: int, mine: list[Case] = mine, data: list[list[Tensor]] = data) -> list[str]:
            return [text for case, tensors in zip(mine, data, strict=True) if (text := _not_as_alone(case, tensors))]

        for rank, texts in enumerate(run_local(on_rank, world)):
            wrong += [f"rank {rank}, {text}" for text in texts or ()]
    return wrong


def _spoilt(case: Case) -> list[Tensor]:
    """q, k, v with a few bad numbers in q and k, and the output of plain math."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    q, k, v = (torch.randn(case.batch, h, case.length, case.head_dim, generator=generator) for h in heads)
    for x in (q, k):
        for _ in range(rng.choice([0, 1, 1, 2])):
            place = tuple(rng.randrange(size) for size in x.shape)
            x[place] = rng.choice([float("nan"), float("inf"), float("-inf")])
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    wide = [x.double().repeat_interleave(case.q_heads // x.shape[1], 1) for x in (q, k, v)]
    logits = (wide[0] @ wide[1].mT * scale).masked_fill(~visible_pairs(case), float("-inf"))
    return [q, k, v, logits.softmax(-1) @ wide[2]]


def _not_as_alone(case: Case, tensors: list[Tensor]) -> str | None:
    sequence = case.parallel().sequence(case.length, case.documents)
    q, k, v, truth = (sequence.shard(x, 2) for x in tensors)
    out = sequence.attention(q, k, v, causal=case.causal, window=case.window, scale=case.scale).double()
    if torch.allclose(out, truth, rtol=1e-4, atol=1e-4, equal_nan=True):
        return None
    found = f"{(out - truth).abs().max().item()} off, {out.isnan().sum()} NaN instead of {truth.isnan().sum()}"
    return f"seed {case.seed}: {case}\n    {found}"


def test_a_smaller_run():
    assert not run(first_seed=10_000, count=60)


def test_numbers_that_are_not_finite():
    assert not not_finite(first_seed=20_000, count=20)


def test_random_cases_cover_the_ground():
    """The search is no use if it never meets the hard parts."""
    cases = [random_case(seed) for seed in range(500)]
    plans = [Plan.parse(case.plan) for case in cases]
    assert {case.world for case in cases} == set(WORLDS)
    assert all(any(test(p) for p in plans) for test in (
        lambda p: p.family is STAR, lambda p: len(p.shard_levels) > 1, lambda p: p.groups > 1,
        lambda p: p.heads > 1 and p.shard_levels, lambda p: len(p.head_levels) > 1,
        lambda p: isinstance(p.levels[0], Heads) and p.shard_levels,
        lambda p: any(isinstance(level, Heads) for level in p.levels[1:-1]),
        lambda p: isinstance(p.levels[0], Heads) and p.family is STAR,
        lambda p: p.keep == "all", lambda p: p.keep == "queries", lambda p: p.backward == "queries",
    ))  # fmt: skip
    assert any(case.documents and case.window and case.causal for case in cases)
    for name in ("chunk", "blocks", "slices", "value_dim", "sinks", "lse"):
        assert sum(bool(getattr(case, name)) for case in cases) > 15, name
    assert {case.use for case in cases} == set(USES) and {case.wire_dtype for case in cases} == {None, *DTYPES}
    assert any(len(p.levels) == 3 and p.size == 12 for p in plans if p.family is not STAR)
    assert auto_plan(Machine(2, 4), 8, 2)[0].size == 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = run(options.seed, options.cases, progress=True) + not_finite(options.seed, options.cases // 10)
    print("\n".join(wrong) or f"{options.cases} cases, nothing found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

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
from math import lcm

import torch

from startrail.check import Case, check_cases
from startrail.cluster import Machine
from startrail.plan import Plan, plans_for, variants_of
from startrail.planner import auto_plan
from startrail.schedule.family import Heads
from startrail.schedule.star import STAR

WORLDS = (1, 2, 3, 4, 5, 6, 8, 9, 12)
BATCH = 25  # cases on one set of ranks


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    world = rng.choice(WORLDS)
    plan = rng.choice([v for p in plans_for(world, max_levels=3 if world <= 8 else 2) for v in variants_of(p)])
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
        dtype=rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16]),
        causal=rng.random() < 0.6,
        window=rng.choice([None, None, 1, rng.randint(2, 50), rng.randint(51, 500)]),
        documents=documents,
        layout=rng.choice(["zigzag", "zigzag", "contiguous"]),
        scale=rng.choice([None, None, 0.05, 0.7]),
        value_dim=rng.choice([None, None, None, 1, 24]),
        sinks=rng.random() < 0.2,
        lse=rng.random() < 0.2,
        seed=seed,
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


def test_a_smaller_run():
    assert not run(first_seed=10_000, count=60)


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
    assert auto_plan(Machine(2, 4), 8, 2)[0].size == 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = run(options.seed, options.cases, progress=True)
    print("\n".join(wrong) or f"{options.cases} cases, nothing found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

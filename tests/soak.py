"""Many calls with changing shapes, documents, windows, sinks and scales, on several plans in turn: ``make soak``
(20,000 calls), and a short one in the tests.

Memory, descriptors, threads and the store's keys must not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local

WORLD = 4
PLANS = ("1x4", "u2/1x2", "2x1/1x2,keep=all", "1x2/u2,groups=2", "star2")
MEMORY_BYTES = 8 * 2**20  # allowed fluctuation


def resources() -> dict[str, int]:
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return {
        "memory": 1024 * int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),  # also those not started by Python
        "keys": dist.distributed_c10d._get_default_store().num_keys(),
    }


def soak(calls: int, warm: int, every: int = 0) -> tuple[dict[str, int], dict[str, int]]:
    """This rank's resources after ``warm`` calls and after ``calls``."""
    rng = random.Random(0)
    parallels = [startrail.SequenceParallel(plan) for plan in PLANS]
    for sp in parallels:  # the first call with a narrow mask opens lanes
        sequence = sp.sequence(96)
        sequence.attention(*torch.randn(3, 1, 8, sequence.local, 8), window=2)
    before, start = {}, time.monotonic()
    for call in range(calls):
        sp = parallels[call % len(parallels)]
        length = rng.choice([16, 24, 64, rng.randint(8, 96)])
        documents = sorted({0, length, *(rng.randrange(length) for _ in range(rng.choice([0, 1, 5])))})
        sequence = sp.sequence(length, documents)
        heads, dim = rng.choice([4, 8]), rng.choice([8, 16])
        q = torch.randn(rng.choice([1, 2]), heads, sequence.local, dim, requires_grad=True)
        options = dict(
            causal=rng.random() < 0.5,
            window=rng.choice([None, None, rng.randint(1, 100)]),
            scale=rng.choice([None, rng.random() + 0.1]),
            sinks=torch.randn(heads, requires_grad=True) if rng.random() < 0.2 else None,
        )
        out = sequence.attention(q, q, q, **options)
        if rng.random() < 0.5:
            torch.autograd.grad(out, q, torch.randn_like(out))
        if call + 1 == warm:
            dist.barrier()
            before = resources()
        if every and (call + 1) % every == 0 and dist.get_rank() == 0:
            print(f"{call + 1} calls, {time.monotonic() - start:.0f} s: {resources()}", flush=True)
    dist.barrier()
    return before, resources()


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The resources that have grown by more than allowed, and by how much."""
    allowed = {"memory": MEMORY_BYTES, "keys": 2 * len(PLANS), "descriptors": 0, "threads": 0}
    return {name: after[name] - before[name] for name in before if after[name] > before[name] + allowed[name]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm = options.calls // 4
    ranks = run_local(lambda rank: soak(options.calls, warm, warm // 2), WORLD, deadline=7200)
    for rank, (before, after) in enumerate(result for result in ranks if result is not None):
        print(
            f"rank {rank}: {before} after call {warm}, {after} after {options.calls}; too much: {grown(before, after)}"
        )
    return int(any(grown(*result) for result in ranks if result is not None))


if __name__ == "__main__":
    sys.exit(main())

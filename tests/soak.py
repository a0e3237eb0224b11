"""Many calls with ever new shapes, documents and scales: ``make soak`` (20,000 calls), and a short one in the tests.

Memory, descriptors, threads and the store's keys must not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist

import startrail
from startrail.local import run_local


def resources() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "keys": dist.distributed_c10d._get_default_store().num_keys(),
    }


def soak(calls: int, warm: int, every: int = 0) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank holds after ``warm`` calls, and after ``calls``."""
    chance = random.Random(0)
    sp = startrail.SequenceParallel(f"1x{dist.get_world_size()}")
    before, start = {}, time.monotonic()
    for call in range(calls):
        length = chance.choice([16, 24, 64, chance.randint(8, 96)])
        documents = sorted({0, length, *(chance.randrange(length) for _ in range(chance.choice([0, 1, 5])))})
        sequence = sp.sequence(length, documents)
        heads, dim = chance.choice([1, 2, 4]), chance.choice([8, 16])
        q = torch.randn(chance.choice([1, 2]), heads, sequence.local, dim, requires_grad=True)
        scale = chance.choice([None, chance.random() + 0.1])
        out = sequence.attention(q, q, q, causal=chance.random() < 0.5, scale=scale)
        if chance.random() < 0.5:
            torch.autograd.grad(out, q, torch.randn_like(out))
        if call + 1 == warm:
            dist.barrier()
            before = resources()
        if every and (call + 1) % every == 0 and dist.get_rank() == 0:
            print(f"{call + 1} calls, {time.monotonic() - start:.0f} s: {resources()}", flush=True)
    dist.barrier()
    return before, resources()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm = options.calls // 4
    for rank, found in enumerate(run_local(lambda rank: soak(options.calls, warm, warm // 2), 2, deadline=7200)):
        before, after = found or ({}, {})
        grown = {name: after[name] - before[name] for name in before}
        print(f"rank {rank}: from call {warm} to {options.calls} grew by {grown}")
        if grown["memory"] > 8 * 2**20 or grown["keys"] > 2 or grown["descriptors"] > 0 or grown["threads"] > 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

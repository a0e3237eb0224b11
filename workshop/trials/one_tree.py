"""Measures one source tree for `against`, which starts it with that tree on PYTHONPATH.

A line of JSON on stdin is a question, a line on stdout its answer. Everything that is imported must exist in the other
tree, too: of startrail, only the public API, ``run_local`` and ``bench.host``.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local

Json = dict[str, Any]
WARM_UP = 1


def attention(work: Json, plan: str, ranks: int, calls: int) -> list[float]:
    """Seconds of the fastest forward + backward call on the slowest rank, and CPU seconds of a rank, on average."""

    def on_rank(rank: int) -> tuple[float, float]:
        sp = startrail.SequenceParallel(plan, windows=work["window"] is not None)
        sequence = sp.sequence(work["length"], work["documents"] or None)
        heads = (work["q_heads"], work["kv_heads"], work["kv_heads"], work["q_heads"])
        *qkv, dout = (torch.randn(1, number, sequence.local, work["head_dim"]) for number in heads)
        for x in qkv:
            x.requires_grad_()
        times, cpu_times = [], []
        for _ in range(WARM_UP + calls):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            out = sequence.attention(*qkv, causal=work["causal"], window=work["window"])
            torch.autograd.grad(out, qkv, dout)
            dist.barrier()
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu_start)
        return min(times[WARM_UP:]), min(cpu_times[WARM_UP:])

    seconds, cpu_seconds = zip(*(found for found in run_local(on_rank, ranks) if found is not None), strict=True)
    return [max(seconds), sum(cpu_seconds) / ranks]


def host(plan: str, ranks: int, heads: int, calls: int) -> list[float]:
    """Seconds of Python for the fastest forward call plus the fastest backward pass."""
    from startrail.bench.host import host_times

    forward, backward, *_ = host_times(plan, ranks, heads, calls)
    return [(min(forward) + min(backward)) / 1000]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may print there
    print(json.dumps(startrail.__file__), file=answers, flush=True)
    for line in sys.stdin:
        question, *arguments = json.loads(line)
        answer = host(*arguments) if question == "host" else attention(*arguments)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

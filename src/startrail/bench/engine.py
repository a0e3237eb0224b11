"""``startrail bench engine``: speed and memory of the engine on this machine, against single-process SDPA."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import startrail
from startrail.bench import host
from startrail.bench.defaults import ENGINE_PLANS, HOST_PLANS
from startrail.bench.peers.contenders import whole_attention, with_gradients
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.training import memory


def inputs(options: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    size = (1, options.heads, tokens, options.head_dim)
    return torch.randn(size), torch.randn(size), torch.randn(size), torch.randn(size)


def time_sdpa(options: argparse.Namespace) -> float:
    def on_rank(rank: int) -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        q, k, v, dout = inputs(options, options.length)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            with_gradients(partial(whole_attention, causal=not options.full), q, k, v, dout)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    (seconds,) = run_local(on_rank, 1)
    assert seconds is not None
    return seconds


def time_plan(options: argparse.Namespace, plan: str) -> tuple[float, float, float, float]:
    """Seconds, share of waiting, peak bytes that attention adds to a rank, and the engine's formula for them."""

    def on_rank(rank: int) -> tuple[float, float, float, float]:
        sp = startrail.SequenceParallel(plan)
        sequence, few = sp.sequence(options.length), sp.sequence(16 * sp.world)
        attention = partial(sequence.attention, causal=not options.full)
        q, k, v, dout = inputs(options, sequence.local)
        sizes = sp.sizes(q, k)
        # memory of libraries and connections is not attention's
        warm_up = partial(few.attention, causal=not options.full)
        with_gradients(warm_up, q[:, :, :16], k[:, :, :16], v[:, :, :16], dout[:, :, :16])
        resident = memory.resident_bytes()
        memory.reset_peak(dout.device)
        times, shares = [], []
        for _ in range(3):
            dist.barrier()
            sp.reset_counters()
            start = time.perf_counter()
            with_gradients(attention, q, k, v, dout)
            dist.barrier()
            times.append(time.perf_counter() - start)
            shares.append(sp.timings()["waiting"] / sp.timings()["total"])
        formula = max(sizes.peak_bytes(pass_, sp.world) for pass_ in PASSES)
        return min(times[1:]), min(shares[1:]), memory.peak_bytes(dout.device) - resident, formula

    results = [result for result in run_local(on_rank, options.ranks) if result is not None]
    seconds, shares, added, formula = zip(*results, strict=True)
    return max(seconds), statistics.mean(shares), max(added), formula[0]


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    plans = (options.plans or (HOST_PLANS if options.host else ENGINE_PLANS)).replace(",", " ").split()
    if options.calls < 1:
        raise ValueError(f"--calls {options.calls} must be at least 1")
    for plan in plans:
        Plan.parse(plan).check_world(options.ranks)
    if options.host:
        print(host.table(plans, options.ranks, options.heads, options.calls))
        return 0
    print(
        f"forward + backward, {'full' if options.full else 'causal'}, N = {options.length}, {options.heads} heads x "
        f"{options.head_dim}, float32, {options.ranks} ranks of one thread; {os.cpu_count()} cores, "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, startrail {startrail.__version__}"
    )
    sdpa: list[float] = []
    ours: dict[str, list[tuple[float, float, float, float]]] = {plan: [] for plan in plans}
    done, total = 0, options.rounds * len(plans)
    for _ in range(options.rounds):
        sdpa.append(time_sdpa(options))
        for plan in plans:
            ours[plan].append(time_plan(options, plan))
            done += 1
            if sys.stderr.isatty():
                bar, end = "#" * (40 * done // total), "" if done < total else "\n"
                print(f"\r{done}/{total} {bar}", end=end, file=sys.stderr)
    base = statistics.median(sdpa)
    print(f"single-process SDPA, {os.cpu_count()} threads: {base:.3f} s ({min(sdpa):.3f} to {max(sdpa):.3f})\n")
    heads = f"{'seconds':>8s} {'spread':>15s} {'efficiency':>10s} {'waiting':>8s} {'MiB added':>10s} {'formula':>8s}"
    print(f"{'plan':10s} {heads}")
    for plan in sorted(plans, key=lambda name: statistics.median(r[0] for r in ours[name])):
        seconds = [result[0] for result in ours[plan]]
        ratio = statistics.median(a / b for a, b in zip(sdpa, seconds, strict=True))
        waiting, added = (statistics.median(r[i] for r in ours[plan]) for i in (1, 2))
        print(
            f"{plan:10s} {statistics.median(seconds):8.3f} {min(seconds):7.3f}-{max(seconds):7.3f} {ratio:10.2f} "
            f"{waiting:8.1%} {added / 2**20:10.1f} {ours[plan][0][3] / 2**20:8.1f}"
        )
    return 0

"""``startrail bench engine``: speed and memory of the engine on this machine, against single-process SDPA."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import startrail
from startrail.bench import host, job
from startrail.bench.yardstick import (
    Attention,
    Json,
    Workload,
    random_inputs,
    record,
    visible_attention,
    whole_attention,
    with_gradients,
)
from startrail.geometry.distributions import document_lengths
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.training import footprint
from startrail.transport.interface import MessageSet
from startrail.transport.nccl import Fake

SPARSE_FACTOR = 4  # how many times as long sparse sequences are


def engine_works(options: argparse.Namespace) -> list[Workload]:
    """A dense mask, documents and a window. The sparse ones are longer, since they have less to compute."""
    longer = SPARSE_FACTOR * options.length
    ends = (0, *accumulate(document_lengths("pretraining", longer, seed=1)))
    dense = Workload(options.length, options.heads, options.heads, options.head_dim, causal=not options.full)
    sparse = replace(dense, length=longer, causal=True)
    return [dense, replace(sparse, documents=ends), replace(sparse, window=longer // 64)]


def case_name(work: Workload) -> str:
    return work.mask.removeprefix("causal, ")


def one_process(work: Workload) -> Attention:
    """SDPA that computes visible blocks only: whole, by documents, or along the band of a window."""
    if work.call.is_sparse:
        return partial(visible_attention, work.documents or (0, work.length), work.window)
    return partial(whole_attention, causal=work.causal)


def time_sdpa(work: Workload) -> float:
    def on_rank(rank: int) -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        q, k, v, dout = random_inputs(work, work.length)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            with_gradients(one_process(work), q, k, v, dout)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    (seconds,) = run_local(on_rank, 1)
    assert seconds is not None
    return seconds


class EngineTiming(NamedTuple):
    """Seconds, share of waiting, peak bytes that attention adds to a rank, and the engine's formula for them."""

    seconds: float
    waiting: float
    added: float
    formula: float


def time_plan(work: Workload, plan: str, ranks: int) -> EngineTiming:
    def on_rank(rank: int) -> EngineTiming:
        sp = startrail.SequenceParallel(plan, windows=work.window is not None)
        sequence, few = sp.sequence(work.length, work.documents or None), sp.sequence(16 * sp.world)
        attention = partial(sequence.attention, causal=work.causal, window=work.window)
        q, k, v, dout = random_inputs(work, sequence.local)
        sizes = sp.sizes(q, k)
        # memory of libraries and connections is not attention's
        warm_up = partial(few.attention, causal=work.causal)
        with_gradients(warm_up, q[:, :, :16], k[:, :, :16], v[:, :, :16], dout[:, :, :16])
        resident = footprint.resident_bytes()
        footprint.reset_peak(dout.device)
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
        return EngineTiming(min(times[1:]), min(shares[1:]), footprint.peak_bytes(dout.device) - resident, formula)

    results = [result for result in run_local(on_rank, ranks) if result is not None]
    seconds, shares, added, formula = zip(*results, strict=True)
    return EngineTiming(max(seconds), statistics.mean(shares), max(added), formula[0])


class FreeLinks:
    """Posts to lanes that send nothing, and fills what is received with zeros. ``seconds`` is the CPU time of both."""

    def __init__(self) -> None:
        self.seconds, self._post = 0.0, Fake._post

    def post(
        self, transport: Fake, messages: MessageSet, payloads: Sequence[Tensor], *others: Any
    ) -> list[list[dist.Work]]:
        start = time.thread_time()
        works = self._post(transport, messages, payloads, *others)
        for message, payload in zip(messages.messages, payloads, strict=True):
            if not message.send:
                payload.zero_()
        self.seconds += time.thread_time() - start
        return works


def time_without_links(work: Workload, plan: str, ranks: int) -> float:
    """CPU seconds per rank where links cost nothing: the first and the last rank compute on zeros instead of what they
    would receive. Sending and receiving is what the CPU time of a real run has more."""
    times, links = [], FreeLinks()
    for rank in (0, ranks - 1):
        with host.fake_group(rank, ranks), mock.patch.object(Fake, "_post", lambda *given: links.post(*given)):
            sp = startrail.SequenceParallel(plan, windows=work.window is not None)
            sequence = sp.sequence(work.length, work.documents or None)
            attention = partial(sequence.attention, causal=work.causal, window=work.window)
            given = random_inputs(work, sequence.local)
            calls = []
            for _ in range(4):
                start, links.seconds = time.thread_time(), 0.0
                with_gradients(attention, *given)
                calls.append(time.thread_time() - start - links.seconds)
            times.append(min(calls[1:]))
    return statistics.mean(times)


def read_plans(text: str) -> list[str]:
    """
    >>> read_plans("u8,1x8"), read_plans("u8; 1x8,channels=16")
    (['u8', '1x8'], ['u8', '1x8,channels=16'])
    """
    return [part.strip() for part in text.split(";" if ";" in text else ",")]


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    plans = read_plans(options.plans)
    if options.calls < 1:
        raise ValueError(f"--calls {options.calls} must be at least 1")
    if "WORLD_SIZE" in os.environ and not options.host:
        return job.run(options, plans)
    for plan in plans:
        Plan.parse(plan).check_world(options.ranks)
    started = time.time()
    rows = [{"plan": plan} for plan in plans] if options.host else _measure(options, plans)
    hosts = {plan: host.host_times(plan, options.ranks, options.heads, options.calls) for plan in plans}
    if not options.host:
        print()
    print(host.table(hosts, options.ranks, options.heads))
    for row, (forward, backward, _) in zip(rows, hosts.values(), strict=False):  # dense rows come first
        row.update(host_forward_ms=min(forward), host_backward_ms=min(backward))
    record(options.json, options, started, rows)
    return 0


def _measure(options: argparse.Namespace, plans: Sequence[str]) -> list[Json]:
    """One row per case and plan; also printed."""
    works = engine_works(options)
    print(
        f"forward + backward, {options.heads} heads x {options.head_dim}, float32, {options.ranks} one-thread ranks; "
        f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"startrail {startrail.__version__}"
    )
    cases = [(work, plan) for work in works for plan in (plans[:1] if work.call.is_sparse else plans)]
    sdpa: dict[Workload, list[float]] = {work: [] for work in works}
    ours: dict[tuple[Workload, str], list[EngineTiming]] = {case: [] for case in cases}
    done, total = 0, options.rounds * len(cases)
    for _ in range(options.rounds):
        for work in works:
            sdpa[work].append(time_sdpa(work))
        for case in cases:
            ours[case].append(time_plan(*case, options.ranks))
            done += 1
            if sys.stderr.isatty():
                bar, end = "#" * (40 * done // total), "" if done < total else "\n"
                print(f"\r{done}/{total} {bar}", end=end, file=sys.stderr)
    rows = []
    for work in works:
        of_work = {plan: found for (of, plan), found in ours.items() if of == work}
        free = {plan: time_without_links(work, plan, options.ranks) for plan in of_work}
        print(_table(work, sdpa[work], of_work, free))
        rows += [
            {
                "case": case_name(work),
                "length": work.length,
                "plan": plan,
                "seconds": statistics.median(timing.seconds for timing in found),
                "efficiency": _efficiency(sdpa[work], found),
                "waiting": statistics.median(timing.waiting for timing in found),
                "cpu_seconds_without_links": free[plan],
            }
            for plan, found in of_work.items()
        ]
    return rows


def _efficiency(sdpa: list[float], ours: list[EngineTiming]) -> float:
    """SDPA's time over ours, round by round."""
    return statistics.median(a / b.seconds for a, b in zip(sdpa, ours, strict=True))


def _table(work: Workload, sdpa: list[float], ours: dict[str, list[EngineTiming]], free: dict[str, float]) -> str:
    lines = [
        f"\n{case_name(work)}, N = {work.length}; single-process SDPA{' of visible blocks' * work.call.is_sparse}, "
        f"{os.cpu_count()} threads: {statistics.median(sdpa):.3f} s ({min(sdpa):.3f} to {max(sdpa):.3f})",
        f"{'plan':10s} {'seconds':>8s} {'spread':>15s} {'efficiency':>10s} {'waiting':>8s} {'MiB added':>10s} "
        f"{'formula':>8s} {'CPU s per rank without links':>29s}",
    ]
    for plan in sorted(ours, key=lambda name: statistics.median(r.seconds for r in ours[name])):
        seconds, waiting, added, formula = zip(*ours[plan], strict=True)
        ratio = _efficiency(sdpa, ours[plan])
        lines.append(
            f"{plan:10s} {statistics.median(seconds):8.3f} {min(seconds):7.3f}-{max(seconds):7.3f} {ratio:10.2f} "
            f"{statistics.median(waiting):8.1%} {statistics.median(added) / 2**20:10.1f} {formula[0] / 2**20:8.1f} "
            f"{free[plan]:29.3f}"
        )
    return "\n".join(lines)

"""``startrail bench engine`` under torchrun: the engine's speed on the job's own ranks, devices and links.

Efficiency is the time of SDPA with the whole sequence on one device, shared by as many devices as there are ranks,
over ours: 1.0 means that distributing costs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from startrail import SequenceParallel, __version__
from startrail.bench.peers.contenders import own_dtype, whole_attention, with_gradients
from startrail.bench.report.record import record
from startrail.kernels import kernel_for
from startrail.launch.heartbeat import WaitLimit
from startrail.launch.torchrun import JoinError, device_of_rank, join
from startrail.schedule.plan import Plan

JOIN_SECONDS = 600.0
WARM_UP, CALLS = 3, 10


def run(options: argparse.Namespace, plans: Sequence[str]) -> int:
    for plan in plans:
        Plan.parse(plan).check_world(int(os.environ["WORLD_SIZE"]))
    device, started = device_of_rank("auto"), time.time()
    try:
        join(device, WaitLimit(JOIN_SECONDS, "startrail bench engine"))
    except JoinError as error:
        print(f"startrail bench engine: {error}", file=sys.stderr)
        return 1
    world, lead = dist.get_world_size(), dist.get_rank() == 0
    sdpa = _sdpa_seconds(options, device)
    if lead:
        kernel = kernel_for(device, own_dtype(device), options.head_dim)
        print(
            f"forward + backward, {options.length} tokens, {options.heads} heads x {options.head_dim}, "
            f"{'full' if options.full else 'causal'}, {own_dtype(device)}, {world} ranks; {kernel.name} "
            f"({kernel.reason}), torch {torch.__version__}, startrail {__version__}\n"
            f"SDPA on one device: {1000 * sdpa:.2f} ms\n{'plan':16s} {'ms':>9s} {'efficiency':>10s} {'waiting':>8s}"
        )
    rows = []
    for plan in plans:
        seconds, waiting = _plan_seconds(options, plan, device)
        efficiency = sdpa / world / seconds
        rows.append({"plan": plan, "seconds": seconds, "efficiency": efficiency, "waiting": waiting})
        if lead:
            print(f"{plan:16s} {1000 * seconds:9.2f} {efficiency:10.2f} {waiting:8.1%}", flush=True)
    if lead:
        record(options.json, options, started, rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _sdpa_seconds(options: argparse.Namespace, device: torch.device) -> float:
    """Seconds of the whole sequence on rank 0's device."""
    seconds = 0.0
    if dist.get_rank() == 0:
        whole = _inputs(options, options.length, device)
        seconds = _seconds(partial(with_gradients, partial(whole_attention, causal=not options.full), *whole), device)
    return _largest([seconds], device)[0]


def _plan_seconds(options: argparse.Namespace, plan: str, device: torch.device) -> tuple[float, float]:
    """Seconds of the slowest rank, and the largest share of a rank's time that it waits for transfers."""
    with SequenceParallel(plan) as sp:
        sequence = sp.sequence(options.length)
        attention = partial(sequence.attention, causal=not options.full)
        mine = _inputs(options, sequence.local, device)
        dist.barrier()
        seconds = _seconds(partial(with_gradients, attention, *mine), device)
        sp.check()
        timings = sp.timings()
        slowest, waiting = _largest([seconds, timings["waiting"] / max(timings["total"], 1e-9)], device)
        return slowest, waiting


def _inputs(options: argparse.Namespace, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    size = (1, options.heads, tokens, options.head_dim)
    return [torch.randn(size, device=device, dtype=own_dtype(device)) for _ in range(4)]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds per call, many in a row: a GPU computes one while the host queues the next."""
    start = 0.0
    for call in range(WARM_UP + CALLS):
        if call == WARM_UP:
            _synchronize(device)
            start = time.perf_counter()
        work()
    _synchronize(device)
    return (time.perf_counter() - start) / CALLS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(numbers: list[float], device: torch.device) -> list[float]:
    """The largest of all ranks."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    found: list[float] = values.tolist()
    return found

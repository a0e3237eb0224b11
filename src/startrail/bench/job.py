"""Our plans under torchrun, on the job's own ranks, devices and links.

Efficiency is the time of SDPA with the whole sequence on one device, shared by as many devices as there are ranks,
over ours: 1.0 means that distributing costs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from startrail import SequenceParallel, __version__
from startrail.bench.yardstick import Json, Workload, own_dtype, random_inputs, record, whole_attention, with_gradients
from startrail.kernels import kernel_for
from startrail.launch.heartbeat import WaitLimit
from startrail.launch.torchrun import JoinError, device_of_rank, join
from startrail.schedule.plan import Plan

JOIN_SECONDS = 600.0
WARM_UP, CALLS = 3, 10
LOCAL, LONGEST = 4096, 2**19  # tokens per rank and in all, unless the options say otherwise


def run(options: argparse.Namespace, plans: Sequence[str]) -> int:
    """``startrail bench engine``: one mask, and the plans that were asked for."""
    for plan in plans:
        Plan.parse(plan).check_world(int(os.environ["WORLD_SIZE"]))
    work = Workload(options.length, options.heads, options.heads, options.head_dim, causal=not options.full)
    return _in_group(lambda device: _measure(work, plans, device), options, options.json)


def run_own_plans(out: Path) -> int:
    """``startrail bench``: Ring Attention and one plan of each kind, with both masks; results also in ``job.json``."""
    world, ranks = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None
    causal = Workload(min(LOCAL * world, LONGEST), q_heads=16, kv_heads=16, head_dim=64, causal=True)

    def measure(device: torch.device) -> list[Json]:
        rows = []
        for work in (causal, replace(causal, causal=False)):
            rows += _measure(work, own_plans(world // ranks, ranks, work), device)
        return rows

    return _in_group(measure, argparse.Namespace(out=str(out)), out / "job.json")


def own_plans(nodes: int, ranks: int, work: Workload) -> list[str]:
    """Ring Attention, and one plan of each kind that can do this work on ``nodes`` of ``ranks`` each.

    >>> own_plans(4, 8, Workload(8192, 16, 16, 64, causal=True))
    ['1x32', '1x4/1x8', '1x4/u8', 'u4/1x8', 'star2']
    """
    world, found = nodes * ranks, []
    levels = (f"1x{nodes}/1x{ranks}", f"1x{nodes}/u{ranks}", f"u{nodes}/1x{ranks}", f"u{nodes}/u{ranks}")
    for text in (f"1x{world}", *(levels if nodes > 1 and ranks > 1 else ()), f"u{world}", "star2"):
        with suppress(ValueError):
            work.sizes(Plan.parse(text), world)
            found.append(text)
    return found


def _in_group(measure: Callable[[torch.device], list[Json]], options: argparse.Namespace, file: Path | None) -> int:
    device, started = device_of_rank("auto"), time.time()
    try:
        join(device, WaitLimit(JOIN_SECONDS, "startrail bench"))
    except JoinError as error:
        print(f"startrail bench: {error}", file=sys.stderr)
        return 1
    rows = measure(device)
    if dist.get_rank() == 0:
        record(file, options, started, rows)
    dist.barrier()  # leave together, because torchrun kills all ranks when one fails at exit
    dist.destroy_process_group()
    return 0


def _measure(work: Workload, plans: Sequence[str], device: torch.device) -> list[Json]:
    """One row per plan; rank 0 prints them."""
    world, lead = dist.get_world_size(), dist.get_rank() == 0
    sdpa = _sdpa_seconds(work, device)
    if lead:
        dtype = own_dtype(device)
        kernel = kernel_for(device, dtype, work.head_dim)
        print(
            f"forward + backward, {work.length} tokens, {work.q_heads} heads x {work.head_dim}, {work.mask}, {dtype}, "
            f"{world} ranks; {kernel.name} ({kernel.reason}), torch {torch.__version__}, startrail {__version__}\n"
            f"SDPA on one device: {1000 * sdpa:.2f} ms\n{'plan':16s} {'ms':>9s} {'efficiency':>10s} {'waiting':>8s}"
        )
    rows = []
    for plan in plans:
        seconds, waiting = _plan_seconds(work, plan, device)
        efficiency = sdpa / world / seconds
        rows.append({"case": work.mask, "plan": plan, "seconds": seconds, "efficiency": efficiency, "waiting": waiting})
        if lead:
            print(f"{plan:16s} {1000 * seconds:9.2f} {efficiency:10.2f} {waiting:8.1%}", flush=True)
    return rows


def _sdpa_seconds(work: Workload, device: torch.device) -> float:
    """Seconds of the whole sequence on rank 0's device."""
    seconds = 0.0
    if dist.get_rank() == 0:
        whole = random_inputs(work, work.length)
        seconds = _seconds(partial(with_gradients, partial(whole_attention, causal=work.causal), *whole), device)
    return _largest([seconds], device)[0]


def _plan_seconds(work: Workload, plan: str, device: torch.device) -> tuple[float, float]:
    """Seconds of the slowest rank, and the largest share of a rank's time that it waits for transfers."""
    with SequenceParallel(plan) as sp:
        sequence = sp.sequence(work.length)
        attention = partial(sequence.attention, causal=work.causal)
        mine = random_inputs(work, sequence.local)
        dist.barrier()
        seconds = _seconds(partial(with_gradients, attention, *mine), device)
        sp.check()
        timings = sp.timings()
        slowest, waiting = _largest([seconds, timings["waiting"] / max(timings["total"], 1e-9)], device)
        return slowest, waiting


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

"""The host's time per attention call: what a GPU would wait for, without the GPU's own work.

A fake process group sends nothing, a no-op kernel replaces attention, and tensors are so small that a copy costs no
more than its launch. The work for NCCL (`startrail.comm.transfers`) is included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from startrail._compat import make_fake_store, work_error
from startrail.comm.transfers import InFlight, TransferMonitor
from startrail.kernels import Partial, Sum
from startrail.kernels.cpu import CpuKernel
from startrail.parallel import SequenceParallel

TOKENS, HEAD_DIM = 16, 8  # per rank
WARM_UP = 5
LIMITS = 1.0, 1.6  # milliseconds of a forward and of a backward pass


class _NoOpKernel(CpuKernel):
    """A kernel that computes nothing."""

    def forward(self, *given: Any) -> Partial:
        return given[-1]  # the running sums

    def backward(self, *given: Any) -> tuple[Sum, Sum, Sum]:
        return given[-1]


class _CompletedMonitor(TransferMonitor):
    """Treats a fake group's transfers, which never complete, as complete, as on NCCL when all goes well."""

    def _is_done(self, transfer: InFlight) -> bool:
        transfer.work.is_completed()
        return work_error(transfer.work) is None


def host_times(plan: str, ranks: int, heads: int, calls: int) -> tuple[list[float], list[float]]:
    """Milliseconds of every forward call on rank 0 and of its backward pass through autograd."""
    dist.init_process_group("fake", store=make_fake_store(), rank=0, world_size=ranks)
    try:
        with mock.patch("startrail.engine.runtime.kernel_for", lambda device, dtype, dim, softcap: _NoOpKernel(dtype)):
            return _measure(SequenceParallel(plan), heads, calls)
    finally:
        dist.destroy_process_group()


def _measure(sp: SequenceParallel, heads: int, calls: int) -> tuple[list[float], list[float]]:
    executor = sp._runtime.executor_on(torch.device("cpu"))
    executor.lanes.all_ranks = dist.group.WORLD
    executor.monitor = _CompletedMonitor(executor.transfers)
    sequence = sp.sequence(TOKENS * sp.world)
    q, k, v = (torch.randn(1, heads, sequence.local, HEAD_DIM).requires_grad_() for _ in range(3))
    forward, backward = [], []
    for call in range(calls + WARM_UP):
        start = time.perf_counter()
        out = sequence.attention(q, k, v, causal=True)
        between = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), out)
        if call >= WARM_UP:
            forward.append(1000 * (between - start))
            backward.append(1000 * (time.perf_counter() - between))
    return forward, backward


def table(plans: Sequence[str], ranks: int, heads: int, calls: int) -> str:
    lines = [
        f"host time per call on rank 0 of {ranks} in ms, minimum and median of {calls}; target: below "
        f"{LIMITS[0]:g} forward and {LIMITS[1]:g} backward",
        f"{'plan':10s} {'forward':>8s} {'median':>8s} {'backward':>9s} {'median':>8s}",
    ]
    for plan in plans:
        forward, backward = host_times(plan, ranks, heads, calls)
        medians = statistics.median(forward), statistics.median(backward)
        lines.append(f"{plan:10s} {min(forward):8.2f} {medians[0]:8.2f} {min(backward):9.2f} {medians[1]:8.2f}")
    return "\n".join(lines)

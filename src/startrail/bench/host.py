"""Host time per attention call: the time that a GPU would wait, without the GPU's own work.

A fake process group sends nothing, a no-op kernel replaces attention, and tensors are so small that a copy costs no
more than its launch. The work for NCCL (`startrail.transport.nccl`) is included.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from startrail._compat import make_fake_store, work_error
from startrail.geometry.tiles import Tile
from startrail.kernels import Partial, Sum, block_max_logits
from startrail.kernels.cpu import CpuKernel
from startrail.parallel import SequenceParallel
from startrail.transport import opening
from startrail.transport.nccl import InFlight, Link, Nccl

TOKENS, HEAD_DIM = 16, 8  # per rank
DOCUMENTS, PACKED_TOKENS = 4000, 8192  # of a batch, and per rank
BLOCK, BLOCK_DIM = 2048, 64  # of which the largest logits are measured
WARM_UP = 5


class HostTime(NamedTuple):
    """Milliseconds of every forward call on rank 0 and of its backward pass through autograd; and of a new batch of
    packed documents, up to its first call."""

    forward: list[float]
    backward: list[float]
    new_batch: float


class _NoOpKernel(CpuKernel):
    """A kernel that computes nothing."""

    def forward(self, *given: Any) -> Partial:
        return given[-1]  # the running sums

    def backward(self, *given: Any) -> tuple[Sum, Sum, Sum]:
        return given[-1]


class _CompletedNccl(Nccl):
    """Treats a fake group's transfers, which never complete, as complete, as on NCCL when all goes well."""

    def _connect(self, links: Sequence[Link]) -> None:
        pass

    def _is_done(self, transfer: InFlight) -> bool:
        transfer.work.is_completed()
        return work_error(transfer.work) is None


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """A process group that sends nothing: what is received stays as it was."""
    dist.init_process_group("fake", store=make_fake_store(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def host_times(plan: str, ranks: int, heads: int, calls: int) -> HostTime:
    no_op = mock.patch("startrail.engine.attention.kernel_for", lambda device, dtype, *_: _NoOpKernel(dtype))
    like_nccl = mock.patch.dict(opening.CLASSES, fake=_CompletedNccl)
    with fake_group(0, ranks), no_op, like_nccl, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Work::exception API")
        sp = SequenceParallel(plan)
        return HostTime(*_measure(sp, heads, calls), _new_batch(sp, heads))


def _measure(sp: SequenceParallel, heads: int, calls: int) -> tuple[list[float], list[float]]:
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


def _new_batch(sp: SequenceParallel, heads: int) -> float:
    """The layout, routes and tiles of packed documents: the first call of a batch beyond the second. The best of three
    batches."""
    times, length = [], PACKED_TOKENS * sp.world
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ends = torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
        points = [time.perf_counter()]
        sequence = sp.sequence(length, documents=[0, *ends.tolist(), length])
        x = torch.zeros(1, heads, sequence.local, HEAD_DIM)
        for _ in range(2):
            sequence.attention(x, x, x, causal=True)
            points.append(time.perf_counter())
        times.append(1000 * (2 * points[1] - points[0] - points[2]))
    return min(times)


def largest_logits(heads: int) -> tuple[float, float]:
    """Milliseconds of the largest logits (``max_logits=True``) of a causal block, and of its attention."""
    q, kernel, times = torch.randn(1, heads, BLOCK, BLOCK_DIM), CpuKernel(torch.float32), []
    tile = [Tile(0, BLOCK, 0, BLOCK, "causal")]
    for compute in (partial(block_max_logits, q, q, tile, 0.125), partial(kernel.forward, q, q, q, tile, 0.125)):
        starts = []
        for _ in range(4):
            starts.append(time.perf_counter())
            compute()
        starts.append(time.perf_counter())
        times.append(1000 * min(b - a for a, b in pairwise(starts)))
    return times[0], times[1]


def table(found: Mapping[str, HostTime], ranks: int, heads: int) -> str:
    calls = max(len(times.forward) for times in found.values())
    lines = [
        f"host time per call in ms: Python's time on rank 0 of {ranks} for one attention call,",
        f"while kernels compute nothing and nothing is sent; minimum and median of {calls} calls",
        f"{'plan':10s} {'forward':>8s} {'median':>8s} {'backward':>9s} {'median':>8s} {'new batch':>10s}",
    ]
    for plan, (forward, backward, batch) in found.items():
        medians = statistics.median(forward), statistics.median(backward)
        columns = f"{min(forward):8.2f} {medians[0]:8.2f} {min(backward):9.2f} {medians[1]:8.2f} {batch:10.2f}"
        lines.append(f"{plan:10s} {columns}")
    logits, attention = largest_logits(heads)
    lines += [
        f"new batch: layout and tiles of {DOCUMENTS} documents, {PACKED_TOKENS} tokens per rank, once per batch",
        f"largest logits of a causal block of {BLOCK} tokens, {heads} heads x {BLOCK_DIM}: {logits:.1f} ms on one "
        f"thread, its attention {attention:.1f} ms",
    ]
    return "\n".join(lines)

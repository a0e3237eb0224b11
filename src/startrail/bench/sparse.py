"""``startrail bench sparse``: windows, packed documents and mixed layers on emulated clusters, against the peers.

Links are as fast as in the other trials: Ring Attention would keep a node's link busy for 24 or 8 times the compute of
a dense causal mask. Every contender's results are checked against one process before it is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.bench.cases import OUTERMOST, Workload
from startrail.bench.measure import FAST_RATE
from startrail.bench.peers.sparse import SPARSE_PEERS, Attend, SparseWork, compute_dense, whole_attention
from startrail.bench.report.balance import balance_table
from startrail.bench.sizes import ring_bytes
from startrail.geometry.distributions import document_lengths
from startrail.lab.cluster import Cluster, own_link_bytes
from startrail.planner.topology import Machine, rate_for

HEADS, HEAD_DIM = 32, 16  # one head per rank, so that DeepSpeed's Ulysses can run
LENGTH = 4096
REAL_LENGTH = 32 * 8192
PRESSURES = (24.0, 8.0)
WARM_UP = 3
REPEATS = 5
SLOW = ("ring", "all-gather", "ring-flash-attn llama3", "DeepSpeed Ulysses", "best dense plan")  # repeated once


def sparse_works(length: int) -> list[SparseWork]:
    """The workloads of the claims. Documents are scaled as the tokens per rank are, to those of 8,192 on 32 ranks: the
    longest possible one still fits."""

    def packed(name: str) -> tuple[int, ...]:
        ends = [0]
        for tokens in document_lengths(name, length, seed=1, scale=length / REAL_LENGTH):
            ends.append(ends[-1] + tokens)
        return tuple(ends)

    window = length // 64
    return [
        SparseWork(f"window {window}", length, (window,)),
        SparseWork("pretraining documents", length, (None,), packed("pretraining")),
        SparseWork("agents' documents", length, (None,), packed("agents")),
        SparseWork(f"5 layers with window {window}, 1 full", length, (window,) * 5 + (None,)),
    ]


@dataclass
class SparseRow:
    """One contender at one workload: the median of the slowest rank's seconds, and bytes sent by the busiest node."""

    machine: str
    pressure: float
    work: str
    contender: str
    seconds: float | None
    node_bytes: int
    rate: int  # bit/s of a node's link
    compute: float  # seconds of the arithmetic alone, if it is shared evenly
    problem: str = ""

    @property
    def bound(self) -> float:
        """The time that neither this contender's bytes nor the arithmetic allow to beat."""
        return max(self.compute, self.node_bytes * 8 / self.rate)


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    rows: list[SparseRow] = []
    for text in options.shapes:
        rows += measure_machine(Machine.parse(text), options)
    print(balance_table())
    options.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    meta = {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    Path(options.out, "sparse.json").write_text(json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}))
    print(f"\n{options.out / 'sparse.json'}")
    return int(any(row.problem.startswith("wrong") for row in rows))


def measure_machine(machine: Machine, options: argparse.Namespace) -> list[SparseRow]:
    works = [work for work in sparse_works(options.length) if options.only in work.name]
    data = {work: _Data.of(work) for work in works}
    dense = Workload(options.length, HEADS, HEADS, HEAD_DIM, causal=True)
    plan = OUTERMOST.get((str(machine), 16), (f"u{machine.nodes}/1x{machine.ranks_per_node}",))[0]
    rows: list[SparseRow] = []
    with Cluster(machine.nodes, machine.ranks_per_node, link=f"{FAST_RATE}bit") as cluster:
        seconds = max(cluster.call(partial(_time_compute, options.length)))
        for pressure in options.pressures:
            rate = rate_for(ring_bytes(machine, dense), seconds, pressure)
            for work in works:
                _set_links(cluster, machine, FAST_RATE)
                checked, limited = Event(), Event()
                measure = partial(_measure, work, data[work], plan, options.repeats, checked, limited)
                job = cluster.fork(measure, deadline=900)
                checked.wait(300)  # results are checked on fast links
                _set_links(cluster, machine, rate)
                limited.set()
                found = job.wait()
                made = _rows(found, machine, pressure, work, rate, data[work].seconds / machine.world)
                print(table(made), flush=True)
                rows += made
    return rows


@dataclass
class _Data:
    """Inputs, cotangent and results of one process, shared with the forked ranks."""

    inputs: list[Tensor]
    answers: list[Tensor]
    seconds: float  # of the arithmetic on one core

    @classmethod
    def of(cls, work: SparseWork) -> _Data:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, HEADS, work.length, HEAD_DIM, generator=generator) for _ in range(4)]
        answers = _results(partial(whole_attention, work), inputs)
        start = time.perf_counter()
        _results(partial(whole_attention, work), inputs)
        return cls(inputs, answers, time.perf_counter() - start)


def _results(attend: Attend, inputs: Sequence[Tensor]) -> list[Tensor]:
    *qkv, dout = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def _time_compute(length: int, rank: int) -> float:
    """Seconds of this rank's share of a dense causal mask, without communication."""
    times = []
    for _ in range(WARM_UP):
        dist.barrier()
        start = time.perf_counter()
        compute_dense(length, HEADS, HEAD_DIM)
        times.append(time.perf_counter() - start)
    return min(times)


def _set_links(cluster: Cluster, machine: Machine, rate: int) -> None:
    for node in range(machine.nodes):
        cluster.set_link(node, f"{rate}bit")


def _measure(
    work: SparseWork, data: _Data, plan: str, repeats: int, checked: Any, limited: Any, rank: int
) -> dict[str, Any]:
    """Seconds, bytes sent by this rank's node, and any problem of every contender."""
    warnings.simplefilter("ignore", FutureWarning)  # peers use deprecated names of collectives
    found: dict[str, Any] = {}
    right: dict[str, tuple[Attend, list[Tensor]]] = {}
    for name, make in SPARSE_PEERS.items():
        problem = ""
        try:
            shard, attend = make(work, plan, HEADS)
            inputs, expected = ([shard(x) for x in xs] for xs in (data.inputs, data.answers))
            for result, want in zip(_results(attend, inputs), expected, strict=True):
                if not torch.allclose(result, want, rtol=1e-3, atol=3e-5):
                    problem = f"wrong by up to {(result - want).abs().max().item():.1e}"
            right[name] = attend, inputs
        except (ValueError, NotImplementedError, AssertionError, ImportError) as error:
            problem = str(error).splitlines()[0]
        if not _agree_all_right(problem):
            right.pop(name, None)
            found[name] = (None, 0, problem or "wrong on another rank")
    dist.barrier()
    if rank == 0:
        checked.set()
    limited.wait(300)
    for name, (attend, inputs) in right.items():
        times, sent = [], 0
        for _ in range(1 if name in SLOW else repeats):
            dist.barrier()
            before = own_link_bytes()["sent"]
            dist.barrier()
            start = time.perf_counter()
            _results(attend, inputs)
            times.append(time.perf_counter() - start)
            dist.barrier()
            sent = own_link_bytes()["sent"] - before
        found[name] = (statistics.median(times), sent, "")
    return {name: found[name] for name in SPARSE_PEERS}


def _agree_all_right(problem: str) -> bool:
    wrong = torch.tensor([bool(problem)], dtype=torch.int32)
    dist.all_reduce(wrong)
    return int(wrong) == 0


def _rows(
    found: Sequence[dict[str, Any]], machine: Machine, pressure: float, work: SparseWork, rate: int, compute: float
) -> list[SparseRow]:
    rows = []
    for name in found[0]:
        results = [of_rank[name] for of_rank in found]
        problem = next((p for *_, p in results if p and not p.endswith("another rank")), results[0][2])
        seconds = None if problem else max(s for s, *_ in results)
        sent = max(b for _, b, _ in results)
        rows.append(SparseRow(str(machine), pressure, work.name, name, seconds, sent, rate, compute, problem))
    return rows


def table(rows: Sequence[SparseRow]) -> str:
    """One workload as a table: seconds, bound, speed over ring and over the best dense plan, bytes off a node."""
    first, by_name = rows[0], {row.contender: row.seconds for row in rows}
    lines = [
        f"\n{first.machine}, ring {first.pressure:g}x its dense compute ({first.rate / 1e6:.0f} Mbit/s): {first.work}",
        f"{'contender':28s} {'seconds':>8s} {'bound':>8s} {'x ring':>7s} {'x dense':>8s} {'MB off a node':>14s}",
    ]
    for row in rows:
        if row.seconds is None:
            lines.append(f"{row.contender:28s} {row.problem}")
            continue
        ring, dense = (by_name[name] or 0.0 for name in ("ring", "best dense plan"))
        lines.append(
            f"{row.contender:28s} {row.seconds:8.3f} {row.bound:8.3f} {ring / row.seconds:7.1f} "
            f"{dense / row.seconds:8.1f} {row.node_bytes / 1e6:14.2f}"
        )
    return "\n".join(lines)

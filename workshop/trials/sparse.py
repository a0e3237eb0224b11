"""``startrail bench sparse``: windows, packed documents and mixed layers on emulated clusters, against the peers.

Links are as fast as in the other trials: Ring Attention would keep a node's link busy for 24 or 8 times the compute of
a dense causal mask. Every contender's results are checked against one process before it is timed. Times are medians;
a contender whose first pass takes long is not repeated as often. Of a stack of layers, peers run one layer of each
kind, and the times are added up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.bench.yardstick import Attention as Attend
from startrail.bench.yardstick import Workload, stated, visible_attention
from startrail.geometry.distributions import document_lengths
from startrail.planner.topology import Machine
from workshop.lab.cluster import Cluster, available, own_link_bytes
from workshop.peers.sparse import (
    SPARSE_PEERS,
    SparseWork,
    Window,
    compute_dense,
    stack,
)
from workshop.report.page import metadata
from workshop.report.sparse import SPARSE, SparseRow, balance_table, sparse_claims, sparse_table, write_rows
from workshop.trials.links import rate_for, ring_bytes
from workshop.trials.measure import FAST_RATE

HEADS, HEAD_DIM = 32, 16  # one head per rank, so that DeepSpeed's Ulysses can run
REAL_LENGTH = 32 * 8192
WARM_UP = 3
SECONDS = 6.0  # that the repeats of one contender may take


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
        SparseWork("books", length, (None,), packed("books")),
        SparseWork(f"5 layers with window {window}, 1 full", length, (window,) * 5 + (None,)),
    ]


def run(options: argparse.Namespace) -> int:
    if reason := available():
        print(f"startrail bench: {reason}", file=sys.stderr)
        return 1
    if options.length < 64 or options.repeats < 1 or min(options.pressures) <= 0:
        raise ValueError(
            f"--length {options.length} must be at least 64, --repeats {options.repeats} at least 1 and --pressures "
            f"{' '.join(f'{pressure:g}' for pressure in options.pressures)} greater than 0"
        )
    works = [work for work in sparse_works(options.length) if options.only in work.name]
    if not works:
        names = "; ".join(work.name for work in sparse_works(options.length))
        raise ValueError(f"--only {options.only}: no workload's name contains this ({names})")
    machines = [Machine.parse(text) for text in options.shapes]
    torch.set_num_threads(1)
    started = time.time()
    trials = _Trials(works, options.pressures, options.repeats, len(machines))
    for machine in machines:
        trials.measure(machine)
    meta = metadata(stated(options), started)
    tables = [sparse_table(rows) for rows in trials.rows] + [balance_table(), sparse_claims(trials.all_rows)]
    print("\n".join(tables[-2:]))
    print(f"\n{write_rows(options.out, 'sparse', meta, trials.all_rows, tables)}")
    return int(any(row.problem.startswith("wrong") for row in trials.all_rows))


class _Trials:
    """Every workload at every pressure, machine after machine."""

    def __init__(self, works: Sequence[SparseWork], pressures: Sequence[float], repeats: int, machines: int) -> None:
        self.works, self.pressures, self.repeats = works, pressures, repeats
        self.data = {work: _Data.of(work) for work in works}
        self.rows: list[list[SparseRow]] = []  # one list per trial
        self._total = machines * len(works) * len(pressures)

    @property
    def all_rows(self) -> list[SparseRow]:
        return [row for rows in self.rows for row in rows]

    def measure(self, machine: Machine) -> None:
        plan = f"u{machine.nodes}/u{machine.ranks_per_node}"
        with Cluster(machine.nodes, machine.ranks_per_node, link=f"{FAST_RATE}bit") as cluster:
            length = self.works[0].length
            seconds = max(cluster.call(partial(time_compute, length, HEADS, HEAD_DIM)))
            dense = Workload(length, HEADS, HEADS, HEAD_DIM, causal=True)
            for pressure in self.pressures:
                rate = rate_for(ring_bytes(machine, dense), seconds, pressure)
                for work in self.works:
                    self._show(f"{machine}, {pressure:g}x: {work.name}")
                    set_links(cluster, machine, FAST_RATE)
                    checked, limited = Event(), Event()
                    measure = partial(_measure, work, self.data[work], plan, self.repeats, checked, limited)
                    job = cluster.fork(measure, deadline=900)
                    checked.wait(300)  # results are checked on fast links
                    set_links(cluster, machine, rate)
                    limited.set()
                    rows = _rows(job.wait(), machine, pressure, work, rate, seconds * work.visible_share)
                    self.rows.append(rows)
                    self._show("")
                    print(sparse_table(rows), flush=True)

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            bar = "#" * (30 * len(self.rows) // self._total)
            print(f"\r[{bar:.<30s}] {text:80s}", end="" if text else "\n", file=sys.stderr, flush=True)


@dataclass
class _Data:
    """Inputs, cotangent and, for each kind of layer, the results of one process, shared with the forked ranks."""

    inputs: list[Tensor]
    answers: dict[Window, list[Tensor]]

    @classmethod
    def of(cls, work: SparseWork) -> _Data:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, HEADS, work.length, HEAD_DIM, generator=generator) for _ in range(4)]
        answers = {w: results_of(partial(visible_attention, work.ends, w), inputs) for w in work.kinds}
        return cls(inputs, answers)


def results_of(attend: Attend, inputs: Sequence[Tensor]) -> list[Tensor]:
    *qkv, dout = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def time_compute(length: int, heads: int, head_dim: int, rank: int) -> float:
    """Seconds of this rank's share of a dense causal mask, without communication."""
    times = []
    for _ in range(WARM_UP):
        dist.barrier()
        start = time.perf_counter()
        compute_dense(length, heads, head_dim)
        times.append(time.perf_counter() - start)
    return min(times)


def set_links(cluster: Cluster, machine: Machine, rate: int) -> None:
    for node in range(machine.nodes):
        cluster.set_link(node, f"{rate}bit")


@dataclass
class Found:
    """One contender on one rank: seconds, and bytes sent by this rank's node; or the problem."""

    seconds: float = 0.0
    sent: int = 0
    note: str = ""
    problem: str = ""


def _measure(
    work: SparseWork, data: _Data, plan: str, repeats: int, checked: Any, limited: Any, rank: int
) -> dict[str, Found]:
    warnings.simplefilter("ignore", FutureWarning)  # peers use deprecated names of collectives
    found: dict[str, Found] = {}
    right: dict[str, tuple[dict[Window, Attend], list[Tensor]]] = {}
    for name, make in SPARSE_PEERS.items():
        found[name] = Found()
        try:
            contender = make(work, plan, HEADS)
            layers = {window: contender.layer(window) for window in work.kinds}
            inputs = [contender.shard(x) for x in data.inputs]
            found[name].note = contender.note
            for window, attend in layers.items():
                expected = [contender.shard(x) for x in data.answers[window]]
                for result, want in zip(results_of(attend, inputs), expected, strict=True):
                    if not torch.allclose(result, want, rtol=1e-3, atol=3e-5):
                        found[name].problem = f"wrong by up to {(result - want).abs().max().item():.1e}"
            right[name] = layers, inputs
        except (ValueError, NotImplementedError, AssertionError, ImportError) as error:
            found[name].problem = str(error).splitlines()[0]
        if not agree_all_right(found[name].problem):
            right.pop(name, None)
            found[name].problem = found[name].problem or "wrong on another rank"
    dist.barrier()
    if rank == 0:
        checked.set()
    limited.wait(300)
    timed = []
    for name, (layers, inputs) in right.items():
        stacks = {work.windows: 1} if name == SPARSE else {(window,): count for window, count in work.kinds.items()}
        for windows, times in stacks.items():
            attend = partial(stack, [layers[window] for window in windows])
            timed.append((found[name], times, Timer(attend, inputs, repeats)))
    for _ in range(repeats):  # in turns, so that a machine that becomes slower slows all of them
        for *_, timer in timed:
            timer.time()
    for of, times, timer in timed:
        of.seconds += times * statistics.median(timer.seconds)
        of.sent += times * timer.sent
    return found


@dataclass
class Timer:
    """Seconds of each repeat, and bytes that this rank's node sent in the last one."""

    attend: Attend
    inputs: Sequence[Tensor]
    repeats: int
    seconds: list[float] = field(default_factory=list)
    sent: int = 0

    def time(self) -> None:
        if len(self.seconds) == self.repeats:
            return
        dist.barrier()
        before = own_link_bytes()["sent"]
        dist.barrier()
        start = time.perf_counter()
        results_of(self.attend, self.inputs)
        self.seconds.append(time.perf_counter() - start)
        dist.barrier()
        self.sent = own_link_bytes()["sent"] - before
        if len(self.seconds) == 1:
            slowest = torch.tensor(self.seconds)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks repeat alike
            self.repeats = min(self.repeats, 1 + int(SECONDS / slowest.item()))


def agree_all_right(problem: str) -> bool:
    wrong = torch.tensor([bool(problem)], dtype=torch.int32)
    dist.all_reduce(wrong)
    return int(wrong) == 0


def _rows(
    found: Sequence[dict[str, Found]], machine: Machine, pressure: float, work: SparseWork, rate: int, compute: float
) -> list[SparseRow]:
    rows = []
    for name, first in found[0].items():
        results = [of_rank[name] for of_rank in found]
        problem = next((r.problem for r in results if r.problem and "another rank" not in r.problem), first.problem)
        seconds = None if problem else max(r.seconds for r in results)
        sent = max(r.sent for r in results)
        rows.append(
            SparseRow(str(machine), pressure, work.name, name, seconds, sent, rate, compute, first.note, problem)
        )
    return rows

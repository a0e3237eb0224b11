"""``startrail bench hybrid``: the gated delta rule over a split sequence on emulated clusters, against the peers' ways;
and a stack of three of them and one causal attention.

Links are those of the benchmark of sparse masks: with a dense mask of 2,816 tokens and these heads, Ring Attention
communicates so many times as long as it computes. Every contender's results are checked against one process before it
is timed. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import Event
from typing import Any

import torch
import torch.distributed as dist

from startrail.bench.yardstick import Workload, stated
from startrail.planner.topology import Machine
from workshop.lab.cluster import Cluster, available
from workshop.peers.hybrid import HYBRID_PEERS, HybridPeer, Layer, attention, delta_rule, stack
from workshop.report.hybrid import hybrid_claims, hybrid_table
from workshop.report.page import metadata
from workshop.report.sparse import SparseRow, write_rows
from workshop.trials.links import rate_for, ring_bytes
from workshop.trials.measure import FAST_RATE
from workshop.trials.sparse import Found, Timer, results_of, set_links, time_compute

HEADS = 32  # one per rank, so that heads can be exchanged
DENSE_LENGTH = 2816
STACK_LENGTH = 8192  # at most: attention over more takes minutes


def run(options: argparse.Namespace) -> int:
    if reason := available():
        print(f"startrail bench: {reason}", file=sys.stderr)
        return 1
    machine = Machine.parse(options.shape)
    if HEADS % machine.world or min(options.lengths) < 64 or options.repeats < 1 or min(options.pressures) <= 0:
        raise ValueError(
            f"--shape {options.shape} must have ranks that divide {HEADS} heads, --lengths {min(options.lengths)} must "
            f"be at least 64, --repeats {options.repeats} at least 1, --pressures {min(options.pressures):g} above 0"
        )
    if ragged := [length for length in options.lengths if length % (2 * machine.world)]:
        raise ValueError(f"--lengths {ragged[0]} is not a multiple of {2 * machine.world}, as the peers need")
    torch.set_num_threads(1)
    started, rows, tables = time.time(), [], []
    stacks = [length for length in options.lengths if length <= STACK_LENGTH]
    works = [_Work(length, options.head_dim, False) for length in options.lengths]
    works += [_Work(length, options.head_dim, True) for length in stacks]
    with Cluster(machine.nodes, machine.ranks_per_node, link=f"{FAST_RATE}bit") as cluster:
        seconds = max(cluster.call(partial(time_compute, DENSE_LENGTH, HEADS, options.head_dim)))
        dense = Workload(DENSE_LENGTH, HEADS, HEADS, options.head_dim, causal=True)
        for pressure in options.pressures:
            rate = rate_for(ring_bytes(machine, dense), seconds, pressure)
            for work in works:
                found = _trial(cluster, machine, work, rate, options.repeats)
                rows += (of_trial := _rows(found, machine, pressure, work.name, rate))
                tables.append(hybrid_table(of_trial))
                print(tables[-1], flush=True)
    tables.append(hybrid_claims(rows))
    print(f"{tables[-1]}\n\n{write_rows(options.out, 'hybrid', metadata(stated(options), started), rows, tables)}")
    return int(any(row.problem for row in rows))


class _Work:
    """A layer or a stack: inputs, cotangent, and the results of one process, shared with the forked ranks."""

    def __init__(self, length: int, dim: int, stacked: bool) -> None:
        self.length, self.stacked, generator = length, stacked, torch.Generator().manual_seed(0)
        q, k, v, dout = torch.randn(4, 1, length, HEADS, dim, generator=generator)
        g, beta = torch.rand(2, 1, length, HEADS, generator=generator)
        self.inputs = [q, k, v, -0.1 * g, beta, dout]
        self.answers = results_of(partial(stack, delta_rule, attention) if stacked else delta_rule, self.inputs)

    @property
    def name(self) -> str:
        return f"{'stack, ' if self.stacked else ''}{self.length:,} tokens"

    def plan(self, machine: Machine) -> str:
        """Of ours. On slow links, attention decides that a stack's heads go over the nodes."""
        nodes, ranks = machine.nodes, machine.ranks_per_node
        if not self.stacked:
            return f"1x{nodes}/1x{ranks}"
        return f"u{nodes}/u2/1x{ranks // 2},keep=all,groups=2" if ranks % 2 == 0 else f"u{nodes}/1x{ranks}"

    def layer_of(self, peer: HybridPeer) -> Layer:
        return peer.stack if self.stacked else peer.layer


def _trial(cluster: Cluster, machine: Machine, work: _Work, rate: int, repeats: int) -> list[dict[str, Found]]:
    set_links(cluster, machine, FAST_RATE)
    checked, limited = Event(), Event()
    job = cluster.fork(partial(_measure, work, work.plan(machine), repeats, checked, limited), deadline=900)
    checked.wait(300)  # results are checked on fast links
    set_links(cluster, machine, rate)
    limited.set()
    found: list[dict[str, Found]] = job.wait()
    return found


def _measure(work: _Work, plan: str, repeats: int, checked: Any, limited: Any, rank: int) -> dict[str, Found]:
    found: dict[str, Found] = {}
    timers: dict[str, Timer] = {}
    for name, make in HYBRID_PEERS.items():
        found[name], peer = Found(), make(work.length, plan)
        inputs, layer = [peer.shard(x) for x in work.inputs], work.layer_of(peer)
        for result, answer in zip(results_of(layer, inputs), work.answers, strict=True):
            want = peer.shard(answer)
            if not torch.allclose(result, want, rtol=1e-3, atol=1e-4 * answer.abs().max().item()):
                found[name].problem = f"wrong by up to {(result - want).abs().max().item():.1e}"
        timers[name] = Timer(layer, inputs, repeats)
    dist.barrier()
    if rank == 0:
        checked.set()
    limited.wait(300)
    for _ in range(repeats):  # in turns, so that a machine that becomes slower slows all of them
        for timer in timers.values():
            timer.time()
    for name, timer in timers.items():
        found[name].seconds, found[name].sent = statistics.median(timer.seconds), timer.sent
    return found


def _rows(
    found: Sequence[dict[str, Found]], machine: Machine, pressure: float, work: str, rate: int
) -> list[SparseRow]:
    rows = []
    for name in HYBRID_PEERS:
        results = [of_rank[name] for of_rank in found]
        problem = next((r.problem for r in results if r.problem), "")
        seconds = None if problem else max(r.seconds for r in results)
        sent = max(r.sent for r in results)
        rows.append(SparseRow(str(machine), pressure, work, name, seconds, sent, rate, 0.0, "", problem))
    return rows

"""``startrail bench latents``: latent attention on an emulated cluster, against the same attention with expanded keys.

The shapes are those of DeepSeek-V2-Lite scaled down: 16 heads with keys of 16 + 8 and values of 16, expanded from
latents of 64 + 8. Links are as fast as in the other trials: a ring of expanded keys communicates so many times as long
as it computes. Every contender expands all that it needs in the measured time, and its results are checked against one
process. The planner chooses among all contenders, and falls back to expanded keys where these are predicted faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail import SequenceParallel
from startrail.bench.yardstick import stated
from startrail.compile.attention import Attention
from startrail.compile.latents import LatentAttention
from startrail.engine.latents import expand
from startrail.planner.predict import predict
from startrail.planner.pricing import plan_prices
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from workshop.lab.cluster import Cluster, available
from workshop.report.page import metadata
from workshop.trials.cases import lab_cluster
from workshop.trials.links import bytes_between_nodes, rate_for
from workshop.trials.measure import FAST_RATE
from workshop.trials.sparse import Timer, agree_all_right, results_of, set_links, time_compute

HEADS, KEY, ROPE, VALUE, RANK = 16, 16, 8, 16, 64
LATENTS, EXPANDED, RING = "latents", "expanded keys", "ring"
# Plans for N nodes of R ranks: of all plans, the fastest for these shapes on slow and on fast links by prediction; and
# rings.
PLANS = {
    LATENTS: ("1x{N}/{R}x1,keep=all", "1x{N}/{H}x1/u2,keep=all", "2x{M}/u{R},keep=all", "1x{N}/1x{R}", "1x{W}"),
    EXPANDED: ("u{N}/2x{H},keep=all,groups=4", "u{N}/u2/1x{H},keep=all", "2x{M}/u{R},keep=all", "1x{N}/1x{R}", "1x{W}"),
}
ASKED, ASKED_AT = 5.0, 24.0  # times as fast as the best plan with expanded keys, at this pressure
NOISE = 0.05  # a contender that is faster by less is as fast


@dataclass
class LatentRow:
    """One contender: the median of the slowest rank's seconds, the bytes off the busiest node, and these by closed
    form. ``chosen``: by the planner."""

    machine: str
    pressure: float
    sends: str
    plan: str
    predicted: float
    rate: int  # bit/s of a node's link
    closed_bytes: float
    seconds: float | None = None
    node_bytes: int = 0
    engine_bytes: bool = True  # every rank's own count equals the closed form
    chosen: bool = False
    problem: str = ""
    least_bytes: float = 0.0  # that a link carries one way in both passes if latents are sent, by any plan

    @property
    def least_seconds(self) -> float:
        return 8 * self.least_bytes / self.rate


def call_of(length: int, batch: int) -> LatentAttention:
    expanded = replace(Attention.of(length, batch, HEADS, HEADS, KEY + ROPE, True, "float32"), value_dim=VALUE)
    return LatentAttention.from_expanded(expanded, RANK, ROPE)


def least_bytes(machine: Machine, call: LatentAttention) -> int:
    """Bytes over one node's link that no plan avoids if latents are sent under a causal mask: the last row, wherever it
    is, sees all tokens. Its node receives the latents of all other nodes in the forward pass, and returns a gradient
    for each in the backward pass. The passes follow each other, so it does not help that links run both ways.

    >>> least_bytes(Machine.parse("4x8"), call_of(4096, 1))     # 2 x 3/4 x 4096 tokens x (64 + 8) x 4 bytes
    1769472
    """
    token = call.sizes(Plan.parse("1x1"), local=1).nbytes("kv")
    return 2 * (call.length - call.length // machine.nodes) * token


def contenders(machine: Machine, call: LatentAttention, rate: int, pressure: float) -> list[LatentRow]:
    """Those that fit the machine, with predictions and closed forms; the planner's choice first."""
    cluster, rows = lab_cluster(machine, [rate] * machine.nodes), []
    nodes, ranks = machine.nodes, machine.ranks_per_node
    sizes = dict(N=nodes, M=nodes // 2, R=ranks, H=ranks // 2, W=machine.world)
    for sends, texts in PLANS.items():
        of_form = call if sends == LATENTS else call.expanded
        for text in texts:
            plan = Plan.parse(text.format(**sizes))
            pieces = of_form.sizes_on(plan, machine.world).by_kind
            links = bytes_between_nodes(plan, machine, pieces, range(machine.world))
            seconds = predict(cluster, plan, of_form).seconds
            if sends == EXPANDED:  # which their owners expand first, sharing the machine's cores
                prices = plan_prices(cluster, plan, call)
                own = prices.expand(0) + prices.contract(prices.sizes.tokens, new=True)
                seconds += plan.groups * own * machine.world / (cluster.cores or machine.world)
            about = sends, str(plan), seconds, rate, max(max(link) for link in links)
            rows.append(LatentRow(str(machine), pressure, *about, least_bytes=least_bytes(machine, call)))
    rows.sort(key=lambda row: row.predicted)
    rows[0].chosen = True
    return rows


def run(options: argparse.Namespace) -> int:
    if reason := available():
        print(f"startrail bench: {reason}", file=sys.stderr)
        return 1
    if options.length < 64 or options.repeats < 1 or min(options.pressures) <= 0:
        raise ValueError("--length must be at least 64, --repeats at least 1 and --pressures greater than 0")
    machine, call = Machine.parse(options.shape), call_of(options.length, options.batch)
    torch.set_num_threads(1)
    started, found, data = time.time(), [], _Data.of(call)
    with Cluster(machine.nodes, machine.ranks_per_node, link=f"{FAST_RATE}bit") as cluster:
        compute = call.batch * max(cluster.call(partial(time_compute, call.length, HEADS, KEY + ROPE)))
        kinds = call.expanded.sizes_on(Plan.parse(f"1x{machine.world}"), machine.world).by_kind
        ring = 2 * (machine.world - 1) * kinds["kv"] + machine.world * kinds["dkv"]
        for pressure in options.pressures:
            rate = rate_for(ring, compute, pressure)
            rows = contenders(machine, call, rate, pressure)
            set_links(cluster, machine, FAST_RATE)
            checked, limited = Event(), Event()
            job = cluster.fork(partial(_measure, call, data, rows, options.repeats, checked, limited), deadline=900)
            checked.wait(300)  # results are checked on fast links
            set_links(cluster, machine, rate)
            limited.set()
            found += _merged(job.wait(), rows)
            print(table(found[-len(rows) :]), flush=True)
    print("\n".join(claims(found)))
    options.out.mkdir(parents=True, exist_ok=True)
    meta = metadata(stated(options), started) | {"compute": compute}
    path = Path(options.out) / "latents.json"
    path.write_text(json.dumps({"meta": meta, "rows": [asdict(row) for row in found]}, default=str))
    print(f"\n{path}")
    return int(any(row.problem for row in found))


def table(rows: Sequence[LatentRow]) -> str:
    head = f"{rows[0].machine}, a ring of keys {rows[0].pressure:g}x its compute ({rows[0].rate / 1e6:.1f} Mbit/s)"
    lines = [
        f"\n{head}",
        f"{'sends':14s} {'plan':34s} {'seconds':>8s} {'predicted':>9s} {'MB off a node':>14s} {'closed':>8s}",
    ]
    for row in sorted(rows, key=lambda row: row.seconds or 1e9):
        seconds = f"{row.seconds:8.3f}" if row.seconds is not None else row.problem
        sent = f"{row.node_bytes / 1e6:14.2f} {row.closed_bytes / 1e6:8.2f}"
        chosen = "  (the planner's choice)" if row.chosen else ""
        lines.append(f"{row.sends:14s} {row.plan:34s} {seconds} {row.predicted:9.3f} {sent}{chosen}")
    return "\n".join(lines)


def claims(rows: Sequence[LatentRow]) -> Iterator[str]:
    """Each claim with what was found."""
    for pressure in dict.fromkeys(row.pressure for row in rows):
        of = [row for row in rows if row.pressure == pressure and row.seconds is not None]
        chosen = next((row for row in of if row.chosen), None)
        best = min((row for row in of if row.sends == EXPANDED), key=lambda row: row.seconds or 0, default=None)
        if chosen is None or best is None or not chosen.seconds or not best.seconds:
            continue
        ratio, where = best.seconds / chosen.seconds, f"{pressure:g}x: {chosen.sends} by {chosen.plan}"
        compared = f"{ratio:.2f}x as fast as the best with expanded keys, {best.plan}"
        if pressure == ASKED_AT:
            allowed = f"their bytes allow {best.closed_bytes / chosen.closed_bytes:.2f}x"
            yield f"{'met' if ratio >= ASKED else 'NOT MET':8s} {where}: {compared} (asked {ASKED:g}x; {allowed})"
            if best.least_seconds:
                links = f"by any plan, a link needs {best.least_seconds:.2f} s for latents and their gradients"
                most = best.seconds / best.least_seconds
                yield f"{'bound':8s} {links}: at most {most:.2f}x, if all compute were hidden"
        yield f"{'met' if ratio >= 1 - NOISE else 'NOT MET':8s} {where}: {compared} (never slower)"
    off = [row.node_bytes / row.closed_bytes - 1 for row in rows if row.node_bytes and row.closed_bytes > 2e5]
    same = all(row.engine_bytes for row in rows)
    text = f"every rank's bytes equal the closed form; links carry up to {max(off, default=0.0):.1%} more, with headers"
    yield f"{'met' if same else 'NOT MET':8s} {text}"


@dataclass
class _Data:
    """q, latent, k_rope, w_k, w_v and a cotangent; the output and all gradients of one process."""

    inputs: list[Tensor]
    answers: list[Tensor]

    @classmethod
    def of(cls, call: LatentAttention) -> _Data:
        generator, tokens = torch.Generator().manual_seed(0), call.length
        shapes = [(call.batch, HEADS, tokens, KEY + ROPE), (call.batch, tokens, RANK), (call.batch, tokens, ROPE)]
        shapes += [(HEADS, KEY, RANK), (HEADS, VALUE, RANK), (call.batch, HEADS, tokens, VALUE)]
        inputs = [torch.randn(shape, generator=generator) * (0.2 if len(shape) == 3 else 1.0) for shape in shapes]

        def attend(q: Tensor, *rest: Tensor) -> Tensor:
            k, v = expand(*rest)
            v = F.pad(v, (0, KEY + ROPE - VALUE))  # else torch writes out all logits
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :VALUE]

        return cls(inputs, results_of(attend, inputs))


def _measure(
    call: LatentAttention, data: _Data, rows: list[LatentRow], repeats: int, checked: Any, limited: Any, rank: int
) -> list[LatentRow]:
    timed = []
    for row in rows:
        sp = SequenceParallel(row.plan)
        sequence = sp.sequence(call.length)
        q, latent, k_rope, w_k, w_v, dout = data.inputs
        inputs = [sequence.shard(q, 2), sequence.shard(latent, 1), sequence.shard(k_rope, 1)]
        inputs += [w_k, w_v, sequence.shard(dout, 2)]
        attend = partial(sequence.latent_attention, causal=True)
        if row.sends == EXPANDED:
            attend = partial(_attend_expanded, sequence)
        sp.reset_counters()
        row.problem = _mistake(sequence, results_of(attend, inputs), data.answers)
        row.engine_bytes = _promised(sequence, inputs[:5], row) == sum(x["bytes"] for x in sp.traffic().values())
        if agree_all_right(row.problem):
            timed.append((row, sp, Timer(attend, inputs, repeats)))
    dist.barrier()
    if rank == 0:
        checked.set()
    limited.wait(300)
    for _ in range(repeats):  # in turns, so that a machine that becomes slower slows all of them
        for *_, timer in timed:
            timer.time()
    for row, _, timer in timed:
        row.seconds, row.node_bytes = statistics.median(timer.seconds), timer.sent
    return rows


def _attend_expanded(sequence: Any, q: Tensor, *rest: Tensor) -> Tensor:
    return sequence.attention(q, *expand(*rest), causal=True)


def _promised(sequence: Any, tensors: Sequence[Tensor], row: LatentRow) -> int:
    tensors = tensors if row.sends == LATENTS else (tensors[0], *expand(*tensors[1:]))
    return sum(sum(levels.values()) for levels in sequence.promised_traffic(*tensors, causal=True).values())


def _mistake(sequence: Any, results: Sequence[Tensor], answers: Sequence[Tensor]) -> str:
    for name, dim, mine, whole in zip(
        ("out", "dq", "dlatent", "dk_rope", "dw_k", "dw_v"), (2, 2, 1, 1, None, None), results, answers, strict=True
    ):
        if dim is None:
            dist.all_reduce(mine)
        off = (mine - (whole if dim is None else sequence.shard(whole, dim))).abs().max().item()
        if not off <= 2e-4 * max(1.0, whole.abs().max().item()):
            return f"wrong {name}, by up to {off:.1e}"
    return ""


def _merged(found: Sequence[list[LatentRow]], rows: Sequence[LatentRow]) -> list[LatentRow]:
    """The slowest rank's seconds, the busiest node's bytes."""
    merged = []
    for of_ranks in zip(*found, strict=True):
        problem = next((row.problem for row in of_ranks if row.problem), "")
        seconds = None if problem else max(row.seconds for row in of_ranks)
        same, most = all(row.engine_bytes for row in of_ranks), max(row.node_bytes for row in of_ranks)
        merged.append(replace(of_ranks[0], seconds=seconds, node_bytes=most, engine_bytes=same, problem=problem))
    return merged

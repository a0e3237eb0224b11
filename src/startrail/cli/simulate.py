"""``startrail simulate``: predict one attention call on a described cluster, every rank simulated."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from startrail.cli.options import Commands, add_command, make_machine, read_tokens, world_size, write_text
from startrail.compile.attention import Attention
from startrail.planner.auto import ASSUMED_HEAD_DIM, ASSUMED_TOKENS_PER_RANK, fit_cluster
from startrail.planner.cluster import DTYPES, ClusterSpec, find_cluster
from startrail.planner.predict import Prediction, trace_prediction
from startrail.planner.units import seconds_text
from startrail.planner.workload import check_heads
from startrail.schedule.plan import Plan
from startrail.view.trace import EventRecorder, chrome_trace

EXAMPLES = {
    "startrail simulate u4/1x8 --nodes 4 --cluster a100-4x8": "times, waiting and bytes of one attention call",
    "startrail simulate 1x16 --nodes 4 --cluster lab --trace ring.json": "a trace for https://ui.perfetto.dev",
}
MOST_SIMULATED = 1024


def add(commands: Commands) -> None:
    command = add_command(commands, "simulate", EXAMPLES, help="predict one attention call, rank by rank")
    option = command.add_argument
    option("plan", help="for example 2x2, 1x4/u2, star2")
    option("--ranks", type=int, help="number of ranks (required for star plans; default: the plan's size)")
    option("--nodes", type=int, default=1, help="number of nodes (default %(default)s)")
    option("--cluster", help="a cluster's name or .toml file (default: STARTRAIL_CLUSTER)")
    option("--heads", type=int, default=32, help="query heads (default %(default)s)")
    option("--kv-heads", type=int, help="KV heads (default: same as --heads)")
    option("--head-dim", type=int, default=ASSUMED_HEAD_DIM, help="head dimension (default %(default)s)")
    option("--length", type=read_tokens, help="tokens, such as 65536 or 64k (default 4096 per rank)")
    option("--batch", type=int, default=1, help="sequences (default %(default)s)")
    option("--dtype", choices=tuple(DTYPES), help="default: the first that the cluster has rates for")
    option("--full", action="store_true", help="every token sees every other (default: causal)")
    option("--window", type=int, help="a token sees this many tokens: itself and those before it")
    option("--trace", metavar="FILE", type=Path, help="write a trace of all ranks for Perfetto or chrome://tracing")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan = Plan.parse(arguments.plan)
    world = world_size(plan, arguments.ranks)
    if world > MOST_SIMULATED:
        raise ValueError(f"{world} ranks are too many to simulate one by one; at most {MOST_SIMULATED}")
    name = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    if not name:
        raise ValueError("--cluster is missing (or set STARTRAIL_CLUSTER)")
    cluster = fit_cluster(find_cluster(name), make_machine(world, arguments.nodes))
    heads, kv_heads = arguments.heads, arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    check_heads(heads, kv_heads)
    for option in ("batch", "head_dim", "window"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value} must be at least 1")
    call = Attention.of(
        arguments.length or ASSUMED_TOKENS_PER_RANK * world,
        arguments.batch,
        heads,
        kv_heads,
        arguments.head_dim,
        not arguments.full,
        arguments.dtype or next(iter(cluster.device.rates)),
        arguments.window,
    )
    cluster.device.of(call.dtype)  # raises if there are no rates
    recorders = [EventRecorder(rank) for rank in range(world)]
    prediction = trace_prediction(cluster, plan, call, recorders.__getitem__)
    title = f"{plan} on {world} ranks of {cluster}: {call.length} tokens, {call.dtype}, predicted"
    print(_text(title, prediction, cluster))
    if arguments.trace:
        trace = chrome_trace([recorder.records for recorder in recorders], title)
        write_text(arguments.trace, json.dumps(trace))
    return 0


def _text(title: str, prediction: Prediction, cluster: ClusterSpec) -> str:
    lines = [title, "", f"{'':9s} {'time':>10s} {'waiting':>10s}  sent per rank"]
    for name in ("forward", "backward"):
        one = getattr(prediction, name)
        sent = ", ".join(
            f"{nbytes / 1e6:.3g} MB between {level.label}s"
            for level, nbytes in zip(cluster.levels, one.sent, strict=True)
            if nbytes
        )
        lines.append(
            f"{name:9s} {seconds_text(one.seconds):>10s} {seconds_text(one.waiting):>10s}  {sent or 'nothing'}"
        )
    return "\n".join(lines)

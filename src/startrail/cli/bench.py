"""``startrail bench``: our plans on this machine or this job, and in a clone all plans and peers on emulated links."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

from startrail.cli.clone import HOW, workshop
from startrail.cli.options import Commands, Parser, add_command, needs_extra

MACHINES = ("4x8", "8x4", "16x2", "4x4", "2x8")  # those of the claims first
MINUTES = 25.0
ENGINE_PLANS = "u8,2x1/u4,1x2/u4,2x2/u2,2x4,star2,1x8"
HOST_PLANS = "1x8,u8,u4/1x2"
EXAMPLES = {
    "startrail bench --quick": "plans and peers over limited links: 4x4 ranks, three minutes",
    "startrail bench --shapes 4x8 16x2 --out report": "",
    "torchrun --nnodes 4 --nproc-per-node 8 -m startrail.bench --out report": "on real links",
    "startrail bench engine": "speed and memory of the engine; also: bench train, bench memory",
}
ENGINE = (
    "Efficiency is the time of single-process SDPA on all cores divided by ours, forward + backward on the same "
    "sequence. With at least as many ranks as cores, 1.0 means that distributing costs nothing. Rounds are "
    "interleaved and medians reported, because the load of a shared machine varies. Memory is what attention adds to "
    "each rank, compared with the engine's own formula. Without links, a rank computes on zeros instead of what it "
    "would receive: plans differ there by their own overhead alone, and sending is what a real run adds. Host "
    "time is Python's time per attention call, which a GPU would spend waiting; --host measures only that. Under "
    "torchrun, a dense mask is measured on the job's own ranks, devices and links, against SDPA on one device (--ranks "
    "and --rounds have no effect)."
)
TRAIN = (
    "Compares Ring Attention with the recipe's default plan. Both run in every round, one after the other, and "
    "medians are reported, because the load of a shared machine varies. Ranks share this machine's cores and its "
    "loopback, which is faster than any network: the bytes show what a plan saves over real links, and so does the "
    "lab. The prediction is the planner's for this machine, measured by `startrail doctor` with the same ranks."
)


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "bench",
        EXAMPLES,
        help="measure plans and peers side by side",
        usage="%(prog)s [options]\n       %(prog)s BENCHMARK [options]",
        description="Runs the benchmark and writes the report. On one machine it emulates a cluster for every shape. "
        "Under torchrun it measures the ranks and links of the job. `bench engine`, `bench train` and `bench memory` "
        "measure this machine. Peers and emulated clusters need a clone of the repository; installed by pip, this "
        "command measures our own plans under torchrun, and `bench engine` and `bench train` run as well.",
    )
    option = command.add_argument
    option("--quick", action="store_true", help="4x4 ranks only, in under three minutes")
    option("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the report (default %(default)s)")
    option("--shapes", nargs="+", metavar="NxR", help=f"nodes x ranks per node (default {' '.join(MACHINES)})")
    option(
        "--minutes",
        type=float,
        default=MINUTES,
        help="start no trial after this time; the report lists the skipped trials (default %(default)g)",
    )
    option("--again", type=Path, metavar="JSON", help="measure nothing; evaluate and plot a saved report again")
    command.set_defaults(run=run)
    benchmarks = command.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="other benchmarks", prog="startrail bench"
    )
    engine = _add_engine(benchmarks)
    _add_train(benchmarks)
    if clone := workshop("commands"):
        clone.add_benchmarks(benchmarks, engine)
    else:
        for name in ("memory", "sparse", "latents"):
            benchmarks.add_parser(name, help="from a clone", refusal=f"{HOW}startrail bench {name}")


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark: a module of `startrail.bench`, or the workshop's, that defines ``run(options)``."""
    with needs_extra("lab"):
        if arguments.benchmark == "engine":
            arguments.plans = arguments.plans or (HOST_PLANS if arguments.host else ENGINE_PLANS)
            if "against" in arguments and arguments.against and (against := workshop("trials.against")):
                return int(against.run(arguments))
        if arguments.benchmark:
            return int(import_module(f"startrail.bench.{arguments.benchmark}").run(arguments))
        if suite := workshop("trials.suite"):
            return int(suite.run(arguments))
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(f"{HOW}startrail bench; under torchrun, our own plans are measured here as well")
    from startrail.bench import job

    return job.run_own_plans(arguments.out)


def _add_engine(benchmarks: Commands) -> Parser:
    text = "speed and memory of the engine on this machine"
    examples = {"startrail bench engine --plans u8,1x8 --rounds 3": ""}
    engine = add_command(benchmarks, "engine", examples, help=text, description=ENGINE)
    option = engine.add_argument
    option("--length", type=int, default=8192, help="tokens (default %(default)s)")
    option("--heads", type=int, default=8, help="query and KV heads (default %(default)s)")
    option("--head-dim", type=int, default=64, help="head dimension (default %(default)s)")
    option("--ranks", type=int, default=8, help="number of ranks (default %(default)s)")
    option(
        "--plans",
        help=f"separated by commas, or by ';' if they have options (default {ENGINE_PLANS}; with --host {HOST_PLANS})",
    )
    option("--rounds", type=int, default=5, help="rounds to take the median of (default %(default)s)")
    option("--full", action="store_true", help="no causal mask")
    option("--host", action="store_true", help="only host time per call")
    option("--calls", type=int, default=500, help="calls of which host time is taken (default %(default)s)")
    option("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    return engine


def _add_train(benchmarks: Commands) -> None:
    text = "tokens/s and exposed communication in training"
    examples = {"startrail bench train --rounds 5 --steps 6": ""}
    option = add_command(benchmarks, "train", examples, help=text, description=TRAIN).add_argument
    option("--recipes", default="gpt-tiny,gpt-hybrid-tiny,dit-tiny", help="separated by commas (default %(default)s)")
    option("--rounds", type=int, default=3, help="rounds to take the median of (default %(default)s)")
    option("--steps", type=int, default=5, help="measured steps per round (default %(default)s)")

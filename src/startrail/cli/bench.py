"""``startrail bench``: the benchmark on emulated or real links, and smaller benchmarks of this machine."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from startrail.bench.defaults import ENGINE_PLANS, HOST_PLANS, MACHINES, MINUTES
from startrail.cli.options import Commands, Parser, add_command, needs_extra

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
    "would receive: plans differ there by their own overhead alone, and sending is what a real run adds. --host "
    "measures host time per call instead, which a GPU would spend waiting. Under torchrun, a dense mask is measured on "
    "the job's own ranks, devices and links, against SDPA on one device (--ranks and --rounds have no effect)."
)
TRAIN = (
    "Compares Ring Attention with the recipe's default plan. Both run in every round, one after the other, and "
    "medians are reported, because the load of a shared machine varies. Ranks share this machine's cores and its "
    "loopback, which is faster than any network: the bytes show what a plan saves over real links, and so does the "
    "lab. The prediction is the planner's for this machine, measured by `startrail doctor` with the same ranks."
)
MEMORY = (
    "Compares the peak memory per rank with the planner's estimate, which training prints when it starts. The exit "
    "code is 1 if an estimate is more than 10 % off (20 % if all activations are kept, with exchange=twice, and with "
    "ZeRO-2). First the sequence grows on a fixed number of ranks, then both grow together at a fixed N/P: memory "
    "must follow N/P. The model is narrow, because attention costs N². The third part has the limits in the order in "
    "which long sequences hit them, before and after: attention, logits (a Hugging Face model with a vocabulary of "
    "128k; whole logits on a sixteenth of the tokens, since more do not fit), activations with tiled MLPs, and the "
    "optimizer. Each case is one step on fresh ranks, and two for the optimizer."
)

SPARSE = (
    "Times a narrow window, packed documents and a stack of five windowed layers and a full one, against Ring "
    "Attention, an all-gather of keys, ring-flash-attn's ring and all-gather for packed documents, DeepSpeed's Ulysses "
    "and our best plan for dense masks. --pressures sets the link rate: with a dense mask, Ring Attention communicates "
    "this many times as long as it computes. The report ends with how evenly each layout spreads documents over ranks, "
    "and the claims. Writes sparse.json and sparse.txt."
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
        "measure this machine.",
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
    _add_engine(benchmarks)
    _add_train(benchmarks)
    _add_memory(benchmarks)
    _add_sparse(benchmarks)


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark: a module of `startrail.bench` that defines ``run(options)``."""
    with needs_extra("lab"):
        benchmark = import_module(f"startrail.bench.{arguments.benchmark or 'suite'}")
    return int(benchmark.run(arguments))


def _add_engine(benchmarks: Commands) -> None:
    option = _add_benchmark(
        benchmarks, "engine", "--plans u8,1x8 --rounds 3", "speed and memory of the engine on this machine", ENGINE
    ).add_argument
    option("--length", type=int, default=8192, help="tokens (default %(default)s)")
    option("--heads", type=int, default=8, help="query and KV heads (default %(default)s)")
    option("--head-dim", type=int, default=64, help="head dimension (default %(default)s)")
    option("--ranks", type=int, default=8, help="number of ranks (default %(default)s)")
    option("--plans", help=f"separated by commas (default {ENGINE_PLANS}; with --host {HOST_PLANS})")
    option("--rounds", type=int, default=5, help="rounds to take the median of (default %(default)s)")
    option("--full", action="store_true", help="no causal mask")
    option("--host", action="store_true", help="host time per call, without kernels and transfers")
    option("--calls", type=int, default=500, help="calls that --host measures (default %(default)s)")
    option("--json", type=Path, metavar="FILE", help="also write the rows to a file")


def _add_train(benchmarks: Commands) -> None:
    text = "tokens/s and exposed communication in training"
    option = _add_benchmark(benchmarks, "train", "--rounds 5 --steps 6", text, TRAIN).add_argument
    option("--recipes", default="gpt-tiny,dit-tiny", help="separated by commas (default %(default)s)")
    option("--rounds", type=int, default=3, help="rounds to take the median of (default %(default)s)")
    option("--steps", type=int, default=5, help="measured steps per round (default %(default)s)")


def _add_memory(benchmarks: Commands) -> None:
    text = "peak memory per rank in training, against the estimate"
    option = _add_benchmark(benchmarks, "memory", "--lengths 32768,65536 --ranks 4", text, MEMORY).add_argument
    option("--lengths", type=_numbers, default="32768,65536", help="N of the first part (default %(default)s)")
    option("--ranks", type=int, default=4, help="P of the first part (default %(default)s)")
    option("--local", type=int, default=16_384, help="N/P of the second part (default %(default)s)")
    option("--worlds", type=_numbers, default="2,4", help="P of the second part (default %(default)s)")
    option("--recipe", default="gpt-tiny", help="recipe to start from (default %(default)s)")
    option("--no-recompute", action="store_true", help="keep all activations")
    option(
        "--wall-tokens",
        type=int,
        default=16_384,
        metavar="N",
        help="N/P of the Hugging Face model in the third part (default %(default)s; 0: skip that part)",
    )
    option("--json", type=Path, metavar="FILE", help="also write the rows to a file")


def _add_sparse(benchmarks: Commands) -> None:
    text = "windows and packed documents on emulated clusters, against the peers"
    option = _add_benchmark(benchmarks, "sparse", "--shapes 4x8 --pressures 24", text, SPARSE).add_argument
    option(
        "--shapes", nargs="+", default=["4x8", "8x4"], metavar="NxR", help="nodes x ranks per node (default 4x8 8x4)"
    )
    option("--pressures", nargs="+", type=float, default=[24.0, 8.0], metavar="X", help="(default 24 8)")
    option("--length", type=int, default=2816, help="tokens (default %(default)s)")
    option("--only", default="", metavar="TEXT", help="run only workloads whose name contains TEXT, such as layers")
    option("--repeats", type=int, default=9, help="at most; slow contenders run fewer (default %(default)s)")
    option("--out", type=Path, default=Path("report"), metavar="DIR", help="output folder (default %(default)s)")


def _add_benchmark(benchmarks: Commands, name: str, example: str, text: str, description: str) -> Parser:
    return add_command(benchmarks, name, {f"startrail bench {name} {example}": ""}, help=text, description=description)


def _numbers(text: str) -> list[int]:
    """
    >>> _numbers("2,4,8")
    [2, 4, 8]
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers with commas, for example 2,4,8") from None

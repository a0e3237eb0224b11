"""What the command line has in a clone only: ``startrail lab``, and parts of ``startrail bench``.

Nothing here imports torch before a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from startrail.cli.options import Commands, Parser, add_command, needs_extra

LAB_NOTE = (
    "The program gets torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and calls\n"
    "init_process_group('gloo'). Rank 0's output is shown live; --log-dir keeps every rank's.\n"
    "Needs Linux, and root or user namespaces."
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

HYBRID = (
    "Times the gated delta rule over a split sequence, forward and backward: an all-to-all over heads, an all-gather "
    "of every rank's state, and ours. For up to 8,192 tokens, also a stack of three such layers and one of causal "
    "attention, whose heads both others exchange. --pressures sets the link rate as in `bench sparse`. The report ends "
    "with the claims. Writes hybrid.json and hybrid.txt."
)

LATENTS = (
    "Times latent attention, forward and backward, with the shapes of DeepSeek-V2-Lite scaled down, by plans that send "
    "latents and by plans that send expanded keys. --pressures sets the link rate: a ring of expanded keys "
    "communicates this many times as long as it computes. The planner chooses among all of them. Writes latents.json."
)


def add_lab(commands: Commands, examples: Mapping[str, str], text: str) -> None:
    lab = add_command(commands, "lab", examples, help=text, description="An emulated multi-node cluster.")
    command = add_command(
        lab.add_subparsers(required=True, metavar="command"),
        "run",
        examples,
        LAB_NOTE,
        help=text,
        description="Runs a torchrun-style program on emulated nodes: network namespaces joined by rate-limited links.",
        usage="%(prog)s [options] -- script.py [arguments]",
    )
    option = command.add_argument
    option("--nodes", type=int, default=2, help="emulated nodes (default %(default)s)")
    option("--ranks", type=int, default=2, help="ranks per node (default %(default)s)")
    option("--link", default="100mbit", help="rate of every node's link, or unlimited (default %(default)s)")
    option(
        "--slow",
        type=_slow_node,
        action="append",
        default=[],
        metavar="NODE=RATE",
        help="a different rate for one node; repeatable",
    )
    option("--racks", type=int, default=1, help="racks that the nodes are spread over (default %(default)s)")
    option("--rack-link", help="rate of each rack's link to the others")
    option("--deadline", type=float, default=3600.0, help="seconds until the job is killed (default %(default)s)")
    option("--log-dir", help="where to keep each rank's output: rank0.log, rank1.log ...")
    command.set_defaults(run=run_lab, program=[])  # `program` is what follows --


def run_lab(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 1 if the job or the cluster failed. Raises ``ValueError`` for a mistake."""
    with needs_extra("lab"):
        from workshop.lab import Cluster, JobError, LabError

    if not arguments.program:
        arguments.parser.error("no program to run: put it after --, as in -- script.py --its-own-options")
    wiring = {"racks": arguments.racks, "rack_link": arguments.rack_link, "slow": dict(arguments.slow)}
    try:
        with Cluster(arguments.nodes, arguments.ranks, arguments.link, **wiring) as cluster:
            try:
                job = cluster.start(arguments.program, arguments.deadline, log_dir=arguments.log_dir)
            except OSError as error:
                raise ValueError(str(error)) from None
            try:
                job.wait(echo=sys.stdout)
            finally:
                _flush()
            for node, counted in cluster.link_bytes().items():
                sent, received = counted["sent"] / 1e6, counted["received"] / 1e6
                print(f"node {node}: {sent:.3f} MB sent, {received:.3f} MB received over its link", file=sys.stderr)
    except (JobError, LabError) as error:
        print(f"{arguments.parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def add_benchmarks(benchmarks: Commands, engine: Parser) -> None:
    """The benchmarks that need a clone, and the option of ``bench engine`` that does."""
    text = "compare with another source tree: both are measured in turns, in one run"
    engine.add_argument("--against", type=Path, metavar="TREE", help=text)
    _add_memory(benchmarks)
    _add_sparse(benchmarks)
    _add_hybrid(benchmarks)
    _add_latents(benchmarks)


def _add_memory(benchmarks: Commands) -> None:
    text = "peak memory per rank in training, against the estimate"
    examples = {"startrail bench memory --lengths 32768,65536 --ranks 4": ""}
    command = add_command(benchmarks, "memory", examples, help=text, description=MEMORY)
    command.set_defaults(run=_run_memory)
    option = command.add_argument
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
    limits = "attention, logits, activations, optimizer, or groups: the groups of an exchange over heads"
    option("--only", default="", metavar="LIMIT", help=f"measure the rows of one limit only ({limits})")
    option("--json", type=Path, metavar="FILE", help="also write the rows to a file")


def _add_sparse(benchmarks: Commands) -> None:
    text = "windows and packed documents on emulated clusters, against the peers"
    examples = {"startrail bench sparse --shapes 4x8 --pressures 24": ""}
    command = add_command(benchmarks, "sparse", examples, help=text, description=SPARSE)
    command.set_defaults(run=_run_sparse)
    option = command.add_argument
    option(
        "--shapes", nargs="+", default=["4x8", "8x4"], metavar="NxR", help="nodes x ranks per node (default 4x8 8x4)"
    )
    option("--pressures", nargs="+", type=float, default=[24.0, 8.0], metavar="X", help="(default 24 8)")
    option("--length", type=int, default=2816, help="tokens (default %(default)s)")
    option("--only", default="", metavar="TEXT", help="run only workloads whose name contains TEXT, such as layers")
    option("--repeats", type=int, default=9, help="at most; slow contenders run fewer (default %(default)s)")
    option("--out", type=Path, default=Path("report"), metavar="DIR", help="output folder (default %(default)s)")


def _add_hybrid(benchmarks: Commands) -> None:
    text = "the gated delta rule on an emulated cluster, against other ways to split it"
    examples = {"startrail bench hybrid --pressures 24 --lengths 8192": ""}
    command = add_command(benchmarks, "hybrid", examples, help=text, description=HYBRID)
    command.set_defaults(run=_run_hybrid)
    option = command.add_argument
    option("--shape", default="4x8", metavar="NxR", help="nodes x ranks per node (default %(default)s)")
    option("--pressures", nargs="+", type=float, default=[24.0, 8.0], metavar="X", help="(default 24 8)")
    option("--lengths", type=_numbers, default="2048,8192,32768", help="tokens (default %(default)s)")
    option("--head-dim", type=int, default=16, help="of 32 heads (default %(default)s)")
    option("--repeats", type=int, default=3, help="at most; slow contenders run fewer (default %(default)s)")
    option("--out", type=Path, default=Path("report"), metavar="DIR", help="output folder (default %(default)s)")


def _add_latents(benchmarks: Commands) -> None:
    text = "latents against expanded keys on an emulated cluster"
    examples = {"startrail bench latents --pressures 24": ""}
    command = add_command(benchmarks, "latents", examples, help=text, description=LATENTS)
    command.set_defaults(run=_run_latents)
    option = command.add_argument
    option("--shape", default="4x8", metavar="NxR", help="nodes x ranks per node (default %(default)s)")
    option("--pressures", nargs="+", type=float, default=[24.0, 8.0, 3.0, 1.0], metavar="X", help="(default 24 8 3 1)")
    option("--length", type=int, default=16384, help="tokens (default %(default)s)")
    option("--batch", type=int, default=1, help="sequences (default %(default)s)")
    option("--repeats", type=int, default=3, help="at most; slow contenders run fewer (default %(default)s)")
    option("--out", type=Path, default=Path("report"), metavar="DIR", help="output folder (default %(default)s)")


def _run_latents(arguments: argparse.Namespace) -> int:
    with needs_extra("lab"):
        from workshop.trials import latents

        return latents.run(arguments)


def _run_memory(arguments: argparse.Namespace) -> int:
    from workshop.trials import memory

    return memory.run(arguments)


def _run_sparse(arguments: argparse.Namespace) -> int:
    with needs_extra("lab"):
        from workshop.trials import sparse

        return sparse.run(arguments)


def _run_hybrid(arguments: argparse.Namespace) -> int:
    with needs_extra("lab"):
        from workshop.trials import hybrid

        return hybrid.run(arguments)


def _slow_node(text: str) -> tuple[int, str]:
    node, equals, rate = text.partition("=")
    if not (equals and node.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE=RATE, such as 3=50mbit")
    return int(node), rate


def _flush() -> None:
    """Flush the output, or discard it quietly if its reader has closed the pipe, as ``| head`` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _numbers(text: str) -> list[int]:
    """
    >>> _numbers("2,4,8")
    [2, 4, 8]
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers with commas, for example 2,4,8") from None

"""``startrail lab run``: torchrun for an emulated cluster."""

from __future__ import annotations

import argparse
import os
import sys

from startrail.cli.options import Commands, add_command, needs_extra

EXAMPLES = {
    "startrail lab run --nodes 4 --ranks 8 --link 100mbit -- script.py": "32 ranks on emulated links",
    "startrail lab run --nodes 4 --ranks 8 --slow 3=50mbit -- train.py --steps 10": "node 3 has half the rate",
}
NOTE = (
    "The program gets torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and calls\n"
    "init_process_group('gloo'). Rank 0's output is shown live; --log-dir keeps every rank's.\n"
    "Needs Linux, and root or user namespaces."
)


def add(commands: Commands) -> None:
    text = "run a program on an emulated cluster"
    lab = add_command(commands, "lab", EXAMPLES, help=text, description="An emulated multi-node cluster.")
    command = add_command(
        lab.add_subparsers(required=True, metavar="command"),
        "run",
        EXAMPLES,
        NOTE,
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
    command.set_defaults(run=run, program=[])  # `program` is what follows --


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 1 if the job or the cluster failed. Raises ``ValueError`` for a mistake."""
    with needs_extra("lab"):
        from startrail.lab import Cluster, JobError, LabError

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

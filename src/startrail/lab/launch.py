"""``startrail lab run``: torchrun for an emulated cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from startrail.lab.cluster import Cluster
from startrail.lab.job import JobError
from startrail.lab.supervisor import LabError

EXAMPLE = """example, a program of 32 ranks on 4 nodes whose links carry 100 Mbit/s each way, node 3 half as much:

  startrail lab run --nodes 4 --ranks 8 --link 100mbit --slow 3=50mbit -- train.py --steps 10

The program finds torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and calls init_process_group("gloo").
Rank 0's output is shown as it comes; every rank's is in --log-dir. Needs Linux, and root or user namespaces.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")  # argparse would add the usage


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``startrail lab`` and return the exit code: 2 for a user's mistake, 1 for a job or a cluster that failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Everything after "--" is the program's own, whatever it looks like; argparse would take some of it.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    program = arguments[split + 1 :]
    run: Parser = options.parser
    if not program:
        run.error("no program to run: put it after --, as in -- script.py --its-own-options")
    wiring = {"racks": options.racks, "rack_link": options.rack_link, "slow": dict(options.slow)}
    try:
        cluster = Cluster(options.nodes, options.ranks, options.link, **wiring)
    except ValueError as error:
        run.error(str(error))
    try:
        with cluster:
            try:
                job = cluster.start(program, options.deadline, log_dir=options.log_dir)
            except (ValueError, OSError) as error:
                run.error(str(error))
            try:
                job.wait(echo=sys.stdout)
            finally:
                _flush()
            _print_bytes(cluster)
    except (JobError, LabError) as error:
        print(f"{run.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{run.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> Parser:
    parser = Parser(prog="startrail lab", description="An emulated multi-node cluster on this machine.")
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a torchrun-style program on an emulated cluster",
        description="Run a torchrun-style program on emulated nodes: network namespaces joined by rate-limited links.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- script.py [arguments]",
    )
    run.set_defaults(parser=run)
    run.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: %(default)s)")
    run.add_argument("--ranks", type=int, default=2, help="ranks a node (default: %(default)s)")
    run.add_argument("--link", default="100mbit", help="rate of every node's link, or unlimited (default: %(default)s)")
    run.add_argument(
        "--slow", type=_slow, action="append", default=[], metavar="NODE=RATE", help="another rate for a node"
    )
    run.add_argument("--racks", type=int, default=1, help="racks that the nodes are spread over (default: %(default)s)")
    run.add_argument("--rack-link", help="rate of each rack's link to the others")
    run.add_argument("--deadline", type=float, default=3600.0, help="seconds until all is ended (default: %(default)s)")
    run.add_argument("--log-dir", help="where to keep each rank's output, as rank0.log and so on")
    return parser


def _slow(text: str) -> tuple[int, str]:
    node, equals, rate = text.partition("=")
    if not (equals and node.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE=RATE, such as 3=50mbit")
    return int(node), rate


def _flush() -> None:
    """If nobody reads our output any more, as after ``| head``, let the rest of it go nowhere, quietly."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_bytes(cluster: Cluster) -> None:
    for node, counted in cluster.link_bytes().items():
        sent, received = counted["sent"] / 1e6, counted["received"] / 1e6
        print(f"node {node}: {sent:.3f} MB sent, {received:.3f} MB received over its link", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

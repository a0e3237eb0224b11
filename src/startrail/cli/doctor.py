"""``startrail doctor``: measure this machine, or all ranks under torchrun, and write a cluster file."""

from __future__ import annotations

import argparse

from startrail.cli.options import Commands, add_command

EXAMPLES = {
    "startrail doctor --out here.toml": "measure this machine and describe it for the planner",
    "torchrun --nnodes 4 --nproc-per-node 8 ... -m startrail.cli doctor --out cluster.toml": "",
}


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "doctor",
        EXAMPLES,
        help="measure this machine, or all ranks under torchrun, and write a cluster file",
        description="Prints versions, devices, kernels and limits, latency and bandwidth by level, and warnings. "
        "Writes a description of the cluster for `startrail plan --cluster FILE` and STARTRAIL_CLUSTER.",
    )
    command.add_argument("--out", metavar="FILE", help="write the description to this file (default: print only)")
    command.add_argument("--ranks", type=int, default=1, help="local ranks to start without torchrun (default 1)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from startrail.diagnostics.doctor import doctor_command

    return doctor_command(arguments.out, arguments.ranks)

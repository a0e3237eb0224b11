"""``startrail verify``: compare a user's training set-up on several ranks with one process."""

from __future__ import annotations

import argparse

from startrail.cli.options import Commands, add_command
from startrail.schedule.plan import Plan

EXAMPLES = {
    "startrail verify setup.py:make --ranks 4": "does your training set-up give the same results on 4 ranks as on one?",
    "startrail verify my.setup:make --plan u2/1x2": "",
}


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "verify",
        EXAMPLES,
        help="compare a training set-up on several ranks with one process, and name the fault",
        description="FUNCTION returns (model, batch), (model, batch, step) or (model, batch, step, reference), small "
        "enough for this machine. step(model, batch, sp) trains on ranks, reference(model, batch) on one process "
        "without startrail. Each runs forward and backward and returns the loss. The exit code is 1 if loss, "
        "gradients or buffers differ; the fault is printed.",
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", help="for example my.setup:make, or setup.py:make")
    command.add_argument("--ranks", type=int, default=4, help="number of ranks (default %(default)s)")
    command.add_argument("--plan", help="for example u2/1x2, or auto (default: a ring of all ranks)")
    command.add_argument("--deadline", type=float, default=300.0, help="time limit in seconds (default %(default)s)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from startrail.diagnostics.setups import load
    from startrail.diagnostics.verify import verify
    from startrail.launch.local import check_ranks

    if arguments.ranks < 1:
        raise ValueError(f"--ranks {arguments.ranks} must be at least 1")
    check_ranks(arguments.ranks)
    if arguments.plan not in (None, "auto"):
        Plan.parse(arguments.plan).check_world(arguments.ranks)
    verdict = verify(load(arguments.function), arguments.ranks, arguments.plan, arguments.deadline)
    print(verdict.text)
    return 0 if verdict.same else 1

"""``startrail trace``: compare a predicted trace with a measured one."""

from __future__ import annotations

import argparse
from pathlib import Path

from startrail.cli.options import Commands, add_command
from startrail.view.trace import compare, read_trace

EXAMPLES = {"startrail trace compare predicted.json runs/gpt-tiny/trace.json": "where they differ, per level and step"}
NOTE = "`startrail simulate --trace FILE` writes a predicted trace, `startrail train --trace N` a measured one."


def add(commands: Commands) -> None:
    command = add_command(commands, "trace", EXAMPLES, NOTE, help="compare a predicted trace with a measured one")
    command.add_argument("action", choices=("compare",))
    command.add_argument("predicted", type=Path, metavar="PREDICTED")
    command.add_argument("measured", type=Path, metavar="MEASURED")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(compare(read_trace(arguments.predicted), read_trace(arguments.measured)))
    return 0

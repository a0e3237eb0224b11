"""``startrail export``: a checkpoint's model as a safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from startrail.cli.options import Commands, add_command

EXAMPLES = {"startrail export runs/gpt-tiny model.safetensors": "the model of a run's newest checkpoint"}


def add(commands: Commands) -> None:
    command = add_command(commands, "export", EXAMPLES, help="write a checkpoint's model as safetensors")
    command.add_argument("checkpoint", help="a run's folder (uses its newest checkpoint), or one checkpoint's folder")
    command.add_argument("file", help="for example model.safetensors")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from startrail.training.checkpoints.export import export

    print(export(Path(arguments.checkpoint), Path(arguments.file)))
    return 0

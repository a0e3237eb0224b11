"""``startrail recognise``: does a classifier recognise the digits that a run's DiT was asked to paint?"""

from __future__ import annotations

import argparse
from pathlib import Path

from startrail.cli.options import Commands, add_command

EXAMPLES = {"startrail recognise runs/dit-tiny": "how many of the run's 100 samples show the requested digit"}
ENOUGH = 0.8


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "recognise",
        EXAMPLES,
        help="count the digits of a trained DiT that a classifier recognises",
        description="Trains a small classifier on held-out drawings, which the DiT has never seen, and has it read "
        f"samples.png. The exit code is 1 if it recognises fewer than {ENOUGH:.0%}.",
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of `startrail train dit-tiny`")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from startrail.training.recognise import recognise

    share, text = recognise(arguments.run_folder / "samples.png")
    print(text)
    return 0 if share >= ENOUGH else 1

"""``startrail models``: which Hugging Face models run, and the reason for those that do not."""

from __future__ import annotations

import argparse
import sys

from startrail.cli.options import Commands, add_command, needs_extra

EXAMPLES = {
    "startrail models llama gemma3": "which models of these families are supported",
    "startrail models": "all families; takes minutes",
}


def add(commands: Commands) -> None:
    command = add_command(
        commands, "models", EXAMPLES, help="list which Hugging Face models run, with the reason for each that does not"
    )
    command.add_argument("families", nargs="*", metavar="FAMILY", help="for example llama (default: all)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with needs_extra("transformers"):
        from startrail.integrations.survey import families, table

    print(table(families(arguments.families, progress=sys.stderr.isatty())))
    return 0

"""``startrail export``: a checkpoint's model as a folder that transformers loads, or as a safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from startrail.cli.options import Commands, add_command

EXAMPLES = {
    "startrail export runs/gpt-tiny my-gpt": "a folder for AutoModelForCausalLM.from_pretrained",
    "startrail export runs/dit-tiny dit.safetensors": "one file, with the names of startrail.training.models",
}


def add(commands: Commands) -> None:
    command = add_command(commands, "export", EXAMPLES, help="write a checkpoint's model for other programs")
    command.add_argument("checkpoint", help="a run's folder (uses its newest checkpoint), or one checkpoint's folder")
    command.add_argument("target", help="a new folder (a GPT as a Llama model), or a file that ends in .safetensors")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from startrail.training.checkpoints.export import export

    print(export(Path(arguments.checkpoint), Path(arguments.target)))
    return 0

"""``startrail plan``: the best plan for a model on a cluster, and the reason."""

from __future__ import annotations

import argparse
import os
import re

from startrail.cli.options import Commands, add_command
from startrail.planner.answer import plan
from startrail.planner.cluster import DTYPES
from startrail.planner.units import shipped, short_repr

EXAMPLES = {
    "startrail plan --cluster a100-4x8 --model gpt-7b --length 512k": "the best plan, and the reason",
    "startrail plan --cluster h100-8x8@256x8 --model llama3-70b --length 1M --batch 4 --top 3": "",
    "startrail plan --cluster my.toml --model config.json --length 128k --memory '60 GB' --json": "",
}


def add(commands: Commands) -> None:
    clusters, models = (", ".join(shipped(folder)) for folder in ("clusters", "models"))
    command = add_command(
        commands,
        "plan",
        EXAMPLES,
        f"clusters: {clusters}\nmodels: {models}",
        help="choose a plan for a model on a cluster, and explain it",
        description="Tries every plan, simulates the best on the described cluster, and explains the choice. "
        "`startrail doctor` writes a description of the cluster that it runs on.",
    )
    option = command.add_argument
    option("--cluster", help="a name, NAME@SIZES with other sizes, or a .toml (default: STARTRAIL_CLUSTER)")
    option("--model", required=True, help="a name, a .toml, or a Hugging Face config.json")
    option("--length", help="tokens per sequence, such as 131072, 128k or 1M")
    option("--batch", help="sequences per step, over all groups (default 1)")
    option("--dtype", help=f"{', '.join(DTYPES)} (default bfloat16)")
    option("--memory", help="memory that a device may use, such as '60 GB' (default: all of it)")
    option("--zero", type=_whole_number, help="ZeRO level: 0, 2 or 3 (default 3)")
    option("--gather", help="dtype in which FSDP sends parameters and gradients (default float32)")
    option("--no-recompute", dest="recompute", action="store_const", const=False, help="keep all activations")
    option(
        "--run",
        dest="run_file",
        metavar="FILE",
        help="a .toml with length, batch, dtype, recompute, zero, gather, loss_chunk; options override it",
    )
    option(
        "--top", type=_whole_number, default=5, help="plans to show, besides the well-known ones (default %(default)s)"
    )
    option("--json", action="store_true", help="print a list of rows and nothing else")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    cluster = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    if not cluster:
        raise ValueError("--cluster is missing (or set STARTRAIL_CLUSTER)")
    same_names = ("batch", "dtype", "memory", "recompute", "zero", "gather", "top")
    options = {name: getattr(arguments, name) for name in same_names}
    answer = plan(cluster, arguments.model, arguments.length, run=arguments.run_file, **options)
    print(answer.json() if arguments.json else answer)
    return 0


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a whole number")
    return int(text)

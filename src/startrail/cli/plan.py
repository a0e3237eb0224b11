"""``startrail plan``: which plan for my model on my cluster."""

from __future__ import annotations

import argparse
import os
import re

from startrail.planner.answer import plan
from startrail.planner.cluster import DTYPES
from startrail.planner.units import shipped, shown

EXAMPLES = """examples:
  startrail plan --cluster a100-4x8 --model gpt-7b --length 512k
  startrail plan --cluster h100-8x8@256x8 --model llama3-70b --length 1M --batch 4 --top 3
  startrail plan --cluster my-cluster.toml --model path/to/config.json --length 128k --memory "60 GB" --json
"""


def add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    clusters, models = (", ".join(shipped(folder)) for folder in ("clusters", "models"))
    command = commands.add_parser(
        "plan",
        help="which plan for a model on a cluster, why, and how sure",
        description="Tries every plan, plays the best on the described cluster, and explains the choice. "
        "`startrail doctor` writes a description of the cluster that it runs on.",
        epilog=f"{EXAMPLES}\nclusters: {clusters}\nmodels: {models}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--cluster", help="a name, NAME@SIZES with other sizes, or a .toml (default: STARTRAIL_CLUSTER)"
    )
    command.add_argument("--model", required=True, help="a name, a .toml, or a Hugging Face config.json")
    command.add_argument("--length", help="tokens of a sequence, such as 131072, 128k or 1M")
    command.add_argument("--batch", help="sequences in a step, of all groups (default 1)")
    command.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default bfloat16)")
    command.add_argument("--memory", help="what a device may use, such as '60 GB' (default: what it has)")
    command.add_argument("--zero", help="ZeRO level: 0, 2 or 3 (default 3)")
    command.add_argument("--gather", help="dtype of FSDP's parameters and gradients on their way (default float32)")
    command.add_argument(
        "--no-recompute", dest="recompute", action="store_const", const=False, help="hold all activations"
    )
    command.add_argument(
        "--run",
        dest="run_file",
        metavar="FILE",
        help="a .toml with length, batch, dtype, recompute, zero, gather, loss_chunk; options given beside it win",
    )
    command.add_argument("--top", default="5", help="plans to show, beside the well-known (default %(default)s)")
    command.add_argument("--json", action="store_true", help="a list of rows, nothing else")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    cluster = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    if not cluster:
        raise ValueError("--cluster is missing (or set STARTRAIL_CLUSTER)")
    answer = plan(
        cluster,
        arguments.model,
        arguments.length,
        batch=arguments.batch,
        dtype=arguments.dtype,
        memory=arguments.memory,
        recompute=arguments.recompute,
        zero=None if arguments.zero is None else _whole("--zero", arguments.zero),
        gather=arguments.gather,
        run=arguments.run_file,
        top=_whole("--top", arguments.top),
    )
    print(answer.json() if arguments.json else answer)
    return 0


def _whole(option: str, text: str) -> int:
    """Read here, since argparse would answer a slip with its whole usage."""
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise ValueError(f"{option} {shown(text)} is not a whole number")
    return int(text)

"""``startrail plan``: the best plan for a model on a cluster, and the reason."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path

from startrail.cli.options import Commands, add_command
from startrail.geometry.distributions import DISTRIBUTIONS
from startrail.planner.answer import plan
from startrail.planner.cluster import DTYPES
from startrail.planner.units import shipped, short_repr
from startrail.view.plan_plot import plot_answer

EXAMPLES = {
    "startrail plan --cluster a100-4x8 --model gpt-7b --length 512k": "the best plan, and the reason",
    "startrail plan --cluster h100-8x8@256x8 --model llama3-70b --length 1M --batch 4 --top 3": "",
    "startrail plan --cluster h100-8x8 --model llama3-8b --max-length": "the longest sequence that fits",
    "startrail plan --cluster h100-8x8 --model llama3-70b --gpus-for 1M --price 2.5": "the fewest GPUs, and the cost",
    "startrail plan --cluster h100-8x8 --model llama3-8b --length 512k --documents pretraining": "",
    "startrail plan --cluster my.toml --model config.json --length 128k --memory '60 GB' --json": "",
}

SETTINGS = (
    *("batch", "dtype", "recompute", "zero", "gather", "repeat_attention", "offload", "offload_states"),
    *("fp8", "states", "accumulate", "tensor", "documents"),
)
TEMPLATE = "h100-8x8"  # the cluster file to start from


def add(commands: Commands) -> None:
    clusters, models = (", ".join(shipped(folder)) for folder in ("clusters", "models"))
    command = add_command(
        commands,
        "plan",
        EXAMPLES,
        f"clusters: {clusters}\nmodels: {models}",
        help="choose a plan for a model on a cluster, and explain it",
        description="Tries every plan, simulates the best ones on the described cluster, and explains the choice. "
        "`startrail doctor` describes the cluster that it runs on.",
    )
    option = command.add_argument
    option("--cluster", help="a name, NAME@SIZES with other sizes, or a .toml (default: STARTRAIL_CLUSTER)")
    option("--model", help="a name, a .toml, or a Hugging Face config.json")
    option("--length", help="tokens per sequence, such as 131072, 128k or 1M")
    option("--max-length", action="store_true", help="plan for the longest sequence that fits, instead of --length")
    option("--gpus-for", metavar="LENGTH", help="plan for the fewest GPUs that fit this length")
    option("--batch", help="sequences per step, over all groups; auto: as many as still raise throughput (default 1)")
    option("--price", type=float, help="price per GPU hour: adds the cost per million tokens")
    option("--plot", metavar="FILE", help="plot the step time by part, and tokens/s by length (.png, .svg)")
    option("--dtype", help=f"{', '.join(DTYPES)} (default bfloat16)")
    option("--memory", help="memory limit per device, such as '60 GB' (default: all of it)")
    option("--zero", type=_whole_number, help="ZeRO level: 0, 2 or 3 (default 3)")
    option("--gather", help="dtype in which FSDP sends parameters and gradients (default: that of --dtype)")
    option("--no-recompute", dest="recompute", action="store_const", const=False, help="keep all activations")
    switch = partial(option, action="store_const", const=True)
    switch("--repeat-attention", help="recompute attention as well, as Hugging Face does")
    switch("--offload", help="keep the inputs of recomputed layers in host memory")
    switch("--offload-states", help="keep parameters, gradients and the optimizer's moments in host memory")
    switch("--fp8", help="compute linear layers in FP8")
    option("--states", help="dtype of parameters, gradients and moments (default float32)")
    option("--accumulate", help="gradient accumulation: passes that a group splits its sequences into (default 1)")
    option("--tensor", type=_whole_number, help="tensor parallelism: GPUs that split heads and MLP (default 1)")
    option(
        "--documents",
        metavar="FILE",
        help=f"packed documents: a file of lengths, repeated to fill a sequence, or {' or '.join(DISTRIBUTIONS)}",
    )
    option("--kernel", help=f"attention kernel: {', '.join(shipped('kernels'))} (default: the cluster's)")
    option("--plan", action="append", default=[], help="also price this plan and explain why it lost; repeatable")
    option("--compare", default="", help="the same for several plans: '1x32; u4/1x8'")
    option("--template", action="store_true", help="print a cluster file to fill in, and exit")
    option(
        "--run",
        dest="run_file",
        metavar="FILE",
        help="a .toml with length, batch, dtype and the like (docs/planner.md); options override it",
    )
    option(
        "--top", type=_whole_number, default=5, help="plans to show, besides the well-known ones (default %(default)s)"
    )
    option("--json", action="store_true", help="print the rows as JSON instead of text")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.template:
        print(shipped("clusters")[TEMPLATE].read_text(), end="")
        return 0
    cluster = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    missing = [name for name, given in (("--cluster", cluster), ("--model", arguments.model)) if not given]
    if missing:
        hint = " (or set STARTRAIL_CLUSTER)" if "--cluster" in missing else ""
        raise ValueError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{hint}")
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    options = dict(memory=arguments.memory, run=arguments.run_file, top=arguments.top, kernel=arguments.kernel)
    if sum(map(bool, (arguments.length, arguments.max_length, arguments.gpus_for))) > 1:
        raise ValueError("pass only one of --length, --max-length and --gpus-for")
    options |= dict(price=arguments.price, max_length=arguments.max_length, gpus_for=bool(arguments.gpus_for))
    length = arguments.gpus_for or arguments.length
    plans = [*arguments.plan, *(text for text in arguments.compare.split(";") if text.strip())]
    answer = plan(cluster, arguments.model, length, compare=plans, **options, **settings)
    if arguments.plot:
        plot_answer(answer.result, Path(arguments.plot))
    print(answer.json() if arguments.json else answer)
    return 0


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a whole number")
    return int(text)

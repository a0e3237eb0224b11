"""``startrail check``: run a plan and compare results, gradients and bytes with the float64 reference."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from startrail.cli.options import Commands, add_command, world_size
from startrail.schedule.plan import Plan

EXAMPLES = {
    "startrail check 2x2/u2 --ranks 8 --causal": "run it on 8 local processes against float64",
    "startrail check 1x4 --ranks 4 --causal --window 100 --documents 0,300,1000 --length 1000": "",
    "torchrun --nproc-per-node 8 -m startrail.cli check all": "first check of this machine's GPUs",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
SAME_NAMES = ("length", "batch", "head_dim", "causal", "window", "layout", "seed")  # options that are fields of a Case


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "check",
        EXAMPLES,
        help="run a plan against float64, on local processes or under torchrun",
        description="Runs forward and backward with random inputs and output gradients. The exit code is 1 if a result "
        "is wrong or the bytes sent differ from the predicted count. Without torchrun, it forks local processes. Under "
        "torchrun, it uses the ranks and devices of the job: with the plan 'all' it checks kernels, dtypes, plans and "
        "bytes on a new cluster, and prints a table to paste into an issue.",
    )
    option = command.add_argument
    option("plan", help="for example 2x2, 1x4/u2, star2 or auto; all: several plans that fit")
    option(
        "--ranks",
        type=int,
        help="number of ranks (required for star plans, auto and all; default: torchrun's, or the plan's size)",
    )
    option("--length", type=int, default=1024, help="tokens of the whole sequence (default %(default)s)")
    option("--batch", type=int, default=1, help="sequences (default %(default)s)")
    option("--heads", type=int, default=8, help="query heads (default %(default)s)")
    option("--kv-heads", type=int, help="KV heads (default: same as --heads)")
    option("--head-dim", type=int, default=64, help="head dimension (default %(default)s)")
    option("--dtype", choices=DTYPES, default="float32", help="(default %(default)s)")
    option("--wire-dtype", choices=DTYPES, help="dtype of the payload (default: --dtype)")
    option("--causal", action="store_true", help="causal mask (default: full)")
    option("--window", type=int, help="sliding window in tokens")
    option("--documents", metavar="0,A,B,...,LENGTH", help="cu_seqlens of packed documents")
    option("--layout", choices=("zones", "zigzag", "contiguous"), default="zones", help="(default %(default)s)")
    option("--seed", type=int, default=0, help="seed of the random inputs (default %(default)s)")
    option(
        "--tokens-per-rank",
        type=int,
        help="with 'all': also check each plan with this many tokens (default: 4096 on GPUs; 0, none, on CPUs)",
    )
    option(
        "--out", metavar="FILE", help="with 'all': where to write all results as JSON (default startrail-check.json)"
    )
    option("--deadline", type=float, default=600.0, help="time limit in seconds (default %(default)s)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from startrail.diagnostics.cluster_check import (
        check_on_group,
        coverage,
        large_tokens,
        record,
        table,
        typical_cases,
    )
    from startrail.diagnostics.exactness import Report, check_cases, check_memory, environment_text
    from startrail.diagnostics.reference import Case
    from startrail.launch.heartbeat import WaitLimit
    from startrail.launch.local import RankError
    from startrail.launch.torchrun import JoinError, device_of_rank, join

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun
    world = int(os.environ["WORLD_SIZE"]) if launched and arguments.ranks is None else arguments.ranks
    if arguments.plan not in ("auto", "all"):
        world = world_size(Plan.parse(arguments.plan), world)
    elif world is None or world < 1:
        raise ValueError(f"plan {arguments.plan} needs --ranks, at least 1")
    case = Case(
        plan="auto" if arguments.plan == "all" else arguments.plan,
        world=world,
        q_heads=arguments.heads,
        kv_heads=arguments.heads if arguments.kv_heads is None else arguments.kv_heads,
        dtype=getattr(torch, arguments.dtype),
        documents=_parse_documents(arguments.documents),
        wire_dtype=getattr(torch, arguments.wire_dtype) if arguments.wire_dtype else None,
        **{name: getattr(arguments, name) for name in SAME_NAMES},
    )
    if not launched:
        check_memory(case)
    case.validate()
    everything = arguments.plan == "all"
    if not everything and (arguments.out is not None or arguments.tokens_per_rank is not None):
        raise ValueError("--out and --tokens-per-rank need the plan 'all'")
    out = Path(arguments.out or "startrail-check.json")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: folder {out.absolute().parent} does not exist")
    if (arguments.tokens_per_rank or 0) < 0:
        raise ValueError(f"--tokens-per-rank {arguments.tokens_per_rank} must be at least 0")
    device, rank = torch.device("cpu"), 0

    def write(reports: Sequence[Report]) -> None:  # also before each case: one of them may end the program
        if everything and rank == 0:
            out.write_text(json.dumps(record(cases, reports, device), indent=1) + "\n")

    try:
        if launched:
            device, rank = device_of_rank("auto"), int(os.environ["RANK"])
        tokens = large_tokens(world, device) if arguments.tokens_per_rank is None else arguments.tokens_per_rank
        cases = typical_cases(case, tokens) if everything else [case]
        if launched:
            join(device, WaitLimit(arguments.deadline, "startrail check", "--deadline"))
            reports = check_on_group(cases, device, write)
        else:
            reports = check_cases(cases, arguments.deadline)
    except (RankError, JoinError) as error:
        print(f"startrail check: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        if not everything:
            print(reports[0].text(case, device))
        else:
            print(f"{environment_text(device, cases)}\n\n{table(cases, reports)}\n\n{coverage(cases, reports)}")
            write(reports)
            print(f"written: {out}")
    if launched:
        torch.distributed.destroy_process_group()
    return 1 if any(report.verdict() for report in reports) else 0


def _parse_documents(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--documents {text!r}: write whole numbers with commas, for example 0,300,1000") from None

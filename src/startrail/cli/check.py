"""``startrail check``: run a plan and compare results, gradients and bytes with the float64 reference."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from startrail.cli.options import Commands, add_command, world_size
from startrail.geometry.zones import LAYOUT_NAMES
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import ITEMSIZES

if TYPE_CHECKING:
    import torch

    from startrail.diagnostics.exactness import Report
    from startrail.diagnostics.reference import Case

EXAMPLES = {
    "startrail check 2x2/u2 --ranks 8 --causal": "run it on 8 local processes against float64",
    "startrail check 1x4 --ranks 4 --causal --window 100 --documents 0,300,1000 --length 1000": "",
    "startrail check u8/8x8 --prove --ranks 512 --causal --window 4096 --length 65536": "prove 512 programs, run none",
    "startrail check 1x4/1x8 --prove --scan": "prove the scan of a recurrence and the halo of a convolution",
    "torchrun --nproc-per-node 8 -m startrail.cli check all": "first check of this machine's GPUs",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")  # of inputs
SAME_NAMES = ("length", "batch", "head_dim", "causal", "window", "layout", "seed")  # options that are fields of a Case


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "check",
        EXAMPLES,
        help="prove a plan's programs, and run it against float64, on local processes or under torchrun",
        description="Proves the programs of all ranks without data (every visible pair of tokens once, every result at "
        "its owner, no deadlock, bytes and memory as stated). Then runs forward and backward with random inputs and "
        "output gradients. The exit code is 1 if a program or a result is wrong, or if the bytes sent differ from the "
        "predicted count. Without torchrun, it forks local processes. Under "
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
    option("--wire-dtype", choices=tuple(ITEMSIZES), help="dtype of the payload (default: --dtype)")
    option("--causal", action="store_true", help="causal mask (default: full)")
    option("--window", type=int, help="sliding window in tokens")
    option("--documents", metavar="0,A,B,...,LENGTH", help="cu_seqlens of packed documents")
    option("--layout", choices=LAYOUT_NAMES, default="zones", help="(default %(default)s)")
    option("--prove", action="store_true", help="prove only: for any number of ranks, without processes")
    option("--scan", action="store_true", help="with --prove: a recurrence and a convolution instead of attention")
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
    from startrail.diagnostics.exactness import check_memory, prove, prove_recurrence
    from startrail.launch.local import RankError
    from startrail.launch.torchrun import JoinError
    from startrail.schedule.proof import ScheduleError

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ and not arguments.prove  # by torchrun
    case, out = _case(arguments, int(os.environ["WORLD_SIZE"]) if launched else None), _out(arguments)
    if arguments.prove and arguments.plan == "auto":
        raise ValueError("--prove needs a plan: only ranks can choose one")
    if arguments.scan and not arguments.prove:
        raise ValueError("--scan needs --prove: only attention runs against float64 here")
    if not launched and not arguments.prove:
        check_memory(case)
    case.validate()
    try:
        if arguments.prove:
            for each in _cases(case, arguments):
                print((prove_recurrence if arguments.scan else prove)(each))
            return 0
        return _run_under_torchrun(case, out, arguments) if launched else _run_here(case, out, arguments)
    except (RankError, JoinError) as error:
        print(f"startrail check: {error}", file=sys.stderr)
    except ScheduleError as error:
        print(f"startrail check: the schedule is wrong: {error}", file=sys.stderr)
    return 1


def _case(arguments: argparse.Namespace, launched_ranks: int | None) -> Case:
    import torch

    from startrail.diagnostics.reference import Case

    world = launched_ranks if arguments.ranks is None else arguments.ranks
    if arguments.plan not in ("auto", "all"):
        world = world_size(Plan.parse(arguments.plan), world)
    elif world is None or world < 1:
        raise ValueError(f"plan {arguments.plan} needs --ranks, at least 1")
    return Case(
        plan="auto" if arguments.plan == "all" else arguments.plan,
        world=world,
        q_heads=arguments.heads,
        kv_heads=arguments.heads if arguments.kv_heads is None else arguments.kv_heads,
        dtype=getattr(torch, arguments.dtype),
        documents=_parse_documents(arguments.documents),
        wire_dtype=getattr(torch, arguments.wire_dtype) if arguments.wire_dtype else None,
        **{name: getattr(arguments, name) for name in SAME_NAMES},
    )


def _out(arguments: argparse.Namespace) -> Path | None:
    """Where the results of all plans go."""
    if arguments.plan != "all":
        if arguments.out is not None or arguments.tokens_per_rank is not None:
            raise ValueError("--out and --tokens-per-rank need the plan 'all'")
        return None
    out = Path(arguments.out or "startrail-check.json")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: folder {out.absolute().parent} does not exist")
    if (arguments.tokens_per_rank or 0) < 0:
        raise ValueError(f"--tokens-per-rank {arguments.tokens_per_rank} must be at least 0")
    return out


def _cases(case: Case, arguments: argparse.Namespace, tokens_per_rank: int = 0) -> list[Case]:
    from startrail.diagnostics.cluster_check import typical_cases

    if arguments.plan != "all":
        return [case]
    return typical_cases(case, tokens_per_rank if arguments.tokens_per_rank is None else arguments.tokens_per_rank)


def _run_here(case: Case, out: Path | None, arguments: argparse.Namespace) -> int:
    """On local processes, which start when all programs are proven."""
    import torch

    from startrail.diagnostics.exactness import check_cases, prove
    from startrail.launch.local import run_local

    if arguments.plan == "auto":
        asked = case
        case = replace(case, plan=run_local(lambda rank: str(asked.parallel().plan), case.world)[0] or "")
    cases = _cases(case, arguments)
    proven = [prove(each) for each in cases]
    reports = check_cases(cases, arguments.deadline)
    _show(cases, reports, proven, torch.device("cpu"), out)
    return int(any(report.verdict() for report in reports))


def _run_under_torchrun(case: Case, out: Path | None, arguments: argparse.Namespace) -> int:
    """On the ranks of the job. Each first proves some of the cases; one that finds a wrong program ends the job."""
    import torch.distributed as dist

    from startrail.diagnostics.cluster_check import check_on_group, large_tokens, write
    from startrail.diagnostics.exactness import prove
    from startrail.launch.heartbeat import WaitLimit
    from startrail.launch.torchrun import device_of_rank, join

    device = device_of_rank("auto")
    join(device, WaitLimit(arguments.deadline, "startrail check", "--deadline"))
    if arguments.plan == "auto":
        case = replace(case, plan=str(case.parallel().plan))
    cases, rank = _cases(case, arguments, large_tokens(case.world, device)), dist.get_rank()
    proven = [prove(each) for each in cases[rank :: dist.get_world_size()]]
    dist.barrier()
    # written before each case as well: one of them may end the program
    reports = check_on_group(cases, device, lambda done: None if rank else write(out, cases, done, device))
    if rank == 0:
        _show(cases, reports, proven, device, out)
    dist.destroy_process_group()
    return int(any(report.verdict() for report in reports))


def _show(
    cases: Sequence[Case], reports: Sequence[Report], proven: Sequence[str], device: torch.device, out: Path | None
) -> None:
    from startrail.diagnostics.cluster_check import coverage, table, write
    from startrail.diagnostics.exactness import environment_text

    if out is None:
        print(f"{proven[0]}\n{reports[0].text(cases[0], device)}")
        return
    print(f"{environment_text(device, cases)}\n\n{table(cases, reports)}\n\n{coverage(cases, reports)}")
    print(f"proven before they ran: the programs of all {len(cases)} cases")
    write(out, cases, reports, device)
    print(f"written: {out}")


def _parse_documents(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--documents {text!r}: write whole numbers with commas, for example 0,300,1000") from None

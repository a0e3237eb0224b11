"""The command line: ``startrail show``, ``check``, ``plan``, ``doctor``, ``verify``, ``models``, ``train``,
``export``, ``lab`` and ``bench``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module

from startrail import __version__
from startrail.cli.plan import add_plan_command
from startrail.cli.train import export_command, fields_text, train_command
from startrail.planner.auto import fit_cluster, plan_for_heads
from startrail.planner.cluster import find_cluster
from startrail.planner.topology import Machine
from startrail.planner.workload import check_heads
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.view import fitting, show

MOST_SHOWN = 8  # ranks
ASSUMED_CLUSTER = "h100-8x8"  # where `show auto` is not told the cluster; its sizes are the machine's
EXAMPLES = """examples:
  startrail show 2x2                         the schedule of 4 ranks, step by step
  startrail show star2 --ranks 16 --rank 5   one rank of the paper's schedule
  startrail show auto --ranks 32 --nodes 4 --heads 32 --kv-heads 8 --cluster a100-4x8
  startrail check 2x2/u2 --ranks 8 --causal  run it on 8 local processes against float64
  startrail check 1x4 --ranks 4 --causal --window 100 --documents 0,300,1000 --length 1000
  startrail plan --cluster a100-4x8 --model gpt-7b --length 512k
  startrail verify setup.py:make --ranks 4   is your own training set-up the same on 4 ranks as on one process?
  startrail models llama gemma3              which Hugging Face models run (all of them, without names)
  torchrun --nproc-per-node 8 -m startrail.cli check all     a first look at the GPUs that are there
  startrail train                            a small GPT on 8 local ranks, two minutes
  startrail train dit-tiny --plan 1x4 --ranks 4 --steps 50 --out runs/ring
  startrail lab run --nodes 4 --ranks 8 --link 100mbit -- script.py
  startrail bench --quick                    plans and peers on limited links, three minutes
  startrail bench engine                     the engine's speed and memory here; also: bench train, bench memory
"""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in ("lab", "bench"):  # read their own arguments, and need more than the rest
        return _lab(argv[0], argv[1:])
    try:
        parser = _parser(argv)
    except ValueError as error:  # a recipe that there is not
        print(f"startrail {argv[0]}: {error}", file=sys.stderr)
        return 2
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "train":  # reads its own: the fields of its recipe
        arguments.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(f"startrail {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
        return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="startrail",
        description="Exact attention over near-infinite contexts.",
        epilog=EXAMPLES,
        formatter_class=plain,
    )
    parser.add_argument("--version", action="version", version=f"startrail {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("show", help="print a schedule as a grid", epilog=EXAMPLES, formatter_class=plain)
    command.add_argument("plan", help="for example 2x2, 1x4/u2, star2, auto")
    command.add_argument(
        "--ranks", type=int, help="number of ranks (needed for star plans and auto; default: the plan's size)"
    )
    command.add_argument(
        "--rank", type=int, action="append", help="show this rank; may be repeated (default: the first that fit)"
    )
    command.add_argument("--nodes", type=int, default=1, help="for auto: nodes of the machine (default %(default)s)")
    command.add_argument("--heads", type=int, help="for auto: query heads of the model")
    command.add_argument("--kv-heads", type=int, help="for auto: key/value heads (default: as many as query heads)")
    command.add_argument("--head-dim", type=int, help="for auto, with a cluster: the width of a head (default 128)")
    command.add_argument("--length", type=int, help="for auto, with a cluster: tokens (default 4096 a rank)")
    command.add_argument(
        "--cluster", help="for auto: a description by name or file, as a job takes it (default: STARTRAIL_CLUSTER)"
    )
    command.add_argument("--direction", choices=("forward", "backward"), default="forward")
    command.set_defaults(run=_show)

    command = commands.add_parser(
        "check",
        help="run a plan against float64, on local processes or under torchrun",
        description="Runs forward and backward with random inputs and cotangents; exit code 1 if a result is off or a "
        "byte more or less was sent than the closed form says. Started plainly it forks local processes; under "
        "torchrun it uses the ranks and devices that are there: with the plan 'all', a first look at a cluster that "
        "proves its kernels, dtypes, plans and bytes, in a table to paste into an issue.",
        epilog=EXAMPLES,
        formatter_class=plain,
    )
    command.add_argument("plan", help="for example 2x2, 1x4/u2, star2, auto; all: several that fit")
    command.add_argument(
        "--ranks",
        type=int,
        help="number of ranks (needed for star plans, auto and all; default: torchrun's, or the plan's size)",
    )
    command.add_argument("--length", type=int, default=1024, help="tokens of the whole sequence (default %(default)s)")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--heads", type=int, default=8, help="query heads (default %(default)s)")
    command.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as query heads)")
    command.add_argument("--head-dim", type=int, default=64)
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    command.add_argument(
        "--wire-dtype", choices=("float32", "bfloat16", "float16", "float64"), help="what travels (default: --dtype)"
    )
    command.add_argument("--causal", action="store_true")
    command.add_argument("--window", type=int)
    command.add_argument("--documents", metavar="0,A,B,...,LENGTH", help="cu_seqlens of packed documents")
    command.add_argument("--layout", choices=("zigzag", "contiguous"), default="zigzag")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--deadline", type=float, default=600.0, help="seconds (default %(default)s)")
    command.set_defaults(run=_check)

    command = commands.add_parser(
        "verify",
        help="compare a training set-up on many ranks with one process, and name what is wrong",
        description="FUNCTION returns (model, batch) or (model, batch, step), small enough for this machine. It is run "
        "on one process and on local ranks; exit code 1 if loss or gradients differ, with the fault.",
        epilog=EXAMPLES,
        formatter_class=plain,
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", help="for example my.setup:make, or setup.py:make")
    command.add_argument("--ranks", type=int, default=4, help="number of ranks (default %(default)s)")
    command.add_argument("--plan", help="for example u2/1x2 (default: a ring of all ranks)")
    command.add_argument("--deadline", type=float, default=300.0, help="seconds (default %(default)s)")
    command.set_defaults(run=_verify)

    command = commands.add_parser(
        "models",
        help="which Hugging Face models run, and why others do not",
        epilog=EXAMPLES,
        formatter_class=plain,
    )
    command.add_argument("families", nargs="*", metavar="FAMILY", help="for example llama (default: all, minutes)")
    command.set_defaults(run=_models)

    command = commands.add_parser(
        "train",
        help="train a GPT or a DiT",
        usage="startrail train [RECIPE] [--FIELD VALUE ...]",
        description="Starts local ranks itself; under torchrun, uses those that it gives. Continues from the newest "
        "good checkpoint in its folder.\nExit code: 0 when all steps are done, 143 if SIGTERM stopped the run and 130 "
        "if Ctrl-C did (saved, the same\ncommand continues), 1 if something went wrong on the way, 2 for a mistake.",
        epilog=fields_text(argv[1:] if argv[:1] == ["train"] else ()),
        formatter_class=plain,
        allow_abbrev=False,
    )
    command.set_defaults(run=lambda arguments: train_command(arguments.rest))

    add_plan_command(commands)
    _add_doctor(commands)
    commands.add_parser("lab", help="run a program on an emulated cluster", add_help=False)
    commands.add_parser("bench", help="measure plans and peers side by side", add_help=False)

    command = commands.add_parser("export", help="write a checkpoint's model as safetensors")
    command.add_argument("checkpoint", help="a run's folder (its newest checkpoint), or one checkpoint's")
    command.add_argument("file", help="for example model.safetensors")
    command.set_defaults(run=lambda arguments: export_command(arguments.checkpoint, arguments.file))
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="look at this machine, or under torchrun at all ranks, and write a cluster file",
        description="Versions, devices, kernels, limits; latency and bandwidth by level; anything odd by name. Writes "
        "a description of the cluster that `startrail plan --cluster FILE` and STARTRAIL_CLUSTER take.",
        epilog="examples:\n  startrail doctor --out here.toml\n"
        "  torchrun --nnodes 4 --nproc-per-node 8 ... -m startrail.cli doctor --out ours.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--out", metavar="FILE", help="where the description goes (default: it is not written)")
    command.add_argument("--ranks", type=int, default=1, help="local ranks to start if torchrun gives none (default 1)")
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from startrail.diagnostics.doctor import doctor_command  # here: it measures, and so needs torch

    return doctor_command(arguments.out, arguments.ranks)


def _lab(command: str, argv: Sequence[str]) -> int:
    module = {"lab": "startrail.lab.launch", "bench": "startrail.bench.__main__"}[command]
    try:
        return int(import_module(module).main(argv))
    except ModuleNotFoundError as error:
        print(f"startrail {command}: {error.name} is not installed (pip install 'startrail[lab]')", file=sys.stderr)
        return 2


def _show(arguments: argparse.Namespace) -> int:
    plan = _chosen(arguments) if arguments.plan == "auto" else Plan.parse(arguments.plan)
    world = _world(plan, arguments.ranks)
    ranks = arguments.rank or list(range(min(world, MOST_SHOWN)))
    for rank in ranks:
        if not 0 <= rank < world:
            raise ValueError(f"--rank {rank} is not in a world of {world}")
    (pass_,) = (pass_ for pass_ in PASSES if str(pass_) == arguments.direction)
    if not arguments.rank:
        ranks = ranks[: fitting(plan, world, pass_, ranks, shutil.get_terminal_size((120, 24)).columns)]
    print(show(plan, world, pass_, ranks))
    if not arguments.rank and world > len(ranks):
        print(f"... and {world - len(ranks)} more ranks; choose with --rank")
    return 0


def _chosen(arguments: argparse.Namespace) -> Plan:
    if not arguments.ranks or not arguments.heads:
        raise ValueError("auto chooses a plan for a machine and a model: give --ranks and --heads (and --nodes)")
    if arguments.ranks < 1 or arguments.nodes < 1 or arguments.ranks % arguments.nodes:
        raise ValueError(f"--ranks {arguments.ranks} do not fill --nodes {arguments.nodes} evenly")
    machine = Machine(arguments.nodes, arguments.ranks // arguments.nodes)
    heads, kv_heads = arguments.heads, arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    check_heads(heads, kv_heads)
    name = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    cluster = fit_cluster(find_cluster(name or ASSUMED_CLUSTER), machine)
    plan, reason = plan_for_heads(cluster, heads, kv_heads, arguments.head_dim, arguments.length)
    assumed = f"assumed to be like {ASSUMED_CLUSTER} (pass --cluster to plan for yours)"
    print(f"{reason}; cluster {f'described by {name}' if name else assumed}", end="\n\n")
    return plan


def _check(arguments: argparse.Namespace) -> int:
    import torch  # here, so that the other commands work without torch

    from startrail.diagnostics.cluster_check import check_on_group, table, typical_cases
    from startrail.diagnostics.exactness import check_cases, check_room, where
    from startrail.diagnostics.reference import Case
    from startrail.launch.heartbeat import WaitLimit
    from startrail.launch.local import RankError
    from startrail.launch.torchrun import JoinError, device_of_rank, join

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun
    world = int(os.environ["WORLD_SIZE"]) if launched and arguments.ranks is None else arguments.ranks
    if arguments.plan not in ("auto", "all"):
        world = _world(Plan.parse(arguments.plan), world)
    elif world is None or world < 1:
        raise ValueError(f"plan {arguments.plan} needs --ranks, at least 1")
    case = Case(
        plan="auto" if arguments.plan == "all" else arguments.plan,
        world=world,
        length=arguments.length,
        batch=arguments.batch,
        q_heads=arguments.heads,
        kv_heads=arguments.heads if arguments.kv_heads is None else arguments.kv_heads,
        head_dim=arguments.head_dim,
        dtype=getattr(torch, arguments.dtype),
        causal=arguments.causal,
        window=arguments.window,
        documents=_documents(arguments.documents),
        layout=arguments.layout,
        wire_dtype=getattr(torch, arguments.wire_dtype) if arguments.wire_dtype else None,
        seed=arguments.seed,
    )
    if not launched:
        check_room(case)
    case.validate()
    cases = typical_cases(case) if arguments.plan == "all" else [case]
    device, rank = torch.device("cpu"), 0
    try:
        if launched:
            device, rank = device_of_rank("auto"), int(os.environ["RANK"])
            join(device, WaitLimit(arguments.deadline, "startrail check", "--deadline"))
            reports = check_on_group(cases, device)
        else:
            reports = check_cases(cases, arguments.deadline)
    except (RankError, JoinError) as error:
        print(f"startrail check: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        one = len(cases) == 1
        print(reports[0].text(case, device) if one else f"{where(device, cases)}\n\n{table(cases, reports)}")
    if launched:
        torch.distributed.destroy_process_group()
    return 1 if any(report.verdict() for report in reports) else 0


def _verify(arguments: argparse.Namespace) -> int:
    from startrail.diagnostics.verify import load, verify
    from startrail.launch.local import check_ranks

    if arguments.ranks < 1:
        raise ValueError(f"--ranks {arguments.ranks} must be at least 1")
    check_ranks(arguments.ranks)
    if arguments.plan is not None:
        Plan.parse(arguments.plan).check_world(arguments.ranks)
    verdict = verify(load(arguments.function), arguments.ranks, arguments.plan, arguments.deadline)
    print(verdict.text)
    return 0 if verdict.same else 1


def _models(arguments: argparse.Namespace) -> int:
    try:
        from startrail.integrations.survey import families, table
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed (pip install 'startrail[hf]')") from None

    print(table(families(arguments.families, progress=sys.stderr.isatty())))
    return 0


def _world(plan: Plan, ranks: int | None) -> int:
    if ranks is None:
        if plan.family.open_ended:
            raise ValueError(f"plan {plan} needs --ranks, a multiple of {plan.family.unit(plan) * plan.heads}")
        ranks = plan.size
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be at least 1")
    plan.check_world(ranks)
    return ranks


def _documents(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--documents {text!r}: write whole numbers with commas, for example 0,300,1000") from None


if __name__ == "__main__":
    sys.exit(main())

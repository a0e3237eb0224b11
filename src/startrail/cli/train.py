"""``startrail train``: start local ranks or join those of torchrun, and train a recipe on them.

Without torchrun, it forks local ranks with gloo, or starts torchrun on GPUs. Under torchrun it is one of the
ranks. The exit code is 0 when all steps are done, 2 for a mistake, and 1 for a failure during the run. If a signal
stopped the run and it was saved, it is 128 plus the signal's number, as in a shell: 143 for SIGTERM, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from startrail.cli.options import Commands, add_command
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import RECIPES, Recipe, find

if TYPE_CHECKING:
    import torch

    from startrail.launch.heartbeat import Heartbeat, WaitLimit
    from startrail.launch.signals import Stop

EXAMPLES = {
    "startrail train": "a small GPT on 8 local ranks, two minutes",
    "startrail train dit-tiny --plan 1x4 --ranks 4 --steps 50 --out runs/ring": "",
    "startrail train gpt-3b --help": "the fields of a recipe, with its values",
    "torchrun --nproc-per-node 8 -m startrail.cli train gpt-7b --data-parallel 2": "",
}
DEFAULT = "gpt-tiny"
STOPPED = 128 + signal.SIGTERM
FAILED = 1
RECIPE_FIELDS = {item.name: item for item in fields(Recipe) if "meaning" in item.metadata}
MODEL_FIELDS = {item.name: item for config in (GPTConfig, DiTConfig) for item in fields(config)}


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "train",
        EXAMPLES,
        help="train a GPT or a DiT",
        usage="%(prog)s [RECIPE] [--FIELD VALUE ...]",
        description="Starts local ranks, or uses those of the job under torchrun. Continues from the newest good "
        "checkpoint in its folder. Exit code: 0 when all steps are done, 143 if SIGTERM stopped the run and 130 if "
        "Ctrl-C did (the run is saved, and the same command continues it), 1 if the run failed, 2 for a mistake.",
        add_help=False,
        allow_abbrev=False,  # a recipe gets new fields, which may make a short form ambiguous
    )
    command.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        default=DEFAULT,
        help=f"{', '.join(RECIPES)} (default {DEFAULT}), or a .toml or .json file",
    )
    command.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help, with the values of RECIPE")
    run_fields, model_fields = command.add_argument_group("fields of the run"), command.add_argument_group("model")
    for item in RECIPE_FIELDS.values():
        _add_field(run_fields, item, item.metadata["meaning"])
    for item in MODEL_FIELDS.values():
        configs = (("GPT", GPTConfig), ("DiT", DiTConfig))
        models = [name for name, config in configs if item.name in {own.name for own in fields(config)}]
        _add_field(model_fields, item, " and ".join(models))
    command.set_defaults(run=run)


def _add_field(group: Any, item: Field[Any], text: str) -> None:
    """An option whose text the recipe reads itself. Without a value, a flag is true."""
    metavar = {"int": "N", "float": "X", "bool": "BOOL"}.get(str(item.type).removesuffix(" | None"), "TEXT")
    flag = {"nargs": "?", "const": "true"} if item.type == "bool" else {}
    name = f"--{item.name.replace('_', '-')}"
    group.add_argument(name, metavar=metavar, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **flag)


class _Help(argparse.Action):
    """Print the help with the values of the recipe and of the fields given before ``--help``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        try:
            recipe = find(namespace.recipe)
        except ValueError as error:
            parser.error(str(error))
        with suppress(ValueError):  # `run` reports wrong fields
            recipe = recipe.with_(_changes(namespace))
        values = recipe.as_dict()
        for action in parser._actions:
            if action.dest in values and action.dest in (*RECIPE_FIELDS, *MODEL_FIELDS):
                value = values[action.dest]
                action.help += f" [{str(value).lower() if value is None or isinstance(value, bool) else value}]"
        parser.epilog = f"values in brackets: {recipe.name}\n\n{parser.epilog}"
        parser.print_help()
        parser.exit()


def _changes(arguments: argparse.Namespace) -> dict[str, str]:
    """The fields that were given, as texts."""
    return {name: value for name, value in vars(arguments).items() if name in RECIPE_FIELDS or name in MODEL_FIELDS}


def run(arguments: argparse.Namespace) -> int:
    changes = _changes(arguments)
    recipe = find(arguments.recipe).with_(changes)
    if "RANK" in os.environ:
        return _join(recipe)
    recipe.check_world(recipe.ranks)
    from startrail.launch.torchrun import use_gpus  # only now: mistakes are found without torch

    if use_gpus(recipe.device, recipe.ranks):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={recipe.ranks}"]
        same = [arguments.recipe, *(f"--{name}={value}" for name, value in changes.items())]
        os.execv(sys.executable, [*launcher, "-m", "startrail.cli", "train", *same])
    return _start(recipe)


def _start(recipe: Recipe) -> int:
    """Fork local ranks, forward signals to them, and print their errors."""
    import torch

    from startrail.launch.local import RankError, check_ranks, run_local

    check_ranks(recipe.ranks)
    from startrail.launch.heartbeat import Heartbeat, HeartbeatMonitor, SharedMemoryBoard
    from startrail.launch.signals import Stop
    from startrail.launch.torchrun import group_timeout
    from startrail.training import trainer  # noqa: F401, here once, rather than on every rank
    from startrail.training.checkpoints.reading import steps_in

    torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
    board = SharedMemoryBoard(recipe.ranks)
    monitor = HeartbeatMonitor(board, _wait_limit(recipe))

    def check_heartbeats() -> None:
        if text := monitor.check():
            monitor.limit.log(text)
        if monitor.failure:
            raise RankError(monitor.failure)

    def on_rank(rank: int) -> tuple[int, str]:
        return _run(recipe, torch.device("cpu"), stop, Heartbeat(board, rank))

    try:
        with Stop() as stop:
            timeout = group_timeout(monitor.limit.seconds)
            results = run_local(on_rank, recipe.ranks, deadline=None, timeout=timeout, on_poll=check_heartbeats)
    except RankError as error:
        print(f"startrail train: {error}", file=sys.stderr)
        if steps := steps_in(Path(recipe.out, "checkpoints")):
            print(f"startrail train: the same command continues from step {steps[-1]}", file=sys.stderr)
        return FAILED
    assert results[0] is not None
    return _end(results[0], stop)


def _wait_limit(recipe: Recipe) -> WaitLimit:
    from startrail.launch.heartbeat import WaitLimit

    return WaitLimit(60 * recipe.wait_minutes, "startrail train", "--wait-minutes")


def _join(recipe: Recipe) -> int:
    """Run as one of torchrun's ranks."""
    import torch.distributed as dist

    from startrail.launch.heartbeat import Heartbeat, HeartbeatMonitor, report_or_exit
    from startrail.launch.signals import Stop
    from startrail.launch.torchrun import JoinError, device_of_rank, join, store_host

    device, limit = device_of_rank(recipe.device), _wait_limit(recipe)
    with Stop() as stop:
        try:
            board = join(device, limit)
        except JoinError as error:
            return _end((FAILED, str(error)), stop)
        rank, monitor = dist.get_rank(), HeartbeatMonitor(board, limit)
        heartbeat = Heartbeat(board, rank, lambda: report_or_exit(monitor, rank), store_host(), limit)
        result = _run(recipe, device, stop, heartbeat)
        if rank:
            result = result[0], ""  # rank 0 prints the error
        if result[0] == FAILED:
            os._exit(_end(result, stop))  # peers may be gone, and a normal exit could wait for them forever
        dist.barrier()  # a peer may still be reading from this rank
        dist.destroy_process_group()
    return _end(result, stop)


def _run(recipe: Recipe, device: torch.device, stop: Stop, heartbeat: Heartbeat) -> tuple[int, str]:
    """Train on this rank. Returns the exit code, and the error to print if there is one."""
    import torch.distributed as dist

    from startrail.agreement.errors import is_peer_error
    from startrail.launch.signals import StoppedError
    from startrail.training.checkpoints.saving import TrainingError
    from startrail.training.display import make_display
    from startrail.training.trainer import Trainer

    display = make_display(dist.get_rank() == 0)
    try:
        finished = Trainer(recipe, device, display, stop, heartbeat).run()
    except (ValueError, TrainingError) as error:
        return FAILED if isinstance(error, TrainingError) else 2, str(error)
    except StoppedError as error:
        return STOPPED, str(error)
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        return FAILED, f"rank {dist.get_rank()} lost a peer: {str(error).strip().splitlines()[0]}"
    finally:
        display.close()
    return (0 if finished else STOPPED), ""


def _end(result: tuple[int, str], stop: Stop) -> int:
    code, text = result
    if text:
        print(f"startrail train: {text}", file=sys.stderr, flush=True)
    return 128 + signal.SIGINT if code == STOPPED and stop.interrupted else code

"""``startrail train`` and ``startrail export``: read the arguments, start or join the ranks, and end with one line if
something is wrong.

Started plainly, it forks local ranks with gloo, or where there are GPUs, hands over to torchrun. Under torchrun it is
one of the ranks. The exit code is 0 when all steps are done, 2 for a mistake, 1 for what went wrong on the way, and if
a signal stopped the run in order, 128 and its number, as in a shell: 143 for SIGTERM, 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import RECIPES, Recipe, find

if TYPE_CHECKING:
    import torch

    from startrail.launch.heartbeat import Heartbeat, WaitLimit
    from startrail.launch.signals import Stop

DEFAULT = "gpt-tiny"
STOPPED = 128 + signal.SIGTERM
FAILED = 1


def overrides(arguments: Sequence[str]) -> dict[str, str]:
    """``--field value`` and ``--field=value`` as a dict; a field without a value is true.

    >>> overrides(["--steps", "10", "--plan=1x8", "--packed"])
    {'steps': '10', 'plan': '1x8', 'packed': 'true'}
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            raise ValueError(f"cannot read {name!r}; fields are set as --field value")
        if not equals:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        found[name.removeprefix("--").replace("-", "_")] = value
    return found


def fields_text(arguments: Sequence[str] = ()) -> str:
    """What can be set, with the values of the recipe in ``arguments``: for ``startrail train [RECIPE] --help``."""
    recipe = find(arguments[0] if _names_recipe(arguments) else DEFAULT)
    with suppress(ValueError):  # a mistake in a field is told when it is to run
        recipe = _recipe_of([argument for argument in arguments if argument not in ("-h", "--help")])
    shown = [item for item in fields(Recipe) if "meaning" in item.metadata]
    lines = [f"  --{item.name:17s} {item.metadata['meaning']} [{_value(recipe, item.name)}]" for item in shown]
    for model, config in (("GPT", GPTConfig), ("DiT", DiTConfig)):
        own = isinstance(recipe.config, config)
        shape = (f"--{item.name}" + (f" {_value(recipe.config, item.name)}" if own else "") for item in fields(config))
        lines.append(f"  shape of a {model}: " + ", ".join(shape))
    names = ", ".join(RECIPES)
    return "\n".join(
        [
            f"recipes: {names} (default {DEFAULT}), or a .toml or .json file",
            f"fields, and in brackets what {recipe.name} has:",
            *lines,
        ]
    )


def _value(holder: object, name: str) -> str:
    value = getattr(holder, name)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _names_recipe(arguments: Sequence[str]) -> bool:
    return bool(arguments) and not arguments[0].startswith("-")


def _recipe_of(arguments: Sequence[str]) -> Recipe:
    """``[RECIPE] [--FIELD VALUE ...]``."""
    named = _names_recipe(arguments)
    return find(arguments[0] if named else DEFAULT).with_(overrides(arguments[named:]))


def train_command(arguments: Sequence[str]) -> int:
    """``[RECIPE] [--FIELD VALUE ...]``; the exit code."""
    recipe = _recipe_of(arguments)
    if "RANK" in os.environ:
        return _join(recipe)
    recipe.check_world(recipe.ranks)
    from startrail.launch.torchrun import use_gpus  # here, so that mistakes are found without torch

    if use_gpus(recipe.device, recipe.ranks):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={recipe.ranks}"]
        os.execv(sys.executable, [*launcher, "-m", "startrail.cli", "train", *arguments])
    return _start(recipe)


def _start(recipe: Recipe) -> int:
    """Fork local ranks, pass signals on to them, and report what they say."""
    import torch

    from startrail.launch.local import RankError, check_ranks, run_local

    check_ranks(recipe.ranks)
    from startrail.launch.heartbeat import Heartbeat, HeartbeatMonitor, SharedMemoryBoard
    from startrail.launch.signals import Stop
    from startrail.launch.torchrun import group_timeout
    from startrail.training import trainer  # noqa: F401, here once, rather than on every rank

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
        _say_what_is_left(recipe)
        return FAILED
    assert results[0] is not None
    return _end(results[0], stop)


def _say_what_is_left(recipe: Recipe) -> None:
    from startrail.training.checkpoints.saving import steps_in

    if steps := steps_in(Path(recipe.out, "checkpoints")):
        print(f"startrail train: the same command continues from step {steps[-1]}", file=sys.stderr)


def _wait_limit(recipe: Recipe) -> WaitLimit:
    from startrail.launch.heartbeat import WaitLimit

    return WaitLimit(60 * recipe.wait_minutes, "startrail train", "--wait-minutes")


def _join(recipe: Recipe) -> int:
    """Be the rank that torchrun says."""
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
            result = result[0], ""  # the first rank has said it
        if result[0] == FAILED:
            code = _end(result, stop)
            os._exit(code)  # peers may be gone: whatever waits for them on the way out would wait in vain
        dist.barrier()  # nobody leaves while a peer still reads from it
        dist.destroy_process_group()
    return _end(result, stop)


def _run(recipe: Recipe, device: torch.device, stop: Stop, heartbeat: Heartbeat) -> tuple[int, str]:
    """One rank's life: the exit code, and what to say if it is not 0."""
    import torch.distributed as dist

    from startrail.comm.errors import lost_peer
    from startrail.training.checkpoints.saving import TrainingError
    from startrail.training.display import make_display
    from startrail.training.trainer import Trainer

    display = make_display(dist.get_rank() == 0)
    try:
        finished = Trainer(recipe, device, display, stop, heartbeat).run()
    except ValueError as error:
        return 2, str(error)
    except TrainingError as error:
        return FAILED, str(error)
    except RuntimeError as error:
        if not lost_peer(error):
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


def export_command(source: str, target: str) -> int:
    from startrail.training.checkpoints.export import export

    print(export(Path(source), Path(target)))
    return 0

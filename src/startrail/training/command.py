"""``startrail train`` and ``startrail export``: read the arguments, start or join the ranks, and end with one line if
something is wrong.

Started plainly, it forks local ranks with gloo, or where there are GPUs, hands over to torchrun. Under torchrun it is
one of the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from startrail.training.model_configs import DiTConfig, GPTConfig
from startrail.training.recipes import RECIPES, Recipe, find

if TYPE_CHECKING:
    import torch

    from startrail.training.stopping import Stop

DEFAULT = "gpt-tiny"
FOREVER = 20 * 24 * 3600.0  # seconds; about as long as the system's poll can be told to wait


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


def fields_text() -> str:
    """What can be set, for ``startrail train --help``."""
    shown = [item for item in fields(Recipe) if "meaning" in item.metadata]
    lines = [f"  --{item.name:17s} {item.metadata['meaning']} ({item.default})" for item in shown]
    for model, config in (("GPT", GPTConfig), ("DiT", DiTConfig)):
        lines.append(f"  shape of a {model}: " + ", ".join(f"--{item.name}" for item in fields(config)))
    names = ", ".join(RECIPES)
    return "\n".join([f"recipes: {names} (default {DEFAULT}), or a .toml or .json file", "fields:", *lines])


def train_command(arguments: Sequence[str]) -> int:
    """``[RECIPE] [--FIELD VALUE ...]``; the exit code."""
    named = bool(arguments) and not arguments[0].startswith("-")
    recipe = find(arguments[0] if named else DEFAULT).with_(overrides(arguments[named:]))
    if "RANK" in os.environ:
        return _join(recipe)
    recipe.check_world(recipe.ranks)
    from startrail.training.joining import on_gpus  # here, so that mistakes are found without torch

    if on_gpus(recipe.device, recipe.ranks):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={recipe.ranks}"]
        os.execv(sys.executable, [*launcher, "-m", "startrail.cli", "train", *arguments])
    return _start(recipe)


def _start(recipe: Recipe) -> int:
    """Fork local ranks, pass signals on to them, and report what they say."""
    import torch

    from startrail.local import RankError, run_local
    from startrail.training import loop  # noqa: F401, here once, rather than on every rank
    from startrail.training.stopping import Stop

    torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
    try:
        with Stop() as stop:
            results = run_local(lambda rank: _run(recipe, torch.device("cpu"), stop), recipe.ranks, deadline=FOREVER)
    except RankError as error:
        print(f"startrail train: {error}", file=sys.stderr)
        print("startrail train: the same command continues from the last checkpoint, if there is one", file=sys.stderr)
        return 1
    return _end(results[0], stop)


def _join(recipe: Recipe) -> int:
    """Be the rank that torchrun says."""
    import torch.distributed as dist

    from startrail.training.joining import device_of_rank, join
    from startrail.training.stopping import Stop

    device = device_of_rank(recipe.device)
    with Stop() as stop:
        join(device)
        result = _run(recipe, device, stop)
        lead = dist.get_rank() == 0
        dist.barrier()  # nobody leaves while a peer still reads from it
        dist.destroy_process_group()
    return _end(result if lead else (result[0], ""), stop)


def _run(recipe: Recipe, device: torch.device, stop: Stop) -> tuple[int, str]:
    """One rank's life: the exit code, and what to say if it is not 0. What goes wrong here does so on all ranks."""
    import torch.distributed as dist

    from startrail.training.display import make_display
    from startrail.training.loop import Trainer
    from startrail.training.saving import TrainingError

    display = make_display(dist.get_rank() == 0)
    try:
        Trainer(recipe, device, display, stop).run()
    except ValueError as error:
        return 2, str(error)
    except TrainingError as error:
        return 1, str(error)
    finally:
        display.close()
    return 0, ""


def _end(result: tuple[int, str] | None, stop: Stop) -> int:
    assert result is not None
    code, text = result
    if text:
        print(f"startrail train: {text}", file=sys.stderr)
    return 130 if code == 0 and stop.interrupted else code


def export_command(source: str, target: str) -> int:
    from startrail.training.export import export

    print(export(Path(source), Path(target)))
    return 0

"""``startrail train``: start local ranks or join those of torchrun, and train a recipe on them.

Without torchrun, it forks local ranks with gloo, or starts torchrun on GPUs. Under torchrun it is one of the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any

from startrail.cli.options import Commands, add_command
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.recipes import RECIPES, Recipe, find

EXAMPLES = {
    "startrail train": "a small GPT on 8 local ranks, two minutes",
    "startrail train dit-tiny --plan 1x4 --ranks 4 --steps 50 --out runs/ring": "",
    "startrail train gpt-3b --help": "the fields of a recipe, with its values",
    "torchrun --nproc-per-node 8 -m startrail.cli train gpt-7b --data-parallel 2": "",
}
DEFAULT = "gpt-tiny"
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
        from startrail.training.start import join_job

        return join_job(recipe)
    recipe.check_world(recipe.ranks)
    from startrail.launch.torchrun import use_gpus  # only now: mistakes are found without torch

    if use_gpus(recipe.device, recipe.ranks):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={recipe.ranks}"]
        same = [arguments.recipe, *(f"--{name}={value}" for name, value in changes.items())]
        os.execv(sys.executable, [*launcher, "-m", "startrail.cli", "train", *same])
    from startrail.training.start import start_local

    return start_local(recipe)

"""What all commands share: the parser, one way to add a command, and checks that several of them need."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from startrail.planner.topology import Machine
from startrail.planner.units import parse_count
from startrail.schedule.plan import Plan

Commands = Any  # what argparse's add_subparsers returns: its class has no public name


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs, but not texts that have lines of their own, such as examples."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        base = argparse.RawDescriptionHelpFormatter if "\n" in text else argparse.HelpFormatter
        return base._fill_text(self, text, width, indent)


class UsageError(ValueError):
    """A mistake on the command line, as one line that starts with the command."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse prints its usage, and takes ``--kv_heads`` for ``--kv-heads``.

    Subcommands have the same class. ``arguments.parser`` is the parser of the subcommand that was chosen. One with a
    ``refusal`` takes no arguments and gives this reason.
    """

    def __init__(self, refusal: str = "", **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, **options})
        self.set_defaults(parser=self)
        self.refusal = refusal

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.refusal:
            raise UsageError(f"{self.prog}: {self.refusal}")
        return super().parse_known_args([with_hyphens(argument) for argument in args], namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Raise for arguments that the command does not have, and suggest the nearest option."""
        options = [option for action in self._actions for option in action.option_strings]
        name = unknown[0].partition("=")[0]
        near = [option for option in options if name.startswith("--") and option.startswith(name)]
        near = near or difflib.get_close_matches(name, options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def with_hyphens(argument: str) -> str:
    """An option's name with hyphens, however it was written; anything else unchanged.

    >>> [with_hyphens(argument) for argument in ("--kv_heads=2", "--out=my_run", "--kv-heads", "my_file")]
    ['--kv-heads=2', '--out=my_run', '--kv-heads', 'my_file']
    """
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def add_command(commands: Commands, name: str, examples: Mapping[str, str], note: str = "", **options: Any) -> Parser:
    """A subcommand whose help ends with its ``examples`` (command line -> comment) and a ``note``."""
    epilog = "\n\n".join(filter(None, (examples_text(examples), note)))
    command: Parser = commands.add_parser(name, epilog=epilog, **options)
    return command


def examples_text(examples: Mapping[str, str]) -> str:
    lines = [f"  {line:44s}  {comment}".rstrip() for line, comment in examples.items()]
    return "\n".join(["examples:", *lines])


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turns a missing package into a mistake that names the extra which installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed (pip install 'startrail[{extra}]')") from None


def world_size(plan: Plan, ranks: int | None) -> int:
    """``--ranks``, or by default the plan's own size. Raises ``ValueError`` if the plan does not fit."""
    if ranks is None:
        if plan.family.open_ended:
            raise ValueError(f"plan {plan} needs --ranks, a multiple of {plan.family.unit(plan) * plan.heads}")
        ranks = plan.size
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be at least 1")
    plan.check_world(ranks)
    return ranks


def make_machine(ranks: int, nodes: int) -> Machine:
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(f"--ranks {ranks} is not a multiple of --nodes {nodes}")
    return Machine(nodes, ranks // nodes)


def read_tokens(text: str) -> int:
    """For argparse: a number of tokens such as 65536 or 64k."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write_text(file: Path, text: str) -> None:
    """Write a file that the user asked for, and say so."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}") from None
    print(f"wrote {file} ({len(text.encode()) / 1e3:.0f} kB)")

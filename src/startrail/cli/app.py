"""``main``: reads the command line, runs the command, and turns mistakes into one line and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from startrail import __version__
from startrail.cli import (
    bench,
    check,
    doctor,
    export,
    lab,
    models,
    plan,
    recognise,
    serve,
    show,
    simulate,
    trace,
    train,
    verify,
)
from startrail.cli.options import Parser, UsageError, examples_text

COMMANDS = (show, serve, check, plan, simulate, doctor, verify, models, train, recognise, export, lab, bench, trace)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch does not need it here
    # What follows "--" belongs to the program that a command starts; argparse would take some of it.
    end = argv.index("--") if "--" in argv else len(argv)
    try:
        arguments, unknown = build_parser().parse_known_args(argv[:end])
        if unknown or (end < len(argv) and "program" not in arguments):
            arguments.parser.reject([*unknown, *argv[end:]])
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.program = argv[end + 1 :]
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(error if isinstance(error, UsageError) else f"{arguments.parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{arguments.parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()
        return 0


def build_parser() -> Parser:
    first_examples = dict(next(iter(command.EXAMPLES.items())) for command in COMMANDS)
    parser = Parser(
        prog="startrail",
        description="Exact attention over near-infinite contexts.",
        epilog=examples_text(first_examples),
    )
    parser.add_argument("--version", action="version", version=f"startrail {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser

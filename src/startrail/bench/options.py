"""Command lines of the benchmark's tools: help that starts with the module's own docstring and ends with an example."""

from __future__ import annotations

import argparse

from startrail.lab.launch import Parser

# ``startrail bench WORD``: each is a module here with a ``main(argv)``.
TOOLS = {
    "engine": "speed and memory of the engine on this machine",
    "train": "tokens/s and exposed communication in training",
    "memory": "peak memory of a rank in training against its estimate",
}


def tools_text() -> str:
    lines = [f"  startrail bench {word:8s} {text}" for word, text in TOOLS.items()]
    return "\n".join(["other benchmarks, each with a --help of its own:", *lines])


def tool_parser(word: str, docstring: str | None, example: str) -> Parser:
    """A parser for ``startrail bench WORD``; ``example`` is a line of options for it."""
    return Parser(
        prog=f"startrail bench {word}",
        description=docstring,
        epilog=f"example:\n  startrail bench {word} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def numbers(text: str) -> list[int]:
    """
    >>> numbers("2,4,8")
    [2, 4, 8]
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers with commas, for example 2,4,8") from None

"""What mkdocs cannot read from a file: command help, error messages, drawings, and the page that plays schedules."""

from __future__ import annotations

import argparse
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import transformers
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.messages import messages
from startrail.cli.app import COMMANDS, build_parser, main
from startrail.integrations import survey
from startrail.view.page import html_page, scene
from tests.integrations import test_latents, tiny

ROOT = Path(__file__).parent.parent

# Drawings that pages show, and the arguments of `startrail show` that make them.
DRAWINGS = {
    "ring.svg": ["1x8", "--nodes", "2"],
    "teams.svg": ["2x4", "--nodes", "2"],
    "heads.svg": ["u4/1x8", "--nodes", "4"],
    "nested.svg": ["2x2/u8", "--nodes", "4"],
    "ring-4x8.svg": ["1x32", "--nodes", "4"],
    "scan.svg": ["1x2/1x4", "--scan"],
    "cut.svg": ["1x2/1x4", "--scan", "--documents", "14000,9000,5000,2500,1500,768"],
    "cells.svg": ["1x2/1x4", "--nodes", "2", "--documents", "14000,9000,5000,2500,1500,768"],
    "latents.svg": ["1x4/1x8", "--latents", "deepseek-v3"],
    "shares.svg": ["1x4", "--shares", "1,1,0.5,1"],
}
WORKER_FROM_THE_WEB = "https://unpkg.com/iframe-worker/shim"
# What the page that plays schedules shows, as settings of its form: clusters and masks of several kinds.
DOCUMENTS = "44000,15000,14000,12000,11000,9000,7000,6000,5000,3000,2000,1500,1000,572"
EXAMPLES = [
    {"plan": "u4/1x8", "versus": "1x32"},
    {"plan": "1x4/1x8", "mask": "documents", "documents": DOCUMENTS},
    {
        "nodes": "2",
        "ranks": "4",
        "length": "32k",
        "mask": "window",
        "window": "1024",
        "plan": "1x2/1x4",
        "versus": "1x8",
    },
    {"nodes": "8", "cluster": "h100-8x8", "heads": "64", "length": "256k", "plan": "u8/1x8", "versus": "1x64"},
    {"nodes": "2", "cluster": "boxes-10gbe", "length": "64k", "plan": "u2/1x8", "versus": "1x16"},
    {"nodes": "1", "cluster": "b200", "length": "32k", "mask": "full", "plan": "u8", "versus": "1x8"},
    {"nodes": "4", "ranks": "4", "cluster": "lab", "length": "16k", "plan": "star2", "versus": "1x16"},
]


def on_files(files: Files, config: object) -> Files:
    def add(uri: str, content: str) -> None:
        files.append(File.generated(config, uri, content=content))

    add("reference/commands.md", command_reference())
    add("reference/errors.md", error_reference())
    add("reference/models.md", models_reference())
    add("hardware.md", (ROOT / "validation/hardware/results.md").read_text().replace("scatter.png", "hardware.png"))
    files.append(File.generated(config, "hardware.png", abs_src_path=str(ROOT / "validation/hardware/scatter.png")))
    files.append(File.generated(config, "scaling.png", abs_src_path=str(ROOT / "validation/scaling.png")))
    for name, arguments in DRAWINGS.items():
        add(f"drawings/{name}", shown(arguments, "--svg"))
    add("learn/page.html", html_page([scene(settings, all_roles=True) for settings in EXAMPLES]))
    return files


def on_page_markdown(markdown: str, page: object, config: object, files: Files) -> str:
    """Links to files of the repository that are no pages become code; figures' sources are not shown."""
    files_of_ours = "deploy|examples|src|tests|validation|README|CONTRIBUTING"
    markdown = re.sub(rf"\[([^\]]+)\]\(\.\./(?:\.\./)*(?:{files_of_ours})[^)]*\)", r"`\1`", markdown)
    markdown = re.sub(r"^# \{\{ (\S+) \}\}$", lambda found: source_code(found[1]), markdown, flags=re.MULTILINE)
    assert "{{" not in markdown, f"{page}: a file is not included"
    return markdown.replace("](../validation/scaling.png)", "](scaling.png)")


def source_code(path: str) -> str:
    """A file for a code block. Pages name it in a comment, which formatters leave alone: ``# {{ examples/first.py }}``.
    Of ring.py, only the functions."""
    text = (ROOT / path).read_text().rstrip()
    return text[text.index("def visible_by_hop") :] if path.endswith("/ring.py") else text


def on_post_page(output: str, page: Page, config: object) -> str:
    """Search without a network: our own stand-in for a worker instead of one from the web."""
    return output.replace(WORKER_FROM_THE_WEB, "../" * page.url.count("/") + "assets/search-worker.js")


def on_post_template(output: str, template_name: str, config: object) -> str:
    return output.replace(WORKER_FROM_THE_WEB, "assets/search-worker.js")


def shown(arguments: list[str], option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "out")
        with redirect_stdout(None):
            assert main(["show", *arguments, option, str(file)]) == 0
        return file.read_text()


def command_reference() -> str:
    """The help of every command, as the program prints it."""
    parser = build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Command line\n", "All commands take `--help`. Options can also be written with underscores.\n"]
    for name, command in subparsers.choices.items():
        parts.append(f"## startrail {name}\n\n```text\n{command.format_help().rstrip()}\n```\n")
    assert len(subparsers.choices) == len(COMMANDS)
    return "\n".join(parts)


def models_reference() -> str:
    """What `startrail models` finds, with the families whose every gradient is compared with one process."""
    tried = survey.families()
    compared = {found[1].model_type for of in (tiny.families(), tiny.hybrids()) for found in of.values()}
    compared |= set(test_latents.FAMILIES)
    rows = [(each.name, ", ".join(each.kinds), "yes" if each.name in compared else "") for each in tried if each.kinds]
    number = f"**{len(rows)} of {len(tried)}** families of causal language models run"
    parts = [
        "# Which models run\n",
        f"`startrail models`, with transformers {transformers.__version__}: {number}. Each is created from its default "
        "config, completed where that makes no model, and attached; the table says what its layers are. All run with "
        "packed rows, padding and several rows per batch. A family is *compared* if a test holds the loss and every "
        "gradient of a tiny model, on several ranks and with packed rows, against one process in float64. For any "
        "other, `startrail verify` makes that comparison with your model. Vision-language models and diffusers: "
        "[models from other libraries](../integrations.md).\n",
        "| family | layers | compared |\n| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "\n## Families that are rejected\n",
        "The error of `attach` says the same about your model.\n",
        "| family | reason |\n| --- | --- |",
        *(f"| {each.name} | {each.problem.replace('|', ' ')} |" for each in tried if each.problem),
    ]
    return "\n".join(parts) + "\n"


def error_reference() -> str:
    """Every message that startrail raises, by package, with the values left open."""
    parts = [
        "# Error messages\n",
        "Every message that startrail raises, with `...` for values. "
        "Most name their remedy. [Troubleshooting](../troubleshooting.md) explains the ones that have a story. "
        "Search for a few words of yours.\n",
    ]
    by_module: dict[str, list[str]] = {}
    for module, text in sorted(set(messages())):
        by_module.setdefault(module, []).append(text)
    for module, texts in by_module.items():
        parts.append(f"## {module}\n\n" + "\n".join(f"- `{text}`" for text in texts) + "\n")
    return "\n".join(parts)

"""``run.html``: a run as a page. Written next to ``metrics.jsonl`` every few minutes and at the end."""

from __future__ import annotations

import json
import shlex
import time
from html import escape
from pathlib import Path
from typing import Any

from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.training.display import size_text
from startrail.training.files import replace_file
from startrail.training.models.configs import GPTConfig
from startrail.training.recipes import RECIPES, Recipe
from startrail.view.plots import Bar, Series, bar_chart, figure, figures, image, line_chart, page_text
from startrail.view.svg import MAX_DRAWN, svg

PAGE_SECONDS = 180.0  # between two pages of a running job
NAME = "run.html"


class RunPage:
    """Only rank 0 writes. A page that cannot be written does not end the run: ``problem`` says why."""

    def __init__(self, recipe: Recipe, plan: Plan, world: int, data: str, expected: float) -> None:
        self.recipe, self.plan, self.world, self.data, self.expected = recipe, plan, world, data, expected
        self.folder = Path(recipe.out)
        self.problem = ""
        self._written_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._written_at > PAGE_SECONDS

    def write(self, peak: float, sample: str = "", state: str = "running") -> None:
        """``peak``: bytes that training has added on the fullest rank. ``sample``: text, or a line about images."""
        self._written_at = time.monotonic()
        try:
            steps = read_metrics(self.folder / "metrics.jsonl")
            text = run_page(self, steps, peak, sample, state)
            replace_file(self.folder / NAME, text.encode())
        except (OSError, ValueError) as error:
            self.problem = f"{self.folder / NAME} could not be written: {error}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One entry per step; of a step that occurs twice, the later line."""
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise ValueError(f"{path} has a line that is not the metrics of a step")
        steps[entry["step"]] = entry
    return [steps[step] for step in sorted(steps)]


def command_of(recipe: Recipe) -> str:
    """The command that repeats a run: a shipped recipe with what differs from it.

    >>> from dataclasses import replace
    >>> command_of(replace(RECIPES["gpt-tiny"], steps=7, out="runs/my run"))
    "startrail train gpt-tiny --steps 7 --out 'runs/my run'"
    """
    base = recipe.name if recipe.name in RECIPES else "gpt-tiny" if isinstance(recipe.config, GPTConfig) else "dit-tiny"
    usual, parts = RECIPES[base].as_dict(), ["startrail", "train", base]
    for name, value in recipe.as_dict().items():
        if name != "name" and usual.get(name) != value and value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts += [f"--{name.replace('_', '-')}", text]
    return shlex.join(parts)


def run_page(page: RunPage, steps: list[dict[str, Any]], peak: float, sample: str, state: str) -> str:
    recipe = page.recipe

    def series(name: str, key: str, scale: float = 1.0, dots: bool = False) -> Series:
        return Series(name, [(e["step"], scale * e[key]) for e in steps if e.get(key) is not None], dots)

    unit = "nats per token" if isinstance(recipe.config, GPTConfig) else "squared error of the velocity"
    held_out = series("held-out loss", "held_out", dots=True)
    last = steps[-1] if steps else {"step": 0}
    summary = (
        f"{state}, step {last['step']:,} of {recipe.steps:,}; {recipe.tokens:,} tokens per sequence, "
        f"{recipe.tokens_per_step:,} per step, on {page.world} ranks"
    )
    groups = f"{recipe.data_parallel} groups of " if recipe.data_parallel > 1 else ""
    ranks = page.world // recipe.data_parallel
    pictures = [
        figure(line_chart([series("training loss", "loss"), held_out], "step", f"loss ({unit})"), _loss_text(held_out)),
        figure(
            line_chart([series("tokens/s", "tokens_per_second")], "step", "tokens per second", True),
            "All ranks together.",
        ),
        figure(
            line_chart([series("exposed", "waiting", 100)], "step", "exposed communication (%)", True),
            "The share of each step in which the average rank waits for transfers of attention.",
        ),
    ]
    if peak or page.expected:
        bars = [
            Bar("peak, fullest rank", peak, size_text(peak), True),
            Bar("estimate", page.expected, size_text(page.expected)),
        ]
        pictures.append(
            figure(
                bar_chart(bars, "memory that training adds to a rank"),
                "Measured against the estimate made before the run.",
            )
        )
    if ranks <= MAX_DRAWN:
        drawing = image(svg(page.plan, Machine(1, ranks)).encode(), "svg+xml", f"plan {page.plan}")
        pictures.append(figure(drawing, f"The plan: {groups}{page.plan}."))
    return page_text(
        f"{recipe.name}: {recipe.out}",
        [
            f"<h1>{escape(recipe.name)}</h1>",
            f"<p>{escape(summary)}. Written {time.strftime('%Y-%m-%d %H:%M:%S %z')}.</p>",
            f"<p class='note'>Data: {escape(page.data)}</p>",
            f"<h2>Repeat it</h2><pre>{escape(command_of(recipe))}</pre>",
            "<h2>Loss</h2>",
            pictures[0],
            _sample(page.folder, sample),
            "<h2>Speed and memory</h2>",
            figures(pictures[1:]),
        ],
    )


def _loss_text(held_out: Series) -> str:
    if not held_out.points:
        return "No held-out loss yet."
    step, value = held_out.points[-1]
    return f"Diamonds: held-out loss, {value:.4g} at step {step:,}."


def _sample(folder: Path, sample: str) -> str:
    pictures = folder / "samples.png"
    if not sample:
        return "<h2>Samples</h2><p class='note'>They are generated when the run ends.</p>"
    shown = image(pictures.read_bytes(), "png", sample) if pictures.is_file() and "samples.png" in sample else ""
    text = f"<p>{escape(sample)}</p>" if shown else f"<pre>{escape(sample)}</pre>"
    return f"<h2>Samples</h2>{text}{shown}"

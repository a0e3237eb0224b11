"""What a run leaves behind: ``metrics.jsonl`` and TensorBoard events, a line per step; ``run.html``; a step's trace."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from startrail.agreement.gather import gather_texts
from startrail.parallel import SequenceParallel
from startrail.planner.topology import Machine
from startrail.training.display import Display, Metrics, Summary
from startrail.training.files import make_folder, open_regular, replace_file, size_text
from startrail.training.forecast import Forecast
from startrail.training.models.configs import GPTConfig
from startrail.training.recipes import RECIPES, Recipe
from startrail.view.plots import Bar, Series, bar_chart, figure, figures, image, line_chart, page_text
from startrail.view.svg import MAX_DRAWN, svg
from startrail.view.trace import EventRecorder, Record, chrome_trace

LONGEST_LINE_BYTES = 1 << 20
PAGE_SECONDS = 180.0  # between two pages of a running job


class RunRecord:
    """Shows a run, and on rank 0 writes it down from ``open`` on. A resumed run appends; if a step occurs twice, the
    later line counts. A page that cannot be written does not end the run. If a line cannot be written, ``problem`` is
    the reason, which the ranks then raise together."""

    def __init__(self, recipe: Recipe, display: Display, forecast: Forecast) -> None:
        self.display, self.problem = display, ""
        self._recipe, self._forecast, self._folder = recipe, forecast, Path(recipe.out)
        self._metrics: BinaryIO | None = None
        self._events: Any = None
        self._page_at = time.monotonic()

    def open(self, begin: int) -> None:
        """Raises ``ValueError`` if something cannot be written."""
        if self._recipe.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                raise ValueError("tensorboard true needs the package: pip install 'startrail[tensorboard]'") from None
            make_folder(self._folder / "tensorboard", own=1)
            self._events = SummaryWriter(str(self._folder / "tensorboard"), purge_step=begin + 1)
        path = self._folder / "metrics.jsonl"
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = self._metrics = open(descriptor, "r+b")  # noqa: SIM115, open until ``close``
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE_BYTES))
        complete = file.read().rfind(b"\n") + 1
        if start and not complete:
            raise ValueError(f"{path} does not end in lines of metrics: remove it")
        file.truncate(start + complete)  # without a line that a kill or a full disk cut off

    def step(self, metrics: Metrics, peak: float) -> None:
        """``peak``: bytes that training has added to this rank."""
        self.display.step(metrics)
        if self._metrics is None:
            return
        try:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
            self._metrics.write(json.dumps(finite).encode() + b"\n")  # JSON has no NaN
            self._metrics.flush()
        except OSError as error:
            self.problem = f"{self._folder / 'metrics.jsonl'} could not be written: {error.strerror}"
        if self._events is not None:
            for name, value in metrics.items():
                if isinstance(value, float):
                    self._events.add_scalar(name, value, metrics["step"])
        if time.monotonic() - self._page_at > PAGE_SECONDS:
            self._write_page(peak, "", "running")

    def finish(self, summary: Summary) -> None:
        if self._metrics is not None:
            self._write_page(summary.peak, summary.sample, "stopped" if summary.stopped else "finished")
        self.display.finish(summary)

    def close(self) -> None:
        """May be called twice."""
        if self._metrics is not None:
            with suppress(OSError):  # closing retries the write that failed; ``problem`` has the reason
                self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _write_page(self, peak: float, sample: str, state: str) -> None:
        self._page_at = time.monotonic()
        path = self._folder / "run.html"
        try:
            steps = read_metrics(self._folder / "metrics.jsonl")
            page = run_page(self._recipe, self._forecast, steps, peak, sample, state)
            replace_file(path, page.encode())
        except (OSError, ValueError, TypeError, ArithmeticError) as error:  # such as odd metrics of an earlier run
            self.display.note(f"{path} could not be written: {error}")

    @contextmanager
    def traced(self, sp: SequenceParallel, group: int, step: int) -> Iterator[None]:
        """Trace the attention of ``recipe.trace``'s step on the ranks of data-parallel group 0; all ranks enter."""
        if step != self._recipe.trace:
            yield
            return
        recorder = EventRecorder(sp.rank)
        dist.barrier()
        origin = time.perf_counter()  # clocks of several nodes differ
        sp.on_event(recorder)
        try:
            yield
        finally:
            sp.on_event(None)
        records = [record._replace(start=record.start - origin, end=record.end - origin) for record in recorder.records]
        texts = gather_texts(json.dumps([group, sp.rank, records]))
        if self._metrics is None:
            return
        of_ranks = sorted((json.loads(text) for text in texts), key=lambda of_rank: of_rank[:2])
        by_rank = [[Record(*entry) for entry in entries] for number, _, entries in of_ranks if number == 0]
        title = f"{sp.plan} on {sp.world} ranks: {self._recipe.name}, step {step}, measured"
        path = self._folder / "trace.json"
        try:
            replace_file(path, json.dumps(chrome_trace(by_rank, title)).encode())
            self.display.note(f"wrote {path}: open it in https://ui.perfetto.dev or compare it (startrail trace)")
        except OSError as error:
            self.display.note(f"{path} could not be written: {error.strerror}")


# --- the page


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


def run_page(
    recipe: Recipe, forecast: Forecast, steps: list[dict[str, Any]], peak: float, sample: str, state: str
) -> str:
    """``peak``: bytes that training has added on the fullest rank. ``sample``: text, or a line about images."""
    last = steps[-1]["step"] if steps else 0
    summary = (
        f"{state}, step {last:,} of {recipe.steps:,}; {recipe.tokens:,} tokens per sequence, "
        f"{recipe.tokens_per_step:,} per step, on {forecast.world} ranks"
    )
    loss, *others = _charts(recipe, steps)
    pictures = [*others, *_memory(peak, forecast.memory.total), *_plan(recipe, forecast)]
    return page_text(
        f"{recipe.name}: {recipe.out}",
        [
            f"<h1>{escape(recipe.name)}</h1>",
            f"<p>{escape(summary)}. Written {time.strftime('%Y-%m-%d %H:%M:%S %z')}.</p>",
            f"<p class='note'>Data: {escape(forecast.data)}</p>",
            f"<h2>Repeat it</h2><pre>{escape(command_of(recipe))}</pre>",
            "<h2>Loss</h2>",
            loss,
            _sample(Path(recipe.out), sample),
            "<h2>Speed and memory</h2>",
            figures(pictures),
        ],
    )


def _charts(recipe: Recipe, steps: list[dict[str, Any]]) -> list[str]:
    """Loss, tokens per second and exposed communication by step."""

    def series(name: str, key: str, scale: float = 1.0, dots: bool = False) -> Series:
        return Series(name, [(e["step"], scale * e[key]) for e in steps if e.get(key) is not None], dots)

    unit = "nats per token" if isinstance(recipe.config, GPTConfig) else "squared error of the velocity"
    held_out = series("held-out loss", "held_out", dots=True)
    loss = line_chart([series("training loss", "loss"), held_out], "step", f"loss ({unit})")
    speed = line_chart([series("tokens/s", "tokens_per_second")], "step", "tokens per second", True)
    exposed = line_chart([series("exposed", "waiting", 100)], "step", "exposed communication (%)", True)
    return [
        figure(loss, _loss_text(held_out)),
        figure(speed, "All ranks together."),
        figure(exposed, "The share of each step in which the average rank waits for transfers of attention."),
    ]


def _memory(peak: float, expected: float) -> list[str]:
    if not (peak or expected):
        return []
    bars = [
        Bar("peak, fullest rank", peak, size_text(peak), True),
        Bar("estimate", expected, size_text(expected)),
    ]
    chart = bar_chart(bars, "memory that training adds to a rank")
    return [figure(chart, "Measured against the estimate made before the run.")]


def _plan(recipe: Recipe, forecast: Forecast) -> list[str]:
    ranks = forecast.world // recipe.data_parallel
    if ranks > MAX_DRAWN:
        return []
    groups = f"{recipe.data_parallel} groups of " if recipe.data_parallel > 1 else ""
    drawing = image(svg(forecast.plan, Machine(1, ranks)).encode(), "svg+xml", f"plan {forecast.plan}")
    return [figure(drawing, f"The plan: {groups}{forecast.plan}.")]


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

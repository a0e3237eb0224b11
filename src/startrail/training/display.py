"""Progress of a run: a live bar in a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from startrail.training.files import size_text
from startrail.training.forecast import Forecast, Traffic
from startrail.training.recipes import Recipe

LINE_SECONDS = 5.0  # between two plain lines
Metrics = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """The result of a run. ``held_out`` has losses by step. ``peak`` is the memory that training added on the fullest
    rank, ``baseline`` the memory of the program without a model. ``waiting`` is a share of ``seconds``."""

    done: int
    steps: int
    tokens: int
    seconds: float
    waiting: float
    held_out: dict[int, float]
    peak: float
    baseline: float
    sample: str
    stopped: bool
    forecast: Forecast

    def lines(self) -> list[str]:
        lines = []
        if self.steps:
            lines.append(
                f"{self.steps} steps, {self.tokens:,} tokens in {self.seconds:.0f} s: "
                f"{self.tokens / self.seconds:,.0f} tokens/s, {self.waiting:.1%} of the time exposed in communication"
            )
        if self.held_out:
            (first, start), (last, end) = min(self.held_out.items()), max(self.held_out.items())
            losses = f"held-out loss {start:.3f} at step {first}, {end:.3f} at step {last}"
            lines.append(f"{losses}; {self.forecast.data}")
        sent, ring = sum(self.forecast.traffic.values()), sum(self.forecast.ring.values())
        if ring:
            difference = f"{abs(1 - sent / ring):.0%} {'less' if sent <= ring else 'more'}"
            lines.append(
                f"attention sends {size_text(sent)} per rank and step ({by_level(self.forecast.traffic)}), "
                f"{difference} than Ring Attention with {size_text(ring)}"
            )
        if self.peak:
            program = f", plus {size_text(self.baseline)} for the program itself" if self.baseline else ""
            estimate = size_text(self.forecast.memory.total)
            lines.append(f"peak memory per rank {size_text(self.peak)} (estimate {estimate}){program}")
        if self.sample:
            lines.append(self.sample)
        if self.stopped:
            saved = " and saved" if self.steps else ""
            lines.append(f"stopped after step {self.done}{saved}; the same command continues from there")
        return lines


def by_level(sent: Traffic) -> str:
    """
    >>> by_level({"level 0": 4096, "level 1": 1536, "level 2": 0})
    'level 0: 4.0 KiB, level 1: 1.5 KiB'
    """
    return ", ".join(f"{name}: {size_text(size)}" for name, size in sent.items() if size) or "nothing"


class Display:
    """Shows nothing: for all ranks except rank 0."""

    def start(self, recipe: Recipe, begin: int, forecast: Forecast) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, summary: Summary) -> None: ...

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


class LineDisplay(Display):
    """Plain lines, at most one every few seconds."""

    def start(self, recipe: Recipe, begin: int, forecast: Forecast) -> None:
        self._recipe, self._begin = recipe, begin
        self._started_at, self._shown_at = time.monotonic(), 0.0
        groups = f"{recipe.data_parallel} x " if recipe.data_parallel > 1 else ""
        self.note(
            f"{recipe.name}: {recipe.tokens:,} tokens per sequence, {recipe.tokens_per_step:,} per step, "
            f"on {forecast.world} ranks as {groups}{forecast.plan}"
        )
        self.note(f"data: {forecast.data}")
        self.note(f"estimated memory: {forecast.memory}")
        if begin >= recipe.steps:
            self.note(f"{recipe.out} already has all {recipe.steps} steps: raise --steps, or choose another --out")
        elif begin:
            self.note(f"continuing {recipe.out} after step {begin}")

    def step(self, metrics: Metrics) -> None:
        now, step, steps = time.monotonic(), metrics["step"], self._recipe.steps
        if now - self._shown_at < LINE_SECONDS and "held_out" not in metrics and step < steps:
            return
        self._shown_at = now
        left = (steps - step) * (now - self._started_at) / max(1, step - self._begin)
        self.note(f"step {step}/{steps} | {_status(metrics)} | {left:.0f} s left")

    def note(self, text: str) -> None:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)
        except OSError:  # the pipe is closed or the log's disk is full: the run continues
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the rest of this process

    def finish(self, summary: Summary) -> None:
        self.close()
        for line in summary.lines():
            self.note(line)


class LiveDisplay(LineDisplay):
    """A progress bar; notes scroll by above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._console = Console()
        # in a narrow terminal rich shrinks what has no minimum: first the bar, then the end of the status
        columns = (
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True, min_width=13)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
        )
        self._bar = Progress(*columns, console=self._console)

    def start(self, recipe: Recipe, begin: int, forecast: Forecast) -> None:
        super().start(recipe, begin, forecast)
        self._task = self._bar.add_task("", total=recipe.steps, completed=begin, status="")
        self._bar.start()

    def step(self, metrics: Metrics) -> None:
        self._bar.update(self._task, completed=metrics["step"], status=_status(metrics))
        if "held_out" in metrics:
            self.note(f"step {metrics['step']}: held-out loss {metrics['held_out']:.3f}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _status(metrics: Metrics) -> str:
    held_out = f"held-out {metrics['held_out']:.3f} | " if "held_out" in metrics else ""
    return (
        f"loss {metrics['loss']:.3f} | {held_out}{metrics['tokens_per_second']:,.0f} tokens/s | "
        f"exposed {metrics['waiting']:.1%} | sent {by_level(metrics['sent'])}"
    )


def make_display(lead: bool) -> Display:
    """For rank 0 a live bar if there is a terminal and rich, otherwise lines; nothing for other ranks."""
    if not lead:
        return Display()
    if sys.stdout.isatty():
        with suppress(ModuleNotFoundError):
            return LiveDisplay()
    return LineDisplay()

"""What a run tells a person: a live line in a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from startrail.training.metrics import Metrics
from startrail.training.recipes import Recipe

LINE_EVERY = 5.0  # seconds between plain lines


@dataclass(frozen=True)
class Summary:
    """``held_out`` losses by step; ``traffic``: bytes that the average rank's attention sends in a step, by level, for
    our plan and Ring Attention; ``peak`` bytes that training added on the fullest rank, ``expected`` before the start,
    and the program's own ``before`` it had a model."""

    done: int
    steps: int
    tokens: int
    seconds: float
    waiting: float
    held_out: dict[int, float]
    traffic: dict[str, dict[str, float]]
    peak: float
    before: float
    expected: float
    sample: str
    stopped: bool

    def lines(self, data: str) -> list[str]:
        found = []
        if self.steps:
            found.append(
                f"{self.steps} steps, {self.tokens:,} tokens in {self.seconds:.0f} s: "
                f"{self.tokens / self.seconds:,.0f} tokens/s, {self.waiting:.1%} of the time exposed in communication"
            )
        if self.held_out:
            (first, start), (last, end) = min(self.held_out.items()), max(self.held_out.items())
            found.append(f"held-out loss {start:.3f} at step {first}, {end:.3f} at step {last}; {data}")
        ours, ring = (sum(self.traffic[name].values()) for name in ("ours", "ring"))
        if ring:
            less = f"{abs(1 - ours / ring):.0%} {'saved' if ours <= ring else 'more'}"
            found.append(
                f"attention sends {size_text(ours)} a rank and step ({by_level(self.traffic['ours'])}); "
                f"Ring Attention would send {size_text(ring)}: {less}"
            )
        if self.peak:
            found.append(
                f"peak memory of a rank {size_text(self.peak)} (estimate {size_text(self.expected)})"
                + (f", beside {size_text(self.before)} of the program itself" if self.before else "")
            )
        if self.sample:
            found.append(self.sample)
        if self.stopped:
            saved = " and saved" if self.steps else ""
            found.append(f"stopped after step {self.done}{saved}; the same command continues from there")
        return found


def size_text(size: float) -> str:
    """In the unit that suits it.

    >>> size_text(3 * 2**20), size_text(1536)
    ('3.0 MiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def by_level(sent: dict[str, float]) -> str:
    """
    >>> by_level({"level 0": 4096, "level 1": 1536, "level 2": 0})
    'level 0: 4.0 KiB, level 1: 1.5 KiB'
    """
    return ", ".join(f"{name}: {size_text(size)}" for name, size in sent.items() if size) or "nothing"


class Display:
    """Says nothing: for all ranks but the first."""

    def start(self, recipe: Recipe, begin: int, data: str, plan: str, world: int, expected: object) -> None:
        pass

    def step(self, metrics: Metrics) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""


class Lines(Display):
    """Plain lines, at most one every few seconds."""

    def start(self, recipe: Recipe, begin: int, data: str, plan: str, world: int, expected: object) -> None:
        self._recipe, self._data = recipe, data
        self._begin, self._first, self._last = begin, time.monotonic(), 0.0
        split = f"{recipe.data_parallel} x " if recipe.data_parallel > 1 else ""
        self.note(
            f"{recipe.name}: {recipe.tokens:,} tokens a sequence, {recipe.tokens_per_step:,} a step, "
            f"over {world} ranks as {split}{plan}"
        )
        self.note(f"data: {data}")
        self.note(f"memory, estimated: {expected}")
        if begin >= recipe.steps:
            self.note(f"{recipe.out} has all {recipe.steps} steps already; more with --steps, anew with --out")
        elif begin:
            self.note(f"continuing {recipe.out} after step {begin}")

    def step(self, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_EVERY or "held_out" in metrics or metrics["step"] == self._recipe.steps:
            self._last = now
            self.note(self._line(metrics))

    def _line(self, metrics: Metrics) -> str:
        step = metrics["step"]
        left = (self._recipe.steps - step) * (time.monotonic() - self._first) / max(1, step - self._begin)
        held_out = f" | held-out {metrics['held_out']:.3f}" if "held_out" in metrics else ""
        return (
            f"step {step}/{self._recipe.steps} | loss {metrics['loss']:.3f}{held_out} | "
            f"{metrics['tokens_per_second']:,.0f} tokens/s | exposed {metrics['waiting']:.1%} | "
            f"sent {by_level(metrics['sent'])} | {left:.0f} s left"
        )

    def note(self, text: str) -> None:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)
        except OSError:  # nobody listens any more, or the log's disk is full: the run goes on
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the rest of this process

    def finish(self, summary: Summary) -> None:
        self.close()
        for line in summary.lines(self._data):
            self.note(line)


class Live(Lines):
    """A bar that stays in its place; what is noted scrolls by above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
        )

    def start(self, recipe: Recipe, begin: int, data: str, plan: str, world: int, expected: object) -> None:
        super().start(recipe, begin, data, plan, world, expected)
        self._task = self._bar.add_task("", total=recipe.steps, completed=begin, status="")
        self._bar.start()

    def step(self, metrics: Metrics) -> None:
        status = (
            f"loss {metrics['loss']:.3f} | {metrics['tokens_per_second']:,.0f} tokens/s | "
            f"exposed {metrics['waiting']:.1%} | sent {by_level(metrics['sent'])}"
        )
        self._bar.update(self._task, completed=metrics["step"], status=status)
        if "held_out" in metrics:
            self.note(f"step {metrics['step']}: held-out loss {metrics['held_out']:.3f}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def make_display(lead: bool) -> Display:
    """For the first rank a live bar, if there is a terminal and rich; the others say nothing."""
    if not lead:
        return Display()
    if sys.stdout.isatty():
        try:
            return Live()
        except ModuleNotFoundError:
            pass
    return Lines()

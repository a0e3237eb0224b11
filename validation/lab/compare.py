"""Fits the lab's figures, predicts everything else and reports the errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from startrail.planner.cluster import find_cluster
from startrail.planner.rows import TIE_SHARE
from validation.lab.model import Case, predicted

FITTED = ("post", "handle")  # the others are measured by themselves, see lab.toml
FACTORS = (0.7, 0.85, 1.0, 1.2, 1.4)
LEAST, MEDIAN, WORST, CHOSEN, WITHIN = 16, 0.10, 0.25, 0.90, 0.05  # targets


@dataclass(frozen=True)
class Compared:
    case: Case
    predicted: float
    sent: tuple[float, ...] = (0.0,)  # bytes per rank, outermost level first

    @classmethod
    def of(cls, case: Case, figures: dict[str, float]) -> Compared:
        prediction = predicted(case, figures)
        return cls(case, prediction.seconds, prediction.sent)

    @property
    def off(self) -> float:
        return self.predicted / self.case.seconds - 1


def fit(cases: Sequence[Case], progress: Callable[[str], None]) -> dict[str, float]:
    """For one figure after the other, twice, take the factor on ``lab.toml``'s value with the least mean error. Factors
    are small, so that a disturbed calibration does little harm."""
    device = find_cluster("lab").device
    stated = {name: float(getattr(device, name)) for name in FITTED}
    figures = dict(stated)
    for _ in range(2):
        for name in stated:
            progress(f"fitting {name}")
            options = [figures | {name: stated[name] * factor} for factor in FACTORS]
            figures = min(options, key=lambda option: statistics.mean(abs(_off(case, option)) for case in cases))
    return figures


def _off(case: Case, figures: dict[str, float]) -> float:
    return Compared.of(case, figures).off


@dataclass(frozen=True)
class Verdict:
    """``missing``: trials to predict that have no measurement. ``least``: configurations asked for; a quick run judges
    what it measured."""

    rows: list[Compared]
    missing: tuple[str, ...] = ()
    least: int = LEAST

    @property
    def median(self) -> float:
        return statistics.median(abs(row.off) for row in self.rows)

    @property
    def sparse(self) -> list[Compared]:
        """Those with a window or documents."""
        return [row for row in self.rows if row.case.work.call.is_sparse]

    @property
    def sparse_median(self) -> float:
        return statistics.median(abs(row.off) for row in self.sparse) if self.sparse else 0.0

    @property
    def worst(self) -> Compared:
        return max(self.rows, key=lambda row: abs(row.off))

    @property
    def bias(self) -> float:
        return statistics.mean(row.off for row in self.rows)

    @property
    def choices(self) -> list[tuple[Case, float]]:
        """For each trial, the plan that the planner chose from all plans, or would choose from the measured ones, and
        how much slower it is than the best measured one."""
        chosen = []
        for trial in dict.fromkeys(row.case.trial for row in self.rows):
            rows = [row for row in self.rows if row.case.trial == trial]
            if len(rows) > 1:
                fastest = min(row.predicted for row in rows)
                tied = [row for row in rows if row.predicted <= fastest * (1 + TIE_SHARE)]
                own = [row for row in rows if row.case.chosen]
                pick = own[0] if own else min(tied, key=lambda row: row.sent)  # the planner's own rule
                chosen.append((pick.case, pick.case.seconds / min(row.case.seconds for row in rows) - 1))
        return chosen

    @property
    def good_choices(self) -> float:
        return sum(slower <= WITHIN for _, slower in self.choices) / len(self.choices)

    @property
    def met(self) -> bool:
        near = max(self.median, self.sparse_median) <= MEDIAN and abs(self.worst.off) <= WORST
        return near and self.good_choices >= CHOSEN and len(self.rows) >= self.least and not self.missing

    def text(self, about: str, figures: dict[str, float]) -> str:
        fitted = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        lines = [
            "# Predictions against the lab",
            "",
            about,
            "",
            f"Fitted on other trials: {fitted or 'nothing'} (seconds).",
            "",
            f"- {len(self.rows)} configurations (target: at least {self.least}), bias {self.bias:+.1%}",
            f"- median error {self.median:.1%} (target: at most {MEDIAN:.0%})",
            f"- with a window or documents: {len(self.sparse)} configurations, median error {self.sparse_median:.1%} "
            f"(target: at most {MEDIAN:.0%})",
            f"- worst error {self.worst.off:+.1%} (target: at most {WORST:.0%}): {self.worst.case}",
            f"- the chosen plan is within {WITHIN:.0%} of the best measured one in {self.good_choices:.0%} of "
            f"{len(self.choices)} trials (target: at least {CHOSEN:.0%})",
            *(f"- not measured: {text}" for text in self.missing),
            f"- {'all targets met' if self.met else 'NOT all targets met'}",
            "",
            "| machine | work | links | plan | measured | predicted | off |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in self.rows:
            case = row.case
            links = f"{max(case.rates) / 1e6:.0f} Mbit/s{', node 0 half' if case.slow_node else ''}"
            plan = f"`{case.plan}`{' across' if case.across else ''}"
            work = f"{case.work.name} {case.work.mask}, {case.work.batch} x {case.work.length}"
            times = f"{case.seconds:.3f} s ({case.repeats}) | {row.predicted:.3f} s | {row.off:+.1%}"
            lines.append(f"| {case.machine} | {work} | {links} | {plan} | {times} |")
        lines += ["", "The chosen plan of each trial, and how much slower it is than the best measured one:", ""]
        lines += [f"- {case}: {slower:+.1%}" for case, slower in self.choices]
        return "\n".join(lines) + "\n"


def scatter(rows: Sequence[Compared], path: Path) -> bool:
    """Plot predicted against measured seconds; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for machine in dict.fromkeys(str(row.case.machine) for row in rows):
        of_machine = [row for row in rows if str(row.case.machine) == machine]
        axes.scatter([r.case.seconds for r in of_machine], [r.predicted for r in of_machine], s=18, label=machine)
    ends = [0.8 * min(row.case.seconds for row in rows), 1.25 * max(row.case.seconds for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="black", alpha=0.1, label="10 %")
    axes.set(xscale="log", yscale="log", xlabel="measured, seconds", ylabel="predicted, seconds", xlim=ends, ylim=ends)
    axes.legend(title="nodes x ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True

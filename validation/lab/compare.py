"""Fitting the lab's own figures, predicting everything else, and how far off that is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from startrail.planner.cluster import find_cluster
from startrail.planner.search import TIE_SHARE
from validation.lab.model import SPEED, Case, predicted

FITTED = ("call", "post", "handle", "copy")  # and SPEED
FACTORS = (0.7, 0.85, 1.0, 1.2, 1.4)
LEAST, MEDIAN, WORST, CHOSEN, WITHIN = 16, 0.10, 0.25, 0.90, 0.05  # what must be met


@dataclass(frozen=True)
class Compared:
    case: Case
    predicted: float
    sent: tuple[float, ...] = (0.0,)  # bytes a rank, outermost level first

    @classmethod
    def of(cls, case: Case, figures: dict[str, float]) -> Compared:
        found = predicted(case, figures)
        return cls(case, found.seconds, found.sent)

    @property
    def off(self) -> float:
        return self.predicted / self.case.seconds - 1


def fit(cases: Sequence[Case], progress: Callable[[str], None]) -> dict[str, float]:
    """One figure after the other, twice: the factor on ``lab.toml``'s with the least mean error. No factor is large, so
    that a disturbed calibration does not spoil everything else."""
    device = find_cluster("lab").device
    stated = {name: float(getattr(device, name)) for name in FITTED} | {SPEED: 1.0}
    figures = dict(stated)
    for _ in range(2):
        for name in stated:
            progress(f"fitting {name}")
            tried = [figures | {name: stated[name] * factor} for factor in FACTORS]
            figures = min(tried, key=lambda some: statistics.mean(abs(_off(case, some)) for case in cases))
    return figures


def _off(case: Case, figures: dict[str, float]) -> float:
    return Compared.of(case, figures).off


@dataclass(frozen=True)
class Verdict:
    """``missing``: trials that were to be predicted and were not measured."""

    rows: list[Compared]
    missing: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(abs(row.off) for row in self.rows)

    @property
    def worst(self) -> Compared:
        return max(self.rows, key=lambda row: abs(row.off))

    @property
    def bias(self) -> float:
        return statistics.mean(row.off for row in self.rows)

    @property
    def choices(self) -> list[tuple[Case, float]]:
        """By trial: the plan that the planner chose for it out of all plans, or else would choose of those measured,
        and how much slower than the best measured one it is."""
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
        near = self.median <= MEDIAN and abs(self.worst.off) <= WORST
        return near and self.good_choices >= CHOSEN and len(self.rows) >= LEAST and not self.missing

    def text(self, about: str, figures: dict[str, float]) -> str:
        fitted = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        lines = [
            "# Predictions against the lab",
            "",
            about,
            "",
            f"Fitted on other trials: {fitted or 'nothing'} (seconds; bytes/s; a factor on lab.toml's kernels).",
            "",
            f"- {len(self.rows)} configurations (at least {LEAST}): median error {self.median:.1%} (at most "
            f"{MEDIAN:.0%}), worst {self.worst.off:+.1%} (at most {WORST:.0%}; {self.worst.case}), bias "
            f"{self.bias:+.1%}",
            f"- the plan that would be chosen is within {WITHIN:.0%} of the best measured one in "
            f"{self.good_choices:.0%} of {len(self.choices)} trials (at least {CHOSEN:.0%})",
            *(f"- not measured: {text}" for text in self.missing),
            f"- {'all met' if self.met else 'NOT all met'}",
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
        lines += ["", "What would be chosen, and how much slower than the best measured it is:", ""]
        lines += [f"- {case}: {slower:+.1%}" for case, slower in self.choices]
        return "\n".join(lines) + "\n"


def scatter(rows: Sequence[Compared], path: Path) -> bool:
    """Predicted against measured; False without matplotlib."""
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

"""The planner's answer as a picture: the time of a step by part, and tokens/s by length. It needs matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from startrail.planner.candidates import RING
from startrail.planner.rows import HEADS_OUTERMOST, Row, SearchResult
from startrail.planner.sparse.advice import price_row
from startrail.planner.step import Training

SHOWN = 3  # of the best plans
LENGTHS = (1 / 8, 1 / 4, 1 / 2, 1, 2)  # of the asked one


def parts_of(row: Row) -> dict[str, float]:
    """Seconds of a step: attention, the other layers, loss and optimizer, and what waits for transfers."""
    training = row.training
    layers = training.model.layers * training.run.accumulate * sum(training.dense_seconds)
    waiting = max(0.0, row.seconds - row.step.compute)
    attention = max(0.0, row.step.compute - layers - training.outer_seconds)
    return {
        "attention": attention,
        "other layers": layers,
        "loss, optimizer": training.outer_seconds,
        "waiting": waiting,
    }


def shown_rows(result: SearchResult) -> list[Row]:
    """The best plans, the ring and the paper's schedules, also those that do not fit."""
    known = [
        row
        for row in result.rows[SHOWN:]
        if row.role.startswith((RING, HEADS_OUTERMOST)) or (row.role and row.plan.family.is_papers)
    ]
    return [*result.rows[:SHOWN], *known, *result.too_large]


def plot_answer(result: SearchResult, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = shown_rows(result)
    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    names = [row.name + (f"\n({_remark(row, result)})" if row.role else "") for row in rows]
    left = [0.0] * len(rows)
    for part in parts_of(rows[0]):
        widths = [parts_of(row)[part] for row in rows]
        bars.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="seconds per step")
    bars.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.15))
    for row in (rows[0], *rows[SHOWN:]):
        points = [(length, speed) for length in LENGTHS if (speed := _tokens_per_second(row, length))]
        xs = [length * result.run.length for length, _ in points]
        lines.plot(xs, [speed for _, speed in points], marker="o", label=row.name)
    lines.set(xscale="log", xlabel="tokens per sequence", ylabel="tokens/s", ylim=(0, None))
    ticks = [round(length * result.run.length) for length in LENGTHS]
    lines.set_xticks(ticks, [f"{tick / 1024:,.0f}k" for tick in ticks])
    lines.minorticks_off()
    lines.legend(fontsize=8)
    figure.suptitle(f"{result.model.name} on {result.cluster}, as predicted")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _remark(row: Row, result: SearchResult) -> str:
    return f"{row.role}, does not fit" if row in result.too_large else row.role


def _tokens_per_second(row: Row, share: float) -> float | None:
    """At another length; None where the plan does not fit."""
    run = replace(row.training.run, length=max(2 * row.training.cluster.world, round(row.training.run.length * share)))
    training = Training(row.training.cluster, row.training.model, run, row.training.data_parallel)
    memory = training.memory(row.plan)
    if memory.total > memory.limit:
        return None
    return price_row(replace(row, training=training)).tokens_per_second

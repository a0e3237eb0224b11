"""The report's plots, from the recorded data. Needs matplotlib; without it a report has tables only."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from startrail.bench.cases import BOUND_BY_LINKS, GROWING, LONG, MHA, Workload, heads_first, plan_contenders
from startrail.bench.report.findings import Json, headline_machine, lines_of, pressure_text, title
from startrail.bench.sizes import link_bytes, ring_bytes
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan

COLOURS = {
    "ring": "#8a8f98",
    "peer": "#c98b8b",
    "double ring": "#b08968",
    "usp": "#e0a458",
    "ulysses": "#7aa874",
    "star": "#9d79bc",
    "nested": "#2a6fbb",
    "nested keep": "#0b3c6f",
    "auto": "#c0392b",
    "heads": "#c0392b",
}
BEST = "heads outermost"  # the best of several such plans
CURVES = ("ring, textbook", "USP", "nested", "nested, keep")


def pictures(report: Json) -> dict[str, tuple[bytes, str]]:
    """PNG and caption by file name; empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("Agg")
    machine = headline_machine(report["trials"])
    made = {}
    for trial in report["trials"]:
        work = Workload(**trial["work"])
        bound = trial["machine"] == machine and (trial["pressure"] or 0) >= BOUND_BY_LINKS
        if not bound or trial["slow_node"] or work.model:
            continue
        slug = work.name.replace(" ", "-").replace(":", "-").lower()
        name = f"throughput-{slug}-{work.mask}-{trial['pressure']:g}x.png"
        caption = f"{title(trial)}: throughput relative to the faster flat ring, and the bound of its bytes"
        made[name] = (_throughput(trial), caption)
    if len({trial["pressure"] for trial in report["trials"]}) > 1:
        made["rates.png"] = (_rates(report, machine), "Throughput relative to ring, from slow links to fast ones (MHA)")
    made["growth.png"] = (_growth(report), "Bytes over a node's link: lines by closed form, dots measured (MHA)")
    return made


def _figure(width: float, height: float, columns: int = 1) -> Any:
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _throughput(trial: Json) -> bytes:
    timed = sorted(lines_of(trial), key=lambda line: line.seconds, reverse=True)
    ratios = {line: line.against_ring for line in timed if line.against_ring is not None and line.role != "compute"}
    lines = list(ratios)
    figure, axes = _figure(7, 0.8 + 0.34 * len(lines))
    labels = [f"{line.name} ({line.plan})" if line.plan and line.plan not in line.name else line.name for line in lines]
    colours = [COLOURS.get(line.role, "#cccccc") for line in lines]
    below = [ratio * (1 - line.seconds / line.spread[1]) for line, ratio in ratios.items()]
    above = [ratio * (line.seconds / line.spread[0] - 1) for line, ratio in ratios.items()]
    axes.barh(labels, list(ratios.values()), color=colours, xerr=[below, above], error_kw={"lw": 1, "alpha": 0.6})
    limits = [ratio / line.share_of_bound for line, ratio in ratios.items()]
    axes.scatter(limits, labels, marker="|", s=160, color="black", label="its bound", zorder=3)
    axes.axvline(1.0, color="black", lw=0.7, ls=":")
    axes.set_xlabel("throughput relative to ring", fontsize=9)
    axes.tick_params(labelsize=8)
    figure.legend(frameon=False, loc="upper right", fontsize=8)
    return _png(figure)


def _rates(report: Json, machine: str) -> bytes:
    figure, both = _figure(8, 3.4, columns=2)
    for axes, causal in zip(both, (True, False), strict=True):
        trials = [
            trial
            for trial in report["trials"]
            if trial["machine"] == machine
            and Workload(**trial["work"]).name == "MHA"
            and trial["work"]["causal"] == causal
            and trial["work"]["length"] != LONG.length
            and not trial["slow_node"]
        ]
        trials.sort(key=lambda trial: -(trial["pressure"] or 0))
        series: dict[tuple[str, str], dict[int, float]] = {}
        for place, trial in enumerate(trials):
            for line in lines_of(trial):
                if line.role in COLOURS and line.against_ring is not None and line.way == "plan":
                    points = series.setdefault((BEST if line.role == "heads" else line.name, line.role), {})
                    points[place] = max(points.get(place, 0.0), line.against_ring)
        for (name, role), points in series.items():
            if len(points) == 1:  # a single point is no line; it is in the tables
                continue
            dashed = "--" if name == "star4" else "-"  # star2 and star4 share a colour
            axes.plot(list(points), list(points.values()), dashed, marker="o", ms=3, color=COLOURS[role], label=name)
        rates = [pressure_text(trial["pressure"]).replace(" its ", "\n") for trial in trials]
        axes.set_xticks(range(len(trials)), rates)
        axes.tick_params(axis="x", labelsize=7)
        axes.axhline(1.0, color="black", lw=0.7, ls=":")
        axes.set_title("causal" if causal else "full", fontsize=9)
    both[0].set_ylabel("throughput relative to ring")
    handles, labels = both[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    return _png(figure)


def _growth(report: Json) -> bytes:
    """Growth of bytes with the nodes, at 8 ranks each, and with the sequence, on 4 nodes of 4."""
    figure, (by_nodes, by_length) = _figure(8, 3.4, columns=2)
    nodes = (2, 4, 8, 16)
    machines = [Machine(count, 8) for count in nodes]
    for label, role, amounts in _curves(machines, [replace(MHA, length=16_384)] * len(machines)):
        by_nodes.plot(nodes, amounts, marker=".", color=COLOURS[role], label=label)
    by_nodes.set_xlabel("nodes of 8 ranks, 16,384 tokens")
    by_nodes.set_ylabel("MB over a node's link", fontsize=9)
    lengths = [work.length for work in GROWING]
    for label, role, amounts in _curves([Machine(4, 4)] * len(lengths), GROWING):
        by_length.plot(lengths, amounts, color=COLOURS[role], label=label)
    for trial in report["trials"]:
        work = Workload(**trial["work"])
        if trial["machine"] == "4x4" and work in GROWING and trial["pressure"] == BOUND_BY_LINKS:
            for line in lines_of(trial):
                if (line.name in CURVES or line.role == "heads") and line.bytes_measured:
                    by_length.scatter([work.length], [line.bytes_measured / 1e6], color=COLOURS[line.role], s=14)
    by_length.set_xlabel(f"tokens of {GROWING[0].batch} sequences, 4 nodes of 4 ranks")
    by_length.legend(frameon=False, fontsize=7)
    by_nodes.set_xscale("log", base=2)
    for axes, ticks in ((by_nodes, nodes), (by_length, lengths)):
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_ylim(bottom=0)
    return _png(figure)


def _curves(machines: Sequence[Machine], works: Sequence[Workload]) -> list[tuple[str, str, list[float]]]:
    """MB over the busiest link, by schedule, for pairs of machine and work."""
    pairs = list(zip(machines, works, strict=True))

    def plans(machine: Machine, work: Workload) -> dict[tuple[str, str], str]:
        shape = machine.nodes, machine.ranks_per_node
        named = {(c.name, c.role): c.plan for c in plan_contenders(*shape) if c.name in CURVES}
        return {**named, (BEST, "heads"): heads_first(*shape, work.q_heads)}

    curves = {("ring, textbook", "ring"): [ring_bytes(machine, work) / 1e6 for machine, work in pairs]}
    for machine, work in pairs:
        for name, text in plans(machine, work).items():
            busiest = max(max(link) for link in link_bytes(Plan.parse(text), machine, work))
            curves.setdefault(name, []).append(busiest / 1e6)
    return [(*name, amounts) for name, amounts in curves.items()]

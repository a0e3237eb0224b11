"""The report's plots, from the recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from startrail.bench.yardstick import Json, Workload
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.view.plots import Bar, Series, bar_chart, figure, line_chart
from workshop.report.findings import headline_machine, lines_of, title
from workshop.trials.cases import BOUND_BY_LINKS, GROWING, LONG, MHA, OURS, heads_first, plan_contenders
from workshop.trials.links import link_bytes, ring_bytes

SHOWN = ("ring", "double ring", "usp", "star", "nested", "nested keep", "auto", "heads")  # roles in plots over rates
BEST = "heads outermost"  # the best of several such plans
CURVES = ("ring, textbook", "USP", "nested", "nested, keep")


def pictures(report: Json) -> list[str]:
    """Figures with captions; the headline first."""
    trials, machine = report["trials"], headline_machine(report["trials"])
    made = []
    for trial in trials:
        work = Workload(**trial["work"])
        bound = trial["machine"] == machine and (trial["pressure"] or 0) >= BOUND_BY_LINKS
        if bound and not trial["slow_node"] and not work.model:
            made.append(throughput(trial))
    if len({trial["pressure"] for trial in trials}) > 1:
        made += [_rates(report, machine, causal) for causal in (True, False)]
    return [*made, *_growth(report)]


def throughput(trial: Json) -> str:
    """Every contender of a trial against the faster flat ring, with its spread and its bound."""
    bars = []
    for line in sorted(lines_of(trial), key=lambda line: line.seconds):
        if line.against_ring is None or line.role == "compute":
            continue
        name = f"{line.name} ({line.plan})" if line.plan and line.plan not in line.name else line.name
        ratio = line.against_ring
        spread = ratio * line.seconds / line.spread[1], ratio * line.seconds / line.spread[0]
        bars.append(Bar(name, ratio, f"{ratio:.2f}x", line.role in OURS, *spread, ratio / line.share_of_bound))
    text = "throughput relative to the faster flat ring (1 = as fast)"
    return figure(
        bar_chart(bars, text, "its bound"),
        f"{title(trial)}. Filled: our plans. Thin line: fastest and slowest repeat.",
    )


def _rates(report: Json, machine: str, causal: bool) -> str:
    trials = [
        trial
        for trial in report["trials"]
        if trial["machine"] == machine
        and Workload(**trial["work"]).name == "MHA"
        and trial["work"]["causal"] == causal
        and trial["work"]["length"] != LONG.length
        and not trial["slow_node"]
        and trial["pressure"]
    ]
    trials.sort(key=lambda trial: trial["pressure"])
    found: dict[str, dict[float, float]] = {}
    for trial in trials:
        for line in lines_of(trial):
            if line.role in SHOWN and line.against_ring is not None and line.way == "plan":
                points = found.setdefault(BEST if line.role == "heads" else line.name, {})
                points[trial["pressure"]] = max(points.get(trial["pressure"], 0.0), line.against_ring)
    series = [Series(name, list(points.items())) for name, points in found.items() if len(points) > 1]
    mask = "causal" if causal else "full"
    label = "how many times its compute ring communicates, as the links were set"
    chart = line_chart(series, label, "throughput relative to ring", True)
    return figure(chart, f"From fast links (left) to slow ones: {machine}, MHA, {mask}.") if series else ""


def _growth(report: Json) -> list[str]:
    """Growth of bytes with the nodes, at 8 ranks each, and with the sequence, on 4 nodes of 4."""
    nodes = (2, 4, 8, 16)
    machines = [Machine(count, 8) for count in nodes]
    curves = _curves(machines, [replace(MHA, length=16_384)] * len(machines))
    by_nodes = [Series(label, list(zip(nodes, amounts, strict=True))) for label, _, amounts in curves]
    lengths = [work.length for work in GROWING]
    curves = _curves([Machine(4, 4)] * len(lengths), GROWING)
    by_length = [Series(label, list(zip(lengths, amounts, strict=True))) for label, _, amounts in curves]
    measured = [
        (float(work.length), line.bytes_measured / 1e6)
        for trial in report["trials"]
        for work in (Workload(**trial["work"]),)
        if trial["machine"] == "4x4" and work in GROWING and trial["pressure"] == BOUND_BY_LINKS
        for line in lines_of(trial)
        if (line.name in CURVES or line.role == "heads") and line.bytes_measured
    ]
    if measured:
        by_length.append(Series("measured", measured, dots=True))
    unit = "MB over a node's link"
    return [
        figure(line_chart(by_nodes, "nodes of 8 ranks", unit, True), "Bytes by closed form, 16,384 tokens, MHA."),
        figure(
            line_chart(by_length, f"tokens of {GROWING[0].batch} sequences, 4 nodes of 4 ranks", unit, True),
            "Lines by closed form, diamonds measured, MHA.",
        ),
    ]


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

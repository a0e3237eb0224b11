"""The questions that a report answers, one table each: which plan is fastest, how close to the bound, against whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from startrail.bench.record import Json
from workshop.report.claims import best_of_ours
from workshop.report.findings import Line, best, headline_machine, is_emulated, lines_of, title
from workshop.trials.cases import OURS

NOTHING = "None of our plans was timed in this run."


def command(trial: Json) -> str:
    """The command that measures a trial again, with the others of its machine."""
    if not is_emulated(trial):
        return f"torchrun --nproc-per-node {trial['ranks_per_node']} -m startrail.bench"
    return f"startrail bench --shapes {trial['machine']}"


def result_sentence(trials: Sequence[Json]) -> str:
    """The result in one sentence: the best plan against the ring where it has the slowest links."""
    trial = headline_trial(trials)
    if trial is None:
        return NOTHING
    lines = lines_of(trial)
    ours, ring = best_of_ours(lines), best(lines, "ring")
    assert ours is not None
    bound = f"{ours.share_of_bound:.0%} of what its bytes and arithmetic allow"
    if ring is None:
        return f"{ours.plan} takes {ours.seconds:.3f} s, {bound} ({title(trial)})."
    return (
        f"{ours.plan} computes attention {ring.seconds / ours.seconds:.2f}x as fast as {ring.name} "
        f"({ours.seconds:.3f} s against {ring.seconds:.3f} s) and reaches {bound} ({title(trial)})."
    )


def headline_trial(trials: Sequence[Json]) -> Json | None:
    """The trial with the slowest links on the machine of the claims, MHA if there is one."""
    machine = headline_machine(trials)
    timed = [t for t in trials if t["machine"] == machine and not t["slow_node"] and best_of_ours(lines_of(t))]
    timed = [t for t in timed if not t["work"]["model"]] or timed
    return max(timed, key=lambda t: (t["pressure"] or 0.0, t["work"]["causal"]), default=None)


def _with_ours(trials: Sequence[Json]) -> Iterator[tuple[Json, list[Line], Line]]:
    for trial in trials:
        lines = lines_of(trial)
        if (ours := best_of_ours(lines)) is not None:
            yield trial, lines, ours


def fastest(trials: Sequence[Json]) -> str:
    rows = []
    for trial, lines, ours in _with_ours(trials):
        ring = best(lines, "ring")
        second = best((line for line in lines if line is not ours), *OURS)
        rows.append(
            [
                title(trial),
                ours.plan,
                f"{ours.seconds:.3f}",
                f"{ring.seconds / ours.seconds:.2f}x" if ring else "–",
                f"{second.plan} {second.seconds:.3f}" if second else "–",
                command(trial),
            ]
        )
    return table(("setting", "our fastest plan", "median s", "against ring", "next, s", "command"), rows)


def bounds(trials: Sequence[Json]) -> str:
    rows = [
        [
            title(trial),
            ours.plan,
            f"{ours.seconds:.3f}",
            f"{ours.bound:.3f}",
            f"{ours.share_of_bound:.0%}",
            f"{ours.exposed:.3f}",
            "–" if ours.waiting is None else f"{ours.waiting:.0%}",
            command(trial),
        ]
        for trial, _, ours in _with_ours(trials)
    ]
    return table(("setting", "plan", "median s", "bound s", "of bound", "exposed s", "waiting", "command"), rows)


def against(trials: Sequence[Json]) -> str:
    rows = [
        [
            title(trial),
            line.name + (f" ({line.plan})" if line.plan and line.plan not in line.name else ""),
            f"{line.seconds:.3f}",
            f"{ours.plan} {ours.seconds:.3f}",
            f"{line.seconds / ours.seconds:.2f}x",
            command(trial),
        ]
        for trial, lines, ours in _with_ours(trials)
        for line in sorted(lines, key=lambda line: line.seconds)
        if line.role not in (*OURS, "compute")
    ]
    return table(("setting", "contender", "its s", "our best, s", "ours is", "command"), rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<p class='note'>{NOTHING}</p>"
    head = "".join(f"<th{' class=text' * (name == 'command')}>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='text'><code>{escape(cell)}</code></td>" if name == "command" else f"<td>{escape(cell)}</td>"
            for name, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"

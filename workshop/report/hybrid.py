"""What ``startrail bench hybrid`` found: a table per link, and the claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workshop.report.sparse import SparseRow

OURS, HEADS = "startrail", "heads all-to-all"
ASKED, ASKED_AT = 5.0, ("4x8", 24.0, "8,192 tokens")  # times as fast as the exchange of heads


def by_trial(rows: Iterable[SparseRow]) -> dict[tuple[str, float, str], dict[str, SparseRow]]:
    """The rows of each machine, pressure and work, by contender."""
    trials: dict[tuple[str, float, str], dict[str, SparseRow]] = {}
    for row in rows:
        trials.setdefault((row.machine, row.pressure, row.work), {})[row.contender] = row
    return trials


def hybrid_table(rows: Sequence[SparseRow]) -> str:
    """One trial: seconds, bytes off a node, and speed over the exchange of heads."""
    (((machine, pressure, work), found),) = by_trial(rows).items()
    lines = [f"\n{machine}, link of {pressure:g}x ({rows[0].rate / 1e6:.0f} Mbit/s): {work}"]
    lines.append(f"{'contender':24s} {'seconds':>8s} {'MB off a node':>14s} {'x heads':>8s}")
    heads = found[HEADS].seconds or 0.0
    for name, row in found.items():
        text = row.problem
        if row.seconds is not None:
            text = f"{row.seconds:8.3f} {row.node_bytes / 1e6:14.3f} {heads / row.seconds:8.1f}"
        lines.append(f"{name:24s} {text}")
    return "\n".join(lines)


def hybrid_claims(rows: Sequence[SparseRow]) -> str:
    """Each claim with what was found, one per line."""
    lines, slower = [""], []
    for where, found in by_trial(rows).items():
        seconds = {name: row.seconds for name, row in found.items() if row.seconds is not None}
        if OURS not in seconds:
            continue
        machine, pressure, work = where
        at = f"{machine}, {pressure:g}x, {work}"
        slower += [f"{at}: {name}" for name, other in seconds.items() if other < seconds[OURS]]
        if where == ASKED_AT and HEADS in seconds:
            times = seconds[HEADS] / seconds[OURS]
            verdict = "met" if times >= ASKED else "NOT MET"
            lines.append(f"{verdict:8s} {at}: {times:.1f}x the exchange of heads (asked {ASKED:g})")
    lines.append(f"{'NOT MET' if slower else 'met':8s} never slower than a peer: {'; '.join(slower) or 'none was'}")
    return "\n".join(lines)

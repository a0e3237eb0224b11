"""What ``startrail bench sparse`` found: a table per trial, the claims, how evenly documents are spread, and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from startrail.compile.attention import Attention
from startrail.compile.call import compile_call
from startrail.compile.explain import work_by_rank
from startrail.compile.problem import Split
from startrail.geometry.distributions import document_lengths
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES

RING, DENSE, SPARSE = "ring", "best dense plan", "startrail"  # contenders that claims compare

# Workload (by the start of its name): how many times as fast as Ring Attention and as our best dense plan it must be.
DOCUMENTS = {"pretraining": (15.0, 5.0), "agents": (10.0, 3.0), "books": (10.0, 3.0)}
ASKED = {"window": (20.0, 6.0), **DOCUMENTS, "5 layers": (8.0, 2.5)}
ASKED_AT = "4x8", 24.0  # machine, pressure


@dataclass
class SparseRow:
    """One contender at one workload: the median of the slowest rank's seconds, and bytes sent by the busiest node."""

    machine: str
    pressure: float
    work: str
    contender: str
    seconds: float | None
    node_bytes: int
    rate: int  # bit/s of a node's link
    compute: float  # seconds of the arithmetic alone, at the speed of a dense mask
    note: str = ""
    problem: str = ""

    @property
    def bound(self) -> float:
        """The time that neither this contender's bytes nor the arithmetic allow to beat."""
        return max(self.compute, self.node_bytes * 8 / self.rate)


def sparse_table(rows: Sequence[SparseRow]) -> str:
    """One trial as a table: seconds, bound, speed over ring and over the best dense plan, bytes off a node."""
    first, seconds = rows[0], _seconds(rows)
    lines = [
        f"\n{first.machine}, ring {first.pressure:g}x its dense compute ({first.rate / 1e6:.0f} Mbit/s): {first.work}",
        f"{'contender':28s} {'seconds':>8s} {'bound':>8s} {'x ring':>7s} {'x dense':>8s} {'MB off a node':>14s}",
    ]
    for row in rows:
        if row.seconds is None:
            lines.append(f"{row.contender:28s} {row.problem}")
            continue
        ring, dense = (seconds.get(name, 0.0) / row.seconds for name in (RING, DENSE))
        lines.append(
            f"{row.contender:28s} {row.seconds:8.3f} {row.bound:8.3f} {ring:7.1f} {dense:8.1f} "
            f"{row.node_bytes / 1e6:14.2f}{f'  {row.note}' if row.note else ''}"
        )
    return "\n".join(lines)


def _seconds(rows: Sequence[SparseRow]) -> dict[str, float]:
    return {row.contender: row.seconds for row in rows if row.seconds is not None}


def sparse_claims(rows: Sequence[SparseRow]) -> str:
    """Each claim with what was found, one per line."""
    trials: dict[tuple[str, float, str], list[SparseRow]] = {}
    for row in rows:
        trials.setdefault((row.machine, row.pressure, row.work), []).append(row)
    lines, slower = [""], []
    for (machine, pressure, work), of_trial in trials.items():
        seconds = _seconds(of_trial)
        if SPARSE not in seconds:
            continue
        where = f"{machine}, {pressure:g}x, {work}"
        slower += [f"{where}: {name}" for name, s in seconds.items() if name != DENSE and s < seconds[SPARSE]]
        asked = next((limits for name, limits in ASKED.items() if work.startswith(name)), None)
        if asked and (machine, pressure) == ASKED_AT and {RING, DENSE} <= seconds.keys():
            found = [seconds[name] / seconds[SPARSE] for name in (RING, DENSE)]
            met = all(value >= limit for value, limit in zip(found, asked, strict=True))
            lines.append(
                f"{'met' if met else 'NOT MET':8s} {where}: {found[0]:.1f}x ring (asked {asked[0]:g}), "
                f"{found[1]:.1f}x our best dense plan (asked {asked[1]:g})"
            )
    lines.append(f"{'NOT MET' if slower else 'met':8s} never slower than a peer: {'; '.join(slower) or 'none was'}")
    return "\n".join(lines)


def write_rows(out: Path, name: str, meta: dict[str, Any], rows: Sequence[SparseRow], tables: Sequence[str]) -> Path:
    """Write ``name``.json and ``name``.txt; returns the path of the latter."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, default=str))
    machine = f"{meta['processor']}, {meta['cores']} cores"
    head = f"{meta['date']}, commit {meta['commit'][:9]}, {machine}, {meta['seconds']:.0f} s"
    path = out / f"{name}.txt"
    path.write_text("\n".join([head, *tables, ""]))
    return path


BALANCED = {8: "1x8", 32: "u4/1x8", 64: "u8/1x8"}  # ranks and plan
TOKENS_PER_RANK = (8192, 32768)


def balance_table(kinds: Sequence[str] = ("pretraining", "agents", "books")) -> str:
    """Busiest rank over the mean (work and tokens), padding, and bytes by level per rank, for both layouts."""
    lines = [
        "",
        "balance of packed documents (busiest rank over the mean), and MB sent per rank by level, forward + backward,",
        "bfloat16, 32:8 heads x 128:",
        "documents    ranks  tokens layout    work   held  padding  levels",
    ]
    for kind in kinds:
        for ranks, text in BALANCED.items():
            for per_rank in TOKENS_PER_RANK:
                documents = [0]
                for tokens in document_lengths(kind, ranks * per_rank, seed=1):
                    documents.append(documents[-1] + tokens)
                for layout in ("zigzag", "zones"):
                    found = _balance_line(Plan.parse(text), ranks, documents, layout)
                    lines.append(f"{kind:12s} {ranks:5d} {per_rank:7d} {found}")
    return "\n".join(lines)


def _balance_line(plan: Plan, ranks: int, documents: list[int], name: str) -> str:
    problem = Attention.of(documents[-1], 1, 32, 8, 128, causal=True, documents=tuple(documents))
    split = Split(plan, ranks, name, sparse=name == "zones")
    layout = split.layout_of(problem.boundaries)
    work, mean = work_by_rank(layout, documents), documents[-1] / ranks
    calls = [compile_call(problem, split, rank, layout) for rank in range(ranks)]
    sent = [[sum(level) for level in zip(*map(call.traffic, PASSES), strict=True)] for call in calls]
    levels = " ".join(f"{sum(level) / ranks / 1e6:.1f}" for level in zip(*sent, strict=True))
    return (
        f"{name:7s} {max(work) * ranks / sum(work):6.2f} {layout.largest / mean:6.3f} "
        f"{layout.largest / mean - 1:8.1%}  {levels}"
    )

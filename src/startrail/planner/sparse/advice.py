"""Prices the plans that a search found for their documents and windows, and ranks them again.

The search takes a window only for less arithmetic, and knows no documents. Its best plans and the well-known ones are
simulated once more, with the programs that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from startrail.planner.cluster import ClusterSpec
from startrail.planner.rows import Row, SearchResult, ranked_rows
from startrail.planner.sparse.documents import describe_documents
from startrail.planner.sparse.predict import MAX_RANKS, SparseCall, predict_call
from startrail.planner.workload import Run

LEAST_PRICED = 8  # plans of the search that are priced, besides the well-known ones


def price_sparse(result: SearchResult, run: Run, top: int) -> SearchResult:
    """The ``top`` rows and the well-known ones for ``run``, whose sequences may be packed. Rows are as they were if
    there are neither documents nor windows, or if windows are all there is and groups are too large to simulate every
    rank."""
    sparse = run.documents or any(call.is_sparse for call in result.best.training.calls)
    rows = [row for row in result.rows if row.training.group.world <= MAX_RANKS]
    if run.documents and not rows:
        ranks = result.best.training.group.world
        raise ValueError(f"documents can be planned for groups of up to {MAX_RANKS} ranks, not {ranks}")
    if not (sparse and rows):
        return replace(result, rows=_first(result.rows, top))
    ranked = ranked_rows([price_row(replace(row, training=replace(row.training, run=run))) for row in rows])
    runs = _what_runs(ranked[0], run)
    return replace(result, run=run, rows=_first(ranked, top), possible_gain=0.0, peers=(), too_large=(), runs=runs)


def _first(rows: Sequence[Row], top: int) -> tuple[Row, ...]:
    return tuple(row for at, row in enumerate(rows) if at < top or row.role)


def price_row(row: Row, cluster: ClusterSpec | None = None) -> Row:
    """The row with attention as the engine runs it, on another cluster if given."""
    training = row.training if cluster is None else replace(row.training, cluster=cluster)
    step = training.step(row.plan, lambda call: predict_call(training.group, row.plan, call))
    return replace(row, training=training, step=step)


def _what_runs(row: Row, run: Run) -> tuple[str, ...]:
    """The documents, and for each kind of layer which programs run."""
    training, lines = row.training, []
    if run.documents:
        lines.append(f"each sequence has {describe_documents(run.documents, run.length)}")
    for call, layers in training.calls.items():
        kind = f"window {call.mask.window:,}" if call.mask.window is not None else "full attention"
        text = "alone" if training.group.world == 1 else SparseCall(training.group, row.plan, call).describe()
        lines.append(f"{layers} x {kind}: {text}")
    return tuple(lines)

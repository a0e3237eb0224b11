"""The planner's answer as a table, a paragraph or JSON, and ``plan``, the planner as a function.

>>> answer = plan(cluster="a100-4x8", model="gpt-3b", length="128k")
>>> row = answer.rows[0]
>>> sorted(row)[:6]
['bytes', 'data_parallel', 'exposed', 'high', 'low', 'memory']
>>> "ring" in str(answer) and "would change the answer" in answer.why
True
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from startrail.planner.candidates import LARGE_WORLD
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.predict import predict
from startrail.planner.rows import DoesNotFitError, Row, SearchResult, expected_error
from startrail.planner.search import TIE_SHARE, search
from startrail.planner.units import Fields, count_text, read_file
from startrail.planner.workload import Model, find_model, read_run


@dataclass(frozen=True)
class Answer:
    """``rows`` are the plans as plain data, fastest first. The well-known plans that cannot be used come last, with the
    reason as ``why_not`` and None for every figure. ``str(answer)`` is a table and a paragraph."""

    result: SearchResult

    @property
    def best(self) -> str:
        """The text form of the best plan."""
        return str(self.result.best.plan)

    @property
    def rows(self) -> list[dict[str, Any]]:
        usable = [_as_data(row) for row in self.result.rows]
        unusable = dict.fromkeys(usable[0])  # None for every figure
        return usable + [
            unusable | {"plan": known.plan, "role": known.role, "why_not": known.reason}
            for known in self.result.missing
        ]

    def json(self) -> str:
        return json.dumps(self.rows, indent=1)

    @property
    def table(self) -> str:
        sent = [f"GB/{level.label}" for level in self.result.cluster.levels]
        head = ["plan", "", "step", "interval", "tokens/s", "MFU", "exposed", *sent, "memory"]
        lines = [head, *(_cells(row) for row in self.result.rows)]
        missing = [(known.plan, known.role, f"cannot be used: {known.reason}") for known in self.result.missing]
        # the reasons may be longer than their columns
        name, role = (max(len(line[at]) for line in [*lines, *missing]) for at in range(2))
        widths = [max(len(line[at]) for line in lines) for at in range(2, len(head))]
        text = []
        for line in lines:
            figures = (cell.rjust(width) for cell, width in zip(line[2:], widths, strict=True))
            text.append("  ".join([line[0].ljust(name), line[1].ljust(role), *figures]).rstrip())
        return "\n".join(text + [f"{line[0]:{name}s}  {line[1]:{role}s}  {line[2]}" for line in missing])

    @cached_property
    def why(self) -> str:
        return " ".join(_why(self.result))

    def __str__(self) -> str:
        result = self.result
        head = (
            f"{result.model.name} ({result.model.parameters / 1e9:.1f}B parameters), {result.run.batch} x "
            f"{result.run.length} tokens, {result.run.dtype}, ZeRO-{result.run.zero}, "
            f"{'all but attention recomputed' if result.run.recompute else 'nothing recomputed'}, on {result.cluster}: "
            f"{result.cluster.world} x {result.cluster.device.name}"
        )
        notes = [f"dropped: {count_text(number, 'plan')}: {reason}" for reason, number in result.dropped.items()]
        effort = f"{result.bounded} combinations of levels bounded, {count_text(result.simulated, 'plan')} simulated"
        if result.possible_gain > 0.005:
            effort += f"; no other plan can be more than {result.possible_gain:.1%} faster than the best"
        return "\n".join([head, "", self.table, "", *notes, effort, "", self.why])


def _as_data(row: Row) -> dict[str, Any]:
    levels = row.training.cluster.levels
    return {
        "plan": str(row.plan),
        "role": row.role,
        "data_parallel": row.training.data_parallel,
        "seconds": row.seconds,
        "low": row.low,
        "high": row.high,
        "tokens_per_second": row.tokens_per_second,
        "mfu": row.mfu,
        "exposed": row.exposed,
        "bytes": {level.name: round(nbytes) for level, nbytes in zip(levels, row.step.sent, strict=True)},
        "memory": round(row.step.memory.total),
        "why_not": None,
    }


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(12.345), seconds_text(0.0123), seconds_text(0.00045)
    ('12.35 s', '12.3 ms', '450.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds / 1e-3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _cells(row: Row) -> list[str]:
    times = seconds_text(row.seconds), f"{seconds_text(row.low)} - {seconds_text(row.high)}"
    speed = f"{row.tokens_per_second:,.0f}", f"{row.mfu:.1%}", f"{row.exposed:.1%}"
    sent = (f"{nbytes / 1e9:.3g}" for nbytes in row.step.sent)
    return [row.name, row.role, *times, *speed, *sent, f"{row.step.memory.total / 1e9:.1f} GB"]


def _why(result: SearchResult) -> Iterator[str]:
    """The sentences of the paragraph."""
    best, cluster = result.best, result.cluster
    sent = best.step.sent[0]
    yield f"{best.name} wins: {_shape(best)}."
    ring = next((row for row in result.rows if row.role == "ring"), None)
    if ring is not None and ring is not best and sent:
        yield (
            f"Each rank sends {sent / 1e9:.3g} GB per step between {cluster.levels[0].label}s; Ring Attention sends "
            f"{ring.step.sent[0] / 1e9:.3g} GB and takes {ring.seconds / best.seconds:.2f}x as long."
        )
    yield f"Ranks wait for transfers {best.exposed:.1%} of the step."
    other = next((row for row in result.rows if row.plan.levels != best.plan.levels), None)
    if other is not None:
        yield f"The runner-up, {other.name}, {_compare(other, best)}."
    if cluster.slow:
        yield _about_slow_members(result)
    yield f"What would change the answer? {_what_if(result)}."
    error = expected_error(best.training)
    yield f"Times may be off by {error.share:.0%}: {error.reason}."
    if (kernel := cluster.device.of(result.run.dtype).kernel) is not None:
        yield f"Attention runs at the speeds of {kernel.source(result.model.head_dim)}."


def _shape(row: Row) -> str:
    """The plan in words, level by level."""
    levels = ", then ".join(level.describe() for level in row.plan.levels)
    parts = [f"{levels} (outermost first)" if len(row.plan.levels) > 1 else levels]
    if row.plan.keep != "none":
        parts.append(f"keep={row.plan.keep} saves the backward pass transfers that the forward pass already made")
    if row.plan.groups > 1:
        parts.append(f"with {row.plan.groups} groups, transfers of one overlap with compute of another")
    return "; ".join(parts)


def _compare(other: Row, best: Row) -> str:
    slower = other.seconds / best.seconds - 1
    text = f"is {slower:.1%} slower: it" if slower >= 0.001 else "is as fast, but"
    for level, least, sent in zip(best.training.cluster.levels, best.step.sent, other.step.sent, strict=True):
        if sent > 1.02 * least and sent > 1e6:
            return f"{text} sends {sent / 1e9:.3g} GB between {level.label}s, not {least / 1e9:.3g} GB"
    if other.exposed > best.exposed + 0.002:
        return f"{text} waits for transfers {other.exposed:.1%} of the step"
    if other.step.memory.total > 1.02 * best.step.memory.total:
        return f"{text} needs {other.step.memory.total / 1e9:.1f} GB, not {best.step.memory.total / 1e9:.1f} GB"
    return f"{text} has more or smaller messages and blocks"


def _what_if(result: SearchResult) -> str:
    """The best plans with twice and half the bandwidth, and with half the memory."""
    cluster, best = result.cluster, result.best
    texts = []
    for factor, change in ((2.0, "With twice the bandwidth"), (0.5, "with half the bandwidth")):
        changed = cluster.faster(0, factor)
        fastest, same = search(changed, result.model, result.run, top=1, known=False).best, _seconds_on(best, changed)
        tied = same <= (1 + TIE_SHARE) * fastest.seconds
        verdict = f"{best.name} stays best ({seconds_text(same)})" if tied else _becomes_best(fastest)
        texts.append(f"{change} between {cluster.levels[0].label}s, {verdict}")
    verdict, half = f"{best.name} stays best", best.step.memory.limit / 2
    if best.step.memory.total > half:
        try:
            verdict = _becomes_best(search(cluster, result.model, result.run, top=1, memory=half, known=False).best)
        except DoesNotFitError as error:
            verdict = f"no plan fits: {error.needs}"
    return "; ".join([*texts, f"with half the memory, {verdict}"])


def _becomes_best(row: Row) -> str:
    return f"{row.name} becomes best ({seconds_text(row.seconds)})"


def _about_slow_members(result: SearchResult) -> str:
    """The cost of slow members, and whether to leave one out."""
    cluster, best = result.cluster, result.best
    healthy = _seconds_on(best, replace(cluster, slow=()))
    named = ", ".join(
        f"{cluster.levels[slow.level].label} {slow.member} (bandwidth {slow.bandwidth:.0%}, compute {slow.compute:.0%})"
        for slow in cluster.slow
    )
    text = f"All ranks wait for {named}: at full speed, a step would take {seconds_text(healthy)}"
    outer = cluster.levels[0]
    if len(cluster.slow) > 1 or cluster.slow[0].level or outer.size < 2 or cluster.world > LARGE_WORLD:
        return f"{text}."
    smaller = replace(cluster, slow=()).resized([outer.size - 1, *(level.size for level in cluster.levels[1:])])
    try:
        without = search(smaller, result.model, result.run, top=1, known=False).best
    except ValueError as error:
        reason = error.problem if isinstance(error, DoesNotFitError) else error
        return f"{text}; the others alone cannot do it ({reason})."
    advice = "leave it out" if without.seconds < best.seconds else "keep it"
    others = f"the other {outer.size - 1} {outer.label}s alone take {seconds_text(without.seconds)} with {without.name}"
    return f"{text}; {others}: {advice}."


def _seconds_on(row: Row, cluster: ClusterSpec) -> float:
    training = replace(row.training, cluster=cluster)
    return training.step(row.plan, lambda call: predict(training.group, row.plan, call)).seconds


def plan(
    cluster: str | ClusterSpec,
    model: str | Model,
    length: int | str | None = None,
    *,
    batch: int | str | None = None,
    dtype: str | None = None,
    memory: str | None = None,
    recompute: bool | None = None,
    zero: int | None = None,
    gather: str | None = None,
    loss_chunk: int | str | None = None,
    run: str | None = None,
    top: int = 5,
) -> Answer:
    """The best plans for a model on a cluster. Both are names of shipped descriptions, or files.

    ``memory`` ("30 GB") limits the memory per device. ``run`` is a file with length, batch, dtype, recompute, zero,
    gather and loss_chunk; arguments take precedence over the file.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top = {top!r} is not a whole number of at least 1")
    cluster = find_cluster(cluster) if isinstance(cluster, str) else cluster
    model = find_model(model) if isinstance(model, str) else model
    given = dict(length=length, batch=batch, dtype=dtype, recompute=recompute, zero=zero, gather=gather)
    given["loss_chunk"] = loss_chunk
    table = read_file(Path(run)) if run is not None else {}
    table |= {name: value for name, value in given.items() if value is not None}
    if "length" not in table:
        raise ValueError("length is missing: the tokens of a sequence, such as 131072 or 128k")
    described = read_run(table, "the run" if run is None else run)
    limit = None if memory is None else Fields({"memory": memory}, "the run").quantity("memory", "bytes")
    return Answer(search(cluster, model, described, top, limit))

"""The planner's answer as a table, a paragraph or JSON, and ``plan``, the planner as a function.

>>> answer = plan(cluster="a100-4x8", model="gpt-3b", length="128k")
>>> row = answer.rows[0]
>>> sorted(row)[:6]
['bytes', 'cost', 'data_parallel', 'exposed', 'high', 'low']
>>> "ring" in str(answer) and "would change the answer" in answer.why
True
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from startrail.planner.candidates import LARGE_WORLD
from startrail.planner.cluster import DTYPES, ClusterSpec, find_cluster
from startrail.planner.operate import cost_per_million, settle
from startrail.planner.rows import HEADS_OUTERMOST, TIE_SHARE, DoesNotFitError, Row, SearchResult, expected_error
from startrail.planner.search import YOURS, search
from startrail.planner.sparse.advice import LEAST_PRICED, price_row, price_sparse
from startrail.planner.units import Fields, count_text, plural, read_file
from startrail.planner.workload import Model, Run, find_model, read_run
from startrail.schedule.plan import Plan

COMPARED = 3  # of the best plans, if each takes long to price
SUSPICIOUS_RATE = 150e9  # bytes/s per device between nodes: three times the fastest adapters


@dataclass(frozen=True)
class Answer:
    """``rows`` are the plans as plain data, fastest first, then Ring Attention as others run it. The well-known plans
    that cannot be used come last, with the reason as ``why_not`` and None for every figure. ``str(answer)`` is a table
    and a paragraph."""

    result: SearchResult
    price: float | None = None  # per device and hour
    asked: tuple[str, ...] = ()  # what was looked for, and found: the longest sequence, the fewest devices, the batch

    @property
    def best(self) -> str:
        """The text form of the best plan."""
        return str(self.result.best.plan)

    @property
    def rows(self) -> list[dict[str, Any]]:
        usable = [_as_data(row, self.price) for row in (*self.result.rows, *self.result.peers)]
        unusable = dict.fromkeys(usable[0])  # None for every figure
        return usable + [
            unusable | {"plan": known.plan, "role": known.role, "why_not": known.reason}
            for known in self.result.missing
        ]

    def json(self) -> str:
        return json.dumps(self.rows, indent=1)

    @property
    def table(self) -> str:
        sent = [f"{level.label} GB/rank" for level in self.result.cluster.levels if level.size > 1]
        head = ["plan", "", "step", "interval", "tokens/s", "MFU", "exposed", *sent, "memory/rank"]
        head += [] if self.price is None else ["cost/M tokens"]
        lines = [head, *(_cells(row, self.price) for row in (*self.result.rows, *self.result.peers))]
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
        head = f"{_model_text(result.model)}, {_run_text(result.model, result.run)}, on {result.cluster}: "
        head += f"{result.cluster.world} x {result.cluster.device.name}"
        notes = list(self.asked)
        notes += [f"what runs: {'; '.join(result.runs)}"] if result.runs else []
        notes += [f"note: {text}" for text in _warnings(result)]
        notes += [f"dropped: {count_text(number, 'plan')}: {reason}" for reason, number in result.dropped.items()]
        if result.closest is not None:
            plan, excess = result.closest
            notes.append(f"the fastest plan that needs too much memory is {plan}: {excess / 1e9:.1f} GB over the limit")
        notes.append(
            f"plans within {TIE_SHARE:.0%} of the fastest count as equal; among them, those that send less over the "
            "outermost links come first, unless transfers are hidden, then smaller teams and fewer groups"
        )
        effort = f"{result.bounded} combinations of levels bounded, {count_text(result.simulated, 'plan')} simulated"
        if result.runs:
            effort += "; the best of them without documents and windows were simulated again with them"
        if result.possible_gain > 0.005:
            effort += f"; no other plan can be more than {result.possible_gain:.1%} faster than the best"
        return "\n".join([head, "", self.table, "", *notes, effort, "", self.why])


def _model_text(model: Model) -> str:
    active = f", {model.active_parameters / 1e9:.1f}B active" if model.experts else ""
    return f"{model.name} ({model.parameters / 1e9:.1f}B parameters{active})"


def _run_text(model: Model, run: Run) -> str:
    """The run with every setting that is not a default."""
    recomputed = "all but attention" if not run.repeat_attention else "everything"
    parts = [f"{run.batch} x {run.length} tokens", run.dtype, f"ZeRO-{run.zero}"]
    parts.append(f"{recomputed if run.recompute else 'nothing'} recomputed")
    if run.tensor > 1:
        heads = model.heads // run.tensor
        parts.append(f"tensor parallelism over {run.tensor} ({heads} of {count_text(model.heads, 'head')} each)")
    parts += [f"in {run.accumulate} parts"] if run.accumulate > 1 else []
    parts += [f"states in {run.states}"] if run.states != "float32" else []
    told = {
        "fp8": "linear layers in FP8",
        "offload": "layer inputs on the host",
        "offload_states": "states on the host",
    }
    return ", ".join(parts + [text for name, text in told.items() if getattr(run, name)])


def _warnings(result: SearchResult) -> Iterator[str]:
    """What in the question may be a mistake, or would help."""
    cluster, run, best = result.cluster, result.run, result.best
    for level in cluster.levels[:-1]:
        if level.bandwidth / (cluster.spans[0] if level.shared else 1) > SUSPICIOUS_RATE:
            rate = level.bandwidth / 1e9
            yield f"{rate:.0f} GB/s between {plural(level.label)} is more than adapters have; is it {rate:.0f} Gbit/s?"
    if run.gather == "float32" and run.itemsize < DTYPES["float32"]:
        narrow = replace(best.training, run=replace(run, gather=run.dtype))
        faster = price_row(replace(best, training=narrow)).seconds
        if faster < 0.99 * best.seconds:
            yield f"with --gather {run.dtype}, {best.name} would take {seconds_text(faster)}"


def _as_data(row: Row, price: float | None) -> dict[str, Any]:
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
        "cost": None if price is None else cost_per_million(row, price),
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


def _cells(row: Row, price: float | None) -> list[str]:
    times = seconds_text(row.seconds), f"{seconds_text(row.low)} - {seconds_text(row.high)}"
    speed = f"{row.tokens_per_second:,.0f}", f"{row.mfu:.1%}", f"{row.exposed:.1%}"
    levels = row.training.cluster.levels
    sent = (f"{nbytes / 1e9:.3g}" for level, nbytes in zip(levels, row.step.sent, strict=True) if level.size > 1)
    cost = [] if price is None else [f"{cost_per_million(row, price):.3g}"]
    return [row.name, row.role, *times, *speed, *sent, f"{row.step.memory.total / 1e9:.1f} GB", *cost]


def _outermost(cluster: ClusterSpec) -> int:
    """The outermost level of several members."""
    return next((at for at, level in enumerate(cluster.levels) if level.size > 1), len(cluster.levels) - 1)


def _why(result: SearchResult) -> Iterator[str]:
    """The sentences of the paragraph."""
    best, cluster = result.best, result.cluster
    outer = _outermost(cluster)
    sent, links = best.step.sent[outer], plural(cluster.levels[outer].label)
    yield f"{best.name} wins: {_shape(best)}."
    fastest = min(result.rows, key=lambda row: row.seconds)
    if fastest.seconds < 0.999 * best.seconds:
        faster = 1 - fastest.seconds / best.seconds
        yield f"{fastest.name} is predicted {faster:.1%} faster, which counts as equal, {_than(fastest, best)}."
    alike = [row for row in result.rows if row.training.data_parallel == best.training.data_parallel]
    ring = next((row for row in alike if row.role.startswith("ring")), None)
    if ring is not None and ring is not best and sent:
        yield (
            f"Each rank sends {sent / 1e9:.3g} GB per step between {links}; Ring Attention sends "
            f"{ring.step.sent[outer] / 1e9:.3g} GB and takes {ring.seconds / best.seconds:.2f}x as long."
        )
    stars = [row for row in (*alike, *result.too_large) if row.role.startswith("star") and row is not best]
    star = min(stars, key=lambda row: row.seconds, default=None)
    if star is not None:
        would = "would take" if star in result.too_large else "takes"
        fits = ", and does not fit" if star in result.too_large else ""
        yield f"The paper's schedule, {star.role}, {would} {star.seconds / best.seconds:.2f}x as long{fits}."
    yield f"Ranks wait for transfers {best.exposed:.1%} of the step."
    for row in result.rows[1:]:
        if row.role == HEADS_OUTERMOST:
            yield _about_heads(row, fastest, [each for each in (ring, star) if each is not None])
    for row in result.rows:
        if YOURS in row.role and row is not best:
            yield f"Yours, {row.name}, {_compare(row, best)}."
    other = next((row for row in result.rows if row.plan.levels != best.plan.levels), None)
    if other is not None:
        yield f"The runner-up, {other.name}, {_compare(other, best)}."
    if cluster.slow:
        yield _about_slow_members(result)
    yield f"What would change the answer? {_what_if(result)}."
    error = expected_error(best.training)
    yield f"Times may be off by {error.share:.0%}: {error.reason}."
    if result.runs:
        yield "None of those had packed documents or windows."
    if (kernel := cluster.device.of(result.run.dtype).kernel) is not None:
        yield f"Attention runs at the speeds of {kernel.source(result.model.head_dim)}."


def _about_heads(heads: Row, fastest: Row, known: Sequence[Row]) -> str:
    """How good the best plan with heads over the nodes is, and why it does not come first."""
    cluster, outer = heads.training.cluster, _outermost(heads.training.cluster)
    links, sent = plural(cluster.levels[outer].label), heads.step.sent[outer] / 1e9
    memory = heads.step.memory.total / 1e9
    text = f"The best plan with heads over the {links}, {heads.name}, sends {sent:.3g} GB between {links}, needs "
    text += f"{memory:.1f} GB per {cluster.levels[-1].label}"
    if known:
        faster = (f"{row.seconds / heads.seconds:.2f}x as fast as {row.role.split()[0]}" for row in known)
        text += f", and is {' and '.join(faster)}"
    reason = f"{heads.seconds / fastest.seconds - 1:.1%} slower than the fastest"
    if heads.exposed > fastest.exposed:
        reason += f" (ranks wait {heads.exposed:.1%} of the step: nothing hides its first and last exchange)"
    return f"{text}; it does not come first because it is {reason}."


def _shape(row: Row) -> str:
    """The plan in words, level by level."""
    levels = ", then ".join(level.describe() for level in row.plan.levels)
    levels = "each rank computes sequences of its own" if row.training.group.world == 1 else levels
    parts = [f"{levels} (outermost first)" if len(row.plan.levels) > 1 else levels]
    if row.plan.keep != "none":
        parts.append(f"keep={row.plan.keep} saves the backward pass transfers that the forward pass already made")
    if row.plan.heads > 1 and not row.plan.keeps_exchanged:
        parts.append("exchange=twice saves memory: queries, keys and values are exchanged again in the backward pass")
    if row.plan.groups > 1:
        parts.append(f"with {row.plan.groups} groups, transfers of one overlap with compute of another")
    return "; ".join(parts)


def _than(fastest: Row, best: Row) -> str:
    """Why a plan that is slightly faster does not come first."""
    for level, least, sent in zip(best.training.cluster.levels, best.step.sent, fastest.step.sent, strict=True):
        if sent > 1.02 * least and sent > 1e6:
            return f"but sends {sent / 1e9:.3g} GB between {plural(level.label)}, not {least / 1e9:.3g} GB"
    if fastest.plan.groups > best.plan.groups:
        return f"but runs {fastest.plan.groups} groups, not {best.plan.groups}"
    return "but has larger teams or more levels"


def _compare(other: Row, best: Row) -> str:
    slower = other.seconds / best.seconds - 1
    text = f"is {slower:.1%} slower: it" if slower >= 0.001 else "is as fast, but"
    for level, least, sent in zip(best.training.cluster.levels, best.step.sent, other.step.sent, strict=True):
        if sent > 1.02 * least and sent > 1e6:
            return f"{text} sends {sent / 1e9:.3g} GB between {plural(level.label)}, not {least / 1e9:.3g} GB"
    if other.exposed > best.exposed + 0.002:
        return f"{text} waits for transfers {other.exposed:.1%} of the step"
    if other.step.memory.total > 1.02 * best.step.memory.total:
        return f"{text} needs {other.step.memory.total / 1e9:.1f} GB, not {best.step.memory.total / 1e9:.1f} GB"
    return f"{text} has more or smaller messages and blocks"


def _what_if(result: SearchResult) -> str:
    """The best plans with twice and half the bandwidth, and with half the memory."""
    cluster, best = result.cluster, result.best
    outer = _outermost(cluster)
    links = plural(cluster.levels[outer].label)
    texts = []
    for factor, change in ((2.0, "With twice the bandwidth"), (0.5, "with half the bandwidth")):
        changed = cluster.faster(outer, factor)
        if result.runs:
            fastest = min((price_row(row, changed) for row in result.rows[:COMPARED]), key=lambda row: row.seconds)
        else:
            fastest = search(changed, result.model, result.run, top=1, known=False).best
        same = price_row(best, changed).seconds
        tied = same <= (1 + TIE_SHARE) * fastest.seconds
        verdict = f"{best.name} stays best ({seconds_text(same)})" if tied else _becomes_best(fastest)
        texts.append(f"{change} between {links}, {verdict}")
    verdict, half = f"{best.name} stays best", best.step.memory.limit / 2
    if best.step.memory.total > half and result.runs:
        fitting = [row for row in result.rows if row.step.memory.total <= half]
        verdict = _becomes_best(fitting[0]) if fitting else "none of these plans fits"
    elif best.step.memory.total > half:
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
    healthy = price_row(best, replace(cluster, slow=())).seconds
    named = ", ".join(
        f"{cluster.levels[slow.level].label} {slow.member} (bandwidth {slow.bandwidth:.0%}, compute {slow.compute:.0%})"
        for slow in cluster.slow
    )
    text = f"All ranks wait for {named}: at full speed, a step would take {seconds_text(healthy)}"
    outer = cluster.levels[0]
    too_large = cluster.world > LARGE_WORLD or result.runs
    if len(cluster.slow) > 1 or cluster.slow[0].level or outer.size < 2 or too_large:
        return f"{text}."
    smaller = replace(cluster, slow=()).resized([outer.size - 1, *(level.size for level in cluster.levels[1:])])
    try:
        without = search(smaller, result.model, result.run, top=1, known=False).best
    except ValueError as error:
        reason = error.problem if isinstance(error, DoesNotFitError) else error
        return f"{text}; the others alone cannot do it ({reason})."
    advice = "leave it out" if without.seconds < best.seconds else "keep it"
    rest = f"the other {outer.size - 1} {plural(outer.label)}"
    others = f"{rest} alone take {seconds_text(without.seconds)} with {without.name}"
    return f"{text}; {others}: {advice}."


def plan(
    cluster: str | ClusterSpec,
    model: str | Model,
    length: int | str | None = None,
    *,
    memory: str | None = None,
    run: str | None = None,
    top: int = 5,
    kernel: str | None = None,
    compare: Sequence[str] = (),
    price: float | None = None,
    max_length: bool = False,
    gpus_for: bool = False,
    **settings: object,
) -> Answer:
    """The best plans for a model on a cluster. Both are names of shipped descriptions, or files.

    ``memory`` ("30 GB") limits the memory per device. ``kernel`` ("fa2", "fa3", "fa4", "cudnn") computes attention
    instead of the cluster's own. ``compare`` lists plans of yours, which become rows in any case. ``settings`` are
    those of a ``Run`` (batch, dtype, recompute, zero, documents, ...), and take precedence over the file ``run``;
    ``batch="auto"`` picks the batch beyond which more sequences add little. ``price`` per device and hour adds costs.
    ``max_length`` plans for the longest sequence that fits, ``gpus_for`` for the fewest devices that fit the length.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top = {top!r} is not a whole number of at least 1")
    cluster, model = _described(cluster, model, kernel)
    auto_batch = settings.get("batch") == "auto"
    settings = settings | {"batch": None} if auto_batch else settings
    described = _read_settings(2 * cluster.world if max_length else length, run, settings)
    documents, described = described.documents, replace(described, documents=())
    limit = None if memory is None else Fields({"memory": memory}, "the run").quantity("memory", "bytes")
    if price is not None and not 0 < price < 1e6:
        raise ValueError(f"price = {price!r} is not a price per device and hour, such as 2.5")
    cluster, described, asked = settle(cluster, model, described, limit, max_length, gpus_for, auto_batch)
    plans = tuple(Plan.parse(text) for text in compare)
    sparse = documents or any(model.windows)
    found = search(cluster, model, described, max(top, LEAST_PRICED) if sparse else top, limit, compare=plans)
    return Answer(price_sparse(found, replace(described, documents=documents), top), price, asked)


def _described(cluster: str | ClusterSpec, model: str | Model, kernel: str | None) -> tuple[ClusterSpec, Model]:
    cluster = find_cluster(cluster) if isinstance(cluster, str) else cluster
    cluster = cluster if kernel is None else cluster.with_kernel(kernel)
    return cluster, find_model(model) if isinstance(model, str) else model


def _read_settings(length: int | str | None, run: str | None, settings: Mapping[str, object]) -> Run:
    table = read_file(Path(run)) if run is not None else {}
    table |= {name: value for name, value in {"length": length, **settings}.items() if value is not None}
    if "length" not in table:
        raise ValueError("length is missing: the tokens of a sequence, such as 131072 or 128k")
    return read_run(table, "the run" if run is None else run)

"""The planner's answer as text or JSON, and ``plan``, the planner as a function.

>>> answer = plan(cluster="a100-4x8", model="gpt-3b", length="128k")
>>> row = answer.rows[0]
>>> sorted(row)[:6]
['bytes', 'cost', 'data_parallel', 'exposed', 'high', 'low']
>>> answer.choice.startswith(f"Use {answer.best}: "), "Ring Attention" in answer.why
(True, True)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any

from startrail.compile.latents import LatentAttention
from startrail.planner.candidates import LARGE_WORLD, RING
from startrail.planner.cluster import DTYPES, ClusterSpec, find_cluster
from startrail.planner.operate import complete_question, cost_per_million
from startrail.planner.recurrent import kernel_speeds
from startrail.planner.rows import HEADS_OUTERMOST, SENDS, TIE_SHARE, DoesNotFitError, Row, SearchResult, expected_error
from startrail.planner.search import YOURS, search
from startrail.planner.sparse.advice import LEAST_PRICED, price_row, price_sparse
from startrail.planner.sparse.predict import predict_call
from startrail.planner.units import Fields, bytes_text, count_text, plural, read_file, seconds_text
from startrail.planner.workload import Model, Run, find_model, read_run
from startrail.schedule.plan import Plan

COLUMNS, INDENT = 100, 11  # of a screen
NO_BREAK = "\xa0"
COMPARED = 3  # of the best plans, if each takes long to price
SUSPICIOUS_RATE = 150e9  # bytes/s per device between nodes: three times the fastest adapters


@dataclass(frozen=True)
class Answer:
    """``rows`` are the plans as plain data, the choice first, then Ring Attention as others run it. The well-known
    plans that cannot be used come last, with the reason as ``why_not`` and None for every figure. ``choice`` says in a
    sentence which plan to use, ``reasons`` why, what it costs and what would change it. ``str(answer)`` is all of it.
    """

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
    def choice(self) -> str:
        """The best plan in one sentence."""
        return _choice(self.result)

    @cached_property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Sentences about the choice, each with what it is about: Plan, Why, Cost, Runner-up, What if, How sure."""
        return tuple(_reasons(self.result, self.price))

    @property
    def why(self) -> str:
        return "\n".join([self.choice, *(f"{about}: {sentence}" for about, sentence in self.reasons)])

    @property
    def table(self) -> str:
        return "\n".join(_table(self.result, self.price))

    def __str__(self) -> str:
        lines = [*_wrapped(_question(self.result)), *self.asked, "", *_wrapped(self.choice), ""]
        above = ""
        for about, sentence in self.reasons:
            lines += _wrapped(f"{'' if about == above else about:{INDENT}s}{sentence}", INDENT)
            above = about
        lines += ["", self.table, ""]
        for note in _notes(self.result):
            lines += _wrapped(note, 2)
        return "\n".join(lines)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    """Lines that fit a screen. Neither plans nor numbers with their units are broken."""
    text = re.sub(r"(?<=\d) (?=[kMGTP]?B\b|[mu]?s\b)", NO_BREAK, text)
    lines = wrap(text, COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def _question(result: SearchResult) -> str:
    """The model, the run with every setting that is not a default, and the cluster."""
    model, run, cluster = result.model, result.run, result.cluster
    active = f", {model.active_parameters / 1e9:.1f}B active" if model.experts else ""
    recomputed = "all but attention" if not run.repeat_attention else "everything"
    parts = [f"{model.name} ({model.parameters / 1e9:.1f}B parameters{active})", f"{run.batch} x {run.length} tokens"]
    parts += [run.dtype, f"ZeRO-{run.zero}", f"{recomputed if run.recompute else 'nothing'} recomputed"]
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
    parts += [text for name, text in told.items() if getattr(run, name)]
    return f"{', '.join(parts)}, on {cluster}: {cluster.world} x {cluster.device.name}"


def _as_data(row: Row, price: float | None) -> dict[str, Any]:
    levels = row.training.cluster.levels
    return {
        "plan": str(row.plan),
        "role": row.role,
        "data_parallel": row.training.data_parallel,
        "sends": row.sends,
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


# --- the choice and its reasons


def _choice(result: SearchResult) -> str:
    best, ring = result.best, _ring(result)
    text = f"Use {best.name}: {seconds_text(best.seconds)} per step"
    if ring is None:
        return f"{text}."
    if ring is best:
        return f"{text}. It is Ring Attention."
    ratio = ring.seconds / best.seconds
    return f"{text}, {f'{ratio:.2f}x' if ratio > 1.01 else 'about'} as fast as Ring Attention."


def _reasons(result: SearchResult, price: float | None) -> Iterator[tuple[str, str]]:
    best = result.best
    fastest = min(result.rows, key=lambda row: row.seconds)
    other = next((row for row in result.rows if row.plan.levels != best.plan.levels), None)
    groups: dict[str, Iterable[str]] = {
        "Plan": _shape(best),
        "Runs": (f"{line[0].upper()}{line[1:]}." for line in result.runs),
        "Why": _why(result, fastest),
        "Latents": _about_latents(result) if best.sends is not None else (),
        "Cost": _cost(best, price),
        "Heads": (_about_heads(row, fastest, result) for row in result.rows[1:] if row.role == HEADS_OUTERMOST),
        "Yours": (f"{row.name} {_compare(row, best)}." for row in result.rows[1:] if YOURS in row.role),
        "Runner-up": [f"{other.name} {_compare(other, best)}."] if other is not None else [],
        "Slow": [_about_slow_members(result)] if result.cluster.slow else [],
        "What if": _what_if(result),
        "How sure": _how_sure(result),
    }
    return ((about, sentence) for about, sentences in groups.items() for sentence in sentences)


def _ring(result: SearchResult) -> Row | None:
    """Ring Attention with as many groups as the choice."""
    groups = result.best.training.data_parallel
    rings = (row for row in result.rows if row.training.data_parallel == groups and row.role.startswith(RING))
    return next(rings, None)


def _papers(result: SearchResult) -> Row | None:
    """The best of the paper's own schedules, with as many groups as the choice, if that is another plan."""
    groups = result.best.training.data_parallel
    rows = [row for row in result.rows if row.training.data_parallel == groups and row is not result.best]
    known = [row for row in (*rows, *result.too_large) if row.role and row.plan.family.is_papers]
    return min(known, key=lambda row: row.seconds, default=None)


def _outermost(cluster: ClusterSpec) -> int:
    """The outermost level of several members."""
    return next((at for at, level in enumerate(cluster.levels) if level.size > 1), len(cluster.levels) - 1)


def _shape(row: Row) -> Iterator[str]:
    """The plan in words, level by level, and what its options do."""
    plan = row.plan
    levels = ", then ".join(level.describe() for level in plan.levels)
    if row.training.group.world == 1:
        levels = "each rank computes sequences of its own"
    yield f"{levels[0].upper()}{levels[1:]}{' (outermost first)' if len(plan.levels) > 1 else ''}."
    if plan.keep != "none":
        yield f"keep={plan.keep}: the backward pass saves transfers that the forward pass already made."
    if plan.heads > 1 and not plan.keeps_exchanged:
        yield "exchange=twice: to save memory, inputs are exchanged again in the backward pass."
    if plan.groups > 1:
        yield f"groups={plan.groups}: transfers of one group overlap with compute of another."


def _why(result: SearchResult, fastest: Row) -> Iterator[str]:
    best, ring, papers = result.best, _ring(result), _papers(result)
    outer = _outermost(result.cluster)
    sent, links = best.step.sent[outer], plural(result.cluster.levels[outer].label)
    if sent:
        rings = f", with Ring Attention {bytes_text(ring.step.sent[outer])}" if ring not in (None, best) else ""
        yield f"Each rank sends {bytes_text(sent)} per step between {links}{rings}."
    if papers is not None:
        is_too_large = papers in result.too_large
        takes = f"{'would take' if is_too_large else 'takes'} {papers.seconds / best.seconds:.2f}x as long"
        yield f"The paper's schedule, {papers.role}, {takes}{', and does not fit' if is_too_large else ''}."
    if fastest.seconds < 0.999 * best.seconds:
        faster = f"{1 - fastest.seconds / best.seconds:.1%} faster, which counts as equal"
        yield f"{fastest.name} is predicted {faster}, {_why_not_first(fastest, best)}."


def _about_latents(result: SearchResult) -> Iterator[str]:
    """What attention sends, with latents and with expanded keys, and what expanding and absorbing cost."""
    best, outer = result.best, _outermost(result.cluster)
    links, training = plural(result.cluster.levels[outer].label), best.training
    other = next((row for row in result.rows if row.role == SENDS[not training.latents]), None)
    same = price_row(replace(best, training=replace(training, latents=not training.latents)))
    rows = {row.sends: row for row in (same, best)}
    latents, expanded = (rows[name].step.by_attention[outer] for name in SENDS.values())
    if expanded:
        yield (
            f"Attention sends {bytes_text(latents)} per rank and step between {links} as latents, and "
            f"{bytes_text(expanded)} as expanded keys ({expanded / max(latents, 1):.1f}x) by the same plan, which "
            f"would take {same.seconds / best.seconds:.2f}x as long with {same.sends}."
        )
    if other is not None:
        yield (
            f"The best plan with {other.sends}, {other.plan}, takes {other.seconds / best.seconds:.2f}x as long: its "
            f"attention sends {bytes_text(other.step.by_attention[outer])} between {links}."
        )
    if best.sends == SENDS[False]:
        yield "Expanding latents where they arrive costs more time than their bytes save on these links."
    call = replace(training, latents=True).call(None)
    assert isinstance(call, LatentAttention)
    one = replace(best.plan, groups=1)  # the latents are a single head
    seconds, absorbed = (predict_call(training.group, one, each).seconds for each in (call, call.absorbed))
    yield (
        "Absorbed queries (all heads attend to the latents themselves, which are wider and need no expansion) would "
        f"make attention with latents take {absorbed / seconds:.2f}x as long by this plan."
    )


def _cost(best: Row, price: float | None) -> Iterator[str]:
    memory, device = best.step.memory, best.training.cluster.levels[-1].label
    cost = "" if price is None else f" A million tokens cost {cost_per_million(best, price):.3g}."
    yield f"{best.tokens_per_second:,.0f} tokens/s. Ranks wait for transfers {best.exposed:.1%} of the step.{cost}"
    yield f"Each {device} needs {bytes_text(memory.total)} of {bytes_text(memory.limit)}."


def _about_heads(heads: Row, fastest: Row, result: SearchResult) -> str:
    """How good the best plan with heads over the nodes is, and why it does not come first."""
    cluster, outer = heads.training.cluster, _outermost(heads.training.cluster)
    links = plural(cluster.levels[outer].label)
    text = f"With heads over the {links}, the best is {heads.name}: "
    for row in (_ring(result), _papers(result)):
        text += f"{row.seconds / heads.seconds:.2f}x as fast as {row.role.split()[0]}, " if row is not None else ""
    text += f"{bytes_text(heads.step.sent[outer])} between {links}, {bytes_text(heads.step.memory.total)} per "
    text += f"{cluster.levels[-1].label}. It is {heads.seconds / fastest.seconds - 1:.1%} slower than the fastest"
    hides = ", because nothing hides its first and last exchange" if heads.exposed > fastest.exposed else ""
    return f"{text}{hides}."


def _why_not_first(fastest: Row, best: Row) -> str:
    """Why a plan that is slightly faster does not come first."""
    more = _sends_more(fastest, best)
    if more:
        return f"but {more}"
    if fastest.plan.groups > best.plan.groups:
        return f"but runs {fastest.plan.groups} groups, not {best.plan.groups}"
    return "but has larger teams or more levels"


def _sends_more(one: Row, best: Row) -> str:
    """Over which links a plan sends more than the best one; "" if it does not."""
    for level, least, sent in zip(best.training.cluster.levels, best.step.sent, one.step.sent, strict=True):
        if sent > 1.02 * least and sent > 1e6:
            return f"sends {bytes_text(sent)} between {plural(level.label)}, not {bytes_text(least)}"
    return ""


def _compare(other: Row, best: Row) -> str:
    slower = other.seconds / best.seconds - 1
    text = f"is {slower:.1%} slower: it" if slower >= 0.001 else "is as fast, but"
    more = _sends_more(other, best)
    if more:
        return f"{text} {more}"
    if other.exposed > best.exposed + 0.002:
        return f"{text} waits for transfers {other.exposed:.1%} of the step"
    needed, least = other.step.memory.total, best.step.memory.total
    if needed > 1.02 * least:
        return f"{text} needs {bytes_text(needed)}, not {bytes_text(least)}"
    return f"{text} has more or smaller messages and blocks"


def _what_if(result: SearchResult) -> Iterator[str]:
    """The best plans with twice and half the bandwidth, and with half the memory."""
    cluster, best = result.cluster, result.best
    outer = _outermost(cluster)
    links = plural(cluster.levels[outer].label)
    for factor, change in ((2.0, f"twice the bandwidth between {links}"), (0.5, "half of it")):
        changed = cluster.faster(outer, factor)
        if result.runs:
            fastest = min((price_row(row, changed) for row in result.rows[:COMPARED]), key=lambda row: row.seconds)
        else:
            fastest = search(changed, result.model, result.run, top=1, known=False).best
        same = price_row(best, changed).seconds
        tied = same <= (1 + TIE_SHARE) * fastest.seconds
        yield f"With {change}, {f'it stays best ({seconds_text(same)})' if tied else _becomes_best(fastest)}."
    half = best.step.memory.limit / 2
    if best.step.memory.total <= half:
        verdict = "it stays best"
    elif result.runs:
        fitting = [row for row in result.rows if row.step.memory.total <= half]
        verdict = _becomes_best(fitting[0]) if fitting else "none of these plans fits"
    else:
        try:
            verdict = _becomes_best(search(cluster, result.model, result.run, top=1, memory=half, known=False).best)
        except DoesNotFitError as error:
            verdict = f"no plan fits: {error.needs}"
    yield f"With half the memory, {verdict}."


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
    text = f"All ranks wait for {named}: at full speed, a step would take {seconds_text(healthy)}{_shared(result)}"
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


def _shared(result: SearchResult) -> str:
    """What a step takes if slower devices get fewer tokens. In a ring, work follows tokens; ranks that share queries or
    heads share the work of their attention anyway."""
    rings = [row for row in result.rows if row.plan.heads == row.plan.family.team(row.plan) == 1]
    if not rings or all(slow.compute == 1 for slow in result.cluster.slow):
        return ""
    seconds, name = min((price_row(row, result.cluster.evened()).seconds, row.name) for row in rings)
    return f', and with shares="measured" {name} would take {seconds_text(seconds)}'


def _how_sure(result: SearchResult) -> Iterator[str]:
    error = expected_error(result.best.training)
    yield f"Times may be off by {error.share:.0%}: {error.reason}."
    if result.runs:
        yield "None of those had packed documents or windows."
    if result.best.training.linear is not None:
        yield _about_recurrences(result.best)
    if (kernel := result.cluster.device.of(result.run.dtype).kernel) is not None:
        yield f"Attention runs at the speeds of {kernel.source(result.model.head_dim)}."


def _about_recurrences(best: Row) -> str:
    """What the layers without attention take, and where the speed of their kernel is from."""
    training, speeds, chip = best.training, kernel_speeds(), best.training.cluster.device.chip
    found = training.of_linear(best.plan)
    assert found is not None and training.linear is not None
    states = found.seconds - sum(training.linear.own_seconds)
    text = f"Each of the {training.linear.layers.layers} layers without attention takes {seconds_text(found.seconds)}"
    text += f" besides its MLP and projections, {seconds_text(states)} of them for states and halos of other ranks."
    known = f" Their kernel runs at the speeds of {speeds.source}"
    if chip == speeds.chip:
        return f"{text}{known}."
    return (
        f"{text} No speeds of their kernel are known for {chip or 'this device'}:{known.lower()} on {speeds.chip}, "
        + ("in proportion to the rates of matrix products.")
    )


# --- the table and what else there is to know


def _table(result: SearchResult, price: float | None) -> Iterator[str]:
    """One line per plan, the choice first."""
    levels = [(at, level) for at, level in enumerate(result.cluster.levels) if level.size > 1]
    links = [plural(level.label) for _, level in levels]
    lines = [["", "step", "MFU", "wait", *links, "memory", *([] if price is None else ["cost/M"])]]
    for row in result.rows:
        sent = [bytes_text(row.step.sent[at]) for at, _ in levels]
        cells = [_title(row, result.best), seconds_text(row.seconds), f"{row.mfu:.1%}", f"{row.exposed:.0%}", *sent]
        cells += [bytes_text(row.step.memory.total)]
        cells += [] if price is None else [f"{cost_per_million(row, price):.3g}"]
        lines.append(cells)
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for title, *figures in lines:
        yield "  ".join([title.ljust(widths[0]), *map(str.rjust, figures, widths[1:])])


def _title(row: Row, best: Row) -> str:
    """A plan with its role: 'u4/1x8 (the choice)', '1x4/1x8 (double ring)'."""
    name = str(row.plan) if row.training.data_parallel == best.training.data_parallel else row.name
    return _with_role(name, ", ".join(filter(None, ("the choice" if row is best else "", row.role))))


def _with_role(plan: str, role: str) -> str:
    return f"{plan} ({role})" if role not in ("", plan) else plan


def _notes(result: SearchResult) -> Iterator[str]:
    links = ", ".join(plural(level.label) for level in result.cluster.levels if level.size > 1)
    if links:
        yield f"Wait: how much of the step ranks wait. {links[0].upper()}{links[1:]}: what a rank sends between them."
    if result.peers:
        others = ", ".join(f"{seconds_text(row.seconds)} {row.role}" for row in result.peers)
        yield f"Ring Attention as others run it: {others}."
    yield from _unusable(result)
    if result.dropped:
        reasons = (f"{count_text(number, 'plan')}: {reason}" for reason, number in result.dropped.items())
        yield f"Dropped: {'; '.join(reasons)}."
    if result.closest is not None:
        plan, excess = result.closest
        yield f"The fastest plan that needs too much memory is {plan}: {bytes_text(excess)} over the limit."
    yield from _warnings(result)
    yield f"Plans within {TIE_SHARE:.0%} count as equal; of these, fewer bytes over the outermost links come first."
    effort = f"{count_text(result.bounded, 'combination')} of levels bounded, {count_text(result.simulated, 'plan')} "
    effort += "simulated"
    if result.runs:
        effort += "; the best of them without documents and windows were simulated again with them"
    if result.possible_gain > 0.005:
        effort += f"; no other can be more than {result.possible_gain:.1%} faster"
    yield f"{effort}."


def _unusable(result: SearchResult) -> Iterator[str]:
    """The well-known plans that cannot be used. Those that need too much memory share a sentence."""
    titles = {known: _with_role(known.plan, known.role) for known in result.missing}
    if reasons := [f"{title}: {known.reason}" for known, title in titles.items() if not known.memory]:
        yield f"Cannot be used: {'; '.join(reasons)}."
    if needed := [(title, bytes_text(known.memory)) for known, title in titles.items() if known.memory]:
        (title, first), *others = needed
        limit, rest = bytes_text(result.best.step.memory.limit), "".join(f", {each} {more}" for each, more in others)
        yield f"Cannot be used with {limit} per device: {title} needs {first}{rest}."


def _warnings(result: SearchResult) -> Iterator[str]:
    """What in the question may be a mistake, or would help."""
    cluster, run, best = result.cluster, result.run, result.best
    for level in cluster.levels[:-1]:
        if level.bandwidth / (cluster.spans[0] if level.shared else 1) > SUSPICIOUS_RATE:
            rate = level.bandwidth / 1e9
            yield (
                f"Note: {rate:.0f} GB/s between {plural(level.label)} is more than adapters have; is it {rate:.0f} "
                "Gbit/s?"
            )
    if run.gather == "float32" and run.itemsize < DTYPES["float32"]:
        narrow = replace(best.training, run=replace(run, gather=run.dtype))
        faster = price_row(replace(best, training=narrow)).seconds
        if faster < 0.99 * best.seconds:
            yield f"Note: with --gather {run.dtype}, {best.name} would take {seconds_text(faster)}."


# --- the planner as a function


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
    cluster, described, asked = complete_question(cluster, model, described, limit, max_length, gpus_for, auto_batch)
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

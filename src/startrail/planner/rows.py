"""What the search finds: rows with their predicted step and its interval, their order, and the whole result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from startrail.planner.candidates import WellKnown, heads_outermost
from startrail.planner.cluster import ClusterSpec
from startrail.planner.step import StepEstimate, Training
from startrail.planner.units import read_file
from startrail.planner.workload import Model, Run
from startrail.schedule.plan import Plan

ERRORS = Path(__file__).parent / "errors.toml"
HEADS_OUTERMOST = "heads outermost"  # that of the best plan that splits heads over the nodes, if another one wins
SENDS = {True: "latents", False: "expanded keys"}  # what a plan sends, and the role of the best that sends the other
TIE_SHARE = 0.03  # plans whose times differ by less are tied: predictions err by more
TWIN_SHARE = 0.01  # plans of the same levels in another order whose times differ by less are one
EXPOSED_SHARE = 0.01  # of the step: below it, the bytes that a plan sends do not matter


class ExpectedError(NamedTuple):
    """How far a prediction of one kind may be off, and the reason to think so."""

    share: float
    reason: str


@lru_cache(maxsize=1)
def _recorded_errors() -> dict[str, Any]:
    return read_file(ERRORS)


def expected_error(training: Training) -> ExpectedError:
    """The error that nine in ten predictions of this kind had where it could be compared: in the lab, or on GPUs whose
    kernels were published; else the ``accuracy`` that the cluster's file states."""
    cluster, attention_only = training.cluster, training.model.hidden == 1
    kind = "lab" if cluster.cores else "attention" if attention_only else "step"
    known = cluster.cores or cluster.device.of(training.run.dtype).kernel is not None
    if not known:
        return ExpectedError(cluster.accuracy, f"the file of {cluster} states this accuracy; nothing was compared")
    found = _recorded_errors()[kind]
    what = {"lab": "predictions in the lab", "attention": "attention rates", "step": "training steps"}[kind]
    published = "measured" if kind == "lab" else "published"
    return ExpectedError(found["within"], f"nine in ten of {found['figures']} {published} {what} were within this")


@dataclass(frozen=True)
class Row:
    """One simulated plan. ``role`` names the well-known ones: ring, star, USP, double ring, Ulysses."""

    plan: Plan
    training: Training
    step: StepEstimate
    role: str = ""

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def low(self) -> float:
        return self.seconds * (1 - expected_error(self.training).share)

    @property
    def high(self) -> float:
        return self.seconds * (1 + expected_error(self.training).share)

    @property
    def tokens_per_second(self) -> float:
        return self.training.run.length * self.training.run.batch / self.seconds

    @property
    def exposed(self) -> float:
        """The share of a step spent waiting for communication."""
        return max(0.0, 1 - self.step.compute / self.seconds)

    @property
    def mfu(self) -> float:
        cluster = self.training.cluster
        peak = cluster.device.of(self.training.run.dtype).peak * (cluster.cores or cluster.world)
        return self.step.flops / self.seconds / peak

    @property
    def name(self) -> str:
        groups, expanded = self.training.data_parallel, self.sends == SENDS[False]
        text = str(self.plan) + (f" x {groups} data parallel" if groups > 1 else "")
        return f"{text} with {self.sends}" if expanded else text

    @property
    def sends(self) -> str | None:
        """Of models with latent attention, what is sent."""
        return SENDS[self.training.latents] if self.training.model.latents is not None else None


@dataclass(frozen=True)
class SearchResult:
    """``rows`` are the best plans, fastest first, and the well-known ones. ``missing`` are the well-known plans that
    cannot be used, with the reason. ``dropped`` counts plans that cannot be used, by reason. ``bounded`` counts
    combinations of levels with a bound, whatever their options. ``closest``: of the plans that need too much memory,
    the fastest by its bound, and the bytes that it is over. ``peers``: Ring Attention as others run it.
    ``too_large``: the paper's schedules that need too much memory. ``runs``: what runs with the best plan, by kind of
    layer, if documents or windows decide it."""

    cluster: ClusterSpec
    model: Model
    run: Run
    rows: tuple[Row, ...]
    dropped: dict[str, int]
    missing: tuple[WellKnown, ...]
    bounded: int
    simulated: int
    possible_gain: float  # the share of the best time that a plan not simulated could save at most
    closest: tuple[Plan, float] | None = None
    peers: tuple[Row, ...] = ()
    too_large: tuple[Row, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def best(self) -> Row:
        return self.rows[0]


class DoesNotFitError(ValueError):
    """No plan fits the memory of a device. ``plan`` needs the least, ``needs`` says how much; ``problem`` is the
    message without hints at what would fit."""

    def __init__(self, problem: str, hints: Iterable[str], plan: Plan, needs: str) -> None:
        super().__init__("; ".join([problem, *hints]))
        self.problem, self.plan, self.needs = problem, plan, needs


def ranked_rows(rows: list[Row]) -> list[Row]:
    """Fastest first. Ties go to the plan that sends least over the outermost links, if ranks wait for transfers at
    all, then to the smallest teams and the fewest groups, because predictions are least certain about the cost of
    waiting and of messages; then to the plan that sends least inside, and then to the simplest."""
    fastest = min(row.seconds for row in rows)
    tied = [row for row in rows if row.seconds <= fastest * (1 + TIE_SHARE)]
    exposed = any(row.exposed > EXPOSED_SHARE for row in tied)
    least = [max(min(sent), 1.0) for sent in zip(*(row.step.sent for row in tied), strict=True)]

    def rank(row: Row) -> tuple[object, ...]:
        if row not in tied:
            return 1, row.seconds
        plan = row.plan
        sent = tuple(round(nbytes / fewest, 1) for nbytes, fewest in zip(row.step.sent, least, strict=True))
        simple = len(plan.levels) + (plan.keep != "none")
        outer, inner = (sent[:1], sent[1:]) if exposed else ((), ())
        return 0, outer, plan.family.team(plan), plan.groups, inner, simple, row.seconds, row.step.memory.total

    return _without_twins(sorted(rows, key=rank))


def with_heads_outermost(ranked: list[Row]) -> list[Row]:
    """With a role for the best plan that splits heads over the nodes, if another one wins: it sends the least between
    nodes, so people ask why it does not come first."""
    group = ranked[0].training.group
    found = next((row for row in ranked if row.training.group is group and heads_outermost(row.plan, group)), None)
    if found is None or found is ranked[0] or found.role:
        return ranked
    return [replace(row, role=HEADS_OUTERMOST) if row is found else row for row in ranked]


def with_other_form(ranked: list[Row]) -> list[Row]:
    """With a role for the best plan that sends expanded keys if latents win, or the other way round."""
    best = ranked[0]
    if best.sends is None:
        return ranked
    found = next((row for row in ranked if row.sends != best.sends and not row.role), None)
    return [replace(row, role=str(row.sends)) if row is found else row for row in ranked]


def _without_twins(rows: list[Row]) -> list[Row]:
    """Without plans that do the same as one before them in another order of levels, such as u4/1x2 and 1x2/u4 inside a
    node."""
    kept: list[Row] = []
    seen: dict[tuple[object, ...], float] = {}
    for row in rows:
        plan = row.plan
        options = plan.backward, plan.keep, plan.groups
        same = row.training.data_parallel, row.training.latents, tuple(sorted(map(str, plan.levels))), options
        if row.role or abs(row.seconds / seen.get(same, inf) - 1) > TWIN_SHARE:
            kept.append(row)
        seen.setdefault(same, row.seconds)
    return kept

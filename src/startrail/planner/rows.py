"""What the search finds: rows with their predicted step, the interval of its error, and the whole result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from startrail.planner.candidates import WellKnown
from startrail.planner.cluster import ClusterSpec
from startrail.planner.step import StepEstimate, Training
from startrail.planner.units import read_file
from startrail.planner.workload import Model, Run
from startrail.schedule.plan import Plan

ERRORS = Path(__file__).parent / "errors.toml"


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
        groups = self.training.data_parallel
        return str(self.plan) + (f" x {groups} data parallel" if groups > 1 else "")


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

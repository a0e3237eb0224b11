"""The cluster of a measured trial, and the prediction for each plan in it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from startrail.bench.yardstick import Workload
from startrail.planner.cluster import ClusterSpec
from startrail.planner.predict import Prediction, predict
from startrail.planner.search import search_attention
from startrail.planner.sparse.predict import predict_sparse
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from workshop.trials.cases import Contender, Trial, lab_cluster
from workshop.trials.links import interleaved, rate_for, ring_bytes

CHOSEN = "chosen"  # the role of the plan that the planner chooses
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One plan in one trial, measured."""

    machine: Machine
    work: Workload
    pressure: float
    rates: tuple[int, ...]
    plan: str
    across: bool
    seconds: float
    repeats: int
    chosen: bool = False  # by the planner, for this trial, out of all plans

    @property
    def trial(self) -> tuple[object, ...]:
        return self.machine, self.work, self.pressure, self.rates

    @property
    def slow_node(self) -> bool:
        return len(set(self.rates)) > 1

    def __str__(self) -> str:
        slow = ", node 0 at half rate" if self.slow_node else ""
        name = f"{self.plan} across" if self.across else self.plan
        return f"{self.machine} {self.work.name} {self.work.mask} {self.pressure:g}x{slow}: {name}"


def cases_of(trials: list[Json]) -> list[Case]:
    """All our plans that were measured on limited links with attention alone."""
    cases = []
    for trial in trials:
        work = Workload(**trial["work"])
        if work.model or trial["pressure"] is None:
            continue
        machine = Machine(trial["nodes"], trial["ranks_per_node"])
        for row in trial["rows"]:
            if row["way"] == "plan" and row.get("seconds"):
                seconds = statistics.median(row["seconds"])
                rest = row["plan"], row["across"], seconds, len(row["seconds"]), row["role"] == CHOSEN
                cases.append(Case(machine, work, trial["pressure"], tuple(trial["rates"]), *rest))
    return cases


def cluster_of(case: Case, figures: Mapping[str, float]) -> ClusterSpec:
    """``lab.toml`` with the trial's links and ``figures`` of the device."""
    base = lab_cluster(case.machine, case.rates)
    return replace(base, device=replace(base.device, **figures))


def predicted(case: Case, figures: Mapping[str, float]) -> Prediction:
    cluster, plan = cluster_of(case, figures), Plan.parse(case.plan)
    if case.work.call.is_sparse:
        return predict_sparse(cluster, plan, case.work.call)
    order = interleaved(case.machine) if case.across else None
    return predict(cluster, plan, case.work.call, all_ranks=True, order=order)


def with_choice(machine: Machine, trial: Trial, compute: float) -> Trial:
    """The trial with the planner's choice from all plans added to its contenders. The links' rate follows from seconds
    of ``compute``, as the rate of the trial will from the measured seconds."""
    pressure = trial.pressure or 1.0
    rate = rate_for(ring_bytes(machine, trial.work), compute, pressure)
    rates = tuple(rate // 2 if trial.slow_node and node == 0 else rate for node in range(machine.nodes))
    case = Case(machine, trial.work, pressure, rates, "", False, 0.0, 0)
    plan = str(search_attention(cluster_of(case, {}), case.work.call, keep=True).best.plan)
    others = tuple(contender for contender in trial.contenders if contender.plan != plan)
    return replace(trial, contenders=(*others, Contender(plan, CHOSEN, plan=plan)))

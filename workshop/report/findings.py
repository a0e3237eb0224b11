"""Numbers from the recorded measurements.

A report is plain data: ``{"meta": ..., "trials": [{"machine", "work", "pressure", "rates", "rows": [...]}, ...]}``.
Every row is a contender with its seconds per repeat and its bytes per node. `measured_trial` makes a trial from the
outcomes of the ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from startrail.bench.yardstick import Json, Workload
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from workshop.trials.cases import COMPUTE, Trial
from workshop.trials.links import link_bytes, ring_bytes, transfer_seconds
from workshop.trials.measure import Outcome, Sample, with_plan

CLAIMED = "4x8"


def measured_trial(machine: Machine, trial: Trial, outcomes: Sequence[Outcome]) -> Json:
    """One trial's record from the outcomes of all ranks. The time of a repeat is that of its slowest rank."""
    rows = []
    for contender in (COMPUTE, *(with_plan(contender, outcomes[0].auto) for contender in trial.contenders)):
        row: Json = {**asdict(contender), "refused": outcomes[0].refused.get(contender.name)}
        if not row["refused"]:
            row |= _measured_row([outcome.samples[contender.name] for outcome in outcomes], machine)
            if contender.way == "plan" and not trial.work.model and not trial.work.call.is_sparse:
                row["closed"] = link_bytes(Plan.parse(contender.plan), machine, trial.work, contender.across)
        rows.append(row)
    return {
        "machine": str(machine),
        "nodes": machine.nodes,
        "ranks_per_node": machine.ranks_per_node,
        "work": asdict(trial.work),
        "pressure": trial.pressure,
        "slow_node": trial.slow_node,
        "rates": outcomes[0].rates,
        "rows": rows,
    }


def _measured_row(samples: Sequence[Sequence[Sample]], machine: Machine) -> Json:
    """``samples`` by rank, then by repeat."""
    repeats = list(zip(*samples, strict=True))
    seconds = [max(sample.seconds for sample in repeat) for repeat in repeats]
    row: Json = {"seconds": seconds, "waiting": None, "links": None}
    if all(sample.waiting is not None for sample in repeats[0]):
        row["waiting"] = statistics.median(
            statistics.mean(sample.waiting / slowest for sample in repeat)
            for repeat, slowest in zip(repeats, seconds, strict=True)
        )
    if repeats[0][0].sent is not None:
        row["links"] = [
            [statistics.median(getattr(repeat[rank], way) for repeat in repeats) for way in ("sent", "received")]
            for rank in range(0, machine.world, machine.ranks_per_node)  # all ranks of a node read the same counters
        ]
    return row


@dataclass(frozen=True)
class Line:
    """The numbers of one contender in one trial. ``bound`` is the least time that its bytes and arithmetic allow."""

    name: str
    plan: str
    role: str
    way: str
    seconds: float
    spread: tuple[float, float]
    repeats: int
    against_ring: float | None
    bytes_measured: float | None
    bytes_closed: float | None
    bytes_off: float | None
    bound: float
    exposed: float
    waiting: float | None

    @property
    def share_of_bound(self) -> float:
        return self.bound / self.seconds


def lines_of(trial: Json) -> list[Line]:
    """A trial's contenders that were timed. They are compared with the fastest flat ring of the trial: the textbook
    one, or our engine's if it takes part; peers' rings send the same bytes."""
    rows = [row for row in trial["rows"] if not row["refused"]]
    alone = next(row for row in rows if row["role"] == "compute")
    compute, overhead = statistics.median(alone["seconds"]), alone["links"]  # every row has the bytes of its barriers
    rings = [statistics.median(row["seconds"]) for row in rows if row["role"] == "ring"]
    lines = []
    for row in rows:
        seconds = statistics.median(row["seconds"])
        measured = None
        if row["links"]:
            pairs = zip(row["links"], overhead, strict=True)
            measured = [[total - barriers for total, barriers in zip(*pair, strict=True)] for pair in pairs]
        closed = _textbook_bytes(trial) if row["way"] == "textbook ring" else row.get("closed")
        must = closed or measured or [[0.0, 0.0] for _ in trial["rates"]]
        lines.append(
            Line(
                row["name"],
                row["plan"],
                row["role"],
                row["way"],
                seconds,
                (min(row["seconds"]), max(row["seconds"])),
                len(row["seconds"]),
                min(rings) / seconds if rings else None,
                _busiest(measured),
                _busiest(closed),
                _farthest_off(measured, closed),
                compute if row["role"] == "compute" else max(compute, transfer_seconds(must, trial["rates"])),
                seconds - compute,
                row["waiting"],
            )
        )
    return lines


def _textbook_bytes(trial: Json) -> list[list[float]] | None:
    work = Workload(**trial["work"])
    if work.model:
        return None
    size = ring_bytes(Machine(trial["nodes"], trial["ranks_per_node"]), work)
    return [[size, size]] * trial["nodes"]


def _busiest(links: Sequence[Sequence[float]] | None) -> float | None:
    return max(max(link) for link in links) if links else None


def _farthest_off(measured: Sequence[Sequence[float]] | None, closed: Sequence[Sequence[float]] | None) -> float | None:
    """Relative error of the closed form against the measured bytes: the worst of all links and both directions.

    >>> round(_farthest_off([[101, 99], [150, 100]], [[100, 100], [150, 100]]), 3)
    0.01
    """
    if not measured or not closed:
        return None
    pairs = [pair for links in zip(measured, closed, strict=True) for pair in zip(*links, strict=True)]
    return max((ours / right - 1 for ours, right in pairs if right), key=abs, default=None)


def title(trial: Json) -> str:
    work = Workload(**trial["work"])
    slow = ", node 0 at half rate" if trial["slow_node"] else ""
    if trial["pressure"] is None and not is_emulated(trial):
        return f"{trial['machine']}, {work}, links as they are"
    found = measured_pressure(lines_of(trial)) if trial["pressure"] else None
    measured = f" (measured: {found:.1f}x)" if found else ""
    return f"{trial['machine']}, {work}, {pressure_text(trial['pressure'])}{measured}{slow}"


def pressure_text(pressure: float | None) -> str:
    return "links not limited" if pressure is None else f"ring communication {pressure:g}x its compute"


def measured_pressure(lines: Sequence[Line]) -> float | None:
    """Time of the fastest ring over the compute time."""
    ring, compute = best(lines, "ring"), best(lines, "compute")
    return ring.seconds / compute.seconds if ring and compute else None


def is_emulated(trial: Json) -> bool:
    """True if the links were emulated: only those have counters that ranks can read."""
    return any(row.get("links") for row in trial["rows"])


def headline_machine(trials: Sequence[Json]) -> str:
    """4 nodes of 8 ranks, which the claims are about; a run without them shows its first machine, unjudged."""
    machines = [trial["machine"] for trial in trials]
    return CLAIMED if CLAIMED in machines or not machines else machines[0]


def best(lines: Iterable[Line], *roles: str) -> Line | None:
    return min((line for line in lines if line.role in roles), key=lambda line: line.seconds, default=None)

"""From measurements to numbers and verdicts. Works on the recorded report alone, so any report can be judged again.

A report is plain data: ``{"meta": ..., "trials": [{"machine", "work", "pressure", "rates", "rows": [...]}, ...]}``.
Every row is a contender with its seconds by repeat and its bytes by node; `measured_trial` makes one from what ranks
return.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from startrail.bench.cases import BOUND_BY_LINKS, COMPUTE, PRESSURES, Trial, Work
from startrail.bench.closed import Machine, link_bytes, ring_bytes, transfer_seconds
from startrail.bench.measure import Outcome, Sample
from startrail.plan import Plan

BYTES_WITHIN = 0.03
CLAIMED = "4x8"
Json = dict[str, Any]


def measured_trial(machine: Machine, trial: Trial, outcomes: Sequence[Outcome]) -> Json:
    """One trial's record, from the outcomes of all ranks: the slowest rank of every repeat is its time."""
    rates = outcomes[0].rates
    rows = []
    for contender in (COMPUTE, *trial.contenders):
        row: Json = {**asdict(contender), "refused": outcomes[0].refused.get(contender.name)}
        if not row["refused"]:
            row |= _measured_row([outcome.samples[contender.name] for outcome in outcomes], machine)
            if contender.way == "plan" and not trial.work.model:
                row["closed"] = link_bytes(Plan.parse(contender.plan), machine, trial.work, contender.across)
        rows.append(row)
    return {
        "machine": str(machine),
        "nodes": machine.nodes,
        "ranks_per_node": machine.ranks_per_node,
        "work": asdict(trial.work),
        "pressure": trial.pressure,
        "slow_node": trial.slow_node,
        "rates": rates,
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
        first = range(0, machine.world, machine.ranks_per_node)  # every rank of a node reads the same counters
        row["links"] = [
            [statistics.median(getattr(repeat[rank], way) for repeat in repeats) for way in ("sent", "received")]
            for rank in first
        ]
    return row


@dataclass(frozen=True)
class Line:
    """One contender in one trial, in numbers. ``bound`` is what its bytes and the arithmetic allow at best."""

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
    """A trial's contenders that could be timed. All are held against the fastest flat ring of the trial: the textbook
    one, and our engine's where it takes part; peers' rings move the same bytes."""
    rows = [row for row in trial["rows"] if not row["refused"]]
    compute = statistics.median(next(row for row in rows if row["role"] == "compute")["seconds"])
    overhead = next(row["links"] for row in rows if row["role"] == "compute")  # what barriers add to every row
    rings = [statistics.median(row["seconds"]) for row in rows if row["role"] == "ring"]
    lines = []
    for row in rows:
        seconds = statistics.median(row["seconds"])
        measured = None
        if row["links"]:
            measured = [
                [a - b for a, b in zip(*pair, strict=True)] for pair in zip(row["links"], overhead, strict=True)
            ]
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
    work = Work(**trial["work"])
    if work.model:
        return None
    size = ring_bytes(Machine(trial["nodes"], trial["ranks_per_node"]), work)
    return [[size, size]] * trial["nodes"]


def _busiest(links: Sequence[Sequence[float]] | None) -> float | None:
    return max(max(link) for link in links) if links else None


def _farthest_off(measured: Sequence[Sequence[float]] | None, closed: Sequence[Sequence[float]] | None) -> float | None:
    """How far measured bytes are from the closed form, as a share of it: the worst of all links and both directions.

    >>> round(_farthest_off([[101, 99], [150, 100]], [[100, 100], [150, 100]]), 3)
    0.01
    """
    if not measured or not closed:
        return None
    pairs = [pair for links in zip(measured, closed, strict=True) for pair in zip(*links, strict=True)]
    return max((ours / right - 1 for ours, right in pairs if right), key=abs, default=None)


# --- claims


@dataclass(frozen=True)
class Claim:
    """A thing that must be shown, what was found, and whether it holds; None where it is a finding without a target
    or was not measured in this run."""

    text: str
    found: str
    met: bool | None


def title(trial: Json) -> str:
    work = Work(**trial["work"])
    slow = ", node 0 at half rate" if trial["slow_node"] else ""
    if trial["pressure"] is None and not is_emulated(trial):
        return f"{trial['machine']}, {work}, links as they are"
    found = measured_pressure(lines_of(trial)) if trial["pressure"] else None
    measured = f" (measured: {found:.1f}x)" if found else ""
    return f"{trial['machine']}, {work}, {pressure_text(trial['pressure'])}{measured}{slow}"


def pressure_text(pressure: float | None) -> str:
    return "links not limited" if pressure is None else f"links for ring at {pressure:g}x its compute"


def measured_pressure(lines: Sequence[Line]) -> float | None:
    """How many times its compute the fastest ring has really taken."""
    ring, compute = best(lines, "ring"), best(lines, "compute")
    return ring.seconds / compute.seconds if ring and compute else None


def is_emulated(trial: Json) -> bool:
    """Only emulated links have counters that ranks can read."""
    return any(row.get("links") for row in trial["rows"])


def claims(report: Json) -> list[Claim]:
    """Everything that the benchmark is there to show, judged from the data."""
    trials = report["trials"]
    found = [right_claim(trials), _bytes_claim(trials)]
    machine = headline_machine(trials)
    for mask in ("causal", "full"):
        found += _ratio_claims(f"{machine}, MHA, {mask}", _most_bound(trials, machine, mask))
    found += [_peers_claim(trials), _same_ratios(trials, machine)]
    found += [_compute_claim(trials), _slower_claim(trials)]
    found += [_step_claim(trials, model, paper) for model, paper in (("gpt", "+77 %"), ("dit", "+114 %"))]
    return [*found, _slow_node_claim(trials, machine)]


def headline_machine(trials: Sequence[Json]) -> str:
    """The claims are about 4 nodes of 8 ranks; a run without them shows the same figures of what it has, unjudged."""
    machines = [trial["machine"] for trial in trials]
    return CLAIMED if CLAIMED in machines or not machines else machines[0]


def _is(trial: Json, machine: str, kind: str, pressure: float | None) -> bool:
    same = trial["machine"] == machine and Work(**trial["work"]).kind == kind
    return same and trial["pressure"] == pressure and not trial["slow_node"]


def _most_bound(trials: Sequence[Json], machine: str, mask: str) -> Json | None:
    """The MHA trial whose links are most of a limit, if they are a limit at all; on real links, what there is."""
    bound = [t for t in trials if (t["pressure"] or 0) >= BOUND_BY_LINKS or not is_emulated(t)]
    alike = [t for t in bound if _is(t, machine, "MHA", t["pressure"]) and Work(**t["work"]).mask == mask]
    return max(alike, key=lambda trial: trial["pressure"] or 0, default=None)


def best(lines: Iterable[Line], role: str) -> Line | None:
    return min((line for line in lines if line.role == role), key=lambda line: line.seconds, default=None)


def right_claim(trials: Sequence[Json]) -> Claim:
    text = "every plan of ours gives the results of one process"
    rows = [(row, t) for t in trials for row in t["rows"] if row["way"] == "plan"]
    if not rows:
        return Claim(text, "not measured in this run", None)
    wrong = [f"{row['plan']}, {title(t)}: {row['refused']}" for row, t in rows if row["refused"]]
    return Claim(text, "; ".join(wrong) or f"all of {len(rows)} cases", not wrong)


def _bytes_claim(trials: Sequence[Json]) -> Claim:
    text = f"bytes on every node's link within {BYTES_WITHIN:.0%} of the closed form, for every plan of ours"
    ours = [(line, t) for t in trials for line in lines_of(t) if line.way == "plan"]
    off = [(line.bytes_off, line, t) for line, t in ours if line.bytes_off is not None]
    if not off:
        return Claim(text, "link counters could not be read in this run", None)
    worst, line, trial = max(off, key=lambda item: abs(item[0]))
    found = f"{len(off)} cases, worst {worst:+.1%}: {line.name} ({line.plan}), {title(trial)}"
    return Claim(text, found, abs(worst) <= BYTES_WITHIN)


def _ratio_claims(where: str, trial: Json | None) -> list[Claim]:
    lines = lines_of(trial) if trial else []
    judged = False
    measured = measured_pressure(lines)
    if trial and measured:
        judged = is_emulated(trial) and trial["machine"] == CLAIMED and measured >= BOUND_BY_LINKS
        where += f", ring measured at {measured:.1f}x its compute"
    wanted = [
        ("nested", "ring", 2.0),
        ("nested keep", "ring", 2.5),
        ("nested", "star", 1.4),
        ("nested", "usp", 1.3),
    ]
    made = []
    for role, other, target in wanted:
        text = f"{where}: {'nested with keep' if 'keep' in role else 'nested'} against {other} >= {target}x"
        ours, theirs = best(lines, role), best(lines, other)
        if ours is None or theirs is None:
            made.append(Claim(text, "not measured in this run", None))
            continue
        ratio = theirs.seconds / ours.seconds
        names = f"{ours.plan} {ours.seconds:.3f} s, {theirs.name} {theirs.seconds:.3f} s"
        made.append(Claim(text, f"{ratio:.2f}x ({names})", ratio >= target if judged else None))
    for role in ("nested", "nested keep"):
        ours = best(lines, role)
        text = f"{where}: {'nested with keep' if 'keep' in role else 'nested'} reaches >= 85 % of its bound"
        if ours is None:
            made.append(Claim(text, "not measured in this run", None))
            continue
        share = ours.share_of_bound
        found = f"{share:.0%} ({ours.plan}: {ours.seconds:.3f} s, bound {ours.bound:.3f} s)"
        made.append(Claim(text, found, share >= 0.85 if judged else None))
    return made


def _peers_claim(trials: Sequence[Json]) -> Claim:
    parts = []
    for trial in trials:
        if not _is(trial, trial["machine"], "MHA", BOUND_BY_LINKS):
            continue
        lines = lines_of(trial)
        ours = best(lines, "nested")
        peers = [line for line in lines if line.way not in ("plan", "compute", "textbook ring")]
        ratios = [f"{line.name} {line.seconds / ours.seconds:.2f}x" for line in peers if ours]
        if ratios:
            parts.append(f"{trial['machine']}, {Work(**trial['work']).mask}: {', '.join(ratios)}")
    text = f"nested without keep against the peers' own code, {pressure_text(BOUND_BY_LINKS)} (some with one repeat)"
    return Claim(text, "; ".join(parts) or "not measured in this run", None)


def _same_ratios(trials: Sequence[Json], machine: str) -> Claim:
    parts = []
    for trial in trials:
        pressure = trial["pressure"]
        if pressure in PRESSURES and _is(trial, machine, "MHA", pressure):
            lines = lines_of(trial)
            rings, ours, kept = (best(lines, role) for role in ("ring", "nested", "nested keep"))
            if rings and ours and kept:
                mask = "causal" if trial["work"]["causal"] else "full"
                ratios = f"{rings.seconds / ours.seconds:.2f}x, with keep {rings.seconds / kept.seconds:.2f}x"
                found = measured_pressure(lines)
                parts.append(f"{mask}, ring for {pressure:g}x, measured at {found:.1f}x its compute: {ratios}")
    return Claim("nested against ring at every rate", "; ".join(parts) or "not measured", None)


def _compute_claim(trials: Sequence[Json]) -> Claim:
    text = "at least 80 % of compute alone when the network is not limited and N = 16,384"
    for trial in trials:
        if trial["pressure"] is None and is_emulated(trial) and trial["work"]["length"] == 16_384:
            ours = [line for line in lines_of(trial) if line.role.startswith("nested")]
            if ours:
                fastest = min(ours, key=lambda line: line.seconds)
                share = fastest.share_of_bound
                return Claim(text, f"{share:.0%} ({fastest.plan}, {trial['machine']})", share >= 0.8)
    return Claim(text, "not measured in this run", None)


def _slower_claim(trials: Sequence[Json]) -> Claim:
    """Met also where a plan is slower because of its bytes, which the plan states; not for reasons unknown."""
    text = "no nested plan slower than the fastest flat ring by more than 5 % at any rate, or said which and why"
    cases = [(line, t) for t in trials for line in lines_of(t) if line.role.startswith("nested") and line.against_ring]
    if not cases:
        return Claim(text, "not measured in this run", None)
    slower = [(line, t) for line, t in cases if line.against_ring < 1 / 1.05]
    named = "; ".join(
        f"{line.plan} {1 / line.against_ring - 1:+.0%} time, {title(t)}, {_why_slower(line, t)}" for line, t in slower
    )
    found = f"{len(slower)} of {len(cases)} cases slower{': ' + named if named else ''}"
    return Claim(text, found, all(_has_more_bytes(line, t) for line, t in slower))


def _ring_of(trial: Json) -> Line:
    ring = best(lines_of(trial), "ring")
    assert ring is not None
    return ring


def _has_more_bytes(line: Line, trial: Json) -> bool:
    return line.bound > 1.05 * _ring_of(trial).bound


def _why_slower(line: Line, trial: Json) -> str:
    """As far as the data tell: more bytes, or time that is neither arithmetic nor bytes."""
    if _has_more_bytes(line, trial):
        return f"because its bytes take {line.bound:.3f} s at least, the ring's {_ring_of(trial).bound:.3f} s"
    waits = "" if line.waiting is None else f", of which ranks wait {line.waiting:.0%}"
    return f"because {line.seconds - line.bound:.3f} s of its time{waits} are neither arithmetic nor bytes"


def _step_claim(trials: Sequence[Json], model: str, paper: str) -> Claim:
    text = f"a whole training step of the tiny {model.upper() if model == 'gpt' else 'DiT'}: speed-up over ring"
    parts = []
    for trial in trials:
        if trial["work"]["model"] == model:
            lines = lines_of(trial)
            ring = best(lines, "ring")
            gains = [(line.plan, ring.seconds / line.seconds - 1) for line in lines if ring and "nested" in line.role]
            shown = ", ".join(f"{plan} {gain:+.0%}" for plan, gain in gains)
            parts.append(f"{pressure_text(trial['pressure'])}: {shown}")
    return Claim(text, f"{'; '.join(parts)} (the paper: up to {paper})" if parts else "not measured in this run", None)


def _slow_node_claim(trials: Sequence[Json], machine: str) -> Claim:
    text = "one node's link at half rate: what each loses"
    for trial in trials:
        if not trial["slow_node"]:
            continue
        work = Work(**trial["work"])
        even = [t for t in trials if _is(t, machine, work.kind, trial["pressure"]) and t["work"] == trial["work"]]
        if even:
            before = {line.name: line for line in lines_of(even[0])}
            parts = [
                f"{line.name} {before[line.name].seconds / line.seconds - 1:+.0%}"
                for line in lines_of(trial)
                if line.name in before and line.role != "compute"
            ]
            return Claim(text, "throughput: " + ", ".join(parts), None)
    return Claim(text, "not measured in this run", None)

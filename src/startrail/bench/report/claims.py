"""The benchmark's claims, judged from a recorded report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from startrail.bench.cases import BOUND_BY_LINKS, OURS, PRESSURES, Workload
from startrail.bench.report.findings import (
    CLAIMED,
    Json,
    Line,
    best,
    headline_machine,
    is_emulated,
    lines_of,
    measured_pressure,
    pressure_text,
    title,
)

BYTES_TOLERANCE = 0.03
STEEPEST = PRESSURES[0]
# Peers that split heads over nodes, by way: they send the same bytes as our best plans.
HEAD_SPLITTING_PEERS = {"yunchang across": "yunchang with Ulysses across nodes", "deepspeed": "DeepSpeed's Ulysses"}
PAPER = {"gpt": "+77.12 %", "dit": "+114.33 %"}  # the largest gain over Ring Attention in StarTrail's paper


@dataclass(frozen=True)
class Target:
    """The least throughput of our best plan, relative to the fastest contender of role ``other``: MHA, both masks, on
    links where textbook ring communicates ``pressure`` times as long as it computes."""

    machine: str
    other: str
    least: float
    pressure: float = STEEPEST
    ours: tuple[str, ...] = OURS

    @property
    def name(self) -> str:
        named = {OURS: "best plan of ours", ("nested keep",): "nested with keep"}
        return f"{named.get(self.ours, ' or '.join(self.ours))} against {self.other} >= {self.least}x"


TARGETS: tuple[Target, ...] = (
    Target("4x8", "ring", 3.4),
    Target("8x4", "ring", 5.0),
    Target("16x2", "ring", 8.0),
    Target("4x8", "star", 2.5),
    Target("4x8", "usp", 2.5),
    Target("4x8", "ring", 3.0, BOUND_BY_LINKS),
    Target("4x8", "ring", 2.0, ours=("nested",)),
    Target("4x8", "ring", 2.5, ours=("nested keep",)),
)
SHARES = {"4x8": 0.90, "8x4": 0.85}  # share of its bound that our best plan must reach on the slowest links
MACHINES = {target.machine for target in TARGETS}
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Claim:
    """A claim, the finding, and whether it is met; None if it has no target or was not measured in this run."""

    text: str
    found: str
    met: bool | None


def claims(report: Json) -> list[Claim]:
    """All claims, judged from the data."""
    trials = report["trials"]
    found = [right_claim(trials), _bytes_claim(trials)]
    machine = headline_machine(trials)
    targets, shares = TARGETS, SHARES
    if trials and MACHINES.isdisjoint(
        trial["machine"] for trial in trials
    ):  # the same figures of other machines, unjudged
        claimed = (target for target in TARGETS if (target.machine, target.pressure) == (CLAIMED, STEEPEST))
        targets, shares = tuple(replace(target, machine=machine) for target in claimed), {machine: SHARES[CLAIMED]}
    found += [_ratio_claim(trials, target, mask) for target in targets for mask in MASKS]
    found += [_share_claim(trials, *share, mask) for share in shares.items() for mask in MASKS]
    found += [
        *(_peer_claim(trials, way) for way in HEAD_SPLITTING_PEERS),
        _peers_claim(trials),
        _same_ratios(trials, machine),
    ]
    found += [_compute_claim(trials), _slower_claim(trials), *(_step_claim(trials, model) for model in PAPER)]
    return [*found, _slow_node_claim(trials, machine)]


def _is(trial: Json, machine: str, work: str, pressure: float | None) -> bool:
    same = trial["machine"] == machine and Workload(**trial["work"]).name == work
    return same and trial["pressure"] == pressure and not trial["slow_node"]


def _judged(trials: Sequence[Json], machine: str, mask: str, pressure: float) -> tuple[str, list[Line], bool]:
    """The claim's setting as text, the lines to judge it by, and whether they count.

    They count on a machine of the claims if its ring is measured to be slow enough. Other machines, and real links, show
    their trial with the slowest links.
    """
    alike = [t for t in trials if _is(t, machine, "MHA", t["pressure"]) and Workload(**t["work"]).mask == mask]
    chosen = [t for t in alike if t["pressure"] == pressure]
    if not chosen and (machine not in MACHINES or not all(map(is_emulated, alike))):
        bound = [t for t in alike if (t["pressure"] or 0) >= BOUND_BY_LINKS or not is_emulated(t)]
        chosen = sorted(bound, key=lambda trial: trial["pressure"] or 0)[-1:]
    where = f"{machine}, MHA, {mask}"
    if not chosen:
        return f"{where}, {pressure_text(pressure)}", [], False
    lines = lines_of(chosen[0])
    measured = measured_pressure(lines)
    if measured is None:
        return f"{where}, {pressure_text(pressure)}", lines, False
    counts = machine in MACHINES and is_emulated(chosen[0]) and measured >= 0.75 * pressure
    return f"{where}, ring measured at {measured:.1f}x its compute", lines, counts


def _best_of_ours(lines: Sequence[Line], roles: Sequence[str] = OURS) -> Line | None:
    """The fastest plan of ours among those that were repeated most: a single fast repeat proves nothing."""
    ours = [line for line in lines if line.role in roles]
    most = max((line.repeats for line in ours), default=0)
    return best((line for line in ours if line.repeats == most), *roles)


def _ratio_claim(trials: Sequence[Json], target: Target, mask: str) -> Claim:
    where, lines, judged = _judged(trials, target.machine, mask, target.pressure)
    text = f"{where}: {target.name}"
    ours, theirs = _best_of_ours(lines, target.ours), best(lines, target.other)
    if ours is None or theirs is None:
        return Claim(text, "not measured in this run", None)
    ratio = theirs.seconds / ours.seconds
    found = f"{ratio:.2f}x ({ours.plan} {ours.seconds:.3f} s, {theirs.name} {theirs.seconds:.3f} s)"
    return Claim(text, found, ratio >= target.least if judged else None)


def _share_claim(trials: Sequence[Json], machine: str, least: float, mask: str) -> Claim:
    where, lines, judged = _judged(trials, machine, mask, STEEPEST)
    text = f"{where}: best plan of ours reaches >= {least:.0%} of its bound"
    ours = _best_of_ours(lines)
    if ours is None:
        return Claim(text, "not measured in this run", None)
    share = ours.share_of_bound
    found = f"{share:.0%} ({ours.plan}: {ours.seconds:.3f} s, bound {ours.bound:.3f} s)"
    return Claim(text, found, share >= least if judged else None)


def right_claim(trials: Sequence[Json]) -> Claim:
    text = "every plan of ours gives the results of one process"
    rows = [(row, t) for t in trials for row in t["rows"] if row["way"] == "plan"]
    if not rows:
        return Claim(text, "not measured in this run", None)
    wrong = [f"{row['plan']}, {title(t)}: {row['refused']}" for row, t in rows if row["refused"]]
    return Claim(text, "; ".join(wrong) or f"all of {len(rows)} cases", not wrong)


def _bytes_claim(trials: Sequence[Json]) -> Claim:
    text = f"bytes on every node's link within {BYTES_TOLERANCE:.0%} of the closed form, for every plan of ours"
    ours = [(line, t) for t in trials for line in lines_of(t) if line.way == "plan"]
    off = [(line.bytes_off, line, t) for line, t in ours if line.bytes_off is not None]
    if not off:
        return Claim(text, "link counters could not be read in this run", None)
    worst, line, trial = max(off, key=lambda item: abs(item[0]))
    found = f"{len(off)} cases, worst {worst:+.1%}: {line.name} ({line.plan}), {title(trial)}"
    return Claim(text, found, abs(worst) <= BYTES_TOLERANCE)


def _peer_claim(trials: Sequence[Json], way: str) -> Claim:
    """Judged on emulated links, on every machine and at every rate at which the peer took part."""
    text = f"best plan of ours no slower than {HEAD_SPLITTING_PEERS[way]} on the same work"
    ratios, texts = [], []
    for trial in trials:
        lines = lines_of(trial)
        ours = _best_of_ours(lines)
        for theirs in (line for line in lines if line.way == way and ours):
            assert ours is not None
            ratio = theirs.seconds / ours.seconds
            ratios += [ratio] if is_emulated(trial) else []
            texts.append(f"{_short_title(trial)}: {ratio:.2f}x ({ours.plan})")
    return Claim(text, "; ".join(texts) or "not measured in this run", min(ratios) >= 1 if ratios else None)


def _peers_claim(trials: Sequence[Json]) -> Claim:
    texts = []
    for trial in trials:
        if not _is(trial, trial["machine"], "MHA", BOUND_BY_LINKS):
            continue
        lines = lines_of(trial)
        ours = _best_of_ours(lines)
        peers = [line for line in lines if line.role == "peer" and line.way not in HEAD_SPLITTING_PEERS]
        ratios = [f"{line.name} {line.seconds / ours.seconds:.2f}x" for line in peers if ours]
        if ratios:
            texts.append(f"{trial['machine']}, {Workload(**trial['work']).mask}: {', '.join(ratios)}")
    text = (
        f"best plan of ours against the other peers' own code, {pressure_text(BOUND_BY_LINKS)} (some with one repeat)"
    )
    return Claim(text, "; ".join(texts) or "not measured in this run", None)


def _same_ratios(trials: Sequence[Json], machine: str) -> Claim:
    texts = []
    for trial in trials:
        if trial["pressure"] in PRESSURES and _is(trial, machine, "MHA", trial["pressure"]):
            lines = lines_of(trial)
            ring, ours, kept = best(lines, "ring"), _best_of_ours(lines), best(lines, "nested keep")
            if ring and ours:
                nested = f", nested with keep {ring.seconds / kept.seconds:.2f}x" if kept else ""
                measured = f"measured at {measured_pressure(lines):.1f}x"
                texts.append(
                    f"{_short_title(trial)}, {measured}: {ours.plan} {ring.seconds / ours.seconds:.2f}x{nested}"
                )
    return Claim(f"{machine}: best plan of ours against ring at every rate", "; ".join(texts) or "not measured", None)


def _short_title(trial: Json) -> str:
    """
    >>> from startrail.bench.cases import MHA
    >>> _short_title({"machine": "4x8", "work": vars(MHA), "pressure": 8.0, "slow_node": False})
    '4x8 MHA full 8x'
    """
    work, pressure = Workload(**trial["work"]), trial["pressure"]
    slow = " slow node" if trial["slow_node"] else ""
    return f"{trial['machine']} {work.name} {work.mask} {'not limited' if pressure is None else f'{pressure:g}x'}{slow}"


def _compute_claim(trials: Sequence[Json]) -> Claim:
    text = "at least 80 % of compute alone when the network is not limited and N = 16,384"
    for trial in trials:
        if trial["pressure"] is None and is_emulated(trial) and trial["work"]["length"] == 16_384:
            ours = _best_of_ours(lines_of(trial))
            if ours:
                share = ours.share_of_bound
                return Claim(text, f"{share:.0%} ({ours.plan}, {trial['machine']})", share >= 0.8)
    return Claim(text, "not measured in this run", None)


def _slower_claim(trials: Sequence[Json]) -> Claim:
    """Also met if a plan is slower because of its bytes; not met if the reason is unknown."""
    text = "no plan of ours slower than the fastest flat ring by more than 5 % at any rate, or the reason is named"
    cases = [(line, t) for t in trials for line in lines_of(t) if line.role in OURS and line.against_ring]
    if not cases:
        return Claim(text, "not measured in this run", None)
    slower = [(line, t) for line, t in cases if line.against_ring and line.against_ring < 1 / 1.05]
    named = "; ".join(
        f"{line.plan} {line.seconds / _ring_of(t).seconds - 1:+.0%} time, {title(t)}, {_slower_reason(line, t)}"
        for line, t in slower
    )
    found = f"{len(slower)} of {len(cases)} cases slower{': ' + named if named else ''}"
    return Claim(text, found, all(_has_more_bytes(line, t) for line, t in slower))


def _ring_of(trial: Json) -> Line:
    ring = best(lines_of(trial), "ring")
    assert ring is not None
    return ring


def _has_more_bytes(line: Line, trial: Json) -> bool:
    return line.bound > 1.05 * _ring_of(trial).bound


def _slower_reason(line: Line, trial: Json) -> str:
    """The reason in the data: more bytes, or time that is neither arithmetic nor bytes."""
    if _has_more_bytes(line, trial):
        return f"because its bytes take at least {line.bound:.3f} s, the ring's {_ring_of(trial).bound:.3f} s"
    waits = "" if line.waiting is None else f", of which ranks wait {line.waiting:.0%}"
    return f"because {line.seconds - line.bound:.3f} s of its time{waits} are neither arithmetic nor bytes"


def _step_claim(trials: Sequence[Json], model: str) -> Claim:
    text = f"a whole training step of the tiny {'GPT' if model == 'gpt' else 'DiT'}: best plan's speed-up over ring"
    texts = []
    for trial in trials:
        if trial["work"]["model"] == model:
            lines = lines_of(trial)
            ring, ours = best(lines, "ring"), _best_of_ours(lines)
            if ring and ours:
                gain, times = ring.seconds / ours.seconds - 1, f"{ours.seconds:.3f} s, ring {ring.seconds:.3f} s"
                where = f"{trial['machine']}, {pressure_text(trial['pressure'])}"
                texts.append(f"{where}: {ours.plan} {gain:+.1%} ({times})")
    found = f"{'; '.join(texts)} (the paper: up to {PAPER[model]})" if texts else "not measured in this run"
    return Claim(text, found, None)


def _slow_node_claim(trials: Sequence[Json], machine: str) -> Claim:
    text = "one node's link at half rate: loss of each contender"
    for trial in trials:
        if not trial["slow_node"]:
            continue
        work = Workload(**trial["work"])
        even = [t for t in trials if _is(t, machine, work.name, trial["pressure"]) and t["work"] == trial["work"]]
        if even:
            before = {line.name: line for line in lines_of(even[0])}
            texts = [
                f"{line.name} {before[line.name].seconds / line.seconds - 1:+.0%}"
                for line in lines_of(trial)
                if line.name in before and line.role != "compute"
            ]
            return Claim(text, "throughput: " + ", ".join(texts), None)
    return Claim(text, "not measured in this run", None)

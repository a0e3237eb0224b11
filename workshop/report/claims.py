"""The benchmark's claims, judged from a recorded report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from startrail.bench.yardstick import Json, Workload
from workshop.report.findings import (
    CLAIMED,
    Line,
    best,
    headline_machine,
    is_emulated,
    lines_of,
    measured_pressure,
    pressure_text,
    title,
)
from workshop.trials.cases import BOUND_BY_LINKS, OURS, PRESSURES

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
        named = {OURS: "our best plan", ("nested keep",): "nested with keep"}
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
    found: str = "not measured in this run"
    met: bool | None = None


def claims(report: Json) -> list[Claim]:
    """All claims, judged from the data."""
    trials = report["trials"]
    machine = headline_machine(trials)
    targets, shares = TARGETS, SHARES
    if trials and MACHINES.isdisjoint(t["machine"] for t in trials):  # the same figures of other machines, unjudged
        claimed = (target for target in TARGETS if (target.machine, target.pressure) == (CLAIMED, STEEPEST))
        targets, shares = tuple(replace(target, machine=machine) for target in claimed), {machine: SHARES[CLAIMED]}
    return [
        right_claim(trials),
        _bytes_claim(trials),
        *(_ratio_claim(trials, target, mask) for target in targets for mask in MASKS),
        *(_share_claim(trials, *share, mask) for share in shares.items() for mask in MASKS),
        *(_peer_claim(trials, way) for way in HEAD_SPLITTING_PEERS),
        _peers_claim(trials),
        _rates_claim(trials, machine),
        _compute_claim(trials),
        _slower_claim(trials),
        *(_step_claim(trials, model) for model in PAPER),
        _slow_node_claim(trials, machine),
    ]


def _is_mha(trial: Json, machine: str) -> bool:
    return trial["machine"] == machine and Workload(**trial["work"]).name == "MHA" and not trial["slow_node"]


def _judged(trials: Sequence[Json], machine: str, mask: str, pressure: float) -> tuple[str, list[Line], bool]:
    """The claim's setting as text, the lines to judge it by, and whether they count.

    They count on a machine of the claims if its ring is slow enough. Other machines, and real links, show
    their trial with the slowest links.
    """
    alike = [t for t in trials if _is_mha(t, machine) and Workload(**t["work"]).mask == mask]
    chosen = [t for t in alike if t["pressure"] == pressure]
    if not chosen and (machine not in MACHINES or not all(map(is_emulated, alike))):
        bound = [t for t in alike if (t["pressure"] or 0) >= BOUND_BY_LINKS or not is_emulated(t)]
        chosen = sorted(bound, key=lambda trial: trial["pressure"] or 0)[-1:]
    where, lines = f"{machine}, MHA, {mask}", lines_of(chosen[0]) if chosen else []
    measured = measured_pressure(lines)
    if measured is None:
        return f"{where}, {pressure_text(pressure)}", lines, False
    counts = machine in MACHINES and is_emulated(chosen[0]) and measured >= 0.75 * pressure
    return f"{where}, ring measured at {measured:.1f}x its compute", lines, counts


def best_of_ours(lines: Sequence[Line], roles: Sequence[str] = OURS) -> Line | None:
    """The our fastest plan among those that were repeated most: a single fast repeat proves nothing."""
    most = max((line.repeats for line in lines if line.role in roles), default=0)
    return best((line for line in lines if line.repeats == most), *roles)


def with_ours(trials: Sequence[Json]) -> Iterator[tuple[Json, list[Line], Line]]:
    """Each trial that has a plan of ours, its lines, and the our best plan."""
    for trial in trials:
        lines = lines_of(trial)
        if ours := best_of_ours(lines):
            yield trial, lines, ours


def _with_ring(trials: Sequence[Json]) -> Iterator[tuple[Json, list[Line], Line, Line]]:
    """The same for trials that have a ring too, with the fastest ring."""
    for trial, lines, ours in with_ours(trials):
        if ring := best(lines, "ring"):
            yield trial, lines, ours, ring


def _shown(text: str, findings: Sequence[str]) -> Claim:
    """A claim without a target."""
    return Claim(text, "; ".join(findings)) if findings else Claim(text)


def _ratio_claim(trials: Sequence[Json], target: Target, mask: str) -> Claim:
    where, lines, judged = _judged(trials, target.machine, mask, target.pressure)
    text = f"{where}: {target.name}"
    ours, theirs = best_of_ours(lines, target.ours), best(lines, target.other)
    if ours is None or theirs is None:
        return Claim(text)
    ratio = theirs.seconds / ours.seconds
    found = f"{ratio:.2f}x ({ours.plan} {ours.seconds:.3f} s, {theirs.name} {theirs.seconds:.3f} s)"
    return Claim(text, found, ratio >= target.least if judged else None)


def _share_claim(trials: Sequence[Json], machine: str, least: float, mask: str) -> Claim:
    where, lines, judged = _judged(trials, machine, mask, STEEPEST)
    text = f"{where}: our best plan reaches >= {least:.0%} of its bound"
    ours = best_of_ours(lines)
    if ours is None:
        return Claim(text)
    found = f"{ours.share_of_bound:.0%} ({ours.plan}: {ours.seconds:.3f} s, bound {ours.bound:.3f} s)"
    return Claim(text, found, ours.share_of_bound >= least if judged else None)


def right_claim(trials: Sequence[Json]) -> Claim:
    text = "all our plans match the results of one process"
    rows = [(row, t) for t in trials for row in t["rows"] if row["way"] == "plan"]
    wrong = [f"{row['plan']}, {title(t)}: {row['refused']}" for row, t in rows if row["refused"]]
    return Claim(text, "; ".join(wrong) or f"all of {len(rows)} cases", not wrong) if rows else Claim(text)


def _bytes_claim(trials: Sequence[Json]) -> Claim:
    text = f"bytes on every node's link within {BYTES_TOLERANCE:.0%} of the closed form, for all our plans"
    ours = [(line, t) for t in trials for line in lines_of(t) if line.way == "plan"]
    off = [(line.bytes_off, line, t) for line, t in ours if line.bytes_off is not None]
    if not off:
        return Claim(text)  # no link counters here
    worst, line, trial = max(off, key=lambda item: abs(item[0]))
    found = f"{len(off)} cases, worst {worst:+.1%}: {line.name} ({line.plan}), {title(trial)}"
    return Claim(text, found, abs(worst) <= BYTES_TOLERANCE)


def _peer_claim(trials: Sequence[Json], way: str) -> Claim:
    """Judged on emulated links, on every machine and at every rate at which the peer took part."""
    compared = [
        (trial, ours, line.seconds / ours.seconds)
        for trial, lines, ours in with_ours(trials)
        for line in lines
        if line.way == way
    ]
    shown = _shown(
        f"our best plan is no slower than {HEAD_SPLITTING_PEERS[way]} on the same work",
        [f"{_short_title(trial)}: {ratio:.2f}x ({ours.plan})" for trial, ours, ratio in compared],
    )
    ratios = [ratio for trial, _, ratio in compared if is_emulated(trial)]
    return replace(shown, met=min(ratios) >= 1 if ratios else None)


def _peers_claim(trials: Sequence[Json]) -> Claim:
    texts = []
    for trial, lines, ours in with_ours(trials):
        peers = [line for line in lines if line.role == "peer" and line.way not in HEAD_SPLITTING_PEERS]
        if peers and trial["pressure"] == BOUND_BY_LINKS and _is_mha(trial, trial["machine"]):
            ratios = ", ".join(f"{line.name} {line.seconds / ours.seconds:.2f}x" for line in peers)
            texts.append(f"{trial['machine']}, {Workload(**trial['work']).mask}: {ratios}")
    rate = pressure_text(BOUND_BY_LINKS)
    return _shown(f"our best plan against the other peers' own code, {rate} (some with one repeat)", texts)


def _rates_claim(trials: Sequence[Json], machine: str) -> Claim:
    texts = []
    for trial, lines, ours, ring in _with_ring(trials):
        if trial["pressure"] in PRESSURES and _is_mha(trial, machine):
            kept = best(lines, "nested keep")
            nested = f", nested with keep {ring.seconds / kept.seconds:.2f}x" if kept else ""
            where = f"{_short_title(trial)}, measured at {measured_pressure(lines):.1f}x"
            texts.append(f"{where}: {ours.plan} {ring.seconds / ours.seconds:.2f}x{nested}")
    return _shown(f"{machine}: our best plan against ring at every rate", texts)


def _short_title(trial: Json) -> str:
    """
    >>> from workshop.trials.cases import MHA
    >>> _short_title({"machine": "4x8", "work": vars(MHA), "pressure": 8.0, "slow_node": False})
    '4x8 MHA full 8x'
    """
    work, pressure = Workload(**trial["work"]), trial["pressure"]
    slow = " slow node" if trial["slow_node"] else ""
    return f"{trial['machine']} {work.name} {work.mask} {'not limited' if pressure is None else f'{pressure:g}x'}{slow}"


def _compute_claim(trials: Sequence[Json]) -> Claim:
    text = "at least 80 % of compute alone when the network is not limited and N = 16,384"
    for trial, _, ours in with_ours(trials):
        if trial["pressure"] is None and is_emulated(trial) and trial["work"]["length"] == 16_384:
            share = ours.share_of_bound
            return Claim(text, f"{share:.0%} ({ours.plan}, {trial['machine']})", share >= 0.8)
    return Claim(text)


def _slower_claim(trials: Sequence[Json]) -> Claim:
    """Also met if a plan is slower because of its bytes; not met if its time is neither arithmetic nor bytes."""
    text = "none of our plans is more than 5 % slower than the fastest flat ring at any rate, or the reason is named"
    cases = [(trial, line, ring) for trial, lines, _, ring in _with_ring(trials) for line in lines if line.role in OURS]
    if not cases:
        return Claim(text)
    named, met = [], True
    for trial, line, ring in cases:
        if line.seconds <= 1.05 * ring.seconds:
            continue
        if line.bound > 1.05 * ring.bound:
            reason = f"its bytes take at least {line.bound:.3f} s, the ring's {ring.bound:.3f} s"
        else:
            met = False
            waits = "" if line.waiting is None else f", of which ranks wait {line.waiting:.0%}"
            reason = f"{line.seconds - line.bound:.3f} s of its time{waits} are neither arithmetic nor bytes"
        named.append(f"{line.plan} {line.seconds / ring.seconds - 1:+.0%} time, {title(trial)}, because {reason}")
    return Claim(text, f"{len(named)} of {len(cases)} cases slower{': ' if named else ''}{'; '.join(named)}", met)


def _step_claim(trials: Sequence[Json], model: str) -> Claim:
    texts = [
        f"{trial['machine']}, {pressure_text(trial['pressure'])}: {ours.plan} {ring.seconds / ours.seconds - 1:+.1%} "
        f"({ours.seconds:.3f} s, ring {ring.seconds:.3f} s)"
        for trial, _, ours, ring in _with_ring(trials)
        if trial["work"]["model"] == model
    ]
    text = f"a whole training step of the tiny {'GPT' if model == 'gpt' else 'DiT'}: best plan's speed-up over ring"
    return Claim(text, f"{'; '.join(texts)} (the paper: up to {PAPER[model]})") if texts else Claim(text)


def _slow_node_claim(trials: Sequence[Json], machine: str) -> Claim:
    text = "one node's link at half rate: loss of each contender"
    for slow in (trial for trial in trials if trial["slow_node"]):
        for even in trials:
            same = all(even[key] == slow[key] for key in ("work", "pressure"))
            if same and even["machine"] == machine and not even["slow_node"]:
                before = {line.name: line.seconds for line in lines_of(even) if line.role != "compute"}
                lines = [line for line in lines_of(slow) if line.name in before]
                losses = ", ".join(f"{line.name} {before[line.name] / line.seconds - 1:+.0%}" for line in lines)
                return Claim(text, f"throughput: {losses}")
    return Claim(text)

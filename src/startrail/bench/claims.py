"""From numbers to verdicts: everything that the benchmark is there to show, judged from a recorded report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail.bench.cases import BOUND_BY_LINKS, PRESSURES, Work
from startrail.bench.findings import (
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

BYTES_WITHIN = 0.03


@dataclass(frozen=True)
class Claim:
    """A thing that must be shown, what was found, and whether it holds; None where it is a finding without a target
    or was not measured in this run."""

    text: str
    found: str
    met: bool | None


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


def _is(trial: Json, machine: str, work: str, pressure: float | None) -> bool:
    same = trial["machine"] == machine and Work(**trial["work"]).name == work
    return same and trial["pressure"] == pressure and not trial["slow_node"]


def _most_bound(trials: Sequence[Json], machine: str, mask: str) -> Json | None:
    """The MHA trial whose links are most of a limit, if they are a limit at all; on real links, what there is."""
    bound = [t for t in trials if (t["pressure"] or 0) >= BOUND_BY_LINKS or not is_emulated(t)]
    alike = [t for t in bound if _is(t, machine, "MHA", t["pressure"]) and Work(**t["work"]).mask == mask]
    return max(alike, key=lambda trial: trial["pressure"] or 0, default=None)


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
    texts = []
    for trial in trials:
        if not _is(trial, trial["machine"], "MHA", BOUND_BY_LINKS):
            continue
        lines = lines_of(trial)
        ours = best(lines, "nested")
        peers = [line for line in lines if line.way not in ("plan", "compute", "textbook ring")]
        ratios = [f"{line.name} {line.seconds / ours.seconds:.2f}x" for line in peers if ours]
        if ratios:
            texts.append(f"{trial['machine']}, {Work(**trial['work']).mask}: {', '.join(ratios)}")
    text = f"nested without keep against the peers' own code, {pressure_text(BOUND_BY_LINKS)} (some with one repeat)"
    return Claim(text, "; ".join(texts) or "not measured in this run", None)


def _same_ratios(trials: Sequence[Json], machine: str) -> Claim:
    texts = []
    for trial in trials:
        pressure = trial["pressure"]
        if pressure in PRESSURES and _is(trial, machine, "MHA", pressure):
            lines = lines_of(trial)
            rings, ours, kept = (best(lines, role) for role in ("ring", "nested", "nested keep"))
            if rings and ours and kept:
                mask = "causal" if trial["work"]["causal"] else "full"
                ratios = f"{rings.seconds / ours.seconds:.2f}x, with keep {rings.seconds / kept.seconds:.2f}x"
                found = measured_pressure(lines)
                texts.append(f"{mask}, ring for {pressure:g}x, measured at {found:.1f}x its compute: {ratios}")
    return Claim("nested against ring at every rate", "; ".join(texts) or "not measured", None)


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
    slower = [(line, t) for line, t in cases if line.against_ring and line.against_ring < 1 / 1.05]
    named = "; ".join(
        f"{line.plan} {line.seconds / _ring_of(t).seconds - 1:+.0%} time, {title(t)}, {_why_slower(line, t)}"
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


def _why_slower(line: Line, trial: Json) -> str:
    """As far as the data tell: more bytes, or time that is neither arithmetic nor bytes."""
    if _has_more_bytes(line, trial):
        return f"because its bytes take {line.bound:.3f} s at least, the ring's {_ring_of(trial).bound:.3f} s"
    waits = "" if line.waiting is None else f", of which ranks wait {line.waiting:.0%}"
    return f"because {line.seconds - line.bound:.3f} s of its time{waits} are neither arithmetic nor bytes"


def _step_claim(trials: Sequence[Json], model: str, paper: str) -> Claim:
    text = f"a whole training step of the tiny {model.upper() if model == 'gpt' else 'DiT'}: speed-up over ring"
    texts = []
    for trial in trials:
        if trial["work"]["model"] == model:
            lines = lines_of(trial)
            ring = best(lines, "ring")
            gains = [(line.plan, ring.seconds / line.seconds - 1) for line in lines if ring and "nested" in line.role]
            shown = ", ".join(f"{plan} {gain:+.0%}" for plan, gain in gains)
            texts.append(f"{pressure_text(trial['pressure'])}: {shown}")
    return Claim(text, f"{'; '.join(texts)} (the paper: up to {paper})" if texts else "not measured in this run", None)


def _slow_node_claim(trials: Sequence[Json], machine: str) -> Claim:
    text = "one node's link at half rate: what each loses"
    for trial in trials:
        if not trial["slow_node"]:
            continue
        work = Work(**trial["work"])
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

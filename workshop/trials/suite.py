"""The benchmark: every contender on the same work, on every machine, and the report.

On one machine it emulates a cluster for every shape. Under torchrun it measures the ranks and links of the job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from startrail.bench.yardstick import Json
from startrail.cli.bench import MACHINES
from startrail.launch.heartbeat import WaitLimit
from startrail.launch.torchrun import JoinError, device_of_rank, join
from startrail.planner.topology import Machine
from workshop.lab.cluster import available
from workshop.lab.job import JobError
from workshop.report.claims import claims, right_claim
from workshop.report.findings import measured_trial, pressure_text
from workshop.report.page import metadata, write
from workshop.trials.cases import Contender, Trial, limited_trials, unlimited_trials
from workshop.trials.measure import Outcome, run_on_cluster, run_on_group, unsupported_reason

START_SECONDS = 15.0  # per machine
PREPARE_SECONDS = 2.3  # per contender and work
JOIN_SECONDS = 600.0  # for the ranks of torchrun to start, however little time there is to measure
OUT_OF_TIME = "out of time (--minutes)"


def run(options: argparse.Namespace) -> int:
    if not options.minutes > 0:
        raise ValueError(f"--minutes {options.minutes:g} is not a positive number")
    torch.set_num_threads(1)
    started = time.time()
    if os.environ.get("RANK", "0") == "0":
        try:
            options.out.mkdir(parents=True, exist_ok=True)  # before measuring: a wrong path fails at the start
        except OSError as error:
            raise ValueError(f"--out {options.out}: {error.strerror}") from None
    if options.again:
        try:
            report = json.loads(options.again.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--again {options.again}: {error}") from None
    elif "WORLD_SIZE" in os.environ:
        try:
            report = measure_group(options.quick, 60 * options.minutes)
        except JoinError as error:
            print(f"startrail bench: {error}", file=sys.stderr)
            return 1
        if report is None:
            end_group()  # rank 0 writes the report
            return 0
    else:
        if reason := available():
            print(f"startrail bench: {reason}", file=sys.stderr)
            return 1
        machines = [Machine.parse(text) for text in options.shapes or (["4x4"] if options.quick else MACHINES)]
        report = measure_clusters(machines, options.quick, 60 * options.minutes)
    if not options.again:
        given = [f"{key}={value}" for key in ("quick", "shapes", "minutes") if (value := getattr(options, key))]
        report = {"meta": metadata(given, started), **report}
    try:
        write(report, options.out)
    except (AttributeError, KeyError, TypeError):
        if not options.again:
            raise
        raise ValueError(f"--again {options.again}: not a report of this benchmark") from None
    for claim in claims(report):
        print(f"{ {True: 'met', False: 'NOT MET', None: '-'}[claim.met]:8s} {claim.text}: {claim.found}")
    for failure in report.get("failed", []):
        print(f"FAILED   {failure}", file=sys.stderr)
    print(f"\n{options.out / 'report.html'}")
    if dist.is_initialized():
        end_group()
    return 1 if report.get("failed") or right_claim(report["trials"]).met is False else 0


def measure_clusters(machines: Sequence[Machine], quick: bool, seconds: float) -> Json:
    found: Json = {"trials": [], "left_out": [], "failed": []}
    plan = []
    for machine in machines:
        shape = machine.nodes, machine.ranks_per_node
        for limited, trials in ((True, limited_trials(*shape, quick)), (False, unlimited_trials(*shape, quick))):
            if trials:
                plan.append((machine, limited, fitting(machine, trials, found["left_out"])))
    plan.sort(key=lambda entry: not entry[1])  # trials that no claim about links needs come last
    planned = [planned_seconds(trials) for _, _, trials in plan]
    bar = ProgressBar(sum(planned))
    start, out_of_time = time.monotonic(), OUT_OF_TIME
    for number, (machine, limited, trials) in enumerate(plan):
        done: list[Sequence[Outcome]] = []
        reason = out_of_time
        # a machine that takes too long shortens the later ones in proportion, so that every machine gets its turn
        end = start + seconds * sum(planned[: number + 1]) / sum(planned)
        if (left := end - time.monotonic()) > 0:
            try:
                by_rank = run_on_cluster(machine, trials, bar.in_trial(machine, trials), limited, left)
                done = list(zip(*by_rank, strict=True))
            except JobError as error:
                reason = str(error)
                found["failed"].append(f"{machine}: {error}")
            except KeyboardInterrupt:
                reason = out_of_time = "interrupted"
                seconds = 0.0
                found["failed"].append(f"{machine}: interrupted; the report has the machines before it")
        found["trials"] += [measured_trial(machine, trial, row) for trial, row in zip(trials, done, strict=False)]
        found["left_out"] += [unmeasured(machine, trial, reason) for trial in trials[len(done) :]]
        bar.done(trials)
    return found


def planned_seconds(trials: Sequence[Trial]) -> float:
    """Expected time of these trials on two quiet cores, with connecting and checking the results."""
    prepared = {(contender, trial.work) for trial in trials for contender in trial.contenders}
    return START_SECONDS + PREPARE_SECONDS * len(prepared) + sum(trial.seconds for trial in trials)


def unmeasured(machine: Machine, trial: Trial, reason: str) -> Json:
    where = f"{machine} {trial.work}, {pressure_text(trial.pressure)}"
    return {"name": "all contenders", "where": where, "why": reason}


def measure_group(quick: bool, seconds: float) -> Json | None:
    """Measure the ranks of torchrun. Their link rates cannot be set, so every workload runs once."""
    join(device_of_rank("auto"), WaitLimit(JOIN_SECONDS, "startrail bench"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = Machine(dist.get_world_size() // ranks, ranks)
    left_out: list[Json] = []
    every = [*limited_trials(machine.nodes, ranks, quick), *unlimited_trials(machine.nodes, ranks, quick)]
    once = {trial.work: replace(trial, pressure=None, slow_node=False) for trial in reversed(every)}
    trials = fitting(machine, list(once.values()), left_out)
    by_rank = run_on_group(machine, trials, seconds)
    if dist.get_rank():
        return None
    done = list(zip(*by_rank, strict=True))
    records = [measured_trial(machine, trial, row) for trial, row in zip(trials, done, strict=False)]
    left_out += [unmeasured(machine, trial, OUT_OF_TIME) for trial in trials[len(done) :]]
    return {"trials": records, "left_out": left_out, "failed": []}


def end_group() -> None:
    """Leave together, because torchrun kills all ranks when one fails at exit."""
    dist.barrier()
    dist.destroy_process_group()


def fitting(machine: Machine, trials: Sequence[Trial], left_out: list[Json]) -> list[Trial]:
    """Trials with the contenders that can do the work; the others go to ``left_out`` with the reason."""
    fitted = []
    for trial in trials:
        reasons = {contender: unsupported_reason(contender, machine, trial.work) for contender in trial.contenders}
        where = f"{machine} {trial.work.name} {trial.work.mask}"
        left_out += [{"name": c.name, "where": where, "why": reason} for c, reason in reasons.items() if reason]
        able = tuple(contender for contender, reason in reasons.items() if not reason)
        fitted.append(replace(trial, contenders=_without_duplicates(able)))
    return fitted


def _without_duplicates(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """Run the same plan once. On two nodes our plan is USP's; ours stays, because the claims need its role."""
    by_plan: dict[tuple[str, str, bool], Contender] = {}
    for contender in contenders:
        key = contender.way, contender.plan or contender.way, contender.across
        if duplicate := by_plan.get(key):
            contender = replace(contender, name=f"{contender.name} = {duplicate.name}")
        by_plan[key] = contender
    return tuple(by_plan.values())


class ProgressBar:
    """Progress in planned seconds. Without a terminal, it prints one line per trial."""

    def __init__(self, total: float) -> None:
        self.total, self.before, self.start, self.last = total, 0.0, time.monotonic(), ""

    def in_trial(self, machine: Machine, trials: Sequence[Trial]):  # type: ignore[no-untyped-def]
        def show(number: int, text: str) -> None:
            so_far, trial = self.before + planned_seconds(trials[:number]), trials[number]
            self.draw(so_far, f"{machine} {trial.work.name} {trial.work.mask}, {pressure_text(trial.pressure)}", text)

        return show

    def done(self, trials: Sequence[Trial]) -> None:
        self.before += planned_seconds(trials)
        self.draw(self.before, "", "")

    def draw(self, so_far: float, trial: str, text: str) -> None:
        if sys.stderr.isatty():
            filled = int(30 * so_far / self.total)
            line = f"\r[{'#' * filled:.<30s}] {trial}: {text}"
            print(f"{line[:118]:118s}", end="" if so_far < self.total else "\n", file=sys.stderr, flush=True)
        elif trial and trial != self.last:
            print(f"{time.monotonic() - self.start:5.0f} s  {trial}", file=sys.stderr, flush=True)
            self.last = trial

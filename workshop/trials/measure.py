"""Runs trials: one set of ranks per machine, contenders in turn, link rates changed while the ranks run.

Starting and connecting 32 ranks takes longer than most trials, so ranks are forked once per machine. Only the process
that built the cluster can change its links; rank 0 asks it to, through a pipe made before the fork.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from startrail import SequenceParallel
from startrail.agreement.gather import gather_texts
from startrail.bench.yardstick import Workload, own_device
from startrail.planner.auto import plan_for_heads
from startrail.planner.live.choose import choose
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan, PlanError
from workshop.lab.cluster import Cluster, own_link_bytes
from workshop.peers.contenders import (
    AttentionRunner,
    ComputeOnly,
    DeepSpeed,
    PlanRunner,
    TextbookRing,
    TorchRing,
    deepspeed,
    make_data,
)
from workshop.peers.flash import RingFlash, Yunchang, ring_flash_attn, yunchang
from workshop.trials.cases import AUTO, BRIEF, COMPUTE, Contender, Trial, lab_cluster
from workshop.trials.links import piece_sizes, rate_for, ring_bytes
from workshop.trials.models import StepRunner, expected_results

FAST_RATE = 2_000_000_000  # bit/s, while nothing is timed
WARM_UP = 4
TRIAL_SECONDS = 400.0  # for the start, and the trial that is running when time is up
START_SECONDS = 0.1  # for the broadcast of rank 0's start time
RUNNERS: dict[str, type[AttentionRunner]] = {
    "plan": PlanRunner,
    "compute": ComputeOnly,
    "textbook ring": TextbookRing,
    "torch ring": TorchRing,
    "torch gather": TorchRing,
    "ring-flash-attn": RingFlash,
    "yunchang": Yunchang,
    "yunchang across": Yunchang,
    "deepspeed": DeepSpeed,
}
# Peers that must be installed, by way: the module, and the function that imports it.
PACKAGES: dict[str, tuple[str, Callable[[], object]]] = {
    "ring-flash-attn": ("ring_flash_attn", ring_flash_attn),
    "yunchang": ("yunchang", yunchang),
    "yunchang across": ("yunchang", yunchang),
    "deepspeed": ("deepspeed", deepspeed),
}
UNPADDED = tuple(way for way in RUNNERS if way not in ("plan", "compute"))


@dataclass
class Sample:
    """One repeat of one contender on one rank; bytes are those of its node's link, where they can be read."""

    seconds: float
    waiting: float | None
    sent: int | None
    received: int | None


@dataclass
class Outcome:
    """Measurements of one rank in one trial. ``refused`` maps contenders that failed or were wrong, which are not
    timed, to the reason. ``auto`` is the plan that ``auto`` chose, if it took part."""

    rates: list[int | None]
    samples: dict[str, list[Sample]]
    refused: dict[str, str]
    auto: str = ""

    @staticmethod
    def parse(fields: dict[str, Any]) -> Outcome:
        samples = {name: [Sample(**each) for each in repeats] for name, repeats in fields["samples"].items()}
        return Outcome(**fields | {"samples": samples})


class DataByWork(dict[Workload, Any]):
    """Inputs and expected results of workloads, each made when it is first used."""

    def __missing__(self, work: Workload) -> Any:
        self[work] = expected_results(work) if work.model else make_data(work)
        return self[work]


def prepare_data(trials: Sequence[Trial]) -> DataByWork:
    """The data of all workloads, made once and shared with the forked ranks."""
    data = DataByWork()
    for trial in trials:
        data[trial.work]
    return data


def make_runner(contender: Contender, machine: Machine, work: Workload, data: Any) -> AttentionRunner | StepRunner:
    if work.model:
        return StepRunner(contender, machine, work, data)
    return RUNNERS[contender.way](contender, machine, work, data)


def unsupported_reason(contender: Contender, machine: Machine, work: Workload) -> str | None:
    """The reason why a contender cannot do this work here, or None; checked before any rank starts."""
    if work.model and contender.way not in ("plan", "textbook ring"):
        return f"{contender.name} has no adapter for whole models"
    if work.call.is_sparse and contender.way not in ("plan", "compute"):
        return "its adapter is for dense masks only"
    if own_device().type == "cuda" and contender.way not in ("plan", "textbook ring"):
        return "its adapter is for CPUs only"
    if contender.way in PACKAGES and find_spec(PACKAGES[contender.way][0]) is None:
        return f"{PACKAGES[contender.way][0].replace('_', '-')} is not installed (pip install 'startrail[bench]')"
    if contender.way in UNPADDED and work.length % (2 * machine.world):
        return f"needs a length that is a multiple of 2 x {machine.world} ranks, not {work.length}"
    sharing = {"deepspeed": machine.world, "yunchang": machine.ranks_per_node, "yunchang across": machine.nodes}
    if work.kv_heads % (share := sharing.get(contender.way, 1)):
        return f"{work.kv_heads} KV heads are not a multiple of {share} ranks"
    if contender.way != "plan" or contender == AUTO:
        return None
    try:
        piece_sizes(Plan.parse(contender.plan), machine, work)
    except ValueError as error:
        return error.problem if isinstance(error, PlanError) else str(error)
    return None


def with_plan(contender: Contender, auto: str) -> Contender:
    """``auto`` with the plan that it chose; others as they are."""
    return replace(contender, plan=auto) if contender == AUTO else contender


class Links:
    """A rank's access to the links: reads their bytes and requests rates. On a real cluster it can do neither."""

    def __init__(self, pipe: Connection | None) -> None:
        self.pipe = pipe

    def ask(self, *request: Any) -> None:
        """Send a request to the process that owns the cluster; all ranks return when it is done."""
        if self.pipe is not None and dist.get_rank() == 0:
            self.pipe.send(request)
            self.pipe.recv()
        dist.barrier()

    def bytes(self) -> dict[str, int] | None:
        return None if self.pipe is None else own_link_bytes()

    def start_together(self) -> None:
        """Return on all ranks at the same time. Where 32 ranks share two cores, a barrier releases some long before
        others. Emulated nodes share one clock, so their ranks agree on a time and sleep until it."""
        if self.pipe is None:
            dist.barrier()
            return
        when = torch.tensor([time.perf_counter() + START_SECONDS], dtype=torch.float64)
        dist.broadcast(when, 0)
        time.sleep(max(0.0, when.item() - time.perf_counter()))


class Ranks:
    """Measures trials; runs on every rank, and all ranks do the same in the same order."""

    def __init__(self, machine: Machine, links: Links, data: Mapping[Workload, Any]) -> None:
        self.machine, self.links, self.data = machine, links, data
        self.runners: dict[tuple[Contender, Workload], AttentionRunner | StepRunner] = {}
        self.refused: dict[tuple[Contender, Workload], str] = {}
        self.compute: dict[Workload, float] = {}

    def run(self, trials: Sequence[Trial], seconds: float) -> list[Outcome]:
        """Outcomes of the trials in order; no trial starts after ``seconds``."""
        outcomes: list[Outcome] = []
        start = time.perf_counter()
        for number, trial in enumerate(trials):
            if self.late(start, seconds):
                break
            self.links.ask("rates", [FAST_RATE] * self.machine.nodes)
            self.prepare(number, COMPUTE, trial.work)
            if (COMPUTE, trial.work) in self.refused:
                raise RuntimeError(f"compute alone, {trial.work}: {self.refused[COMPUTE, trial.work]}")
            rates, auto = self.rates_of(trial), ""
            if AUTO in trial.contenders:
                auto = self.choose_plan(trial.work, rates)
                trial = replace(trial, contenders=tuple(with_plan(c, auto) for c in trial.contenders))
            for contender in trial.contenders:
                self.prepare(number, contender, trial.work)
            outcomes.append(replace(self.measure(number, trial, rates), auto=auto))
        return outcomes

    def choose_plan(self, work: Workload, rates: list[int | None]) -> str:
        """The plan of ``SequenceParallel("auto")`` here: emulated links are described, real ones measured."""
        heads, kv_heads = work.q_heads, work.kv_heads
        ask = partial(plan_for_heads, heads=heads, kv_heads=kv_heads, head_dim=work.head_dim, length=work.length)
        limits = [rate for rate in rates if rate is not None]
        cluster = lab_cluster(self.machine, limits) if limits else None
        return str(choose(dist.group.WORLD, self.machine, ask, cluster).plan)

    def late(self, start: float, seconds: float) -> bool:
        """True if more than ``seconds`` have passed since ``start``, by rank 0's clock."""
        late = torch.tensor([time.perf_counter() - start > seconds], dtype=torch.uint8)
        dist.broadcast(late, 0)
        return bool(late.item())

    def prepare(self, number: int, contender: Contender, work: Workload) -> None:
        """Connect, warm up, and check the results."""
        self.links.ask("progress", number, f"preparing {contender.name}")
        key = contender, work
        if key in self.runners or key in self.refused:
            return
        runners: list[AttentionRunner | StepRunner] = []

        def connect() -> str | None:
            runners.append(make_runner(contender, self.machine, work, self.data[work]))
            return None

        def check() -> str | None:
            problem = runners[0].mistake()
            runners[0].waiting()
            return problem

        # All ranks connect before one of them sends: gloo aborts a process that receives another message than expected.
        for step in (connect, check):
            try:
                problem = step()
            except Exception as error:  # a peer may raise anything: it is reported, not handled
                problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            problems = gather_texts(problem or "")
            if any(problems):
                self.refused[key] = next(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
                return
        self.runners[key] = runners[0]

    def measure(self, number: int, trial: Trial, rates: list[int | None]) -> Outcome:
        self.links.ask("rates", rates)
        refused = {c.name: self.refused[c, trial.work] for c in trial.contenders if (c, trial.work) in self.refused}
        everyone = (COMPUTE, *(contender for contender in trial.contenders if contender.name not in refused))
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in everyone}
        start = time.perf_counter()
        for repeat in range(trial.repeats):
            if repeat == BRIEF:
                everyone = tuple(contender for contender in everyone if contender not in trial.brief)
            turn = repeat % len(everyone)  # so that no contender always runs after the same one
            for contender in everyone[turn:] + everyone[:turn]:
                self.links.ask("progress", number, f"{contender.name}, repeat {repeat + 1}")
                samples[contender.name].append(self.sample(contender, trial.work))
            if repeat + 1 >= trial.at_least and self.late(start, trial.seconds):
                break
        return Outcome(rates, samples, refused)

    def rates_of(self, trial: Trial) -> list[int | None]:
        if trial.pressure is None:
            return [None] * self.machine.nodes
        rate = rate_for(ring_bytes(self.machine, trial.work), self.compute_seconds(trial.work), trial.pressure)
        return [rate // 2 if trial.slow_node and node == 0 else rate for node in range(self.machine.nodes)]

    def compute_seconds(self, work: Workload) -> float:
        """Compute time of this work, measured once: the minimum, because disturbances only add to it, and a value that
        is too large makes links too slow and every trial longer."""
        if work not in self.compute:
            times = torch.tensor([self.sample(COMPUTE, work).seconds for _ in range(WARM_UP)], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            self.compute[work] = min(times.tolist())
        return self.compute[work]

    def sample(self, contender: Contender, work: Workload) -> Sample:
        runner = self.runners[contender, work]
        dist.barrier()  # all bytes of the previous contender have arrived
        before = self.links.bytes()
        self.links.start_together()
        start = time.perf_counter()
        runner.step()
        if own_device().type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        dist.barrier()
        after = self.links.bytes()
        if before is None or after is None:
            return Sample(seconds, runner.waiting(), None, None)
        return Sample(seconds, runner.waiting(), *(after[way] - before[way] for way in ("sent", "received")))


def run_on_cluster(
    machine: Machine, trials: Sequence[Trial], progress: Callable[[int, str], None], limited: bool, seconds: float
) -> list[list[Outcome]]:
    """Outcomes by rank, then by trial, on an emulated cluster; no trial starts after ``seconds``."""
    import_peers(trials)
    data = prepare_data(trials)
    own_end, rank_end = Pipe()

    def on_rank(rank: int) -> list[Outcome]:
        logging.getLogger("startrail").setLevel(logging.ERROR)  # links are slow on purpose: no warnings of slow waits
        return Ranks(machine, Links(rank_end), data).run(trials, seconds)

    def serve() -> None:
        while (request := own_end.recv()) is not None:
            match request:
                case "rates", rates if limited:
                    for node, rate in enumerate(rates):
                        cluster.set_link(node, f"{rate}bit")
                case "progress", number, text:
                    progress(number, text)
            own_end.send(True)

    with Cluster(machine.nodes, machine.ranks_per_node, link=f"{FAST_RATE}bit" if limited else None) as cluster:
        # before the thread starts, because a fork copies only the calling thread
        job = cluster.fork(on_rank, seconds + TRIAL_SECONDS)
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        try:
            return job.wait()
        finally:
            rank_end.send(None)
            server.join()


def run_on_group(machine: Machine, trials: Sequence[Trial], seconds: float) -> list[list[Outcome]]:
    """The same on the ranks of torchrun and their real links; every rank gets all outcomes."""
    mine = Ranks(machine, Links(None), DataByWork()).run(trials, seconds)
    gathered = gather_texts(json.dumps([asdict(outcome) for outcome in mine]))
    return [[Outcome.parse(fields) for fields in json.loads(text)] for text in gathered]


def import_peers(trials: Sequence[Trial]) -> None:
    """Import peers and run attention once in the parent: on 32 ranks and two cores it would take over 20 seconds."""
    torch.set_num_threads(1)
    for way in {contender.way for trial in trials for contender in trial.contenders} & PACKAGES.keys():
        PACKAGES[way][1]()
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    alone = SequenceParallel("1x1").sequence(4)  # kept alive until its backward pass is done
    alone.attention(x, x, x).sum().backward()

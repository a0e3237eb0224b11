"""Running trials: one set of ranks a machine, contenders in turn, link rates changed while the ranks live.

Starting 32 ranks and connecting them costs more than most trials, so ranks are forked once and told what to measure.
Only the process that built the cluster can change its links; rank 0 asks it to, through a pipe made before the fork.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lab.bench.cases import COMPUTE, Contender, Trial, Work
from lab.bench.closed import Machine, rate_for, ring_bytes
from lab.bench.peers import Results, Runner, make_runner
from lab.cluster import Cluster, own_link_bytes

FAST = "2gbit"  # for what is not timed; slow enough to be a limited link, whose frames are real ones
TOLERANCE = {"rtol": 1e-3, "atol": 2e-5}
Progress = Callable[[str], None]


@dataclass
class Data:
    """Inputs and the answers of one process that has all of the sequence."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    answers: Results


def make_data(work: Work, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(work.batch, heads, work.length, work.head_dim, generator=generator)

    q, k, v, dout = random(work.q_heads), random(work.kv_heads), random(work.kv_heads), random(work.q_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=work.causal, enable_gqa=work.q_heads != work.kv_heads)
    return Data((q, k, v, dout), (out.detach(), *torch.autograd.grad(out, leaves, dout)))


class Links:
    """What a rank knows of its links: their bytes, and how to ask for other rates. On a real cluster, neither."""

    def __init__(self, pipe: Connection | None, nodes: int) -> None:
        self.pipe, self.nodes = pipe, nodes

    def ask(self, *request: Any) -> None:
        if self.pipe is not None and dist.get_rank() == 0:
            self.pipe.send(request)
            self.pipe.recv()
        dist.barrier()

    def set_rates(self, rates: Sequence[int | None]) -> None:
        self.ask("rates", tuple(rates))

    def bytes(self) -> dict[str, int] | None:
        return None if self.pipe is None else own_link_bytes()


@dataclass
class Sample:
    """One repeat of one contender, as one rank saw it."""

    seconds: float
    waiting: float | None
    sent: int | None
    received: int | None


@dataclass
class Outcome:
    """What one rank measured in one trial: the links' rates by node, and samples by contender."""

    rates: list[int | None]
    samples: dict[str, list[Sample]]


class Ranks:
    """The measuring end: lives on every rank."""

    def __init__(self, machine: Machine, links: Links, data: dict[Work, Data]) -> None:
        self.machine, self.links, self.data = machine, links, data
        self.runners: dict[tuple[Contender, Work], Runner] = {}
        self.inputs: dict[tuple[Contender, Work], list[Tensor]] = {}
        self.compute: dict[Work, float] = {}

    def run(self, trials: Sequence[Trial]) -> list[Outcome]:
        outcomes = []
        for trial in trials:
            self.links.set_rates([parse(FAST)] * self.machine.nodes)
            for contender in (COMPUTE, *trial.contenders):
                self.prepare(contender, trial.work)
            outcomes.append(self.measure(trial))
        return outcomes

    def prepare(self, contender: Contender, work: Work) -> None:
        """Connect, warm up, and see that the answers are right, so that nothing wrong is ever timed."""
        if (contender, work) in self.runners:
            return
        self.links.ask("progress", f"preparing {contender.name}")
        runner = make_runner(contender, self.machine, work)
        data = self.data[work]
        inputs = [runner.shard(x) for x in data.inputs]
        results = runner.step(*inputs)
        if contender.way != "compute":
            for name, ours, whole in zip(("out", "dq", "dk", "dv"), results, data.answers, strict=True):
                torch.testing.assert_close(
                    ours, runner.shard(whole), **TOLERANCE, msg=lambda text, n=name: f"{contender.name}, {n}: {text}"
                )
        runner.waiting()
        self.runners[contender, work], self.inputs[contender, work] = runner, inputs
        if contender.way == "compute":
            times = [self.sample(contender, work).seconds for _ in range(5)]
            slowest = torch.tensor(times, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            self.compute[work] = statistics.median(slowest.tolist())

    def measure(self, trial: Trial) -> Outcome:
        rates = self.rates_of(trial)
        self.links.set_rates(rates)
        everyone = (COMPUTE, *trial.contenders)
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in everyone}
        for repeat in range(trial.repeats):
            turn = repeat % len(everyone)  # nobody always runs after the same neighbour
            for contender in everyone[turn:] + everyone[:turn]:
                self.links.ask("progress", f"{trial.work.kind} {trial.work.mask}, {contender.name}")
                samples[contender.name].append(self.sample(contender, trial.work))
        return Outcome(rates, samples)

    def rates_of(self, trial: Trial) -> list[int | None]:
        if trial.pressure is None:
            return [None] * self.machine.nodes
        rate = rate_for(ring_bytes(self.machine, trial.work), self.compute[trial.work], trial.pressure)
        return [rate // 2 if trial.slow_node and node == 0 else rate for node in range(self.machine.nodes)]

    def sample(self, contender: Contender, work: Work) -> Sample:
        runner, inputs = self.runners[contender, work], self.inputs[contender, work]
        dist.barrier()  # the last contender's bytes have all arrived
        before = self.links.bytes()
        dist.barrier()  # everybody has read the counters
        start = time.perf_counter()
        runner.step(*inputs)
        seconds = time.perf_counter() - start
        dist.barrier()
        after = self.links.bytes()
        if before is None or after is None:
            return Sample(seconds, runner.waiting(), None, None)
        sent, received = (after[way] - before[way] for way in ("sent", "received"))
        return Sample(seconds, runner.waiting(), sent, received)


def parse(rate: str) -> int:
    from lab.shape import parse_rate

    bits = parse_rate(rate)
    assert bits is not None
    return bits


def run_on_cluster(
    machine: Machine, trials: Sequence[Trial], progress: Progress, deadline: float, limited: bool = True
) -> list[list[Outcome]]:
    """Outcomes by rank, then by trial, on an emulated cluster. The parent's data is shared with the forked ranks."""
    torch.set_num_threads(1)
    data = {work: make_data(work) for work in {trial.work for trial in trials}}
    ours, theirs = Pipe()
    with Cluster(machine.nodes, machine.ranks_per_node, link=FAST if limited else None) as cluster:

        def on_rank(rank: int) -> list[Outcome]:
            return Ranks(machine, Links(theirs, machine.nodes), data).run(trials)

        def serve() -> None:
            while (request := ours.recv()) is not None:
                if request[0] == "rates" and limited:
                    for node, rate in enumerate(request[1]):
                        cluster.set_link(node, f"{rate}bit")
                elif request[0] == "progress":
                    progress(request[1])
                ours.send(True)

        server = threading.Thread(target=serve, daemon=True)
        job = cluster.fork(on_rank, deadline)  # forked before the thread starts: a fork takes only its own thread along
        server.start()
        try:
            return job.wait()
        finally:
            theirs.send(None)
            server.join()

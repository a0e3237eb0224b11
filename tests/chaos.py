"""A small GPT run under a series of faults: ``make chaos``, or ``python -m tests.chaos --faults 64 --seed 0``.

Ranks and launchers are killed, paused and asked to stop, cables pulled, links slowed, disks filled, bits flipped in
checkpoints, batches skipped, calls made wrong on one rank, at steps and in an order that follow from the seed: first
locally, then on an emulated cluster. In the end
every recorded loss must equal that of an undisturbed run, each fault must have ended as documented, and no process,
namespace or folder may remain. Prints the cost of each fault.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from startrail.training import loop  # noqa: F401, once, rather than in every launcher
from startrail.training.checkpoints.saving import checkpoint_path, steps_in
from tests import chaos_inside
from tests.chaos_runs import HANG_MINUTES, NODES, RANKS, ChaosRun, LabRun, LocalRun
from tests.helpers import FULL, eventually, holders_of
from workshop import lab
from workshop.lab.namespaces import processes_in

DEADLINE = 120.0  # seconds for each expected event
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Fault:
    """``exit_code`` is that of the run, or None if the run continues; ``output`` has texts that the run must print."""

    name: str
    do: Callable[[ChaosRun, random.Random], None]
    exit_code: int | None = None
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    run: str
    step: int
    fault: Fault
    repeated: int
    seconds: float

    def __str__(self) -> str:
        end = "continues" if self.fault.exit_code is None else f"exit {self.fault.exit_code}"
        return f"{self.run:5s} {self.step:5d}  {self.fault.name:30s} {end:9s} {self.repeated:8d} {self.seconds:8.1f}"


HEADER = f"{'where':5s} {'step':>5s}  {'fault':30s} {'run':9s} {'repeated':>8s} {'seconds':>8s}"


# --- faults


def kill_rank(run: ChaosRun, rng: random.Random) -> None:
    os.kill(rng.choice(run.ranks), signal.SIGKILL)


def kill_launcher(run: ChaosRun, rng: random.Random) -> None:
    assert isinstance(run, LocalRun)
    os.kill(run.pid, signal.SIGKILL)


def request_stop(run: ChaosRun, rng: random.Random) -> None:
    run.request_stop()


def request_stop_when_busy(run: ChaosRun, rng: random.Random) -> None:
    """Ranks end while the machine is loaded: threads that outlive the interpreter abort their process."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        run.request_stop()
        assert eventually(run.ended, DEADLINE), "the run does not stop"
    finally:
        for process in busy:
            process.kill()
            process.wait()


def pause_rank(run: ChaosRun, rng: random.Random) -> None:
    rank = rng.choice(run.ranks)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 3))
    os.kill(rank, signal.SIGCONT)


def hang_rank(run: ChaosRun, rng: random.Random) -> None:
    os.kill(rng.choice(run.ranks), signal.SIGSTOP)


def fill_disk(run: ChaosRun, rng: random.Random) -> None:
    """Limit the size of files from now on: writing fails halfway, as on a full disk."""
    limit = rng.choice([64, 20_000]) if isinstance(run, LocalRun) else 20_000  # lab ranks must still log it
    for rank in run.ranks:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def flip_bit(run: ChaosRun, rng: random.Random) -> None:
    """Stop the run and flip one bit of its newest checkpoint."""
    run.request_stop()
    assert eventually(run.ended, DEADLINE), "the run does not stop"
    folder = run.out / "checkpoints"
    file = rng.choice(sorted(checkpoint_path(folder, steps_in(folder)[-1]).iterdir()))
    contents = bytearray(file.read_bytes())
    contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
    file.write_bytes(contents)


def _ordered(fault: str) -> Callable[[ChaosRun, random.Random], None]:
    """A fault inside a rank, a few steps ahead; returns when that step is done or the run has ended."""

    def do(run: ChaosRun, rng: random.Random) -> None:
        step = run.last_step() + chaos_inside.AHEAD
        chaos_inside.order(run.out, fault, rng.randrange(RANKS), step)
        assert eventually(lambda: run.ended() or run.last_step() > step, DEADLINE), f"step {step} is not reached"
        chaos_inside.cancel(run.out)

    return do


def _cluster(run: ChaosRun) -> lab.Cluster:
    assert isinstance(run, LabRun)
    return run.cluster


def pause_node(run: ChaosRun, rng: random.Random) -> None:
    node = rng.randrange(NODES)
    _cluster(run).stop(node)
    time.sleep(rng.uniform(0.5, 3))
    _cluster(run).resume(node)


def hang_first_rank(run: ChaosRun, rng: random.Random) -> None:
    os.kill(run.ranks[0], signal.SIGSTOP)  # it holds the store


def hang_node(run: ChaosRun, rng: random.Random) -> None:
    _cluster(run).stop(rng.randrange(NODES))


def pull_cable(run: ChaosRun, rng: random.Random) -> None:
    node = rng.randrange(NODES)
    _cluster(run).cut(node)
    time.sleep(rng.uniform(0.5, 3))
    _cluster(run).restore(node)


def lose_cable(run: ChaosRun, rng: random.Random) -> None:
    cluster = _cluster(run)
    cluster.cut(1)
    assert eventually(run.ended, DEADLINE), "the run does not notice that a cable is out"
    cluster.restore(1)


def slow_link(run: ChaosRun, rng: random.Random) -> None:
    cluster, node = _cluster(run), rng.randrange(NODES)
    cluster.set_link(node, "2mbit")
    time.sleep(rng.uniform(1, 3))
    cluster.set_link(node, LINK)


LINK = "200mbit"
HANG_OUTPUT = ("still waiting for rank", f"made no progress within {HANG_MINUTES} minutes (--wait-minutes): silent for")
COMMON_FAULTS = (
    Fault("asked to stop (SIGTERM)", request_stop, STOPPED, ("and saved; the same command continues",)),
    Fault("asked to stop when busy", request_stop_when_busy, STOPPED, ("and saved; the same command continues",)),
    Fault("a rank stops for seconds", pause_rank),
    Fault("a rank hangs", hang_rank, 1, HANG_OUTPUT),
    Fault("the disk is full", fill_disk, 1, ("could not be written: File too large",)),
    Fault("a bit of a checkpoint flips", flip_bit, STOPPED),
)
LOCAL_FAULTS = (
    *COMMON_FAULTS,
    Fault("a rank is killed", kill_rank, 1, (" was killed by SIGKILL\n", "the same command continues from step")),
    Fault("the launcher is killed", kill_launcher, -signal.SIGKILL),
    Fault("a rank skips a batch", _ordered("skip"), 2, ("they were given different data",)),
    Fault("ranks fail different calls", _ordered("fail")),
    Fault("ranks disagree in collectives", _ordered("disagree")),
)
LAB_FAULTS = (
    *COMMON_FAULTS,
    Fault("the first rank hangs", hang_first_rank, 1, (*HANG_OUTPUT, "rank 0, which holds the store")),
    Fault("a rank is killed", kill_rank, -signal.SIGKILL),
    Fault("a node stops for seconds", pause_node),
    Fault("a node hangs", hang_node, 1, HANG_OUTPUT),
    Fault("a cable is out for seconds", pull_cable),
    Fault("a cable stays out", lose_cable, 1, HANG_OUTPUT),
    Fault("a link is slow for seconds", slow_link),
)


# --- the storm


def pick_faults(faults: Sequence[Fault], count: int, rng: random.Random) -> list[Fault]:
    """``count`` faults in random order, each about equally often."""
    order: list[Fault] = []
    while len(order) < count:
        order += rng.sample(faults, len(faults))
    return order[:count]


def storm(run: ChaosRun, faults: Sequence[Fault], rng: random.Random, log: Callable[[str], None]) -> list[Cost]:
    """Disturb a run with these faults and let it finish; assert that each ends as documented."""
    costs = []
    run.launch()
    saved = run.out / "checkpoints"
    wait_until(
        run, lambda: bool(steps_in(saved)), "no checkpoint is written"
    )  # a run that ends before has none to name
    for fault in faults:
        target = run.last_step() + rng.randint(1, 4)
        wait_until(run, lambda target=target: run.last_step() >= target, f"step {target} is not reached")
        while fault.do is flip_bit and len(steps_in(saved)) < 2:
            time.sleep(0.02)
        repeated, reached, start = run.repeated(), run.last_step(), time.monotonic()
        fault.do(run, rng)
        if fault.exit_code is not None:
            assert eventually(run.ended, DEADLINE), f"{fault.name}: the run does not end\n{run.text()}"
            text = run.text()
            assert run.code == fault.exit_code, f"{fault.name}: exit code {run.code}, not {fault.exit_code}\n{text}"
            assert all(part in text for part in fault.output), f"{fault.name}: the output lacks {fault.output}\n{text}"
            assert "Traceback" not in text and "terminate called" not in text, text
            reached = max(reached, run.last_step())
            run.launch()
        wait_until(run, lambda reached=reached: run.last_step() > reached, f"{fault.name}: the run does not continue")
        costs.append(Cost(run.name, reached, fault, run.repeated() - repeated, time.monotonic() - start))
        if fault.do is flip_bit:
            assert any(saved.glob("unusable-*")), "the flipped bit was not noticed"
        log(str(costs[-1]))
    assert eventually(run.ended, 4 * DEADLINE), "the run does not finish"
    assert run.code == 0 and "terminate called" not in run.text(), run.text()
    return costs


def wait_until(run: ChaosRun, condition: Callable[[], bool], problem: str) -> None:
    def ready() -> bool:
        assert not run.ended() or condition(), f"{problem}: the run ended with code {run.code}\n{run.text()}"
        return condition()

    assert eventually(ready, DEADLINE), problem


def chaos(local: int, on_nodes: int, seed: int, folder: Path, log: Callable[[str], None] = lambda text: None) -> str:
    """Run both storms and return the tables; an ``AssertionError`` describes what was lost."""
    torch.set_num_threads(1)
    chaos_inside.install()
    rng, start = random.Random(seed), time.monotonic()
    temporary = folder / "tmp"  # for all processes of the test
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    steps = 16 + 6 * max(local, on_nodes)
    undisturbed = LocalRun(folder, steps, "undisturbed")
    undisturbed.launch()
    assert eventually(undisturbed.ended, 4 * DEADLINE) and undisturbed.code == 0, undisturbed.text()
    expected = dict(undisturbed.losses())
    assert sorted(expected) == list(range(1, steps + 1))
    seconds = time.monotonic() - start
    log(f"{steps} steps undisturbed: loss {expected[1]:.3f} to {expected[steps]:.3f}, {seconds:.0f} s\n")
    log(HEADER)
    costs: list[Cost] = []
    if local:
        here = LocalRun(folder, steps, "local")
        costs += storm(here, pick_faults(LOCAL_FAULTS, local, rng), rng, log)
        check_losses(here, expected)
    if on_nodes:
        with lab.Cluster(NODES, RANKS // NODES, LINK) as cluster:
            there = LabRun(folder, steps, cluster)
            costs += storm(there, pick_faults(LAB_FAULTS, on_nodes, rng), rng, log)
            check_losses(there, expected)
            assert cluster._supervisor is not None
            networks = cluster._supervisor.networks
        assert eventually(lambda: not processes_in(networks)), processes_in(networks)
        assert not holders_of(networks)
    assert not list(temporary.iterdir())
    return summary(costs, steps, time.monotonic() - start)


def check_losses(run: ChaosRun, expected: dict[int, float]) -> None:
    """Compare every recorded loss, also those of repeated steps, and check the run's folder."""
    losses = run.losses()
    wrong = [f"step {step}: {loss}, undisturbed {expected[step]}" for step, loss in losses if loss != expected[step]]
    assert not wrong, f"{len(wrong)} losses differ: {wrong[:3]}"
    assert {step for step, _ in losses} == expected.keys()
    names = [path.name for path in (run.out / "checkpoints").iterdir()]
    assert all(name.startswith(("step-", "unusable-")) for name in names), names


def summary(costs: Sequence[Cost], steps: int, seconds: float) -> str:
    lines = [
        "",
        f"{'fault':38s} {'times':>5s} {'repeated steps':>14s} {'seconds':>8s}   (mean, until the next new step)",
    ]
    kinds = dict.fromkeys((cost.run, cost.fault.name) for cost in costs)
    for run, name in kinds:
        mine = [cost for cost in costs if (cost.run, cost.fault.name) == (run, name)]
        repeated, took = (sum(getattr(c, what) for c in mine) / len(mine) for what in ("repeated", "seconds"))
        lines.append(f"{run:5s} {name:32s} {len(mine):5d} {repeated:14.1f} {took:8.1f}")
    lines += [
        "",
        f"{len(costs)} faults in {seconds:.0f} s: all losses of {steps} steps match, nothing is left",
    ]
    return "\n".join(lines)


def test_a_short_storm(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # ``chaos`` replaces both
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    faults = len(LOCAL_FAULTS) if FULL else 2  # test_interruptions.py has most kinds one by one
    text = chaos(local=faults, on_nodes=0, seed=3, folder=tmp_path)
    assert sum(fault.name in text for fault in LOCAL_FAULTS) == faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=64, help="total number (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    on_nodes = options.faults * 3 // 8
    if reason := lab.available():
        print(f"no cluster can be emulated here, so all faults are local: {reason}")
        on_nodes = 0
    try:
        print(chaos(options.faults - on_nodes, on_nodes, options.seed, folder, lambda text: print(text, flush=True)))
    except AssertionError as error:
        print(f"seed {options.seed}: {error}\nthe files of the run are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

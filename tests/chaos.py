"""A small GPT run under a storm of faults: ``make chaos``, or ``python -m tests.chaos --faults 64 --seed 0``.

Ranks and launchers are killed, stopped and asked to stop, cables pulled, links slowed, disks filled and bits flipped in
checkpoints, at steps and in an order that follow from the seed: first locally, then on an emulated cluster. In the end
every loss that was ever written must be the one of a run that nobody disturbed, each fault must have had the end that
is promised, and nothing may be left: no process, no namespace, no folder. Prints what each fault cost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from startrail import lab
from startrail.cli import main as startrail
from startrail.lab.namespaces import living_in
from startrail.training import trainer  # noqa: F401, once, rather than in every launcher
from startrail.training.checkpoints.saving import checkpoint_path, steps_in
from startrail.training.recipes import RECIPES
from tests.helpers import eventually, holders_of, write_words

NODES, RANKS = 2, 4
DEADLINE = 120.0  # seconds for whatever must happen
HANG_MINUTES = 0.12
STOPPED = 128 + signal.SIGTERM
SHAPE = dict(width=32, layers=1, heads=4, kv_heads=2, hidden=48, length=128)
RUN = dict(plan="u2/1x2", ranks=RANKS, zero=2, recompute=False, save_every=4, keep_checkpoints=3, sample=0)
RUN |= dict(evaluate_batches=1, evaluate_every=10, warmup=5, wait_minutes=HANG_MINUTES)


@dataclass(frozen=True)
class Fault:
    """``ends``: the exit code with which it ends the run, or None if the run goes on; ``says``: what it then says."""

    name: str
    do: Callable[[Place, random.Random], None]
    ends: int | None = None
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    place: str
    step: int
    fault: Fault
    repeated: int
    seconds: float

    def __str__(self) -> str:
        end = "goes on" if self.fault.ends is None else f"exit {self.fault.ends}"
        return f"{self.place:5s} {self.step:5d}  {self.fault.name:30s} {end:9s} {self.repeated:8d} {self.seconds:8.1f}"


HEADER = f"{'where':5s} {'step':>5s}  {'fault':30s} {'run':9s} {'repeated':>8s} {'seconds':>8s}"


class Place(ABC):
    """Where a run lives: how to start it, who its ranks are, and how it ended."""

    def __init__(self, folder: Path, steps: int, name: str) -> None:
        self.name = name
        self.out, self.log = folder / self.name, folder / f"{self.name}.log"
        self.argv = command(folder, self.out, steps)
        self.code: int | None = None

    def losses(self) -> list[tuple[int, float]]:
        """Every step and loss that was written, in order; a line that is being written does not count."""
        path = self.out / "metrics.jsonl"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]
        return [(found["step"], found["loss"]) for found in map(json.loads, lines)]

    def furthest(self) -> int:
        return max((step for step, _ in self.losses()), default=0)

    def repeated(self) -> int:
        steps = [step for step, _ in self.losses()]
        return len(steps) - len(set(steps))

    @abstractmethod
    def launch(self) -> None: ...

    @abstractmethod
    def ended(self) -> bool:
        """Whether the run is over, all of its processes gone; ``code`` is then how."""

    @property
    @abstractmethod
    def ranks(self) -> list[int]: ...

    @abstractmethod
    def text(self) -> str:
        """What was said since ``launch``."""

    def ask_to_stop(self) -> None:
        for rank in self.ranks:
            os.kill(rank, signal.SIGTERM)


class Local(Place):
    """Forked ranks; their launcher is forked from this process, which has imported everything already."""

    pid = 0

    def launch(self) -> None:
        self.code = None
        self._before = self.log.stat().st_size if self.log.exists() else 0
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            os.setsid()
            with self.log.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            code = startrail(self.argv)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if found else None
        return self.code is not None and not in_session(self.pid)

    @property
    def ranks(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def text(self) -> str:
        return self.log.read_bytes()[self._before :].decode()

    def ask_to_stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class Lab(Place):
    """The same command on every rank of an emulated cluster; like torchrun, the first rank that fails ends all."""

    def __init__(self, folder: Path, steps: int, cluster: lab.Cluster) -> None:
        super().__init__(folder, steps, "lab")
        self.cluster = cluster

    def launch(self) -> None:
        self.code = None
        self.job = self.cluster.start(["-m", "startrail.cli", *self.argv], deadline=3600, log_dir=self.log)

    def ended(self) -> bool:
        codes = [process.poll() for process in self.job._processes]
        failed = min((code for code in codes if code), default=None)  # who was killed, before who missed it
        if self.code is None and (failed is not None or all(code == 0 for code in codes)):
            self.code = failed or 0
            self._said = "".join(log.read_text() for log in self.job.logs)
            eventually(lambda: None not in [process.poll() for process in self.job._processes], 1.0)
            self.job.kill()
        return self.code is not None

    @property
    def ranks(self) -> list[int]:
        return [process.pid for process in self.job._processes if process.poll() is None]

    def text(self) -> str:
        return self._said


def command(folder: Path, out: Path, steps: int) -> list[str]:
    data = folder / "texts"
    if not data.exists():
        write_words(data)
    fields = {**SHAPE, **RUN, "steps": steps, "data": str(data), "out": str(out)}
    RECIPES["gpt-tiny"].with_(fields)  # a mistake is better found here
    return ["train", "gpt-tiny", *(f"--{name}={value}" for name, value in fields.items())]


def in_session(session: int) -> list[int]:
    """Processes of a session; those that have ended and wait to be reaped do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


# --- faults


def kill_rank(place: Place, chance: random.Random) -> None:
    os.kill(chance.choice(place.ranks), signal.SIGKILL)


def kill_launcher(place: Place, chance: random.Random) -> None:
    assert isinstance(place, Local)
    os.kill(place.pid, signal.SIGKILL)


def ask_to_stop(place: Place, chance: random.Random) -> None:
    place.ask_to_stop()


def pause_rank(place: Place, chance: random.Random) -> None:
    rank = chance.choice(place.ranks)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(chance.uniform(0.5, 3))
    os.kill(rank, signal.SIGCONT)


def hang_rank(place: Place, chance: random.Random) -> None:
    os.kill(chance.choice(place.ranks), signal.SIGSTOP)


def fill_disk(place: Place, chance: random.Random) -> None:
    """No file may grow over some bytes from now on: writing fails in the middle, as on a full disk."""
    limit = chance.choice([64, 20_000]) if isinstance(place, Local) else 20_000  # or it could not even say so
    for rank in place.ranks:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def flip_bit(place: Place, chance: random.Random) -> None:
    """Stop the run in order, and change one bit of its newest checkpoint."""
    place.ask_to_stop()
    assert eventually(place.ended, DEADLINE), "the run does not stop"
    folder = place.out / "checkpoints"
    file = chance.choice(sorted(checkpoint_path(folder, steps_in(folder)[-1]).iterdir()))
    contents = bytearray(file.read_bytes())
    contents[chance.randrange(len(contents))] ^= 1 << chance.randrange(8)
    file.write_bytes(contents)


def _cluster_of(place: Place) -> lab.Cluster:
    assert isinstance(place, Lab)
    return place.cluster


def pause_node(place: Place, chance: random.Random) -> None:
    node = chance.randrange(NODES)
    _cluster_of(place).stop(node)
    time.sleep(chance.uniform(0.5, 3))
    _cluster_of(place).resume(node)


def hang_first_rank(place: Place, chance: random.Random) -> None:
    os.kill(place.ranks[0], signal.SIGSTOP)  # it holds the store in which all meet


def hang_node(place: Place, chance: random.Random) -> None:
    _cluster_of(place).stop(chance.randrange(NODES))


def pull_cable(place: Place, chance: random.Random) -> None:
    node = chance.randrange(NODES)
    _cluster_of(place).cut(node)
    time.sleep(chance.uniform(0.5, 3))
    _cluster_of(place).restore(node)


def lose_cable(place: Place, chance: random.Random) -> None:
    cluster = _cluster_of(place)
    cluster.cut(1)
    assert eventually(place.ended, DEADLINE), "the run does not notice that a cable is out"
    cluster.restore(1)


def slow_link(place: Place, chance: random.Random) -> None:
    cluster, node = _cluster_of(place), chance.randrange(NODES)
    cluster.set_link(node, "2mbit")
    time.sleep(chance.uniform(1, 3))
    cluster.set_link(node, LINK)


LINK = "200mbit"
OVER = ("still waiting for rank", f"made no progress within {HANG_MINUTES} minutes (--wait-minutes): silent for")
EVERYWHERE = (
    Fault("asked to stop (SIGTERM)", ask_to_stop, STOPPED, ("and saved; the same command continues",)),
    Fault("a rank stops for seconds", pause_rank),
    Fault("a rank hangs", hang_rank, 1, OVER),
    Fault("the disk is full", fill_disk, 1, ("could not be written: File too large",)),
    Fault("a bit of a checkpoint flips", flip_bit, STOPPED),
)
LOCAL = (
    *EVERYWHERE,
    Fault("a rank is killed", kill_rank, 1, (" was killed by SIGKILL\n", "the same command continues from step")),
    Fault("the launcher is killed", kill_launcher, -signal.SIGKILL),
)
ON_NODES = (
    *EVERYWHERE,
    Fault("the first rank hangs", hang_first_rank, 1, (*OVER, "rank 0, which holds the store")),
    Fault("a rank is killed", kill_rank, -signal.SIGKILL),
    Fault("a node stops for seconds", pause_node),
    Fault("a node hangs", hang_node, 1, OVER),
    Fault("a cable is out for seconds", pull_cable),
    Fault("a cable stays out", lose_cable, 1, OVER),
    Fault("a link is slow for seconds", slow_link),
)


# --- the storm


def in_turn(faults: Sequence[Fault], count: int, chance: random.Random) -> list[Fault]:
    """``count`` of them in a random order, each about as often as any other."""
    order: list[Fault] = []
    while len(order) < count:
        order += chance.sample(faults, len(faults))
    return order[:count]


def storm(place: Place, faults: Sequence[Fault], chance: random.Random, say: Callable[[str], None]) -> list[Cost]:
    """Disturb a run with these faults and let it finish; ``AssertionError`` if one ends otherwise than promised."""
    costs = []
    place.launch()
    for fault in faults:
        wanted = place.furthest() + chance.randint(1, 4)
        wait_until(place, lambda wanted=wanted: place.furthest() >= wanted, f"step {wanted} does not come")
        while fault.do is flip_bit and len(steps_in(place.out / "checkpoints")) < 2:
            time.sleep(0.02)
        repeated, reached, start = place.repeated(), place.furthest(), time.monotonic()
        fault.do(place, chance)
        if fault.ends is not None:
            assert eventually(place.ended, DEADLINE), f"{fault.name}: the run does not end\n{place.text()}"
            text = place.text()
            assert place.code == fault.ends, f"{fault.name}: exit code {place.code}, not {fault.ends}\n{text}"
            assert all(part in text for part in fault.says), f"{fault.name}: does not say {fault.says}\n{text}"
            assert "Traceback" not in text, text
            reached = max(reached, place.furthest())
            place.launch()
        wait_until(place, lambda reached=reached: place.furthest() > reached, f"{fault.name}: the run does not go on")
        costs.append(Cost(place.name, reached, fault, place.repeated() - repeated, time.monotonic() - start))
        if fault.do is flip_bit:
            assert any((place.out / "checkpoints").glob("unusable-*")), "nobody noticed the flipped bit"
        say(str(costs[-1]))
    assert eventually(place.ended, 4 * DEADLINE), "the run does not finish"
    assert place.code == 0, place.text()
    return costs


def wait_until(place: Place, condition: Callable[[], bool], problem: str) -> None:
    def ready() -> bool:
        assert not place.ended() or condition(), f"{problem}: the run ended with code {place.code}\n{place.text()}"
        return condition()

    assert eventually(ready, DEADLINE), problem


def chaos(local: int, on_nodes: int, seed: int, folder: Path, say: Callable[[str], None] = lambda text: None) -> str:
    """Both storms; the tables. ``AssertionError`` says what was lost."""
    torch.set_num_threads(1)
    chance, start = random.Random(seed), time.monotonic()
    temporary = folder / "tmp"  # of all that runs here
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    steps = 16 + 5 * max(local, on_nodes)
    undisturbed = Local(folder, steps, "undisturbed")
    undisturbed.launch()
    assert eventually(undisturbed.ended, 4 * DEADLINE) and undisturbed.code == 0, undisturbed.text()
    truth = dict(undisturbed.losses())
    assert sorted(truth) == list(range(1, steps + 1))
    say(f"{steps} steps undisturbed: loss {truth[1]:.3f} to {truth[steps]:.3f}, {time.monotonic() - start:.0f} s\n")
    say(HEADER)
    costs: list[Cost] = []
    if local:
        here = Local(folder, steps, "local")
        costs += storm(here, in_turn(LOCAL, local, chance), chance, say)
        compare(here, truth)
    if on_nodes:
        with lab.Cluster(NODES, RANKS // NODES, LINK) as cluster:
            there = Lab(folder, steps, cluster)
            costs += storm(there, in_turn(ON_NODES, on_nodes, chance), chance, say)
            compare(there, truth)
            assert cluster._holder is not None
            networks = cluster._holder.networks
        assert eventually(lambda: not living_in(networks)), living_in(networks)
        assert not holders_of(networks)
    assert not list(temporary.iterdir())
    return summary(costs, steps, time.monotonic() - start)


def compare(place: Place, truth: dict[int, float]) -> None:
    """Every loss that was written, also those of repeated steps, and what is left in the run's folder."""
    found = place.losses()
    wrong = [f"step {step}: {loss}, undisturbed {truth[step]}" for step, loss in found if loss != truth[step]]
    assert not wrong, f"{len(wrong)} losses differ: {wrong[:3]}"
    assert {step for step, _ in found} == truth.keys()
    names = [path.name for path in (place.out / "checkpoints").iterdir()]
    assert all(name.startswith(("step-", "unusable-")) for name in names), names


def summary(costs: Sequence[Cost], steps: int, seconds: float) -> str:
    lines = [
        "",
        f"{'fault':38s} {'times':>5s} {'repeated steps':>14s} {'seconds':>8s}   (mean, until the next new step)",
    ]
    kinds = dict.fromkeys((cost.place, cost.fault.name) for cost in costs)
    for place, name in kinds:
        mine = [cost for cost in costs if (cost.place, cost.fault.name) == (place, name)]
        repeated, took = (sum(getattr(c, what) for c in mine) / len(mine) for what in ("repeated", "seconds"))
        lines.append(f"{place:5s} {name:32s} {len(mine):5d} {repeated:14.1f} {took:8.1f}")
    lines += [
        "",
        f"{len(costs)} faults in {seconds:.0f} s: all losses of {steps} steps as undisturbed, nothing left behind",
    ]
    return "\n".join(lines)


def test_a_short_storm(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # ``chaos`` has a folder of its own for that
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    text = chaos(local=len(LOCAL), on_nodes=0, seed=3, folder=tmp_path)
    assert all(fault.name in text for fault in LOCAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=64, help="in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    on_nodes = options.faults * 3 // 8
    if why := lab.available():
        print(f"no cluster can be emulated here, so all faults are local: {why}")
        on_nodes = 0
    try:
        print(chaos(options.faults - on_nodes, on_nodes, options.seed, folder, lambda text: print(text, flush=True)))
    except AssertionError as error:
        print(f"seed {options.seed}: {error}\nwhat the run left is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

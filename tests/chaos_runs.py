"""Training runs for ``tests.chaos``: how to start them, where their ranks are, and how they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from startrail.cli import main as startrail
from startrail.training import loop  # noqa: F401, once here rather than in every launcher
from startrail.training.recipes import RECIPES
from tests.helpers import eventually, write_words
from workshop import lab

NODES, RANKS = 2, 4
HANG_MINUTES = 0.12
SHAPE = dict(width=32, layers=1, heads=4, kv_heads=2, hidden=48, length=128)
RUN = dict(plan="u2/1x2", ranks=RANKS, zero=2, recompute=False, save_every=4, keep_checkpoints=3, sample=0)
RUN |= dict(evaluate_batches=1, evaluate_every=10, warmup=5, wait_minutes=HANG_MINUTES)


class ChaosRun(ABC):
    """A training run that can be started again."""

    def __init__(self, folder: Path, steps: int, name: str) -> None:
        self.name = name
        self.out, self.log = folder / self.name, folder / f"{self.name}.log"
        self.argv = command(folder, self.out, steps)
        self.code: int | None = None

    def losses(self) -> list[tuple[int, float]]:
        """Every recorded step and loss, in order, without an unfinished last line."""
        path = self.out / "metrics.jsonl"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]
        return [(metrics["step"], metrics["loss"]) for metrics in map(json.loads, lines)]

    def last_step(self) -> int:
        return max((step for step, _ in self.losses()), default=0)

    def repeated(self) -> int:
        steps = [step for step, _ in self.losses()]
        return len(steps) - len(set(steps))

    @abstractmethod
    def launch(self) -> None: ...

    @abstractmethod
    def ended(self) -> bool:
        """True if all processes of the run have ended; ``code`` is then the exit code."""

    @property
    @abstractmethod
    def ranks(self) -> list[int]: ...

    @abstractmethod
    def text(self) -> str:
        """The output since ``launch``."""

    def request_stop(self) -> None:
        for rank in self.ranks:
            os.kill(rank, signal.SIGTERM)


class LocalRun(ChaosRun):
    """Forked ranks; their launcher is forked from this process, which has already imported everything."""

    pid = 0

    def launch(self) -> None:
        self.code = None
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
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
        return self.code is not None and not processes_in_session(self.pid)

    @property
    def ranks(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def text(self) -> str:
        return self.log.read_bytes()[self._log_start :].decode()

    def request_stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class LabRun(ChaosRun):
    """The same command on every rank of an emulated cluster; like torchrun, the first rank that fails exit_code all."""

    def __init__(self, folder: Path, steps: int, cluster: lab.Cluster) -> None:
        super().__init__(folder, steps, "lab")
        self.cluster = cluster

    def launch(self) -> None:
        self.code = None
        self.job = self.cluster.start(["-m", "startrail.cli", *self.argv], deadline=3600, log_dir=self.log)

    def ended(self) -> bool:
        codes = [process.poll() for process in self.job._processes]
        failed = min((code for code in codes if code), default=None)  # a signal, before the failures it caused
        if self.code is None and (failed is not None or all(code == 0 for code in codes)):
            self.code = failed or 0
            self._output = "".join(log.read_text() for log in self.job.logs)
            eventually(lambda: None not in [process.poll() for process in self.job._processes], 1.0)
            self.job.kill()
        return self.code is not None

    @property
    def ranks(self) -> list[int]:
        return [process.pid for process in self.job._processes if process.poll() is None]

    def text(self) -> str:
        return self._output


def command(folder: Path, out: Path, steps: int) -> list[str]:
    data = folder / "texts"
    if not data.exists():
        write_words(data)
    fields = {**SHAPE, **RUN, "steps": steps, "data": str(data), "out": str(out)}
    RECIPES["gpt-tiny"].with_(fields)  # raises here if a field is wrong
    return ["train", "gpt-tiny", *(f"--{name}={value}" for name, value in fields.items())]


def processes_in_session(session: int) -> list[int]:
    """Processes of a session, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found

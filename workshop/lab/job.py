"""Jobs: one process per rank in the nodes' namespaces, with a deadline. No process outlives its job."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

LAST_LINES = 30
ECHO_SECONDS = 0.2


class JobError(RuntimeError):
    """A rank failed or the deadline passed; the message names the rank and ends with its last lines."""


class LabJob:
    """Base of programs and forked functions: processes to kill, and a deadline that counts from the start."""

    def __init__(self, deadline: float, kill_leftovers: Callable[[], None]) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline={deadline!r} is not a positive number of seconds")
        self._deadline = deadline
        self._end = time.monotonic() + deadline
        self._kill_leftovers = kill_leftovers
        self._processes: list[Any] = []
        self.is_done = False

    def kill(self) -> None:
        """Kill every rank and all processes that the ranks started. Does nothing if the job is done."""
        if self.is_done:
            return
        for process in self._processes:
            process.kill()
        self._kill_leftovers()
        for process in self._processes:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()
        self.is_done = True

    def _check_running(self) -> None:
        if self.is_done:
            raise JobError("the job is over: it has been waited for or killed")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class ProgramJob(LabJob):
    """A command started once per rank, with one log file each."""

    def __init__(
        self, argv: Sequence[str], environments: Sequence[Mapping[str, str]], enter: Callable[[int], None],
        log_dir: Path, deadline: float, kill_leftovers: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(deadline, kill_leftovers)
        command = _command(argv)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = [log_dir / f"rank{rank}.log" for rank in range(len(environments))]
        try:
            for rank, environment in enumerate(environments):
                with self.logs[rank].open("wb") as log:
                    process = subprocess.Popen(
                        command, env=environment, start_new_session=True, preexec_fn=partial(enter, rank),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip
                    self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def wait(self, echo: TextIO | None = None) -> list[Path]:
        """Wait until every rank has exited with code 0, and return their log files; ``echo`` gets rank 0's output live.

        A slow reader of ``echo`` delays the return of this call, but neither the ranks nor the deadline.
        """
        self._check_running()
        ended = threading.Event()
        copier = threading.Thread(target=self._copy, args=(echo, ended), daemon=True)
        if echo is not None:
            copier.start()
        try:
            self._wait()
        finally:
            ended.set()
            if echo is not None:
                copier.join()
        return self.logs

    def _copy(self, echo: TextIO, ended: threading.Event) -> None:
        with self.logs[0].open(errors="replace") as output:
            while True:
                last = ended.wait(ECHO_SECONDS)
                try:
                    echo.write(output.read())
                    echo.flush()
                except OSError:  # the reader has closed the pipe; the ranks go on
                    return
                if last:
                    return

    def _wait(self) -> None:
        waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}
        ended = select.poll()
        for descriptor in waiting:
            ended.register(descriptor, select.POLLIN)
        try:
            with self:
                while waiting:
                    left = self._end - time.monotonic()
                    if left <= 0:
                        ranks = sorted(waiting.values())
                        late = f"ranks {ranks} did not finish within {self._deadline:g} s"
                        raise JobError(f"{late}; {self._last_lines(ranks[0])}")
                    for descriptor, _ in ended.poll(1000 * left):
                        ended.unregister(descriptor)
                        rank = waiting.pop(descriptor)
                        os.close(descriptor)
                        if code := self._processes[rank].wait():
                            how = f"exited with code {code}"
                            if code < 0:
                                how = f"was killed by {signal.Signals(-code).name}"
                            raise JobError(f"rank {rank} {how}; {self._last_lines(rank)}")
        finally:
            for descriptor in waiting:
                os.close(descriptor)

    def _last_lines(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n  ".join([f"rank {rank}'s last lines:", *lines]) if lines else "it wrote nothing"


def _command(argv: Sequence[str]) -> list[str]:
    """The command line of a program; ``script.py args`` and ``-m module args`` get the interpreter, which finds modules
    as under torchrun: it is the user's program that runs, from where the user is."""
    if not argv:
        raise ValueError("no program to run: pass a script.py, -m module, or a command")
    if argv[0].endswith(".py") and not Path(argv[0]).is_file():
        raise ValueError(f"no script {argv[0]!r}")
    return [sys.executable, *argv] if argv[0].endswith(".py") or argv[0] == "-m" else list(argv)

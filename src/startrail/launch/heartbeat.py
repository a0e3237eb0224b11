"""Heartbeats: every rank publishes that it is alive and how far it is, so that a missing rank can be named.

Training runs in lockstep: if one rank hangs, all others wait inside a collective that cannot tell which rank is
missing. A rank without a heartbeat is missing. If all have one, the ranks behind the furthest rank are.

>>> board = SharedMemoryBoard(3)
>>> monitor = HeartbeatMonitor(board, WaitLimit(60.0, "startrail train", "--wait-minutes"))
>>> for rank, step in enumerate((7, 7, 6)):
...     board.write(rank, heartbeats=1, progress=step, step=step)
>>> monitor.check(now=0.0), monitor.check(now=4.0)       # no rank is reported in the first seconds
(None, None)
>>> for rank, step in enumerate((7, 7, 6)):
...     board.write(rank, heartbeats=2, progress=step, step=step)
>>> monitor.check(now=6.0)
'still waiting for rank 2 (behind for 6 s, in step 6)'
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import run_within, start_thread


@dataclass(frozen=True)
class WaitLimit:
    """How long ranks wait for a missing rank, and the command that messages name, with the option if it has one.

    >>> print(WaitLimit(600.0, "startrail train", "--wait-minutes"))
    10 minutes (--wait-minutes)
    """

    seconds: float
    command: str
    option: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds / 60:g} minutes" + (f" ({self.option})" if self.option else "")

    def log(self, text: str) -> None:
        print(f"{self.command}: {text}", file=sys.stderr, flush=True)


class RankStatus(NamedTuple):
    """``heartbeats`` grows while the rank is alive; it is 0 before the first one and -1 once the rank has ended.
    ``progress`` counts the points in the program that all ranks pass in the same order."""

    heartbeats: int
    progress: int
    step: int


class StatusBoard(Protocol):
    """Where ranks publish their status."""

    world: int

    def write(self, rank: int, heartbeats: int, progress: int, step: int) -> None: ...

    def read(self) -> list[RankStatus]: ...


class SharedMemoryBoard:
    """A board for ranks that are forked from this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._numbers = memoryview(mmap.mmap(-1, 24 * world)).cast("q")

    def write(self, rank: int, heartbeats: int, progress: int, step: int) -> None:
        for place, number in enumerate((progress, step, heartbeats)):
            self._numbers[3 * rank + place] = number

    def read(self) -> list[RankStatus]:
        numbers = self._numbers.tolist()
        return [RankStatus(beats, progress, step) for progress, step, beats in zip(*[iter(numbers)] * 3, strict=True)]


class HeartbeatMonitor:
    """Finds missing ranks on a board. ``failure`` is set when a rank has been missing for longer than ``limit``."""

    def __init__(self, board: StatusBoard, limit: WaitLimit) -> None:
        self.board, self.limit = board, limit
        self.missing: list[int] = []
        self.failure = ""
        self._last: list[RankStatus] | None = None
        self._alive_at: list[float] = []
        self._furthest, self._furthest_at = 0, 0.0
        self._reported: tuple[list[int], float] = [], 0.0

    def check(self, now: float | None = None) -> str | None:
        """Return a line that names the missing ranks, or None if there is nothing new to report."""
        now = time.monotonic() if now is None else now
        ranks = self.board.read()
        if self._last is None:
            self._last, self._alive_at, self._furthest_at = ranks, [now] * len(ranks), now
        for rank, (status, last) in enumerate(zip(ranks, self._last, strict=True)):
            if status.heartbeats != last.heartbeats or status.heartbeats < 0:
                self._alive_at[rank] = now
        if (furthest := max(status.progress for status in ranks)) > self._furthest:
            self._furthest, self._furthest_at = furthest, now
        self._last = ranks
        allowed = [TIMING.missing if status.heartbeats else TIMING.missing_at_start for status in ranks]
        silent = [rank for rank, at in enumerate(self._alive_at) if now - at > allowed[rank]]
        behind = [rank for rank, status in enumerate(ranks) if status.heartbeats >= 0 and status.progress < furthest]
        late = behind if now - self._furthest_at > TIMING.missing else []
        self.missing = silent or late
        if not self.missing:
            self._reported = [], 0.0
            return None
        seconds = now - (min(self._alive_at[rank] for rank in silent) if silent else self._furthest_at)
        steps = sorted({ranks[rank].step for rank in self.missing if ranks[rank].heartbeats})
        position = f"in step {', '.join(map(str, steps))}" if steps else "not started yet"
        state = f"{'silent' if silent else 'behind'} for {seconds:.0f} s, {position}"
        names = rank_names(self.missing)
        if seconds > self.limit.seconds:
            self.failure = f"{names} made no progress within {self.limit}: {state}"
            return None
        if self._reported[0] == self.missing and now - self._reported[1] < TIMING.missing_again:
            return None
        self._reported = self.missing, now
        return f"still waiting for {names} ({state})"


def rank_names(ranks: list[int]) -> str:
    """
    >>> rank_names([3]), rank_names([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Heartbeat:
    """Publishes one rank's status: a thread sends heartbeats, ``advance`` counts progress. No-op without a board.

    The thread calls ``on_stall`` with every heartbeat while the rank makes no progress. If the board is in a store, its
    host may hang and block that thread: give ``store_host``, the host's name, and ``limit``. A second thread then
    reports the host while the rank makes no progress, and ends the process when the limit has passed.
    """

    def __init__(
        self,
        board: StatusBoard | None = None,
        rank: int = 0,
        on_stall: Callable[[], None] | None = None,
        store_host: str = "",
        limit: WaitLimit | None = None,
    ) -> None:
        self._board, self._rank, self._on_stall = board, rank, on_stall
        self._store_host, self._limit = store_host, limit
        self._heartbeats = self._progress = self._step = 0
        self._advanced_at = self._answered_at = time.monotonic()
        self._stopped = threading.Event()
        tasks = () if board is None else (self._beat, self._watch_store) if store_host else (self._beat,)
        self._threads = [start_thread(task, "startrail-heartbeat", self._stopped.set) for task in tasks]

    def advance(self, step: int) -> None:
        """Call at every point that all ranks pass in the same order."""
        self._progress, self._step, self._advanced_at = self._progress + 1, step, time.monotonic()

    def stop(self) -> None:
        """Publish that this rank has ended, so that no rank waits for it."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMING.thread_join)
        board, blocked = self._board, any(thread.is_alive() for thread in self._threads)
        if board is not None and not blocked:  # only after the last heartbeat, which would overwrite it
            with suppress(RuntimeError):
                run_within(TIMING.thread_join, lambda: board.write(self._rank, -1, self._progress, self._step))

    def _beat(self) -> None:
        assert self._board is not None
        with suppress(RuntimeError):  # the store died with its host: pending operations have their own timeouts
            while not self._stopped.is_set():
                self._heartbeats += 1
                self._board.write(self._rank, self._heartbeats, self._progress, self._step)
                if self._on_stall is not None and time.monotonic() - self._advanced_at > TIMING.missing:
                    self._on_stall()
                self._answered_at = time.monotonic()
                self._stopped.wait(TIMING.heartbeat)

    def _watch_store(self) -> None:
        assert self._limit is not None
        # One rank per node; on the first node rank 1 too, since rank 0 may be the host that hangs.
        reports = self._rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        host, reported_at = f"{self._store_host}, which holds the store", float("-inf")
        while not self._stopped.wait(TIMING.heartbeat):
            now = time.monotonic()
            silent = now - self._answered_at
            stalled = min(silent, now - self._advanced_at)  # a rank can make progress without the store
            state = f"silent for {silent:.0f} s, in step {self._step}"
            if stalled > self._limit.seconds:
                exit_rank(self._limit, f"{host}, made no progress within {self._limit}: {state}" if reports else "")
            elif stalled > TIMING.missing and now - reported_at > TIMING.missing_again and reports:
                reported_at = now
                self._limit.log(f"still waiting for {host} ({state})")


def exit_rank(limit: WaitLimit, text: str = "") -> None:
    """Log ``text`` and end the process immediately: the main thread is inside a collective and cannot be interrupted.
    Ranks without a text exit later: a launcher kills all ranks when the first one exits, and the text would be lost."""
    if text:
        limit.log(text)
    else:
        time.sleep(TIMING.report)
    os._exit(1)


def report_or_exit(monitor: HeartbeatMonitor, rank: int) -> None:
    """For ranks without a parent that watches them: the first live rank reports; all exit when the limit has passed."""
    text = monitor.check()
    reports = rank == min(set(range(monitor.board.world)) - set(monitor.missing), default=rank)
    if text and reports:
        monitor.limit.log(text)
    if monitor.failure:
        exit_rank(monitor.limit, monitor.failure if reports else "")

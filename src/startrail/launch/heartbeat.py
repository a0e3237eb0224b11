"""Who is everybody waiting for? Every rank shows signs of life and how far it is; so anybody can tell who is missing.

Training is in step: if one rank hangs, all others wait, deep inside a collective that does not know for whom. A rank
whose signs of life have stopped is missing; if all live, those that are behind the furthest are.

>>> board = SharedBoard(3)
>>> watch = HeartbeatMonitor(board, limit=60.0)
>>> for rank, steps in enumerate((7, 7, 6)):
...     board.write(rank, beats=1, passed=steps, step=steps)
>>> watch.look(now=0.0), watch.look(now=4.0)             # nobody is missed for the first seconds
(None, None)
>>> for rank, steps in enumerate((7, 7, 6)):
...     board.write(rank, beats=2, passed=steps, step=steps)
>>> watch.look(now=6.0)
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
from typing import NamedTuple, Protocol

from startrail.comm.timing import TIMING
from startrail.comm.watchdog import run_within


class Sign(NamedTuple):
    """``beats`` grows as long as the rank lives, is 0 before it begins and -1 when it has ended; ``passed`` counts the
    places in the program that all ranks pass in the same order."""

    beats: int
    passed: int
    step: int


class StatusBoard(Protocol):
    """Where ranks show their signs."""

    world: int

    def write(self, rank: int, beats: int, passed: int, step: int) -> None: ...

    def read(self) -> list[Sign]: ...


class SharedBoard:
    """For ranks that are forked from this process: memory that they share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._numbers = memoryview(mmap.mmap(-1, 24 * world)).cast("q")

    def write(self, rank: int, beats: int, passed: int, step: int) -> None:
        for place, number in enumerate((passed, step, beats)):
            self._numbers[3 * rank + place] = number

    def read(self) -> list[Sign]:
        numbers = self._numbers.tolist()
        return [Sign(beats, passed, step) for passed, step, beats in zip(*[iter(numbers)] * 3, strict=True)]


class HeartbeatMonitor:
    """Looks at a board from time to time. ``limit``: seconds after which a missing rank is given up."""

    def __init__(self, board: StatusBoard, limit: float) -> None:
        self.board, self.limit = board, limit
        self.missing: list[int] = []
        self.over = ""  # why the run must end, once it must
        self._last: list[Sign] | None = None
        self._beat_at: list[float] = []
        self._furthest, self._furthest_at = 0, 0.0
        self._said: tuple[list[int], float] = [], 0.0

    def look(self, now: float | None = None) -> str | None:
        """A line to show about who is missing, or None; ``over`` is set when the limit has passed."""
        now = time.monotonic() if now is None else now
        signs = self.board.read()
        if self._last is None:
            self._last, self._beat_at, self._furthest_at = signs, [now] * len(signs), now
        for rank, (sign, last) in enumerate(zip(signs, self._last, strict=True)):
            if sign.beats != last.beats or sign.beats < 0:
                self._beat_at[rank] = now
        if (furthest := max(sign.passed for sign in signs)) > self._furthest:
            self._furthest, self._furthest_at = furthest, now
        self._last = signs
        patience = [TIMING.missing if sign.beats else TIMING.missing_at_start for sign in signs]
        silent = [rank for rank, at in enumerate(self._beat_at) if now - at > patience[rank]]
        behind = [rank for rank, sign in enumerate(signs) if sign.beats >= 0 and sign.passed < furthest]
        late = behind if now - self._furthest_at > TIMING.missing else []
        self.missing = silent or late
        if not self.missing:
            self._said = [], 0.0
            return None
        since = now - (min(self._beat_at[rank] for rank in silent) if silent else self._furthest_at)
        how = f"{'silent' if silent else 'behind'} for {since:.0f} s, {self._where(signs)}"
        who = names(self.missing)
        if since > self.limit:
            self.over = over(who, self.limit, how)
            return None
        if self._said[0] == self.missing and now - self._said[1] < TIMING.missing_again:
            return None
        self._said = self.missing, now
        return f"still waiting for {who} ({how})"

    def _where(self, signs: list[Sign]) -> str:
        steps = sorted({signs[rank].step for rank in self.missing if signs[rank].beats})
        return f"in step {', '.join(map(str, steps))}" if steps else "not there yet"


def names(ranks: list[int]) -> str:
    """
    >>> names([3]), names([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Pulse:
    """One rank's signs: a thread shows that it lives, and ``passed`` how far it is. Without a board, nothing.

    ``look`` is called with every beat while the rank itself does not get on, in the rank's thread for this. Where the
    board is in a store, its host may hang, and with it that thread: ``holder`` says who that is. Another thread then
    says so while the rank does not get on, and leaves after ``limit`` seconds.
    """

    def __init__(
        self,
        board: StatusBoard | None = None,
        rank: int = 0,
        look: Callable[[], None] | None = None,
        holder: str = "",
        limit: float = float("inf"),
    ) -> None:
        self._board, self._rank, self._look, self._holder, self._limit = board, rank, look, holder, limit
        self._beats = self._passed = self._step = 0
        self._passed_at = self._answered_at = time.monotonic()
        self._ended = threading.Event()
        tasks = () if board is None else (self._live, self._guard) if holder else (self._live,)
        self._threads = [threading.Thread(target=task, name="startrail-pulse", daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def passed(self, step: int) -> None:
        """This rank is at the next of the places that all ranks pass in the same order."""
        self._passed, self._step, self._passed_at = self._passed + 1, step, time.monotonic()

    def end(self) -> None:
        """Nobody need wait for this rank any more."""
        self._ended.set()
        for thread in self._threads:
            thread.join(TIMING.thread_join)
        board, silent = self._board, any(thread.is_alive() for thread in self._threads)
        if board is not None and not silent:  # behind the last beat, which would take it back
            with suppress(RuntimeError):
                run_within(TIMING.thread_join, lambda: board.write(self._rank, -1, self._passed, self._step))

    def _live(self) -> None:
        assert self._board is not None
        with suppress(RuntimeError):  # the store is gone with its host: what waits has deadlines of its own
            while not self._ended.is_set():
                self._beats += 1
                self._board.write(self._rank, self._beats, self._passed, self._step)
                if self._look is not None and time.monotonic() - self._passed_at > TIMING.missing:
                    self._look()
                self._answered_at = time.monotonic()
                self._ended.wait(TIMING.heartbeat)

    def _guard(self) -> None:
        says = self._rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0"  # one of every node, and of the first
        who, said_at = f"{self._holder}, which holds the store", float("-inf")
        while not self._ended.wait(TIMING.heartbeat):
            now = time.monotonic()
            silent = now - self._answered_at
            stuck = min(silent, now - self._passed_at)  # without the store, a rank may well get on
            how = f"silent for {silent:.0f} s, in step {self._step}"
            if stuck > self._limit:
                leave(over(f"{who},", self._limit, how) if says else "")
            elif stuck > TIMING.missing and now - said_at > TIMING.missing_again and says:
                said_at = now
                say(f"still waiting for {who} ({how})")


def over(who: str, limit: float, how: str) -> str:
    return f"{who} did not go on within {limit / 60:g} minutes (wait_minutes): {how}"


def say(text: str) -> None:
    print(f"startrail train: {text}", file=sys.stderr, flush=True)


def leave(text: str = "") -> None:
    """At once: the main thread is deep inside a collective, and cannot be told. Who has nothing to say goes after those
    who have: a launcher ends everybody when the first has left."""
    if text:
        say(text)
    else:
        time.sleep(TIMING.report)
    os._exit(1)


def say_or_leave(watch: HeartbeatMonitor, rank: int) -> None:
    """For ranks that no parent watches: the first one that is there says who is missing; all leave when it is too
    late."""
    text = watch.look()
    says = rank == min(set(range(watch.board.world)) - set(watch.missing), default=rank)
    if text and says:
        say(text)
    if watch.over:
        leave(watch.over if says else "")

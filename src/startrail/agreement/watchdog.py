"""Threads that end before the program does: a C++ call that returns while Python is finalizing aborts the process.

(A thread that wants the GIL then is ended by ``pthread_exit``, and C++ terminates the process where that unwinds a
destructor: "terminate called without an active exception".)

One daemon thread checks all watched objects. A call that may hang runs in its own thread and is abandoned after a
timeout. Both are made by ``start_thread``, and all such threads are stopped and joined at exit: also those that another
of them starts at that time, when it is too late to register anything with ``atexit``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

from startrail.agreement.timing import TIMING

log = logging.getLogger("startrail")


class Watched(Protocol):
    def check(self) -> None: ...


class Watchdog:
    """The watchdog thread of one process. A forked process needs its own."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.watched: WeakSet[Watched] = WeakSet()
        self._failed: WeakSet[Watched] = WeakSet()  # at least once
        self._stopped = threading.Event()
        self._thread = start_thread(self._run, "startrail-watchdog", self._stopped.set)

    def _run(self) -> None:
        while not self._stopped.wait(TIMING.watch_interval):
            with _lock:  # iterating over a set that grows would raise
                watched_now = list(self.watched)
            while watched_now:
                watched = watched_now.pop()
                try:
                    watched.check()
                except Exception as error:  # such as a store that does not answer, for now or for good
                    if watched not in self._failed:
                        self._failed.add(watched)
                        log.warning(
                            "process %d: checking %s failed, and is tried again: %r", self.process, watched, error
                        )
                del watched  # a local variable would keep the last one alive

    def stop(self) -> None:
        self._stopped.set()
        if self.process == os.getpid():
            self._thread.join(TIMING.thread_join)


class Looks:
    """When to look into the store during a wait: more and more seldom the longer it takes, since all ranks of a large
    job may wait at once.

    >>> looks = Looks()
    >>> [seconds for seconds in range(60) if looks.is_due("a wait", seconds)]
    [2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 29, 34, 39, 44, 49, 54, 59]
    """

    def __init__(self) -> None:
        self._wait = 0  # its id: a reference would keep the transport alive that waits, and its connections open
        self._next = 0.0

    def is_due(self, wait: object, seconds: float) -> bool:
        """True if it is time to look again, ``seconds`` after ``wait`` has begun."""
        if id(wait) != self._wait:
            self._wait, self._next = id(wait), TIMING.slow_wait
        if seconds < self._next:
            return False
        self._next = seconds + min(seconds / 4, TIMING.longest_look)
        return True


_watchdog: Watchdog | None = None
_lock = threading.Lock()


def watch(watched: Watched) -> None:
    """Call ``watched.check()`` every ``TIMING.watch_interval`` seconds while ``watched`` is alive."""
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog.process != os.getpid():
            _watchdog = Watchdog()
        _watchdog.watched.add(watched)


def run_within(seconds: float, function: Callable[[], None], abandoned: threading.Event | None = None) -> bool:
    """Run a function that may hang. Returns True if it finished in time, and reraises its error. ``abandoned`` is set
    when its result no longer matters.

    >>> run_within(5.0, lambda: None)
    True
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    try:
        done = run_all_within(seconds, [run])
    finally:
        if abandoned is not None:
            abandoned.set()
    if errors:
        raise errors[0]
    return done


def run_all_within(seconds: float, functions: Sequence[Callable[[], None]]) -> bool:
    """Run functions that may hang, each in its own thread. They must not raise. Returns True if all finish in time."""
    end = time.monotonic() + seconds
    threads = [start_thread(function, "startrail-helper") for function in functions]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


# --- the end of the program

# Threads that have not ended, and how to stop them. Threads start others, so each operation on it must be atomic.
_started: dict[threading.Thread, Callable[[], None] | None] = {}


def start_thread(target: Callable[[], None], name: str, stop: Callable[[], None] | None = None) -> threading.Thread:
    """Start a thread that is joined at exit, after ``stop``, which makes it end soon."""
    for other in list(_started):
        if not other.is_alive():
            _started.pop(other, None)
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _started[thread] = stop  # only now: until it runs, another thread would take it for one that has ended
    return thread


@atexit.register  # at import, so that it runs after the handlers of everything that uses these threads
def _end_threads() -> None:
    start, logged = time.monotonic(), False
    while (
        alive := [each for each in list(_started.items()) if each[0].is_alive()]
    ) and time.monotonic() < start + TIMING.last_join:
        for thread, stop in alive:
            if stop is not None:
                stop()
            thread.join(TIMING.longest_poll)
        if not logged and time.monotonic() > start + TIMING.thread_join:
            logged = True
            log.warning("process %d waits for thread %s before it ends", os.getpid(), alive[0][0].name)

"""Threads that end before the program does: a C++ call that returns while Python is finalizing aborts the process.

One daemon thread checks all watched objects; it is stopped and joined at exit. A call that may hang runs in its
own thread and is abandoned after a timeout.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

from startrail.comm.timing import TIMING


class Watched(Protocol):
    def check(self) -> None: ...


class Watchdog:
    """The watchdog thread of one process. A forked process needs its own."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.watched: WeakSet[Watched] = WeakSet()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="startrail-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        while not self._stopped.wait(TIMING.watch_interval):
            with _lock:  # iterating over a set that grows would raise
                watched_now = list(self.watched)
            while watched_now:
                watched = watched_now.pop()
                try:
                    watched.check()
                except Exception:  # such as a store that is gone: stop checking this object only
                    self.watched.discard(watched)
                del watched  # a local variable would keep the last one alive

    def stop(self) -> None:
        self._stopped.set()
        if self.process == os.getpid():
            self._thread.join(TIMING.thread_join)


_watchdog: Watchdog | None = None
_lock = threading.Lock()


def watch(watched: Watched) -> None:
    """Call ``watched.check()`` every ``TIMING.watch_interval`` seconds while ``watched`` is alive, until it raises."""
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
    threads = [threading.Thread(target=function, name="startrail-helper", daemon=True) for function in functions]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        late = [thread for thread in threads if thread.is_alive()]
        for thread in late:  # it may return from C++ while the program exits
            atexit.register(thread.join, TIMING.thread_join)
    return not late

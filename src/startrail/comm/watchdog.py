"""Threads that must not outlive the program: a C++ call that returns into a Python that is ending aborts it.

One thread watches everything that asks for it; it is stopped and waited for when the program ends. A call that may hang
runs in a thread of its own, and is left behind when its time is over.
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
    def look(self) -> None: ...


class _Watcher:
    """The thread of one process; a forked one needs its own."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.watched: WeakSet[Watched] = WeakSet()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="startrail-watch", daemon=True)
        self.thread.start()
        atexit.register(self.end)

    def _run(self) -> None:
        while not self.stop.wait(TIMING.watch_interval):
            with _lock:  # a set that grows meanwhile would end this thread
                watched_now = list(self.watched)
            while watched_now:
                watched = watched_now.pop()
                try:
                    watched.look()
                except Exception:  # the store is gone, and with it the job; the others are looked after all the same
                    self.watched.discard(watched)
                del watched  # or the last one would live as long as we do

    def end(self) -> None:
        self.stop.set()
        if self.process == os.getpid():
            self.thread.join(TIMING.thread_join)


_watcher: _Watcher | None = None
_lock = threading.Lock()


def watch(watched: Watched) -> None:
    """Call ``watched.look()`` every ``TIMING.watch_interval`` seconds while ``watched`` is alive, until it raises."""
    global _watcher
    with _lock:
        if _watcher is None or _watcher.process != os.getpid():
            _watcher = _Watcher()
        _watcher.watched.add(watched)


def run_within(seconds: float, function: Callable[[], None], ended: threading.Event | None = None) -> bool:
    """Whether ``function``, which may hang, ended in time; what it raises is raised here. ``ended`` is set when nobody
    waits for it any more.

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
        if ended is not None:
            ended.set()
    if errors:
        raise errors[0]
    return done


def run_all_within(seconds: float, functions: Sequence[Callable[[], None]]) -> bool:
    """Whether functions that may hang, each in a thread of its own, have all ended in time; they must not raise."""
    threads = [threading.Thread(target=function, name="startrail-apart", daemon=True) for function in functions]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        late = [thread for thread in threads if thread.is_alive()]
        for thread in late:  # what it called may return at any time: do not end the program meanwhile
            atexit.register(thread.join, TIMING.thread_join)
    return not late

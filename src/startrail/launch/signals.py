"""Stopping in order: a signal is remembered, and acted on when a step is complete."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any


class Stop:
    """Used as a context around the forking of ranks, so that no rank misses a signal that comes early.

    SIGTERM and SIGINT (Ctrl-C) ask for a stop, and are passed on to the ranks that this process has forked; a second
    SIGINT ends at once. A rank whose parent is gone wants to stop as well, rather than train on unseen.
    """

    def __init__(self) -> None:
        self._asked = self.interrupted = False
        self._home, self._parent = os.getpid(), os.getppid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def wanted(self) -> bool:
        alone = os.getppid() != (self._parent if os.getpid() == self._home else self._home)
        return self._asked or alone

    def _hear(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and os.getpid() == self._home:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
        self._asked = True
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGTERM)

"""Graceful stops: a signal is remembered and acted on when the current step is complete."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any


class StoppedError(Exception):
    """A signal has ended some work that nothing depends on yet."""


class Stop:
    """A context manager that turns SIGTERM and SIGINT (Ctrl-C) into a request to stop. Enter it before ranks are
    forked, so that no rank misses an early signal. The request is passed on to forked ranks; a second SIGINT raises
    immediately. A rank whose parent has died also stops, rather than train on unobserved."""

    def __init__(self) -> None:
        self._signalled = self.interrupted = False
        self._owner, self._parent = os.getpid(), os.getppid()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        orphaned = os.getppid() != (self._parent if os.getpid() == self._owner else self._owner)
        return self._signalled or orphaned

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and os.getpid() == self._owner:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
        self._signalled = True
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGTERM)

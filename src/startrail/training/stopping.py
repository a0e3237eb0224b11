"""Stopping in order: a signal is remembered, and acted on when a step is complete."""

from __future__ import annotations

import multiprocessing
import os
import signal


class Stop:
    """Made and told to ``listen`` before ranks are forked, so that no rank misses a signal that comes early.

    SIGTERM and SIGINT (Ctrl-C) ask for a stop, and are passed on to the ranks that this process has forked; a second
    SIGINT ends at once. A rank whose parent is gone wants to stop as well, rather than train on unseen.
    """

    def __init__(self) -> None:
        self._asked = self.interrupted = False
        self._home = os.getpid()
        self._parent = os.getppid()

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)

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

"""Transfers under way where waits never fail (NCCL): who looks whether they end, and what happens if they cannot.

The host is told nothing there: a wait for a peer that died, or that called something else, returns at once on a GPU and
never on a CPU. So a thread looks every half second (``Agreement.watch``). What has been under way for longer than the
lanes' timeout, or belongs to a call that the ranks do not agree about, ends all transfers of the lanes; the program
finds out after its next wait, or at the end of its pass.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from startrail.lanes import Comparison, Lanes

DISAGREE = "ranks made different calls"


class Transfer(Protocol):
    """Something on its way; its text says what."""

    posted: float

    def ended(self) -> bool: ...


class Watch:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.under_way: deque[Transfer] = deque()
        self.comparisons: deque[Comparison] = deque()

    def begin(self, digest: int) -> None:
        """A pass begins: find out meanwhile whether it is the same one everywhere."""
        self.comparisons.append(self.lanes.compare(digest))

    def end(self) -> str | None:
        """A pass has ended: why no result of it, or of one before it, can be trusted, or None."""
        self.comparisons[-1].order()
        while self.under_way and self.under_way[0].ended():
            self.under_way.popleft()
        while not self.lanes.ended and self.comparisons and (differs := self.comparisons[0].differs()) is not None:
            self.comparisons.popleft()
            if differs:
                self.lanes.end(DISAGREE)
        return self.lanes.ended

    def look(self) -> None:
        """From the watching thread."""
        lanes = self.lanes
        if lanes.ended:
            return
        if any(comparison.differs() for comparison in list(self.comparisons)):
            lanes.end(DISAGREE)
            return
        late = time.monotonic() - lanes.timeout.total_seconds()
        for transfer in (*self.under_way, *self.comparisons):
            if transfer.posted < late and not transfer.ended():
                lanes.end(f"{transfer} did not end within {lanes.timeout}")
                return

"""Transfers under way: waiting for them, and where waits never fail (NCCL) who looks whether they end.

The host is told nothing there: a wait for a peer that died, or that called something else, returns at once on a GPU and
never on a CPU. So a thread looks every half second (`watch`). What has been under way for longer than the
lanes' timeout, or belongs to a call that the ranks do not agree about, ends all transfers of the lanes; the program
finds out after its next wait, or at the end of its pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from startrail.agree import PATIENCE
from startrail.lanes import Comparison, Lanes, Message
from startrail.schedule.build import Program

if TYPE_CHECKING:
    from startrail.executor import Executor

DISAGREE = "ranks made different calls"


class Transfer(Protocol):
    """Something on its way; its text says what."""

    posted: float

    def ended(self) -> bool: ...


class UnderWay:
    """Messages that end together: waits once, counts the seconds, and says who waited for what if it fails.

    It does not know its pass. Buffers remember their last sends until they are used again, and would keep all tensors
    of the pass alive.
    """

    def __init__(self, executor: Executor, program: Program, index: int, work: dist.Work) -> None:
        self.executor, self.program, self.index, self.work = executor, program, index, work
        self.messages: list[Message] = []
        self.waited = False
        self.posted = time.monotonic()

    def __str__(self) -> str:
        return f"{self.program.pass_} step {self.index}, {self._what}"

    @property
    def _what(self) -> str:
        name = self.executor.lanes.name
        return "; ".join(f"{'sending' if each.send else 'receiving'} {name(each)}" for each in self.messages)

    def end(self) -> None:
        self.executor.lanes.end_waits()

    def ended(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        executor = self.executor
        waiting, lanes = executor.counters.waiting, executor.lanes
        start = waiting.start(lanes.device)
        executor.agreement.waiting(self)
        try:
            self.work.wait()
            if lanes.ended:  # its bytes may never have come, and a wait that never fails would not say so
                raise RuntimeError(lanes.ended)
        except RuntimeError as error:
            raise executor.failure(self.program, self.index, self._what, error) from error
        finally:
            executor.agreement.arrived()
            waiting.stop(start, lanes.device)


class Watch:
    """``reason`` is what the other ranks say of why something may never end (``Agreement.reason``)."""

    def __init__(self, lanes: Lanes, reason: Callable[[], Exception | None]) -> None:
        self.lanes, self.reason = lanes, reason
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
        now = time.monotonic()
        oldest = next((each for each in (*self.under_way, *self.comparisons) if not each.ended()), None)
        if oldest is None or now - oldest.posted < PATIENCE:
            return
        if now - oldest.posted > lanes.timeout.total_seconds():
            lanes.end(f"{oldest} did not end within {lanes.timeout}")
        elif reason := self.reason():
            lanes.end(DISAGREE if isinstance(reason, ValueError) else str(reason))

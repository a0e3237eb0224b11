"""Transfers under way: waiting for them, and where waits never fail (NCCL) who looks whether they end.

The host is told nothing there: a wait for a peer that died, or that called something else, returns at once on a GPU and
never on a CPU. So a thread looks every half second (`watch`). What has been under way for longer than the
lanes' timeout, or belongs to a call that the ranks do not agree about, ends all transfers of the lanes; the program
finds out after its next wait, or at the end of its pass.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from startrail.comm.consensus import Consensus
from startrail.comm.counters import Counters
from startrail.comm.errors import PeerError
from startrail.comm.lanes import DigestComparison, Lanes, Message, is_done
from startrail.comm.timing import TIMING
from startrail.kernels.device import on_device
from startrail.schedule.program import Program

DISAGREEMENT = "ranks made different calls"


class InFlight(Protocol):
    """Something on its way; its text says what."""

    posted: float
    work: dist.Work


@dataclass(frozen=True)
class TransferContext:
    """What every wait of an executor has in common. Not the executor itself: that has what is under way, and would
    then live, and its lanes with it, until somebody collects garbage."""

    lanes: Lanes
    agreement: Consensus
    counters: Counters

    def failure(self, program: Program, index: int, what: str, error: RuntimeError) -> Exception:
        """Why a transfer failed: ranks disagree about this call, or else a peer is gone, has given up or is late."""
        reason, end = self.agreement.reason(), time.monotonic() + TIMING.explanation
        while reason is None and self.lanes.ended == DISAGREEMENT and time.monotonic() < end:
            time.sleep(TIMING.longest_poll)  # the others are about to say what they called
            reason = self.agreement.reason()
        if isinstance(reason, ValueError):
            return reason
        return PeerError(
            f"rank {program.place.rank}, {program.pass_} step {index} of plan {program.plan}: "
            f"{what} failed: {str(reason or error).splitlines()[0]}"
        )


class PendingTransfer:
    """Messages that end together: waits once, counts the seconds, and says who waited for what if it fails.

    It does not know its pass. Buffers remember their last sends until they are used again, and would keep all tensors
    of the pass alive.
    """

    def __init__(self, waits: TransferContext, program: Program, index: int, work: dist.Work) -> None:
        self.waits, self.program, self.index, self.work = waits, program, index, work
        self.messages: list[Message] = []
        self.waited = False
        self.posted = time.monotonic()

    def __str__(self) -> str:
        return f"{self.program.pass_} step {self.index}, {self._what}"

    @property
    def _what(self) -> str:
        name = self.waits.lanes.name
        return "; ".join(f"{'sending' if each.send else 'receiving'} {name(each)}" for each in self.messages)

    def end(self) -> None:
        self.waits.lanes.end_waits()

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        lanes, agreement, waiting = self.waits.lanes, self.waits.agreement, self.waits.counters.waiting
        start = waiting.start(lanes.device)
        agreement.waiting(self)
        try:
            self.work.wait()
            if lanes.ended:  # its bytes may never have come, and a wait that never fails would not say so
                raise RuntimeError(lanes.ended)
        except RuntimeError as error:
            raise self.waits.failure(self.program, self.index, self._what, error) from error
        finally:
            agreement.arrived()
            waiting.stop(start, lanes.device)


class TransferMonitor:
    """What is under way on lanes whose waits never fail."""

    def __init__(self, waits: TransferContext) -> None:
        self.lanes, self.reason = waits.lanes, waits.agreement.reason
        self.under_way: deque[InFlight] = deque()
        self.comparisons: deque[DigestComparison] = deque()
        # torch has nothing else by which a work says that it failed
        warnings.filterwarnings("ignore", message="Work::exception API is being deprecated")

    def begin(self, digest: int) -> None:
        """A pass begins: find out meanwhile whether it is the same one everywhere."""
        self.comparisons.append(self.lanes.compare(digest))

    def end(self) -> str | None:
        """A pass has ended: why no result of it, or of one before it, can be trusted, or None."""
        self.comparisons[-1].order()
        while self.under_way and self._over(self.under_way[0]):
            self.under_way.popleft()
        while not self.lanes.ended and self.comparisons and (differs := self.comparisons[0].differs()) is not None:
            self.comparisons.popleft()
            if differs:
                self.lanes.end(DISAGREEMENT)
        return self.lanes.ended

    def give_up(self) -> None:
        """No pass goes on: end what is under way, for which closing the lanes would wait, and forget it."""
        if not self.lanes.ended:
            self.lanes.end("this rank gave up")
        self.under_way.clear()
        self.comparisons.clear()

    def _over(self, transfer: InFlight) -> bool:
        """Whether it has ended. One that failed ends all others: nobody else would say so."""
        try:
            return is_done(transfer.work)
        except RuntimeError as error:
            if not self.lanes.ended:
                self.lanes.end(f"{transfer} failed: {error}")
            return True

    def look(self) -> None:
        """From the watching thread, which has no device of its own: asking for an event would make it use GPU 0."""
        with on_device(self.lanes.device):
            self._look()

    def _look(self) -> None:
        lanes = self.lanes
        if lanes.ended:
            return
        if any(comparison.differs() for comparison in list(self.comparisons)):
            lanes.end(DISAGREEMENT)
            return
        now = time.monotonic()
        open_ = [each for each in (*self.under_way, *self.comparisons) if not self._over(each)]
        if lanes.ended or not open_ or now - (oldest := open_[0]).posted < TIMING.slow_wait:
            return
        if now - oldest.posted > lanes.timeout.total_seconds():
            lanes.end(f"{oldest} did not end within {lanes.timeout}")
        elif reason := self.reason():
            lanes.end(DISAGREEMENT if isinstance(reason, ValueError) else str(reason))

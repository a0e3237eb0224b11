"""Pending transfers: waiting for them and, where waits never fail (NCCL), monitoring them.

With NCCL the host gets no error: a wait for a peer that died, or that made another call, returns immediately on a GPU
and never on a CPU. Therefore the watchdog's thread checks pending transfers. One that takes longer than the lanes'
timeout, or belongs to a call that the ranks disagree about, aborts all transfers of the lanes; the program raises after
its next wait, or at the end of its pass.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from startrail import _compat
from startrail.comm.consensus import Consensus
from startrail.comm.counters import Counters
from startrail.comm.errors import PeerError
from startrail.comm.lanes import DigestComparison, Lanes, is_done
from startrail.comm.timing import TIMING
from startrail.kernels.device import on_device
from startrail.schedule.program import Program
from startrail.schedule.walk import Message


class InFlight(Protocol):
    """A posted operation. ``str()`` describes it."""

    posted: float
    work: dist.Work


@dataclass(frozen=True)
class TransferContext:
    """What all transfers of an executor share.

    It deliberately holds no reference to the executor, which holds the pending transfers: the cycle would keep its
    lanes alive until the next garbage collection.
    """

    lanes: Lanes
    consensus: Consensus
    counters: Counters

    def explain(self, program: Program, step: int, operation: str, error: RuntimeError) -> Exception:
        """The error to raise for a failed transfer: ranks made different calls, or a peer is gone, failed or late."""
        where = f"rank {program.place.rank}, {program.pass_} step {step} of plan {program.plan}"
        return self.explain_at(f"{where}: {operation} failed", error)

    def explain_at(self, where: str, error: RuntimeError) -> Exception:
        reason, end = self.consensus.find_reason(), time.monotonic() + TIMING.explanation
        while reason is None and self.lanes.mismatch and time.monotonic() < end:
            time.sleep(TIMING.longest_poll)  # the other ranks are about to write their records
            reason = self.consensus.find_reason()
        if isinstance(reason, ValueError):
            return reason
        return PeerError(f"{where}: {str(reason or self.lanes.aborted or error).splitlines()[0]}")


class PendingTransfer:
    """A batch of messages that complete together.

    ``wait()`` blocks once, adds the time to the counters, and raises a ``PeerError`` that names the rank, the step and
    the messages if the batch fails.

    It deliberately holds no reference to the pass that posted it: pooled buffers keep their last sends until they are
    reused, and would otherwise keep every tensor of that pass alive.
    """

    def __init__(self, context: TransferContext, program: Program, step: int, work: dist.Work) -> None:
        self.context, self.program, self.step, self.work = context, program, step, work
        self.messages: list[Message] = []
        self.posted = time.monotonic()
        self._is_waited_for = False

    def __str__(self) -> str:
        return f"{self.program.pass_} step {self.step}, {self._description}"

    @property
    def _description(self) -> str:
        describe = self.context.lanes.describe
        return "; ".join(f"{'sending' if each.send else 'receiving'} {describe(each)}" for each in self.messages)

    def abort(self) -> None:
        self.context.lanes.abort("aborted after an error on another rank")

    def wait(self) -> None:
        if self._is_waited_for:
            return
        self._is_waited_for = True
        lanes, consensus, waiting = self.context.lanes, self.context.consensus, self.context.counters.waiting
        start = waiting.start(lanes.device)
        consensus.begin_wait(self)
        try:
            self.work.wait()
            if lanes.aborted:  # its bytes may be missing, and NCCL's wait would not raise
                raise RuntimeError(lanes.aborted)
        except RuntimeError as error:
            raise self.context.explain(self.program, self.step, self._description, error) from error
        finally:
            consensus.end_wait()
            waiting.stop(start, lanes.device)


class TransferMonitor:
    """Monitors the pending transfers of lanes whose waits never fail."""

    def __init__(self, context: TransferContext) -> None:
        self.context, self.lanes = context, context.lanes
        self.pending: deque[InFlight] = deque()
        self.comparisons: deque[DigestComparison] = deque()

    def begin_pass(self, digest: int, program: Program) -> None:
        """Start comparing the pass with those of all ranks."""
        try:
            self._compare(digest)
        except RuntimeError as error:
            raise self.context.explain(program, 0, "starting the pass", error) from error

    def _compare(self, digest: int) -> DigestComparison:
        if self.lanes.aborted:  # since the last pass
            raise RuntimeError(self.lanes.aborted)
        comparison = self.lanes.compare_digest(digest)
        self.comparisons.append(comparison)
        return comparison

    def confirm(self) -> None:
        """Wait until all passes so far have completed on the devices of all ranks. Raise if any was aborted.

        The comparison runs on the device after everything on its current stream, and on no rank before all take part.
        """
        try:
            comparison = self._compare(1 + self.context.consensus.call)
            while not is_done(comparison.work):
                if self.lanes.aborted:
                    break
                time.sleep(TIMING.poll)
            if self.lanes.aborted:
                raise RuntimeError(self.lanes.aborted)
            self.end_pass()
            if comparison.least() != 1 + self.context.consensus.call:
                self._abort_mismatch()
            if self.lanes.aborted:
                raise RuntimeError(self.lanes.aborted)
        except RuntimeError as error:
            where = f"global rank {dist.get_rank()}: nothing computed since the last check may be used"
            raise self.context.explain_at(where, error) from error

    def end_pass(self) -> str | None:
        """The reason why no result of this pass, or of an earlier one, can be trusted, or None."""
        self.comparisons[-1].start_read()
        while self.pending and self._is_done(self.pending[0]):
            self.pending.popleft()
        comparisons = self.comparisons
        while not self.lanes.aborted and comparisons and (mismatch := comparisons[0].is_mismatch()) is not None:
            comparisons.popleft()
            if mismatch:
                self._abort_mismatch()
        return self.lanes.aborted

    def abandon(self) -> None:
        """Abort and forget pending transfers, which closing the lanes would wait for."""
        if not self.lanes.aborted:
            self.lanes.abort("aborted after an earlier error on this rank")
        self.pending.clear()
        self.comparisons.clear()

    def _abort_mismatch(self) -> None:
        self.lanes.abort("ranks made different calls", mismatch=True)

    def _is_done(self, transfer: InFlight) -> bool:
        """True if it has ended. A failed one aborts all others: NCCL reports the failure nowhere else."""
        try:
            return is_done(transfer.work)
        except RuntimeError as error:
            if not self.lanes.aborted:
                self.lanes.abort(f"{transfer} failed: {error}")
            return True

    def check(self) -> None:
        """Called by the watchdog's thread, which has no current device: querying an event would initialize GPU 0."""
        lanes = self.lanes
        if lanes.aborted:
            return
        with on_device(lanes.device):
            if lanes.device.type == "cuda":
                _compat.ignore_captures_of_other_threads()
            if any(comparison.is_mismatch() for comparison in list(self.comparisons)):
                self._abort_mismatch()
                return
            now = time.monotonic()
            unfinished = [each for each in (*self.pending, *self.comparisons) if not self._is_done(each)]
            if lanes.aborted or not unfinished or now - (oldest := unfinished[0]).posted < TIMING.slow_wait:
                return
            if now - oldest.posted > lanes.timeout.total_seconds():
                lanes.abort(f"{oldest} did not end within {lanes.timeout}")
            elif isinstance(reason := self.context.consensus.find_reason(), ValueError):
                self._abort_mismatch()
            elif reason is not None:
                lanes.abort(str(reason))

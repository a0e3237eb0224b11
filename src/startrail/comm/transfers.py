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

import torch
import torch.distributed as dist

from startrail import _compat
from startrail.comm.consensus import Consensus, RejoinError, StartedCall
from startrail.comm.counters import Counters
from startrail.comm.errors import PeerError
from startrail.comm.lanes import DigestComparison, Lanes, is_done, max_over_ranks
from startrail.comm.timing import TIMING
from startrail.kernels.device import on_device
from startrail.schedule.program import Program
from startrail.schedule.walk import Message


class InFlight(Protocol):
    """A posted operation. ``str()`` describes it."""

    posted: float

    @property
    def work(self) -> dist.Work: ...


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
        """The error to raise for a failed transfer of a pass."""
        where = f"rank {program.place.rank}, {program.pass_} step {step} of plan {program.plan}"
        return self.explain_wait(f"{where}: {operation} failed", error)

    def explain_wait(self, what: str, error: RuntimeError) -> Exception:
        """The error to raise for a failed transfer: ranks made different calls, or a peer is gone, failed or late, or
        this rank was late itself. ``what`` it means for the program."""
        reason, end = self.consensus.find_reason(), time.monotonic() + TIMING.explanation
        while reason is None and self.lanes.mismatch and time.monotonic() < end:
            time.sleep(TIMING.longest_poll)  # the other ranks are about to write their records
            reason = self.consensus.find_reason()
        if isinstance(reason, ValueError | RejoinError):
            return reason
        others = "" if reason else self.consensus.describe_others()
        return PeerError(f"{what}: {str(reason or self.lanes.aborted or error).splitlines()[0]}{others}")


class PendingTransfer:
    """Messages that are awaited together: all of one work, or each with its own.

    ``wait()`` blocks once, adds the time to the counters, and raises a ``PeerError`` that names the rank, the step and
    the messages that failed.

    It deliberately holds no reference to the pass that posted it: pooled buffers keep their last sends until they are
    reused, and would otherwise keep every tensor of that pass alive.
    """

    def __init__(self, context: TransferContext, program: Program, step: int) -> None:
        self.context, self.program, self.step = context, program, step
        self.messages: list[Message] = []
        self.works: list[dist.Work] = []
        self.posted = time.monotonic()
        self._is_waited_for = False
        self._current = 0  # the work that ``wait()`` waits for

    def add(self, message: Message, work: dist.Work) -> None:
        self.messages.append(message)
        if not self.works or self.works[-1] is not work:
            self.works.append(work)

    @property
    def work(self) -> dist.Work:
        """The only one: that of a whole batch, or of a single message."""
        (work,) = self.works
        return work

    def __str__(self) -> str:
        return f"{self.program.pass_} step {self.step}, {self._description}"

    @property
    def _description(self) -> str:
        describe = self.context.lanes.describe
        described = self.messages if len(self.works) == 1 else [self.messages[self._current]]
        return "; ".join(f"{'sending' if each.send else 'receiving'} {describe(each)}" for each in described)

    def abort(self) -> None:
        self.context.lanes.abort("aborted after an error on another rank")

    def wait(self) -> None:
        if self._is_waited_for:
            return
        self._is_waited_for = True
        lanes, consensus, waiting = self.context.lanes, self.context.consensus, self.context.counters.waiting
        start, failed = waiting.start(lanes.device), True
        consensus.begin_wait(self)
        try:
            for index, work in enumerate(self.works):
                self._current = index
                work.wait()
            if lanes.aborted:  # its bytes may be missing, and NCCL's wait would not raise
                raise RuntimeError(lanes.aborted)
            failed = False
        except RuntimeError as error:
            raise self.context.explain(self.program, self.step, self._description, error) from error
        finally:
            consensus.end_wait(failed)
            waiting.stop(start, lanes.device)


class CallComparison:
    """Compares the current call with all ranks without the store, where waits can fail (gloo): an all-reduce of two
    numbers over every level's lane, one after the other, reaches all ranks. Starting it waits for nothing."""

    def __init__(self, context: TransferContext, digest: int) -> None:
        self.context, self.call = context, context.consensus.current
        self.extremes = torch.tensor([-digest, digest])
        self._groups = [group for group in dict.fromkeys(context.lanes.groups) if group is not None]
        self._work: dist.Work | None = max_over_ranks(self._groups[0], self.extremes)

    def __str__(self) -> str:
        return f"comparing {self.call} with all ranks"

    def abort(self) -> None:
        """End it here and at the peers; closing the lanes would wait for it."""
        if self._work is not None:
            self.context.lanes.abort("aborted after an error on this or another rank")

    def finish(self) -> None:
        """Raise ``ValueError`` on every rank unless all ranks have started it with the same digest."""
        lanes, consensus, failed = self.context.lanes, self.context.consensus, True
        consensus.begin_wait(self)
        try:
            for group in self._groups:
                if self._work is None:
                    self._work = max_over_ranks(group, self.extremes)
                self._work.wait()
                self._work = None
                if lanes.aborted:
                    raise RuntimeError(lanes.aborted)
            failed = False
        except RuntimeError as error:
            explained = self.context.explain_wait(f"rank {lanes.place.rank}: {self} failed", error)
            if isinstance(explained, PeerError):
                explained = PeerError(f"{consensus.missing_ranks()} did not start {self.call}: {explained}")
            raise explained from error
        finally:
            consensus.end_wait(failed)
        low, high = self.extremes.tolist()
        if low + high:
            consensus.compare()
            raise ValueError(f"ranks disagree about {self.call}")


class TransferMonitor:
    """Monitors the pending transfers of lanes whose waits never fail."""

    def __init__(self, context: TransferContext) -> None:
        self.context, self.lanes, self.consensus = context, context.lanes, context.consensus
        self.pending: deque[InFlight] = deque()
        self.comparisons: deque[DigestComparison] = deque()

    def begin_pass(self, digest: int, program: Program) -> None:
        """Start comparing the current call with those of all ranks."""
        try:
            self._compare(digest, self.consensus.current)
        except RuntimeError as error:
            raise self.context.explain(program, 0, "starting the pass", error) from error

    def compare_collective(self, digest: int) -> None:
        """Compare the current call, which runs no program, with those of all ranks."""
        try:
            self._compare(digest, self.consensus.current)
            if reason := self.end_pass():
                raise RuntimeError(reason)
        except RuntimeError as error:
            what = f"rank {self.lanes.place.rank}: {self.consensus.current.record.kind} failed"
            raise self.context.explain_wait(what, error) from error

    def _compare(self, digest: int, call: StartedCall | None) -> DigestComparison:
        if self.lanes.aborted:  # since the last pass
            raise RuntimeError(self.lanes.aborted)
        comparison = self.lanes.compare_digest(digest, call)
        self.comparisons.append(comparison)
        return comparison

    def confirm(self) -> None:
        """Wait until all passes so far have completed on the devices of all ranks. Raise if any was aborted.

        The comparison runs on the device after everything on its current stream, and on no rank before all take part.
        """
        try:
            comparison = self._compare(1 + self.consensus.current.number, None)
            while not (is_done(comparison.work) or self.lanes.aborted):
                time.sleep(TIMING.poll)
            if not self.lanes.aborted:
                comparison.least()  # waits: now the results of all comparisons are known
                self._read_known()
            if self.lanes.aborted:
                raise RuntimeError(self.lanes.aborted)
        except RuntimeError as error:
            what = f"global rank {dist.get_rank()}: nothing computed since the last check may be used"
            explained = self.context.explain_wait(what, error)
            if isinstance(explained, RejoinError):  # what this rank has computed without the others is lost
                explained = PeerError(f"{what}: {explained}")
            raise explained from error

    def end_pass(self) -> str | None:
        """The reason why no result of this pass, or of an earlier one, can be trusted, or None."""
        self.comparisons[-1].start_read()
        self._read_known()
        return self.lanes.aborted

    def _read_known(self) -> None:
        """Forget transfers that have ended, and compare the calls whose comparisons have."""
        while self.pending and self._is_done(self.pending[0]):
            self.pending.popleft()
        comparisons = self.comparisons
        while not self.lanes.aborted and comparisons and (mismatch := comparisons[0].is_mismatch()) is not None:
            comparison = comparisons.popleft()
            if mismatch:
                self._abort_mismatch(comparison)

    def abandon(self) -> None:
        """Abort and forget pending transfers, which closing the lanes would wait for."""
        if not self.lanes.aborted:
            self.lanes.abort("aborted after an earlier error on this rank")
        self.pending.clear()
        self.comparisons.clear()

    def _abort_mismatch(self, comparison: DigestComparison | None = None) -> None:
        if comparison is not None and comparison.call is not None:
            self.consensus.suspect(comparison.call)  # this rank may have made later calls already
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
            if mismatch := next((each for each in list(self.comparisons) if each.is_mismatch()), None):
                self._abort_mismatch(mismatch)
                return
            now = time.monotonic()
            unfinished = [each for each in (*self.pending, *self.comparisons) if not self._is_done(each)]
            if lanes.aborted or not unfinished or now - (oldest := unfinished[0]).posted < TIMING.slow_wait:
                return
            if now - oldest.posted > lanes.timeout.total_seconds():
                lanes.abort(f"{oldest} did not end within {lanes.timeout}")
            elif isinstance(reason := self.consensus.find_reason(), ValueError):
                self._abort_mismatch()
            elif reason is not None:
                lanes.abort(str(reason))

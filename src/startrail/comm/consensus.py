"""Detects ranks that do not make the same attention calls.

Every call has a number and a ``CallRecord`` of everything that its ranks must agree on, including its sequence and, for
a backward pass, its forward call. The first call with a signature, and the first on a sequence, is compared through the
``CallLedger``: each rank writes its record and waits until all ranks have. A rank whose arguments are wrong writes its
problem instead, so all ranks raise the same ``ValueError`` and none waits.

Later calls with that signature on that sequence cost no communication. But a rank that has waited for a transfer longer
than ``TIMING.slow_wait`` writes its record and looks for a different one of the same call. If it finds one, it aborts
its wait and raises the same ``ValueError``.

After an error on any rank, the pending calls of all ranks are useless. A rank that fails writes the reason, which
aborts the waits of the others, and all start again in the next *epoch*: call 1, nothing agreed on, new lanes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from startrail.comm.errors import PeerError
from startrail.comm.ledger import CallLedger, CallRecord, Failure, WaitRegistry, explain_mismatch, rank_names
from startrail.comm.timing import TIMING
from startrail.comm.watchdog import run_within, watch

MAX_AGREED = 1024  # signatures and sequences that are remembered as agreed on

log = logging.getLogger("startrail")


class PendingWait(Protocol):
    """A transfer that the program waits for. ``str()`` describes it."""

    def abort(self) -> None: ...


class Consensus:
    """The calls of one ``SequenceParallel`` on one rank.

    ``ledger`` is None where there is only one rank. ``register_wait`` makes this rank's ``WaitRegistry`` for the key of
    a call.
    """

    def __init__(
        self, ledger: CallLedger | None, register_wait: Callable[[str], WaitRegistry], every_call: bool
    ) -> None:
        self.ledger, self.register_wait, self.every_call = ledger, register_wait, every_call
        self.epoch = self.call = 0
        self.record = CallRecord()
        self._agreed: dict[object, None] = {}  # in the order in which ranks agreed, which is the same on all
        self._reason: Exception | None = None  # why the pending wait can never end
        self._wait: tuple[PendingWait, float] | None = None
        self._reminded: PendingWait | None = None

    @property
    def call_id(self) -> tuple[int, int]:
        """The epoch and the number of the current call; always (0, 0) on one rank, which cannot disagree."""
        return (self.epoch, self.call) if self.ledger is not None else (0, 0)

    @property
    def key(self) -> str:
        """The current call's key in the ledger."""
        return f"{self.epoch}/{self.call}"

    def start(self, record: CallRecord) -> None:
        """Start a call."""
        self.call += 1
        self.record = record

    def has_agreed(self, *keys: object) -> bool:
        return not self.every_call and all(key in self._agreed for key in keys)

    def compare(self, keys: Iterable[object]) -> None:
        """Raise on every rank unless all ranks start this call with the same record and none has a problem; otherwise
        remember ``keys`` as agreed on."""
        if self.ledger is not None:
            self._compare(self.ledger)
        elif self.record.problem is not None:
            raise ValueError(self.record.problem)
        self._agreed |= dict.fromkeys(keys)
        while len(self._agreed) > MAX_AGREED:
            del self._agreed[next(iter(self._agreed))]

    def _compare(self, ledger: CallLedger) -> None:
        """Use the store from another thread, which hangs if the store's host does."""
        comparison, limit = _CallComparison(self, ledger), ledger.timeout.total_seconds() + TIMING.store_answer
        store = "torch.distributed's store, hosted by rank 0 or the launcher,"
        what = f"rank {ledger.rank}, attention call {self.call}: {store}"
        try:
            done = run_within(limit, comparison.run, comparison.cancelled)
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {str(error).splitlines()[0]}") from error
        if not done:
            raise PeerError(f"{what} did not answer within {ledger.timeout}")

    def abandon(self, error: BaseException) -> None:
        """After an error in this rank's call: tell the ranks that wait for it, and start a new epoch."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        self.call, self._reason = 0, None
        self._agreed.clear()
        if (ledger := self.ledger) is not None:
            failure = Failure.of(error, ledger.rank)
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, lambda: ledger.write_failure(epoch, failure))

    # --- waiting for transfers

    def begin_wait(self, wait: PendingWait) -> None:
        self._wait = wait, time.monotonic()

    def end_wait(self) -> None:
        self._wait = self._reminded = None

    def find_reason(self) -> Exception | None:
        """The reason of a failed wait, if the ledger has one."""
        if self._reason is None and (ledger := self.ledger) is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, lambda: self._read_reason(ledger))
        return self._reason

    def watch_waits(self) -> None:
        """Have the watchdog check long waits for the lifetime of this object."""
        if self.ledger is not None:
            watch(self)

    def check(self) -> None:
        """Log a wait that has become long, and abort it if it can never end."""
        if self._wait is None or self.ledger is None:
            return
        wait, since = self._wait
        seconds = time.monotonic() - since
        if seconds > TIMING.reminder and wait is not self._reminded:
            self._reminded = wait
            log.warning("rank %d still waits after %.0f seconds: %s", self.ledger.rank, seconds, wait)
        if seconds < TIMING.slow_wait:
            return
        if self._reason is None:
            self._read_reason(self.ledger)
        if self._reason is not None and self._wait is not None:  # it may have ended meanwhile
            wait.abort()

    def _read_reason(self, ledger: CallLedger) -> None:
        key, epoch, record = self.key, self.epoch, self.record
        ledger.write(key, record, compared=False)
        if not ledger.matches(key, record):
            self._reason = ValueError(explain_mismatch(ledger.read(key)))
        elif failure := ledger.read_failure(epoch):
            self._reason = failure.as_error()


class _CallComparison:
    """Compares one call with all ranks. ``run`` is called in a thread, and returns early once it is ``cancelled``."""

    def __init__(self, consensus: Consensus, ledger: CallLedger) -> None:
        self.ledger, self.record, self.register_wait = ledger, consensus.record, consensus.register_wait
        self.key, self.epoch, self.call = consensus.key, consensus.epoch, consensus.call
        self.cancelled = threading.Event()

    def run(self) -> None:
        ledger, key, record = self.ledger, self.key, self.record
        ledger.write(key, record, compared=True)
        start = time.monotonic()
        pause = TIMING.poll
        with contextlib.ExitStack() as stack:
            registry: WaitRegistry | None = None
            checked_at, reminded = start, False
            while not ledger.is_complete(key) and not self.cancelled.wait(pause):
                pause = min(2 * pause, TIMING.longest_poll)
                now = time.monotonic()
                seconds = now - start
                if seconds > ledger.timeout.total_seconds():
                    raise PeerError(f"{self._missing_ranks()} did not start {self} within {ledger.timeout}")
                if seconds > TIMING.slow_wait and not ledger.matches(key, record):
                    break  # the missing ranks may be stuck in transfers of another call
                if pause >= TIMING.longest_poll:
                    failure = ledger.read_failure(self.epoch)
                    if failure and ledger.matches(key, record):
                        raise failure.as_error()
                if seconds > TIMING.slow_wait and now - checked_at > TIMING.watch_interval:
                    checked_at = now
                    if registry is None:
                        registry = self.register_wait(key)
                        stack.callback(registry.leave)
                    elif conflict := registry.find_conflict():
                        raise ValueError(f"{conflict}: make a new SequenceParallel on all of these ranks, or on none")
                if seconds > TIMING.reminder and not reminded:
                    reminded = True
                    log.warning("rank %d still waits for %s to start %s", ledger.rank, self._missing_ranks(), self)
        if record.problem is not None or not ledger.matches(key, record):
            raise ValueError(explain_mismatch(ledger.read(key)))
        if failure := ledger.read_failure(self.epoch):  # of a rank that wrote its record, but did not wait for ours
            raise failure.as_error()

    def _missing_ranks(self) -> str:
        present = {rank for ranks in self.ledger.read(self.key).values() for rank in ranks}
        return rank_names(sorted(set(range(self.ledger.world)) - present))

    def __str__(self) -> str:
        return f"attention call {self.call} ({self.record})"

"""Detects ranks that do not make the same calls: attention, and the collectives of a sequence.

Every call has a number and a ``CallRecord`` of everything that its ranks must agree on, including its sequence and, for
a backward pass, its forward call. The first call of a kind is compared through the ``CallLedger``: each rank writes its
record and waits until all ranks have. A rank whose arguments are wrong writes its problem instead, so all ranks raise
the same ``ValueError`` and none waits.

Later calls of that kind do not use the store. On a new sequence, ranks compare a digest of the record while the call
runs (`transfers`), and read each other's records only if the digests differ. Any other call costs no communication. But
a rank that has waited for a transfer longer than ``TIMING.slow_wait`` writes its record and looks for a different
one of the same call. If it finds one, it aborts its wait and raises the same ``ValueError``.

After an error on any rank, the pending calls of all ranks are useless. A rank that fails writes the reason, which
aborts the waits of the others, and all start again in the next *epoch*: call 1, nothing agreed on, new lanes. A rank
that finds itself behind continues in the newest epoch. If the others timed out waiting for it, as they do when its own
code raised and it skipped a call, they have already raised, and it joins them without an error (``RejoinError``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from startrail.agreement.digest import fold
from startrail.agreement.errors import PeerError
from startrail.agreement.ledger import (
    CallLedger,
    CallRecord,
    Failure,
    WaitRegistry,
    delete_dropped_keys,
    explain_mismatch,
    shortened,
)
from startrail.agreement.timing import TIMING
from startrail.agreement.waits import PublishedWait, describe_waits, rank_names
from startrail.agreement.watchdog import run_within, watch

MAX_AGREED = 1024  # kinds of calls that are remembered as agreed on
LATEST_SEQUENCES = 16  # with their boundaries: several models may use several in turns

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("startrail")


class PendingWait(NamedTuple):
    """What the program waits for (``str()`` describes it), since when, and how to end it."""

    what: object
    since: float
    abort: Callable[[], None]


class RejoinError(Exception):
    """The other ranks have given up on this one, and go on in another ``epoch``: the call has to start again there.
    ``sequence`` is the one in which they did."""

    def __init__(self, epoch: int, sequence: int | None) -> None:
        super().__init__(f"the other ranks continue in epoch {epoch}")
        self.epoch, self.sequence = epoch, sequence


def rejoining(call: Callable[P, R]) -> Callable[P, R]:
    """Repeat a call that raises ``RejoinError``: it starts again in the epoch of the other ranks."""

    @functools.wraps(call)
    def repeated(*arguments: P.args, **options: P.kwargs) -> R:
        while True:
            try:
                return call(*arguments, **options)
            except RejoinError as error:
                log.info("%s", error)

    return repeated


class StartedCall(NamedTuple):
    """A call with its key in the ledger. ``device_digest`` is of data on a device, and not part of the record yet."""

    epoch: int
    number: int
    record: CallRecord
    device_digest: Tensor | None = None

    @property
    def key(self) -> str:
        return f"{self.epoch}/{self.number}"

    def __str__(self) -> str:
        return f"{self.record.kind} {self.number} ({self.record})"


class Consensus:
    """The calls of one ``SequenceParallel`` on one rank.

    ``ledger`` is None where there is only one rank. ``register_wait`` makes this rank's ``WaitRegistry`` for the key of
    a call. ``ranks`` are the global ranks of the group.
    """

    def __init__(
        self, ledger: CallLedger | None, register_wait: Callable[[str], WaitRegistry], every_call: bool,
        ranks: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.ledger, self.register_wait, self.every_call, self.ranks = ledger, register_wait, every_call, ranks
        self.epoch = 0
        self.current = StartedCall(0, 0, CallRecord())
        self._started = 0.0
        self._agreed: dict[object, None] = {}  # in the order in which ranks agreed, which is the same on all
        self._latest: deque[object] = deque(maxlen=LATEST_SEQUENCES)
        self._suspect: StartedCall | None = None  # a call that the ranks are known to disagree about
        self._reason: Exception | None = None  # why the pending wait can never end
        self._wait: PendingWait | None = None
        self._published: PublishedWait | None = None
        self._reminded: PendingWait | None = None  # the wait that was logged
        self._mistake: PublishedWait | None = None  # of this rank alone, since its last call

    @property
    def call_id(self) -> tuple[int, int]:
        """The epoch and the number of the current call; always (0, 0) on one rank, which cannot disagree."""
        return (self.current.epoch, self.current.number) if self.ledger is not None else (0, 0)

    def start(self, record: CallRecord, device_digest: Tensor | None = None) -> None:
        """Start a call."""
        if self._mistake is not None:
            self._mistake.end()
            self._mistake = None
        self.current = StartedCall(self.epoch, self.current.number + 1, record, device_digest)
        self._started = time.monotonic()

    def has_agreed(self, kind: object) -> bool:
        return not self.every_call and kind in self._agreed

    def is_new(self, sequence: object) -> bool:
        """True unless a call on this sequence, with its data, is among the latest. Ranks that make the same calls get
        the same answers."""
        if self._latest and (self._latest[-1] is sequence or sequence in self._latest):
            return False
        self._latest.append(sequence)
        return True

    def compare(self, kinds: Iterable[object] = ()) -> None:
        """Raise on every rank unless all ranks start this call with the same record and none has a problem; otherwise
        remember ``kinds`` as agreed on."""
        if self.ledger is not None:
            self._compare(self.ledger)
        elif self.current.record.problem is not None:
            raise ValueError(self.current.record.problem)
        self._agreed |= dict.fromkeys(kinds)
        while len(self._agreed) > MAX_AGREED:
            del self._agreed[next(iter(self._agreed))]

    def _compare(self, ledger: CallLedger) -> None:
        """Use the store from another thread, which hangs if the store's host does."""
        comparison, limit = _LedgerComparison(self, ledger), ledger.timeout.total_seconds() + TIMING.store_answer
        store = "torch.distributed's store, hosted by rank 0 or the launcher,"
        what = f"rank {ledger.rank}, {self.current.record.kind} {self.current.number}: {store}"
        try:
            done = run_within(limit, comparison.run, comparison.cancelled)
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {str(error).splitlines()[0]}") from error
        if not done:
            raise PeerError(f"{what} did not answer within {ledger.timeout}")

    # --- errors

    def abandon(self, error: BaseException, sequence: int) -> None:
        """After an error in this rank's call: tell the ranks that wait for it, and go on in a new epoch. ``sequence``
        counts those that calls have used since the error before."""
        call, in_vain, next_epochs = self.current, self._waited_in_vain(error), [self.epoch + 1]
        if (ledger := self.ledger) is not None:

            def tell() -> None:
                late = ledger.missing_ranks(call.key) if in_vain else []
                next_epochs.append(ledger.abandon(call.epoch, Failure.of(error, ledger.rank, sequence), late))

            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, tell)
        self.rejoin(next_epochs[-1])

    def note_mistake(self, operation: str, error: ValueError) -> None:
        """This rank alone has raised, in a helper that sends nothing. It may go on, so no call ends. But if it skips
        the next one, the ranks that wait for it can read the reason."""
        if self.ledger is not None:
            self._mistake = PublishedWait(f"{operation}: {error}", "raised in")
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone
                run_within(TIMING.store_answer, self._mistake.publish)

    def close(self) -> None:
        """No call follows: give up this instance's keys in the store."""
        if (ledger := self.ledger) is not None:
            ledger.drop()
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone
                run_within(TIMING.store_answer, delete_dropped_keys)

    def _waited_in_vain(self, error: BaseException) -> bool:
        """True if the call failed because a peer was late, not dead and not wrong."""
        if self.ledger is None or not isinstance(error, PeerError):
            return False
        return time.monotonic() - self._started >= self.ledger.timeout.total_seconds()

    def rejoin(self, epoch: int) -> None:
        """Go on in an epoch: nothing has been called there or agreed on."""
        self.epoch, self.current = epoch, StartedCall(epoch, 0, CallRecord())
        self._reason = self._suspect = None
        self._agreed.clear()
        self._latest.clear()

    def abandoned(self, ledger: CallLedger, epoch: int) -> Exception | None:
        """What to raise in a call if the other ranks have abandoned its epoch."""
        if (newest := ledger.newest_epoch()) <= epoch:
            return None
        has_just_come = time.monotonic() - self._started < ledger.timeout.total_seconds() / 2
        if has_just_come and ledger.was_late(epoch):
            last = ledger.read_failure(newest - 1)
            return RejoinError(newest, last.sequence if last else None)
        failure = ledger.read_failure(epoch)
        return failure.as_error() if failure else PeerError("the other ranks have abandoned this call after an error")

    # --- waiting for transfers

    def begin_wait(self, what: object, abort: Callable[[], None]) -> None:
        """The program begins to wait for ``what``. ``abort`` ends that, if it turns out that it would never end."""
        self._wait = PendingWait(what, time.monotonic(), abort)

    def end_wait(self, failed: bool) -> None:
        self._wait = self._reminded = None
        if self._published is not None:
            self._published.end(failed)
            self._published = None

    def describe_others(self) -> str:
        """What the other ranks wait for, in brackets; empty if the call has not waited for long."""
        return describe_waits(self.ranks, self._started)

    def missing_ranks(self) -> str:
        """The ranks that have not started the current call, after one that involves all ranks has failed on all."""
        missing: list[int] = []

        def read() -> None:
            assert self.ledger is not None
            time.sleep(TIMING.settle)  # the others are about to write their records
            missing.extend(self.ledger.missing_ranks(self.current.key))

        with contextlib.suppress(RuntimeError):
            run_within(TIMING.store_answer, read)
        return rank_names(missing) if missing else "a rank"

    def suspect(self, call: StartedCall) -> None:
        """The ranks are known to disagree about this call, though maybe only about data on a device."""
        self._suspect = call

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
        if (wait := self._wait) is None or self.ledger is None:
            return
        seconds = time.monotonic() - wait.since
        if seconds > TIMING.reminder and wait is not self._reminded:
            self._reminded = wait
            log.warning("rank %d still waits after %.0f seconds: %s", self.ledger.rank, seconds, wait.what)
        if seconds < TIMING.slow_wait:
            return
        if self._published is None:
            self._published = published = PublishedWait(str(self.current))
            published.publish()
            if self._wait is not wait:  # it ended meanwhile
                published.end()
        if self._reason is None:
            self._read_reason(self.ledger)
        if self._reason is not None and self._wait is not None:  # it may have ended meanwhile
            wait.abort()

    def _read_reason(self, ledger: CallLedger) -> None:
        if reason := self.abandoned(ledger, self.epoch):
            self._reason = reason
            return
        key, record = self.current.key, self.current.record
        if (suspect := self._suspect) is not None:
            key, record = suspect.key, suspect.record
            if suspect.device_digest is not None:  # our record may be there already, without it
                key, record = f"{key}/data", record._replace(data=fold(record.data, int(suspect.device_digest)))
        ledger.write(key, record, compared=False)
        if not ledger.matches(key, record):
            self._reason = ValueError(explain_mismatch(ledger.read(key)))


class _LedgerComparison:
    """Compares one call with all ranks. ``run`` is called in a thread, and returns early once it is ``cancelled``."""

    def __init__(self, consensus: Consensus, ledger: CallLedger) -> None:
        self.consensus, self.ledger, self.call = consensus, ledger, consensus.current
        self.cancelled = threading.Event()

    def run(self) -> None:
        published = PublishedWait(str(self.call))
        try:
            self._run(published)
        except BaseException:
            published.end(failed=True)
            raise
        published.end()

    def _run(self, published: PublishedWait) -> None:
        ledger, record, key = self.ledger, self.call.record, self.call.key
        ledger.write(key, record, compared=True)
        delete_dropped_keys()  # the other ranks take a moment as well
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
                    missing, others = self._missing_ranks(), self.consensus.describe_others()
                    (call,) = shortened([str(self.call)])
                    raise PeerError(f"{missing} did not start {call} within {ledger.timeout}{others}")
                if pause >= TIMING.longest_poll:
                    self._raise_if_abandoned()
                if seconds > TIMING.slow_wait and not ledger.matches(key, record):
                    break  # the missing ranks may be stuck in transfers of another call
                if seconds > TIMING.slow_wait and now - checked_at > TIMING.watch_interval:
                    checked_at = now
                    if registry is None:
                        published.publish()
                        registry = self.consensus.register_wait(key)
                        stack.callback(registry.leave)
                    elif conflict := registry.find_conflict():
                        raise ValueError(f"{conflict}: make a new SequenceParallel on all of these ranks, or on none")
                if seconds > TIMING.reminder and not reminded and (late := ledger.missing_ranks(key)):
                    reminded = True
                    (call,) = shortened([str(self.call)])
                    log.warning("rank %d still waits for %s to start %s", ledger.rank, rank_names(late), call)
        self._raise_if_abandoned()  # maybe by a rank that wrote its record, but did not wait for ours
        if record.problem is not None or not ledger.matches(key, record):
            raise ValueError(explain_mismatch(ledger.read(key)))

    def _raise_if_abandoned(self) -> None:
        if reason := self.consensus.abandoned(self.ledger, self.call.epoch):
            raise reason

    def _missing_ranks(self) -> str:
        return rank_names(self.ledger.missing_ranks(self.call.key))

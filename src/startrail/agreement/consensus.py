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
that comes later raises for the same reason, be it in its first call of an instance or in any other. A rank that the
others have given up on, or that has raised because of the same failure already, joins them without an error
(``RejoinError``):

- the others timed out waiting for it, as they do when its own code raised and it skipped a call;
- after an error, it is a batch ahead of the others. They see that it has already had their batch, raise, skip that
  batch, and meet it at its own;
- the others have heard of a failure in another instance. A rank that waits for long looks at all instances of its
  process: the ranks that failed there may never come to this call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from torch import Tensor

from startrail.agreement.digest import fold
from startrail.agreement.errors import PeerError, in_short
from startrail.agreement.ledger import (
    CallLedger,
    CallRecord,
    Entry,
    Failure,
    abandon_epoch,
    delete_dropped_keys,
    explain_mismatch,
    note_epoch,
    shortened,
)
from startrail.agreement.readiness import Readiness
from startrail.agreement.timing import TIMING
from startrail.agreement.waits import MAX_SHOWN, Meeting, PublishedWait, describe_waits, rank_names, read_wait
from startrail.agreement.watchdog import run_within, watch

MAX_AGREED = 1024  # kinds of calls that are remembered as agreed on
LATEST_SEQUENCES = 16  # with their boundaries: several models may use several in turns
LATEST_BATCHES = 16  # by which ranks find out that they are behind another one

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("startrail")
_alone = itertools.count()


class PendingWait(NamedTuple):
    """What the program waits for (``str()`` describes it), since when, how to end that, and the ``place`` where all
    ranks have to come, if it waits for all of them."""

    what: object
    since: float
    abort: Callable[[], None]
    place: str


class RejoinError(Exception):
    """The other ranks go on in another ``epoch``, without a new error: the call has to start again there. ``sequence``
    is the one in which they gave up."""

    def __init__(self, epoch: int, sequence: int | None = None) -> None:
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
    num_sequences: int = 0  # that calls have used since the last error

    @property
    def key(self) -> str:
        return f"{self.epoch}/{self.number}"

    def __str__(self) -> str:
        return f"{self.record.kind} {self.number} ({self.record})"


class Consensus:
    """The calls of one ``SequenceParallel`` on one rank.

    ``ranks`` are the global ranks of its group, called ``group`` in the store, and ``rank`` is this one's place among
    them. Without a ``group`` there is no other rank.
    """

    def __init__(
        self, group: str | None, ranks: tuple[int, ...], rank: int, timeout: timedelta, every_call: bool = False
    ) -> None:
        self.ledger = None if group is None else CallLedger(group, rank, len(ranks), timeout)
        self.ranks, self.every_call = ranks, every_call
        self.epoch = 0
        self.current = StartedCall(0, 0, CallRecord())
        self.recovering = False  # ranks have not agreed on a call since the last error
        self._num_checks = 0  # in this epoch
        self._process = os.getpid()
        self._started = 0.0
        self._agreed: dict[object, None] = {}  # in the order in which ranks agreed, which is the same on all
        self._latest: deque[object] = deque(maxlen=LATEST_SEQUENCES)
        self._batches: deque[int] = deque(maxlen=LATEST_BATCHES)  # digests of their data
        self._suspect: StartedCall | None = None  # a call that the ranks are known to disagree about
        self._reason: Exception | None = None  # why the pending wait can never end
        self._reading = threading.Lock()
        self._source: tuple[str, int] | None = None  # the instance, and its epoch, in which that began
        self._may_rejoin: list[int] = []  # ranks that this one gives up on
        self._noticed: RejoinError | None = None  # an error here, noticed while this rank waited in another instance
        self._wait: PendingWait | None = None
        self._conflict = ""  # seen at the last look
        self._published: PublishedWait | None = None
        self._reminded: PendingWait | None = None  # the wait that was logged
        self._mistake: PublishedWait | None = None  # of this rank alone, since its last call
        if self.ledger is not None:
            _instances.add(self)
            watch(self)

    @property
    def call_id(self) -> tuple[int, int]:
        """The epoch and the number of the current call; always (0, 0) on one rank, which cannot disagree."""
        return (self.current.epoch, self.current.number) if self.ledger is not None else (0, 0)

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked from the one that made this: it shares connections, but is no rank."""
        return self.ledger is not None and os.getpid() != self._process

    def check_process(self) -> None:
        """Raise ``ValueError`` in a forked process. What it sent would go over the rank's own connections."""
        if self.is_forked:
            raise ValueError(
                f"process {os.getpid()} was forked from process {self._process}, which is the rank: only the rank can "
                "make calls that involve other ranks (a data loader may shard, but not call attention or unshard)"
            )

    def enter(self) -> str:
        """The name that this instance has on all ranks, for the next call."""
        if (ledger := self.ledger) is None:
            return f"alone {next(_alone)}"  # a fake group refuses a name that was used before
        if not ledger.is_numbered:
            self._ask_store(lambda: self._enter(ledger), "making its first call", threading.Event())
        return ledger.name

    def _enter(self, ledger: CallLedger) -> None:
        if (epoch := ledger.enter(self.epoch)) != self.epoch:  # the others have failed before
            last = ledger.read_failure(epoch - 1)
            raise RejoinError(epoch, last.sequence if last else None)

    def start(self, record: CallRecord, device_digest: Tensor | None = None, num_sequences: int = 0) -> None:
        """Start a call. ``num_sequences``: that calls have used since the last error."""
        if self._mistake is not None:
            self._mistake.end()
            self._mistake = None
        noticed, self._noticed = self._noticed, None
        if noticed is not None and noticed.epoch > self.epoch:
            raise noticed
        self.enter()
        if record.data and (not self._batches or record.data != self._batches[-1]):
            self._batches.append(record.data)
        self.current = StartedCall(self.epoch, self.current.number + 1, record, device_digest, num_sequences)
        self._started = time.monotonic()

    def knows(self, kind: object) -> bool:
        """True if ranks have agreed on a call of this kind, since the last error."""
        return kind in self._agreed

    def has_agreed(self, kind: object) -> bool:
        """True if ranks need not agree on a call of this kind again."""
        return not self.every_call and self.knows(kind)

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
        if (ledger := self.ledger) is not None:
            comparison = _LedgerComparison(self, ledger)
            self._ask_store(comparison.run, f"{self.current.record.kind} {self.current.number}", comparison.cancelled)
        elif self.current.record.problem is not None:
            raise ValueError(self.current.record.problem)
        self.recovering = False
        self._agreed |= dict.fromkeys(kinds)
        while len(self._agreed) > MAX_AGREED:
            del self._agreed[next(iter(self._agreed))]

    def wait_until_all_are_ready(self) -> None:
        """Wait for all ranks to call this in the current call, which all have started, however long their kernels take
        to compile. Raises ``PeerError`` after ``TIMING.compiling``, or the timeout if that is longer."""
        if (ledger := self.ledger) is not None:
            readiness = Readiness(self, ledger)
            self._ask_store(readiness.run, "compiling kernels", readiness.cancelled, readiness.limit)

    def _ask_store(
        self, ask: Callable[[], None], purpose: str, cancelled: threading.Event, limit: timedelta | None = None
    ) -> None:
        """Use the store from another thread, which hangs if the store's host does."""
        assert self.ledger is not None
        timeout = limit or self.ledger.timeout
        what = f"rank {self.ledger.rank}, {purpose}: torch.distributed's store, hosted by rank 0 or the launcher,"
        try:
            done = run_within(timeout.total_seconds() + TIMING.store_answer, ask, cancelled)
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {in_short(error)}") from error
        if not done:
            raise PeerError(f"{what} did not answer within {timeout}")

    # --- checks of what was computed

    def start_check(self) -> str:
        """A name for the next check of the passes so far, which is the same on all ranks."""
        self._num_checks += 1
        return f"check {self._num_checks} after call {self.current.key}"

    def decide(self, is_done: bool) -> bool:
        """Whether the passes before the started check count: all ranks keep them or all drop them, as the first rank
        says. Ranks say that they are done only once all ranks have started the check."""
        if (ledger := self.ledger) is None:
            return is_done
        decisions: list[bool] = []
        key, before = (f"{self.epoch}/check {number}" for number in (self._num_checks, self._num_checks - 1))

        def ask() -> None:
            decisions.append(ledger.decide(key, is_done))
            if decisions[0]:
                ledger.forget(before)  # all ranks have started this check, so they have read it

        self._ask_store(ask, "deciding about a check", threading.Event())
        return decisions[0]

    # --- errors

    def abandon(self, error: BaseException, sequence: int) -> None:
        """After an error in this rank's call: tell the ranks that wait for it, and go on in a new epoch. ``sequence``
        counts those that calls have used since the error before."""
        if isinstance(error, RejoinError):
            self.rejoin(error.epoch)
            return
        next_epochs = [self.epoch + 1]

        def tell(ledger: CallLedger) -> None:
            epoch = self.epoch if ledger.name else ledger.enter(self.epoch)
            may_rejoin = self._may_rejoin
            if self._waited_in_vain(error, ledger):
                may_rejoin = ledger.missing_ranks(self.current.key)
            failure = self._failure(error, ledger, epoch, sequence)
            next_epochs.append(abandon_epoch(ledger.name, epoch, failure._replace(may_rejoin=may_rejoin)))

        if (ledger := self.ledger) is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, functools.partial(tell, ledger))
        self.rejoin(next_epochs[-1])

    def _failure(self, error: BaseException, ledger: CallLedger, epoch: int, sequence: int) -> Failure:
        text, is_mistake = str(error) or type(error).__name__, isinstance(error, ValueError)
        if not is_mistake and not isinstance(error, PeerError):
            text = f"rank {ledger.rank} raised {type(error).__name__}: {error}"
        return Failure(is_mistake, text, sequence, *(self._source or (ledger.name, epoch)))

    def note_mistake(self, operation: str, error: ValueError) -> None:
        """This rank alone has raised, in a helper that sends nothing. It may go on, so no call ends. But if it skips
        the next one, the ranks that wait for it can read the reason."""
        if self.ledger is not None and not self.is_forked:
            self._mistake = PublishedWait(f"{operation}: {error}", "raised in")
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone
                run_within(TIMING.store_answer, self._mistake.publish)

    def close(self) -> None:
        """No call follows: give up this instance's keys in the store."""
        if (ledger := self.ledger) is not None and ledger.is_numbered:
            ledger.drop()
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone
                run_within(TIMING.store_answer, delete_dropped_keys)

    def _waited_in_vain(self, error: BaseException, ledger: CallLedger) -> bool:
        """True if the call failed because a peer was late, not dead and not wrong."""
        waited = time.monotonic() - self._started
        return isinstance(error, PeerError) and waited >= ledger.timeout.total_seconds()

    def rejoin(self, epoch: int) -> None:
        """Go on in an epoch: nothing has been called there or agreed on."""
        self.epoch, self.current = epoch, StartedCall(epoch, 0, CallRecord())
        if self.ledger is not None:
            note_epoch(self.ledger.name, epoch)
        self.recovering, self._num_checks = True, 0
        self._reason = self._suspect = self._source = None
        self._may_rejoin = []
        self._agreed.clear()
        self._latest.clear()

    def abandoned(self, ledger: CallLedger, epoch: int) -> Exception | None:
        """What to raise in a call if the other ranks have abandoned its epoch."""
        if (newest := ledger.newest_epoch()) <= epoch:
            return None
        failure = ledger.read_failure(epoch)
        if failure and failure.partner:  # first: once it raises, this rank would go on to that call, and complete it
            instance, other, num_sequences = failure.partner
            note_epoch(instance, abandon_epoch(instance, other, failure._replace(sequence=num_sequences, partner=None)))
        has_just_come = time.monotonic() - self._started < ledger.timeout.total_seconds() / 2
        if (failure and _has_raised(failure)) or (has_just_come and ledger.may_rejoin(epoch)):
            last = ledger.read_failure(newest - 1)
            return RejoinError(newest, last.sequence if last else None)
        if failure is None:
            return PeerError("the other ranks have abandoned this call after an error")
        self._blame(failure)
        return failure.as_error()

    def _blame(self, failure: Failure) -> None:
        """This call is about to fail because of ``failure``, so its source need not raise on this rank any more."""
        self._source = failure.source, failure.source_epoch
        note_epoch(failure.source, failure.source_epoch + 1)
        source = _instance(failure.source)
        if source is not None and source is not self:
            source._notice_failure()

    def _notice_failure(self) -> Failure | None:
        """The failure in this instance that this rank has not raised because of yet, if there is one. It does so in
        another instance now, so the next call here starts in the newest epoch without an error."""
        if self.ledger is None or (newest := self.ledger.newest_epoch()) <= self._known_epoch:
            return None
        failure = self.ledger.read_failure(self._known_epoch)
        self._noticed = RejoinError(newest, failure.sequence if failure else None)
        return failure

    @property
    def _known_epoch(self) -> int:
        """This rank has already raised an error for every epoch before this one."""
        return self.epoch if self._noticed is None else max(self.epoch, self._noticed.epoch)

    def _failure_elsewhere(self) -> Exception | None:
        """Why some ranks may never come to a call: they have failed in another instance, unnoticed by this rank."""
        for other in list(_instances):
            if other is self or other.ledger is None or not other.ledger.is_in_use:
                continue
            if other.ledger.may_rejoin(other._known_epoch):
                continue
            failure = other._notice_failure()
            if failure is not None and not _has_raised(failure, other):
                self._blame(failure)
                return PeerError(failure.message)
        return None

    def _disagreement(self, ledger: CallLedger, key: str) -> Exception:
        """What to raise in a call that ranks disagree about. If they got out of step by an error, those that are ahead
        wait for the others."""
        entries = ledger.read(key)
        own = entries.get(ledger.rank)
        if own is not None and own.record.data:
            others = [entry for entry in entries.values() if entry.record.data not in (0, own.record.data)]
            self._may_rejoin = [
                rank for rank, entry in entries.items() if entry.recovering and own.record.data in entry.earlier
            ]
            if own.recovering and not self._may_rejoin and any(each.record.data in own.earlier for each in others):
                return RejoinError(self.epoch + 1)
        return ValueError(self.explain({rank: entry.record for rank, entry in entries.items()}))

    # --- waiting

    def begin_wait(self, what: object, abort: Callable[[], None], place: str = "") -> None:
        """The program begins to wait for ``what``. ``abort`` ends that, if it turns out that it would never end."""
        self._wait = PendingWait(what, time.monotonic(), abort, place)

    def end_wait(self, failed: bool) -> None:
        self._wait = self._reminded = None
        self._conflict = ""
        if self._published is not None:
            self._published.end(failed)
            self._published = None

    def describe_others(self) -> str:
        """What the other ranks wait for, in brackets; empty if the call has not waited for long."""
        waits = describe_waits(self.ranks, self._started)
        return f" ({waits})" if waits else ""

    def explain(self, records: Mapping[int, CallRecord]) -> str:
        """The error's text if ranks have different records."""
        return explain_mismatch(records)

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
        if (ledger := self.ledger) is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, lambda: self._read_reason(ledger))
        return self._reason

    def check(self) -> None:
        """Called by the watchdog: log a wait that has become long, and end it if it can never end by itself."""
        if (wait := self._wait) is None or self.ledger is None:
            return
        seconds = time.monotonic() - wait.since
        if seconds > TIMING.reminder and wait is not self._reminded:
            self._reminded = wait
            log.warning("rank %d still waits after %.0f seconds: %s", self.ledger.rank, seconds, wait.what)
        if seconds < TIMING.slow_wait:
            return
        if self._published is None:
            meeting = self._meeting(self.ledger, wait.place) if wait.place else None
            self._published = published = PublishedWait(str(self.current), meeting=meeting)
            published.publish()
            if self._wait is not wait:  # it ended meanwhile
                published.end()
        self._read_reason(self.ledger, wait.place)
        if self._reason is not None and self._wait is not None:  # it may have ended meanwhile
            wait.abort()

    def _read_reason(self, ledger: CallLedger, place: str = "") -> None:
        """Called by the watchdog and by helper threads."""
        with self._reading:
            self._reason = self._reason or self._new_reason(ledger, place)

    def _new_reason(self, ledger: CallLedger, place: str) -> Exception | None:
        if reason := self.abandoned(ledger, self.epoch):
            return reason
        key, record = self.current.key, self.current.record
        if (suspect := self._suspect) is not None:
            key, record = suspect.key, suspect.record
            if suspect.device_digest is not None:  # our record may be there already, without it
                key, record = f"{key}/data", record._replace(data=fold(record.data, int(suspect.device_digest)))
        self.write(ledger, key, record, compared=False)
        if not ledger.matches(key, record):
            return self._disagreement(ledger, key)
        return self._failure_elsewhere() or (self._find_conflict(ledger, place) if place else None)

    def write(self, ledger: CallLedger, key: str, record: CallRecord, compared: bool) -> None:
        earlier = [data for data in self._batches if data != record.data]
        ledger.write(key, Entry(record, earlier, self.recovering), compared)

    # --- ranks that wait for each other at different calls

    def place_of_call(self) -> str:
        """Where all ranks have to come for the current call."""
        number = 1 + int(self.ledger.name.rpartition("/")[2]) if self.ledger else 1
        call = f"{self.current.record.kind} {self.current.epoch}.{self.current.number}"
        return f"{call} of number {number} of their SequenceParallels"

    def _meeting(self, ledger: CallLedger, place: str) -> Meeting:
        started = {
            each.ledger.name: (each.current.epoch, each.current.number)
            for each in list(_instances)
            if each.ledger is not None and each.ledger.name
        }
        return Meeting(place, ledger.ranks, ledger.rank, ledger.name, self.epoch, self.current.num_sequences, started)

    def _find_conflict(self, ledger: CallLedger, place: str) -> Exception | None:
        """Two ranks that wait for all ranks at different calls wait for each other: one has made an instance that
        another has not, or has raised in its own code. The first rank at each of the calls looks for the other call.
        If both have seen the other, twice, they abandon both, and all ranks raise."""
        elsewhere = self._meeting_elsewhere(ledger, place) if ledger.came_first else None
        seen, self._conflict = self._conflict, elsewhere.place if elsewhere else ""
        if elsewhere is None or elsewhere.place != seen:
            return None
        ledger.meetings.set(f"{place} sees {elsewhere.place}", "1")
        if not ledger.meetings.check([f"{elsewhere.place} sees {place}"]):  # a wait that has just ended sees nothing
            return None
        here = self._meeting(ledger, place)
        text = f"rank {elsewhere.rank} waits for all ranks at {elsewhere.place}, and rank {here.rank} at {place}"
        if "SequenceParallels" in elsewhere.place and "SequenceParallels" in place:
            text += ": make a new SequenceParallel on all of these ranks, or on none"
        source, epoch = min((here.instance, here.epoch), (elsewhere.instance, elsewhere.epoch))  # the same at both
        partner = elsewhere.instance, elsewhere.epoch, elsewhere.num_sequences
        failure = Failure(True, text, here.num_sequences, source, epoch, partner)
        abandon_epoch(ledger.name, self.epoch, failure)
        return self.abandoned(ledger, self.epoch)

    def _meeting_elsewhere(self, ledger: CallLedger, place: str) -> Meeting | None:
        """Another place where all of these ranks have to come, and where one waits that has not been here."""
        here = self.current.epoch, self.current.number
        for rank in ledger.missing_ranks(self.current.key)[:MAX_SHOWN]:
            found = read_wait(self.ranks[rank])[1]
            if found is None or found.ranks != ledger.ranks or found.place == place:
                continue
            if tuple(found.started.get(ledger.name, (0, 0))) < here:
                return found
        return None


_instances: WeakSet[Consensus] = WeakSet()  # of this process


def _instance(name: str) -> Consensus | None:
    return next((each for each in list(_instances) if each.ledger is not None and each.ledger.name == name), None)


def _has_raised(failure: Failure, seen_in: Consensus | None = None) -> bool:
    """True if this rank has raised already because of a failure, in the instance where it began. It has not if that is
    the one in which it is ``seen_in`` just now."""
    source = _instance(failure.source)
    return source is not None and source is not seen_in and source._known_epoch > failure.source_epoch


class _LedgerComparison:
    """Compares one call with all ranks. ``run`` is called in a thread, and returns early once it is ``cancelled``."""

    def __init__(self, consensus: Consensus, ledger: CallLedger) -> None:
        self.consensus, self.ledger, self.call = consensus, ledger, consensus.current
        self.cancelled = threading.Event()

    def __str__(self) -> str:
        missing = self.ledger.missing_ranks(self.call.key)  # none if all have started just now
        names = rank_names(missing) if missing else "all ranks"
        return f"for {names} to start {shortened([str(self.call)])[0]}"

    def run(self) -> None:
        consensus, ledger, record, key = self.consensus, self.ledger, self.call.record, self.call.key
        self._raise_if_abandoned()  # before this rank came
        consensus.write(ledger, key, record, compared=True)
        delete_dropped_keys()  # the other ranks take a moment as well
        failed = True
        consensus.begin_wait(self, self.cancelled.set, consensus.place_of_call())
        try:
            self._wait()
            self._raise_if_abandoned()  # maybe by a rank that wrote its record, but did not wait for ours
            if record.problem is not None or not ledger.matches(key, record):
                raise consensus._disagreement(ledger, key)
            ledger.settle()
            failed = False
        finally:
            consensus.end_wait(failed)

    def _wait(self) -> None:
        ledger, pause = self.ledger, TIMING.poll
        end = time.monotonic() + ledger.timeout.total_seconds()
        while not ledger.is_complete(self.call.key) and not self.cancelled.wait(pause):
            pause = min(2 * pause, TIMING.longest_poll)
            if time.monotonic() > end:
                missing, others = ledger.missing_ranks(self.call.key), self.consensus.describe_others()
                (call,) = shortened([str(self.call)])
                raise PeerError(f"{rank_names(missing)} did not start {call} within {ledger.timeout}{others}")
            if pause >= TIMING.longest_poll:
                self._raise_if_abandoned()
        if self.consensus._reason is not None:
            raise self.consensus._reason

    def _raise_if_abandoned(self) -> None:
        with self.consensus._reading:  # the watchdog may have found the same, and noted it as raised
            reason = self.consensus._reason or self.consensus.abandoned(self.ledger, self.call.epoch)
        if reason:
            raise reason

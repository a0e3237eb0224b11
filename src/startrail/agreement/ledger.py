"""What the ranks of a group write into torch.distributed's key-value store about their calls and failures.

Records are small JSON lists. Ranks first compare counters, whatever their number, and read each other's records only
to explain a mismatch.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple
from weakref import finalize

from startrail._compat import PrefixStore, Store, default_store
from startrail.agreement.errors import PeerError
from startrail.agreement.waits import rank_names

_dropped: deque[tuple[str, int]] = deque()  # prefixes of keys that this rank does not use any more; ranks that do
_seen: dict[str, int] = {}  # of instances by name: the first epoch for whose end this rank has not raised or rejoined
MAX_SEEN = 64  # instances
KEPT_FAILURES = 16  # epochs whose failures a rank that is late can read
LONGEST = 600  # characters of a call that a message shows in full
# One more record in a call's counter, which has 63 bits. Its lower bits are the sum of the records' digests, which have
# 28 bits, so both fit for 2**17 ranks.
_ONE_RANK = 1 << 46


class CallRecord(NamedTuple):
    """Everything that ranks must agree on when they start a call, or the ``problem`` that prevents it."""

    call: str = ""  # the pass, its tensors and arguments, the plan
    sequence: int = 0  # counts the sequences of this kind; 0 if the call has none
    data: int = 0  # a digest of the batch; 0 if unknown
    backward_of: str = ""  # the forward call
    after_error: int | None = None  # the sequence in which the last call failed, if that has to do for unknown data
    problem: str | None = None
    kind: str = "attention call"
    gradients: bool = False  # a backward pass follows

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        data = f", data digest {self.data:08x}" if self.data else ""
        backward = f", backward of call {self.backward_of}" if self.backward_of else ""
        grads = ", with gradients" if self.gradients else ""
        after = "" if self.after_error is None else f", after an error in sequence {self.after_error}"
        sequence = f", sequence {self.sequence} of this kind" if self.sequence else ""
        return f"{self.call}{sequence}{data}{grads}{backward}{after}"


# What it means if calls differ in one of these fields only.
_HINTS = {
    "sequence": "a rank skipped a sequence, or made one that the others did not",
    "data": "they were given different data: all must shard the same batches",
    "gradients": "only some need gradients, but all must take part in the backward pass: call requires_grad_() on the "
    "inputs of all ranks, or none",
}


def shortened(texts: list[str]) -> list[str]:
    """Texts of readable length: of a batch with thousands of documents, the start and the first difference.

    >>> texts = shortened([f"documents {list(range(1000))}, {end}" for end in ("causal", "full")])
    >>> texts[0][:19], texts[0][-12:], texts[1][-10:], len(texts[0])
    ('documents [0, 1, 2,', '999], causal', '999], full', 605)
    """
    if max(map(len, texts)) <= LONGEST:
        return texts
    same, half = len(os.path.commonprefix(texts)), LONGEST // 2  # noqa: RUF071, characters are meant
    return [_two_parts(text, half, max(half, min(same, len(text)) - half // 2)) for text in texts]


def _two_parts(text: str, size: int, at: int) -> str:
    """``size`` characters from the start and ``size`` from ``at``."""
    at = max(size, min(at, len(text) - size))
    return text[:size] + (" ... " if at > size else "") + text[at : at + size] + (" ..." * (at + size < len(text)))


def explain_mismatch(records_of: Mapping[int, CallRecord]) -> str:
    """The error of ranks whose records differ, or have a problem.

    >>> explain_mismatch({0: CallRecord("forward", 1), 1: CallRecord(problem="length=0 must be at least 1")})
    'rank 1: length=0 must be at least 1'
    """
    records: dict[CallRecord, list[int]] = {}
    for rank, record in records_of.items():
        records.setdefault(record, []).append(rank)
    problems = {record: ranks for record, ranks in records.items() if record.problem is not None}
    if problems and len(records) == 1:
        return str(next(iter(problems)))
    ranks_of = (problems or records).items()
    texts = shortened([str(record) for record, _ in ranks_of])
    listed = "; ".join(f"{rank_names(ranks)}: {text}" for text, (_, ranks) in zip(texts, ranks_of, strict=True))
    if problems:
        return listed
    common = [record._replace(sequence=0, data=0, gradients=False) for record in records]
    alike = [record for record, rest in zip(records, common, strict=True) if common.count(rest) > 1]
    hints = [hint for field, hint in _HINTS.items() if len({getattr(record, field) for record in alike}) > 1]
    hint = f" ({'; '.join(hints)})" if hints else ""
    kinds = {record.kind for record in records}
    return f"ranks disagree about one {kinds.pop() if len(kinds) == 1 else 'call'}{hint}: {listed}"


class Failure(NamedTuple):
    """Why a rank abandoned its calls. ``is_mistake``: with wrong arguments, which is a ``ValueError`` on all ranks.
    ``sequence``: how many sequences its calls had used since the error before. ``source`` and ``source_epoch``: the
    instance in which a rank failed first, if this is what became of that failure elsewhere. ``partner``: the instance,
    epoch and sequences of another call that has to be abandoned together with this one. Ranks that ``may_rejoin``,
    because this one has given up on them, go on with the others without an error."""

    is_mistake: bool
    message: str
    sequence: int
    source: str
    source_epoch: int
    partner: tuple[str, int, int] | None = None
    may_rejoin: Sequence[int] = ()

    def as_error(self) -> Exception:
        return ValueError(self.message) if self.is_mistake else PeerError(self.message)


class Entry(NamedTuple):
    """A rank's record of a call; the data of its batches before, the latest last; and whether the ranks have not agreed
    on a call since its last error."""

    record: CallRecord
    earlier: list[int]
    recovering: bool


class CallLedger:
    """Each rank's record of each call of one instance. A call's key is ``epoch/number``.

    One counter per call holds the number of its records and the sum of their digests: whether a call is complete, and
    whether it matches, costs one request for any number of ranks.

    Instances of the same ranks (``group`` names both) are numbered in the order in which all ranks have first agreed on
    a call of theirs. Until then an instance uses the next number, which it shares with others that have none yet. So
    ranks may make different numbers of instances, if they use the same ones.
    """

    def __init__(self, group: str, rank: int, world: int, timeout: timedelta) -> None:
        self.group, self.rank, self.world, self.timeout = group, rank, world, timeout
        self.name = ""  # of this instance, which comes before all its keys
        self.is_numbered = False  # for good
        self.ranks = group.rpartition("/")[2]
        self.numbers: Store = PrefixStore(group, default_store())
        self.meetings: Store = PrefixStore(f"startrail/meetings/{self.ranks}", default_store())
        self.store = self.numbers
        self.came_first = False  # with the latest record
        self._entries: dict[str, bool] = {}  # our records in the store: key -> is it compared by all ranks
        self._ready_for = ""  # the latest call for which this rank was ready
        self._lock = threading.Lock()

    # --- the instance

    def enter(self, epoch: int) -> int:
        """Before a call in ``epoch``: find out this instance's number. Returns the epoch to go on in: of an instance
        that the others have called before, and failed, the first one in which this rank was not."""
        if self.is_numbered:
            return epoch
        name = f"{self.group}/{self.numbers.add('instances', 0)}"
        if name == self.name:
            return epoch
        if self.name and self.store.get("agreed").decode() in self._entries:  # with our call, although it has failed
            self.settle()
            return epoch
        self.name, self.store = name, PrefixStore(name, default_store())
        self._entries.clear()
        return min(self.newest_epoch(), _seen.get(name, 0))

    def settle(self) -> None:
        """All ranks have agreed on a call of this instance: its number stays."""
        if not self.is_numbered:
            self.store.get("agreed")  # now the next instance gets another number
            self.is_numbered = True
            self.drop = finalize(self, _dropped.append, (self.name, self.world))  # garbage collection only takes a note
            self.drop.atexit = False

    @property
    def is_in_use(self) -> bool:
        """All ranks have agreed on a call, and this one has not given up its keys: looking at them would make them
        again after the last rank has deleted them."""
        return self.is_numbered and self.drop.alive

    # --- records

    def write(self, key: str, entry: Entry, compared: bool) -> None:
        """Add our record of a call. ``compared``: every rank writes one, and reads until all are there."""
        with self._lock:
            if key in self._entries:
                self._entries[key] |= compared
                return
            self._delete_old(compared)
            self._entries[key] = compared
            self.store.set(f"{key}/rank/{self.rank}", json.dumps(entry))
            one = _ONE_RANK + _digest(entry.record)
            total = self.store.add(key, one)
            self.came_first = total == one
            if total == self.world * one and compared and entry.record.problem is None and not self.is_numbered:
                self.numbers.add("instances", 1)
                self.store.set("agreed", key)

    def _delete_old(self, comparing: bool) -> None:
        """Delete our records that no rank reads any more.

        The latest may still be read. Ranks that compare a call read it until they start another one, which all have
        done once the next comparison is complete.
        """
        compared = [key for key, is_compared in self._entries.items() if is_compared]
        for old in list(self._entries)[:-1]:
            if old not in compared or (comparing and old in compared[:-1]):
                self.store.delete_key(f"{old}/rank/{self.rank}")
                self.store.delete_key(old)
                del self._entries[old]

    def matches(self, key: str, record: CallRecord) -> bool:
        """True if all records of a call so far equal ``record``."""
        ranks, digests = divmod(self.store.add(key, 0), _ONE_RANK)
        return digests == ranks * _digest(record)

    def is_complete(self, key: str) -> bool:
        return self.store.add(key, 0) // _ONE_RANK == self.world

    def read(self, key: str) -> dict[int, Entry]:
        """What each rank has written about a call so far."""
        entries = {}
        for rank in range(self.world):
            if self.store.check([f"{key}/rank/{rank}"]):
                record, *notes = json.loads(self.store.get(f"{key}/rank/{rank}"))
                entries[rank] = Entry(CallRecord(*record), *notes)
        return entries

    def missing_ranks(self, key: str) -> list[int]:
        """Ranks that have not written a record of a call: they have not started it, or wait for nothing in it."""
        return sorted(set(range(self.world)) - self.read(key).keys() - {self.rank})

    # --- readiness and decisions

    def mark_ready(self, key: str) -> None:
        """This rank is ready for a call that all ranks have started."""
        self.store.add(f"{key}/ready", 1)
        if self._ready_for:  # all ranks were ready for that call before they started this one
            self.forget(f"{self._ready_for}/ready")
        self._ready_for = key

    def are_all_ready(self, key: str) -> bool:
        return self.store.add(f"{key}/ready", 0) == self.world

    def decide(self, key: str, is_done: bool) -> bool:
        """Whether something is done or dropped: for all ranks, as the first of them says."""
        return self.store.compare_set(key, "", "done" if is_done else "dropped") == b"done"

    def forget(self, key: str) -> None:
        """No rank reads a decision any more."""
        if self.rank == 0:
            self.store.delete_key(key)

    # --- epochs

    def newest_epoch(self) -> int:
        """The number of epochs that ranks have abandoned."""
        return self.store.add("epoch", 0)

    def read_failure(self, epoch: int) -> Failure | None:
        key = f"{epoch}/failure"
        return Failure(*json.loads(self.store.get(key))) if self.store.check([key]) else None

    def may_rejoin(self, epoch: int) -> bool:
        """True if the others gave up on this rank, in ``epoch`` or later."""
        key = f"may rejoin/{self.rank}"
        return self.store.check([key]) and int(self.store.get(key)) >= epoch


def note_epoch(instance: str, epoch: int) -> None:
    """This rank has raised, or rejoined the others, because of every epoch of an instance before this one. It may make
    another object for the same instance later: until all ranks agree on a call, they share its number."""
    _seen[instance] = max(epoch, _seen.pop(instance, 0))
    while len(_seen) > MAX_SEEN:
        del _seen[next(iter(_seen))]


def abandon_epoch(instance: str, epoch: int, failure: Failure) -> int:
    """Tell all ranks why this one abandons an epoch of an instance, which this process may not have made. The first
    failure counts. A rank that comes second finishes what the first has begun: once this has returned, all ranks that
    look see that the epoch is over. Returns the next epoch: if the others have abandoned that as well, this rank's next
    call is the one in which they did."""
    store = PrefixStore(instance, default_store())
    if store.add("epoch", 0) > epoch:
        return epoch + 1
    first = Failure(*json.loads(store.compare_set(f"{epoch}/failure", "", json.dumps(failure))))
    for rank in first.may_rejoin:
        store.set(f"may rejoin/{rank}", str(epoch))
    store.compare_set("epoch", str(epoch), str(epoch + 1))
    store.delete_key(f"{epoch - KEPT_FAILURES}/failure")
    return epoch + 1


def _digest(record: CallRecord) -> int:
    return zlib.crc32(json.dumps(record).encode()) >> 4


def delete_dropped_keys() -> None:
    """Delete the keys that all ranks have dropped: the last rank that says so does. A rank that is behind may still
    read them until then, and would wait for a key that is gone."""
    with contextlib.suppress(IndexError):  # there are no more, or another thread took the last
        while True:
            prefix, world = _dropped.popleft()
            store = PrefixStore(prefix, default_store())
            if store.add("dropped", 1) == world:
                for key in store.list_keys():
                    store.delete_key(key)

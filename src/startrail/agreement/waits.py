"""What each rank waits for, written into torch.distributed's store once a wait has become long.

A rank whose wait times out reads what the others wait for: most often two ranks wait for each other in different calls.
A rank that raised on its own, in a helper that sends nothing, writes its error there as well.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist

from startrail._compat import PrefixStore, Store, default_store
from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import run_within, watch

MAX_SHOWN = 256  # ranks whose waits an error describes
NOWHERE = "waiting in no call of StarTrail"


def _store() -> Store:
    return PrefixStore("startrail/waits", default_store())


class Meeting(NamedTuple):
    """A wait of one ``rank`` for all ``ranks``: the ``place`` is a call of an ``instance`` in its ``epoch``, which has
    used ``num_sequences``. ``started``: the epoch and number of the latest call of each instance of that rank."""

    place: str
    ranks: str
    rank: int
    instance: str
    epoch: int
    num_sequences: int
    started: dict[str, tuple[int, int]]


class PublishedWait:
    """One long wait of this process that the other ranks can read. ``what`` names the call, such as "unshard"; it may
    be another ``state`` than a wait. ``meeting``: if it waits for all ranks."""

    def __init__(self, what: str, state: str = "waiting in", meeting: Meeting | None = None) -> None:
        self.what, self.state, self.meeting = what, state, meeting
        self._lock = threading.Lock()
        self._is_published = self._has_ended = False

    def publish(self) -> None:
        with self._lock:
            self._is_published = True
            if not self._has_ended:
                self._write(f"{self.state} {self.what}", self.meeting)

    def end(self, failed: bool = False) -> None:
        """After a wait that failed, ranks that fail a moment later can still read what it was for."""
        self._has_ended = True
        if self._is_published:
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone, or hang
                run_within(TIMING.store_answer, lambda: self._withdraw(failed))

    def _withdraw(self, failed: bool) -> None:
        with self._lock:  # after a ``publish`` that has begun
            self._write(f"no longer {self.state} {self.what}" if failed else "", None)

    def _write(self, text: str, meeting: Meeting | None) -> None:
        _store().set(str(dist.get_rank()), json.dumps((text, meeting)))


class _WatchedWait(PublishedWait):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._since = time.monotonic()
        watch(self)

    def check(self) -> None:
        if not self._is_published and time.monotonic() - self._since > TIMING.slow_wait:
            self.publish()


@contextlib.contextmanager
def published_wait(what: str) -> Iterator[None]:
    """Publish what this rank waits for if the block takes long."""
    if not dist.is_initialized():
        yield
        return
    wait = _WatchedWait(what)
    try:
        yield
    except BaseException:
        wait.end(failed=True)
        raise
    wait.end()


def read_wait(rank: int) -> tuple[str, Meeting | None]:
    """What a global rank waits for, and the meeting if it waits for all ranks."""
    store, key = _store(), str(rank)
    text, meeting = json.loads(store.get(key)) if store.check([key]) else ("", None)
    return text, Meeting(*meeting) if meeting else None


def describe_waits(ranks: Sequence[int], since: float) -> str:
    """What the other members of a group wait for; ``ranks`` are the global ranks of all its members. Empty if this rank
    waits ``since`` a moment ago, or if the store does not answer."""
    if time.monotonic() - since < TIMING.slow_wait:
        return ""
    found: dict[str, list[int]] = {}

    def read() -> None:
        own = dist.get_rank()
        for place, rank in enumerate(ranks[:MAX_SHOWN]):
            if rank != own:
                found.setdefault(read_wait(rank)[0] or NOWHERE, []).append(place)

    with contextlib.suppress(RuntimeError, ValueError):
        run_within(TIMING.store_answer, read)
    return "; ".join(f"{rank_names(places)}: {text}" for text, places in found.items())


def rank_names(ranks: Sequence[int]) -> str:
    """
    >>> rank_names([3]), rank_names([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

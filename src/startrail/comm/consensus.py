"""Ranks that must do the same thing say so, and find out when they do not.

Every attention call has a number, and a *detail*: a text with everything that its ranks must agree on, also which
sequence it is on, and for a backward pass which forward pass it belongs to. The first call with a signature, and the
first on a sequence, is compared on a board (torch.distributed's key-value store): it waits until all ranks have put up
their details; a rank whose arguments are wrong puts that up instead, so that every rank raises the same ``ValueError``
and nobody waits.

Later calls of that signature on that sequence cost nothing: nobody looks at the board. But a rank that has waited for a
transfer longer than ``TIMING.slow_wait`` puts up its detail and looks whether another rank has put up a different one
for the same call. If so it ends its own wait, and raises the same ``ValueError``.

After an error on any rank the calls of all ranks are of no use to each other any more. A rank that gives up says why on
the board, which ends the others' waits, and all begin anew in the next *epoch*: call 1, nothing agreed on, new lanes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from startrail.comm.errors import PeerError
from startrail.comm.timing import TIMING
from startrail.comm.watchdog import run_within, watch

REMEMBERED = 1024  # signatures and sequences that are agreed on
COUNT = 1 << 40  # one rank more on the board; the rest of the counter is the sum of their texts' digests

log = logging.getLogger("startrail")


class CallLedger:
    """What each rank says of call n of an epoch. Ranks only count the same and the different, whatever their number:
    one counter a call holds how many have put up something, and the sum of its digests."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self._up: dict[str, bool] = {}  # calls that we have something up for; whether all ranks compared it
        self._lock = threading.Lock()

    def put(self, call: str, said: str, compared: bool) -> None:
        """``compared``: all ranks put up theirs for this call, and read until they see it."""
        with self._lock:
            if call in self._up:
                self._up[call] |= compared
                return
            self._take_down(compared)
            self._up[call] = compared
            self.store.set(f"{call}/rank/{self.rank}", said)
            self.store.add(call, COUNT + _digest(said))

    def _take_down(self, comparing: bool) -> None:
        """What nobody reads any more. The last one may still be read; and ranks that compare a call read it until they
        begin another, which they all have once the next comparison is over."""
        compared = [call for call, was_compared in self._up.items() if was_compared]
        for old in list(self._up)[:-1]:
            if old not in compared or (comparing and old in compared[:-1]):
                self.store.delete_key(f"{old}/rank/{self.rank}")
                self.store.delete_key(old)
                del self._up[old]

    def differs(self, call: str, said: str) -> bool:
        """Whether some rank has put up something else."""
        ranks, digests = divmod(self.store.add(call, 0), COUNT)
        return digests != ranks * _digest(said)

    def complete(self, call: str) -> bool:
        return self.store.add(call, 0) // COUNT == self.world

    def read(self, call: str) -> dict[str, list[int]]:
        """The ranks behind each text that is up."""
        texts: dict[str, list[int]] = {}
        for rank in range(self.world):
            if self.store.check([f"{call}/rank/{rank}"]):
                texts.setdefault(self.store.get(f"{call}/rank/{rank}").decode(), []).append(rank)
        return texts

    def give_up(self, epoch: int, why: str) -> None:
        """Say why this rank does not go on; the first to say so is heard."""
        if self.store.add(f"{epoch}/giving up", 1) == 1:
            self.store.set(f"{epoch}/given up", why)
        for old in ("giving up", "given up"):
            self.store.delete_key(f"{epoch - 2}/{old}")

    def given_up(self, epoch: int) -> str | None:
        key = f"{epoch}/given up"
        return self.store.get(key).decode() if self.store.check([key]) else None


class WaitRegistry:
    """Who compares what among all instances of the same ranks: two that wait for all ranks at different places wait
    for each other, which happens when one rank makes a new instance and another does not."""

    def __init__(self, store: Store, rank: int, world: int, place: str) -> None:
        self.store, self.rank, self.world, self.place = store, rank, world, place
        self._since_last = False  # whether somebody was seen elsewhere the last time, too
        store.set(f"waiting/{rank}", place)
        self._count(1)

    def _count(self, change: int) -> tuple[int, int]:
        return self.store.add("waiting", change), self.store.add(f"waiting at {self.place}", change)

    def elsewhere(self) -> str | None:
        """Which rank waits for us at another place, if one does and did so the last time; or if it has said so."""
        if self.store.check([f"told {self.place}"]):
            return self.store.get(f"told {self.place}").decode()
        everywhere, here = self._count(0)
        before, self._since_last = self._since_last, everywhere > here
        if not (before and self._since_last):
            return None
        for rank in range(self.world):
            if self.store.check([f"waiting/{rank}"]):
                place = self.store.get(f"waiting/{rank}").decode()
                if place != self.place:
                    text = f"rank {rank} waits for all ranks at {place}, and rank {self.rank} at {self.place}"
                    self.store.set(f"told {place}", text)
                    self.store.set(f"told {self.place}", text)
                    return text
        return None

    def leave(self) -> None:
        self.store.delete_key(f"waiting/{self.rank}")
        _, here = self._count(-1)
        if here == 0:  # a place is never come back to
            self.store.delete_key(f"waiting at {self.place}")
            self.store.delete_key(f"told {self.place}")


class PendingWait(Protocol):
    """A transfer that the program waits for: what it is, and how to make the wait fail."""

    def __str__(self) -> str: ...

    def end(self) -> None: ...


class Consensus:
    """The calls of one ``SequenceParallel`` on one rank. ``board`` is None where there is only one rank; ``lobby``
    makes our entry among those of all instances, from what we are at."""

    def __init__(self, board: CallLedger | None, lobby: Callable[[str], WaitRegistry], every_call: bool) -> None:
        self.board, self.lobby, self.every_call = board, lobby, every_call
        self.epoch = 0
        self._agreed: dict[object, None] = {}  # in the order in which ranks agreed, which is the same on all
        self._call, self._detail = 0, ""
        self._reason: Exception | None = None  # why the wait under way can never end
        self._wait: tuple[PendingWait, float] | None = None
        self._reminded: PendingWait | None = None

    @property
    def number(self) -> tuple[int, int]:
        """Of our call: the epoch, and the call in it; always the same where nobody could be at another."""
        return (self.epoch, self._call) if self.board is not None else (0, 0)

    @property
    def _place(self) -> str:
        """Our call's name on the board."""
        return f"{self.epoch}/{self._call}"

    def start(self, detail: str) -> None:
        """A new call begins."""
        self._call += 1
        self._detail = detail

    def knows(self, *keys: object) -> bool:
        return not self.every_call and all(key in self._agreed for key in keys)

    def confirm(self, keys: Iterable[object], problem: str | None) -> None:
        """Raise on every rank unless all ranks start this call with the same detail and none has a ``problem``."""
        if self.board is None:
            if problem:
                raise ValueError(problem)
        else:
            self._compare(self.board, problem)
        self._agreed |= dict.fromkeys(keys)
        while len(self._agreed) > REMEMBERED:
            del self._agreed[next(iter(self._agreed))]

    def _compare(self, board: CallLedger, problem: str | None) -> None:
        """The store is asked from a thread: where its host hangs, so would we."""
        comparison = _CallComparison(self, board, f"{_PROBLEM}{problem}" if problem else self._detail)
        try:
            done = run_within(board.timeout.total_seconds() + TIMING.store_answer, comparison.run, comparison.ended)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"rank {board.rank}, attention call {self._call}: {_store_failed(error)}") from error
        if not done:
            raise PeerError(
                f"rank {board.rank}, attention call {self._call}: torch.distributed's store, which rank 0 or the "
                f"launcher hosts, has not answered within {board.timeout}"
            )

    # --- giving up

    def give_up(self, error: BaseException) -> None:
        """This rank's call has failed: tell those who wait for it, and begin a new epoch."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._call, self._reason = 0, None
        self._agreed.clear()
        if (board := self.board) is not None:
            kind = "ValueError" if isinstance(error, ValueError) else "PeerError"
            text = f"{kind}: {str(error) or type(error).__name__}"
            if not isinstance(error, ValueError | PeerError):
                text = f"PeerError: rank {board.rank} gave up: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, lambda: board.give_up(epoch, text))

    # --- waiting for transfers

    def waiting(self, wait: PendingWait) -> None:
        self._wait = wait, time.monotonic()

    def arrived(self) -> None:
        self._wait = self._reminded = None

    def reason(self) -> Exception | None:
        """After a wait has failed: what the board knows of why."""
        if self._reason is None and (board := self.board) is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                run_within(TIMING.store_answer, lambda: self._look(board))
        return self._reason

    def watch(self) -> None:
        """Look after long waits from a thread of our own, as long as this object lives."""
        if self.board is not None:
            watch(self)

    def look(self) -> None:
        """If a wait has become long, say so, and find out whether it can ever end."""
        if self._wait is None or self.board is None:
            return
        wait, since = self._wait
        seconds = time.monotonic() - since
        if seconds > TIMING.reminder and wait is not self._reminded:
            self._reminded = wait
            log.warning("rank %d still waits after %.0f seconds: %s", self.board.rank, seconds, wait)
        if seconds < TIMING.slow_wait:
            return
        if self._reason is None:
            self._look(self.board)
        if self._reason is not None and self._wait is not None:  # it may have ended meanwhile
            wait.end()

    def _look(self, board: CallLedger) -> None:
        place, epoch, detail = self._place, self.epoch, self._detail
        board.put(place, detail, compared=False)
        if board.differs(place, detail):
            self._reason = ValueError(_disagreement(board.read(place)))
        elif why := board.given_up(epoch):
            self._reason = _error_of(why)


class _CallComparison:
    """One call, compared with all ranks; runs in a thread of its own until it ``ended``."""

    def __init__(self, agreement: Consensus, board: CallLedger, said: str) -> None:
        self.board, self.said, self.lobby = board, said, agreement.lobby
        self.place, self.epoch, self.call = agreement._place, agreement.epoch, agreement._call
        self.ended = threading.Event()

    def run(self) -> None:
        board, place, said = self.board, self.place, self.said
        board.put(place, said, compared=True)
        start = time.monotonic()
        pause = TIMING.poll
        with contextlib.ExitStack() as stack:
            lobby: WaitRegistry | None = None
            looked = reminded = start
            while not board.complete(place) and not self.ended.wait(pause):
                pause = min(2 * pause, TIMING.longest_poll)
                now = time.monotonic()
                seconds = now - start
                if seconds > board.timeout.total_seconds():
                    raise PeerError(f"{self._missing()} did not start {self._what()} within {board.timeout}")
                if seconds > TIMING.slow_wait and board.differs(place, said):
                    break  # some ranks may be stuck in transfers of another call; it is clear enough by now
                if (
                    pause >= TIMING.longest_poll
                    and (why := board.given_up(self.epoch))
                    and not board.differs(place, said)
                ):
                    raise _error_of(why)
                if seconds > TIMING.slow_wait and now - looked > TIMING.watch_interval:
                    looked = now
                    if lobby is None:
                        lobby = self.lobby(place)
                        stack.callback(lobby.leave)
                    elif two := lobby.elsewhere():
                        raise ValueError(f"{two}: make a new SequenceParallel on all of these ranks, or on none")
                if now - reminded > TIMING.reminder and reminded == start:
                    reminded = now
                    log.warning("rank %d still waits for %s to start %s", board.rank, self._missing(), self._what())
        if said.startswith(_PROBLEM) or board.differs(place, said):
            raise ValueError(_disagreement(board.read(place)))
        if why := board.given_up(self.epoch):  # by somebody who was here, but did not wait for us
            raise _error_of(why)

    def _missing(self) -> str:
        seen = {rank for ranks in self.board.read(self.place).values() for rank in ranks}
        return _ranks(sorted(set(range(self.board.world)) - seen))

    def _what(self) -> str:
        return f"attention call {self.call} ({self.said.removeprefix(_PROBLEM)})"


_PROBLEM = "problem: "
_HINTS = {  # what texts may differ in alone, and what that means
    re.compile(r"sequence \d+ of that kind"): "a rank has left out a sequence, or made one that others have not",
    re.compile(r", data with digest \w+"): "they were given different data: all must shard the same batches",
}


def _error_of(text: str) -> Exception:
    """The error that another rank's giving up is to us."""
    kind, _, why = text.partition(": ")
    return ValueError(why) if kind == "ValueError" else PeerError(why)


def _store_failed(error: RuntimeError) -> str:
    return f"torch.distributed's store, which rank 0 or the launcher hosts, failed: {str(error).splitlines()[0]}"


def _disagreement(texts: dict[str, list[int]]) -> str:
    problems = {text.removeprefix(_PROBLEM): ranks for text, ranks in texts.items() if text.startswith(_PROBLEM)}
    if problems and len(texts) == 1:
        return next(iter(problems))
    if problems:
        return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in problems.items())
    shown = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in texts.items())
    bare = {text: _without_hints(text) for text in texts}
    alike = [text for text in texts if list(bare.values()).count(bare[text]) > 1]
    hints = [hint for part, hint in _HINTS.items() if len({str(part.findall(text)) for text in alike}) > 1]
    hint = f" ({'; '.join(hints)})" if hints else ""
    return f"ranks disagree about one attention call{hint}: {shown}"


def _without_hints(text: str) -> str:
    for part in _HINTS:
        text = part.sub("", text)
    return text


def _digest(text: str) -> int:
    """Fewer bits than fit: the sum of 4,096 ranks' stays below ``COUNT``."""
    return zlib.crc32(text.encode()) >> 4


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

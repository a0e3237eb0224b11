"""Ranks that must do the same thing say so, and find out when they do not.

Every attention call has a number, and a *detail*: a text with everything that its ranks must agree on. The first call
with a signature, and the first on a sequence, is put on a board (torch.distributed's key-value store) and waits until
all ranks have put up theirs; a rank whose arguments are wrong puts that up instead, so that every rank raises the same
``ValueError`` and nobody waits.

Later calls of that signature on that sequence cost nothing: nobody looks at the board. But a rank that has waited for a
transfer longer than ``PATIENCE`` puts up its detail and looks whether another rank has put up a different one for the
same call. If so it ends its own wait, and raises the same ``ValueError``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

PATIENCE = 2.0  # seconds


class Board:
    """What each rank says of call number n. Ranks only count the same and the different, whatever their number."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self._up: dict[int, str] = {}
        self._lock = threading.Lock()

    def put(self, call: int, detail: str) -> None:
        with self._lock:
            if call in self._up:
                return
            for old in sorted(self._up)[:-1]:  # the last one may still be read by ranks that compare it
                self.store.delete_key(f"{old}/rank/{self.rank}")
                del self._up[old]
            self._up[call] = detail
            self.store.set(f"{call}/rank/{self.rank}", detail)
            self.store.add(f"{call}/same/{_digest(detail)}", 1)
            self.store.add(f"{call}/all", 1)

    def differs(self, call: int, detail: str) -> bool:
        """Whether some rank has put up something else."""
        return self.store.add(f"{call}/all", 0) > self.store.add(f"{call}/same/{_digest(detail)}", 0)

    def complete(self, call: int) -> bool:
        return self.store.add(f"{call}/all", 0) == self.world

    def read(self, call: int) -> dict[str, list[int]]:
        """The ranks behind each text that is up."""
        texts: dict[str, list[int]] = {}
        for rank in range(self.world):
            if self.store.check([f"{call}/rank/{rank}"]):
                texts.setdefault(self.store.get(f"{call}/rank/{rank}").decode(), []).append(rank)
        return texts


class Agreement:
    """The calls of one ``SequenceParallel`` on one rank. ``board`` is None where there is only one rank."""

    def __init__(self, board: Board | None, every_call: bool) -> None:
        self.board, self.every_call = board, every_call
        self._agreed: set[str] = set()
        self._call, self._detail = 0, ""
        self._disagreed: str | None = None
        self._waiting_since: float | None = None
        self._end_wait: Callable[[], None] | None = None
        self.also_look: weakref.WeakMethod[Callable[[], None]] | None = None  # where waits never fail by themselves

    def start(self, detail: str) -> int:
        """A new call begins; its number."""
        self._call += 1
        self._detail = detail
        return self._call

    def knows(self, signature: str) -> bool:
        return signature in self._agreed and not self.every_call

    def confirm(self, signature: str, problem: str | None) -> None:
        """Raise on every rank unless all ranks start this call with the same detail and none has a ``problem``."""
        if self.board is None:
            if problem:
                raise ValueError(problem)
        else:
            self._compare(self.board, problem)
        self._agreed.add(signature)

    def _compare(self, board: Board, problem: str | None) -> None:
        said = f"{_PROBLEM}{problem}" if problem else self._detail
        board.put(self._call, said)
        end = time.monotonic() + board.timeout.total_seconds()
        pause = 0.001
        while not board.complete(self._call):
            if time.monotonic() > end:
                seen = {rank for ranks in board.read(self._call).values() for rank in ranks}
                missing = sorted(set(range(board.world)) - seen)
                raise ValueError(
                    f"{_ranks(missing)} did not start attention call {self._call} within {board.timeout} "
                    f"({said.removeprefix(_PROBLEM)})"
                )
            if board.differs(self._call, said) and time.monotonic() > end - board.timeout.total_seconds() + PATIENCE:
                break  # some ranks may be stuck in transfers of another call; it is clear enough by now
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if problem or board.differs(self._call, said):
            raise ValueError(_disagreement(board.read(self._call)))

    # --- waiting for transfers

    def waiting(self, end_wait: Callable[[], None]) -> None:
        """The program waits for a transfer; ``end_wait`` makes that wait fail."""
        self._end_wait, self._waiting_since = end_wait, time.monotonic()

    def arrived(self) -> None:
        self._waiting_since = self._end_wait = None

    def disagreement(self, sure: bool = False) -> str | None:
        """After a wait has failed: whether it failed because ranks disagree, and about what. Where that is ``sure``,
        the others are given time to say what they called."""
        end = time.monotonic() + (4 * PATIENCE if sure else 0)
        if self._disagreed is None and self.board is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                self._look(self.board)
                while self._disagreed is None and time.monotonic() < end:
                    time.sleep(0.05)
                    self._look(self.board)
        found, self._disagreed = self._disagreed, None
        return found

    def watch(self) -> None:
        """Look after long waits from a thread of our own, as long as this object lives."""
        if self.board is None:
            return
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="startrail-agreement", daemon=True).start()

    def look(self) -> None:
        """If a wait has become long, find out whether it can ever end."""
        if self.also_look is not None and (look := self.also_look()) is not None:
            look()
        since = self._waiting_since
        if since is None or self.board is None or time.monotonic() - since < PATIENCE:
            return
        if not self._disagreed:
            self._look(self.board)
        end_wait = self._end_wait  # None if it has ended meanwhile
        if self._disagreed and end_wait is not None:
            end_wait()

    def _look(self, board: Board) -> None:
        call, detail = self._call, self._detail
        board.put(call, detail)
        if board.differs(call, detail):
            self._disagreed = _disagreement(board.read(call))


_PROBLEM = "problem: "


def _watch(agreement: weakref.ref[Agreement]) -> None:
    while True:
        time.sleep(PATIENCE / 4)
        alive = agreement()
        if alive is None:
            return
        try:
            alive.look()
        except RuntimeError:  # the store is gone: the program is ending, and the wait has its own deadline
            return
        del alive


def _disagreement(texts: dict[str, list[int]]) -> str:
    problems = {text.removeprefix(_PROBLEM): ranks for text, ranks in texts.items() if text.startswith(_PROBLEM)}
    if problems and len(texts) == 1:
        return next(iter(problems))
    if problems:
        return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in problems.items())
    shown = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in texts.items())
    return f"ranks disagree about one attention call: {shown}"


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

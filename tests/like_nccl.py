"""A backend that behaves like NCCL, on CPUs, around gloo: whatever relies on more than NCCL promises goes wrong here.

- Tags are ignored: the nth send of a pair on a communicator meets the nth receive, whatever they are.
- What is posted between ``_start_coalescing`` and ``_end_coalescing`` is one batch with one work, and batches of a
  communicator end in the order in which they were posted.
- Nothing lands before its work's ``wait()``; until then a receive's buffer holds NaN in every floating dtype.
- What is sent may be read until ``wait()``: whoever has written to it meanwhile sent garbage, and is told so.
- ``wait()`` never times out, and raises for the mistakes above alone: a dead peer is not noticed. ``abort()`` ends it.
- A work that failed (``break_with``) is *completed*, and its bytes never came; ``exception()`` says so, ``wait()`` not.
- ``shutdown()`` waits for everything under way, for ever if need be, unless ``abort()`` came first.
- ``abort()`` waits for all that the GPU does: with two groups of a rank that hang, aborting one ends only once the
  other is being aborted, too (NVIDIA/nccl#1013).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "like_nccl"
FOREVER = timedelta(hours=10)
GROUPS: list[LikeNccl] = []  # of this rank


class Batch:
    """What was posted together. ``landing``: where each received tensor goes, and the room that it comes into."""

    def __init__(self, group: LikeNccl) -> None:
        self.group = group
        self.inner: list[dist.Work] = []
        self.landing: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.over = threading.Event()
        self.error: RuntimeError | None = None
        self.waited = False

    def send(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        self.sent.append((x, copy))
        return copy

    def room(self, x: torch.Tensor) -> torch.Tensor:
        x.view(torch.uint8).fill_(0xFF)
        self.landing.append((x, torch.empty_like(x)))
        return self.landing[-1][1]

    def is_completed(self) -> bool:
        return self.over.is_set()

    def exception(self) -> RuntimeError | None:
        return self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.over.wait(0.2):
            if self.group.aborted.is_set():
                return True
        if self.waited or self.error is not None:
            return True
        self.waited = True
        for x, copy in self.sent:
            if not torch.equal(x.view(torch.uint8), copy.view(torch.uint8)):
                raise AssertionError(f"{x.numel()} bytes were written before their send was waited for")
        for x, room in self.landing:
            if not bool((x.view(torch.uint8) == 0xFF).all()):
                raise AssertionError(f"{x.numel()} bytes were written before they were received")
            x.copy_(room)
        return True


class LikeNccl(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # whoever does not even come is missed
        self.gloo._set_default_timeout(FOREVER)
        self.counts: dict[tuple[bool, int], int] = defaultdict(int)
        self.open: Batch | None = None
        self.aborted = threading.Event()
        self.broken: str | None = None
        self.story: list[str] = []  # what became of it
        self.under_way = 0
        GROUPS.append(self)
        self.queue: deque[Batch] = deque()
        self.filled = threading.Condition()
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        """Batches end in order, each once all its transfers have."""
        while True:
            with self.filled:
                while not self.queue:
                    self.filled.wait()
                batch = self.queue.popleft()
            try:
                for work in batch.inner:
                    work.wait()
            except RuntimeError:  # a peer is gone, which NCCL would not notice
                return
            if self.broken:
                batch.error = RuntimeError(self.broken)
            with self.filled:
                self.under_way -= 1
            batch.over.set()

    def break_with(self, text: str) -> None:
        """Whatever ends from now on has failed: a link is gone, say."""
        self.broken = text

    def _launch(self, batch: Batch) -> Batch:
        with self.filled:
            self.queue.append(batch)
            self.under_way += 1
            self.filled.notify()
        return batch

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.open is None
        self.open = Batch(self)

    def _end_coalescing(self, device: torch.device) -> Batch:
        batch, self.open = self.open, None
        assert batch is not None
        return self._launch(batch)

    def _tag(self, send: bool, peer: int) -> int:
        self.counts[send, peer] += 1
        return self.counts[send, peer]

    def _post(self, batch: Batch, send: bool, x: torch.Tensor, peer: int) -> None:
        try:
            if send:
                batch.inner.append(self.gloo.send([batch.send(x)], peer, self._tag(True, peer)))
            else:
                batch.inner.append(self.gloo.recv([batch.room(x)], peer, self._tag(False, peer)))
        except RuntimeError:  # a peer is gone: this one never ends
            batch.inner.append(Never())

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside of a batch makes a communicator of its own"
        self._post(self.open, True, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside of a batch makes a communicator of its own"
        self._post(self.open, False, tensors[0], peer)

    def all_to_all_single(self, output, given, output_splits, input_splits, options=None) -> Batch:
        assert not output_splits and not input_splits
        batch, size, own = Batch(self), self.size(), self.rank()
        targets, sources = output.chunk(size), given.chunk(size)
        for peer in range(size):
            if peer == own:
                batch.room(targets[own]).copy_(batch.send(sources[own]))
            else:
                self._post(batch, True, sources[peer], peer)
                self._post(batch, False, targets[peer], peer)
        return self._launch(batch)

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Batch:
        batch = Batch(self)
        (x,) = tensors
        value = x.clone()
        batch.room(x)
        batch.landing[-1] = (x, value)
        try:
            batch.inner.append(self.gloo.allreduce([value], options))
        except RuntimeError:
            batch.inner.append(Never())
        return self._launch(batch)

    def abort(self) -> None:
        self.story.append("abort")
        self.aborted.set()
        while any(group.under_way and not group.aborted.is_set() for group in GROUPS):
            time.sleep(0.01)

    def shutdown(self) -> None:
        self.story.append("shutdown")
        while self.under_way and not self.aborted.is_set():
            time.sleep(0.01)
        self.aborted.set()

    def getBackendName(self) -> str:  # noqa: N802, torch asks for it under this name
        return NAME


class Never:
    def wait(self) -> None:
        raise RuntimeError("never")


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LikeNccl:
    return LikeNccl(store, rank, size, timeout)


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])

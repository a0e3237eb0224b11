"""A backend for CPUs that behaves like NCCL, built on gloo: code that relies on more than NCCL guarantees fails here.

- Tags are ignored: the nth send to a peer on a communicator matches the peer's nth receive.
- Operations between ``_start_coalescing`` and ``_end_coalescing`` are one batch with one work. The batches of a
  communicator complete in the order in which they were posted.
- Data arrives at its work's ``wait()``; until then a receive buffer holds NaN in every floating dtype.
- A send may read its buffer until ``wait()``, which raises if the buffer has changed.
- ``wait()`` never times out and raises only for the mistakes above, not for a dead peer. ``abort()`` ends it.
- A failed work (``break_with``) is *completed* without its data; ``exception()`` returns the error,
  ``get_future_result()`` its kind, and ``wait()`` does not raise.
- ``shutdown()`` waits for all pending work without a limit, unless ``abort()`` was called first.
- ``abort()`` waits for all work on the GPU: if two groups of a rank hang, aborting one returns only once the other is
  being aborted, too (NVIDIA/nccl#1013).
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
    """Operations with one work. ``received`` and ``sent`` pair each tensor with the buffer that gloo uses."""

    def __init__(self, group: LikeNccl) -> None:
        self.group = group
        self.inner: list[dist.Work] = []
        self.received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.completed = threading.Event()
        self.error: RuntimeError | None = None
        self.waited = False

    def send_buffer(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        self.sent.append((x, copy))
        return copy

    def receive_buffer(self, x: torch.Tensor) -> torch.Tensor:
        x.view(torch.uint8).fill_(0xFF)
        self.received.append((x, torch.empty_like(x)))
        return self.received[-1][1]

    def is_completed(self) -> bool:
        return self.completed.is_set()

    def exception(self) -> RuntimeError | None:
        return self.error

    def get_future_result(self) -> torch.futures.Future[int]:
        """Complete at once only if the work has failed: NCCL's own watchdog sets the result of one that succeeded."""
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.error is not None:
            result.set_result(2)
        return result

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.completed.wait(0.2):
            if self.group.aborted.is_set():
                return True
        if self.waited or self.error is not None:
            return True
        self.waited = True
        for x, copy in self.sent:
            if not torch.equal(x.view(torch.uint8), copy.view(torch.uint8)):
                raise AssertionError(f"{x.numel()} bytes were overwritten before wait() on their send")
        for x, buffer in self.received:
            if not bool((x.view(torch.uint8) == 0xFF).all()):
                raise AssertionError(f"{x.numel()} bytes were written before wait() on their receive")
            x.copy_(buffer)
        return True


class LikeNccl(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # connecting can time out
        self.gloo._set_default_timeout(FOREVER)
        self.counts: dict[tuple[bool, int], int] = defaultdict(int)
        self.open: Batch | None = None
        self.aborted = threading.Event()
        self.broken: str | None = None
        self.history: list[str] = []  # "abort" and "shutdown", in order
        self.pending = 0
        GROUPS.append(self)
        self.queue: deque[Batch] = deque()
        self.filled = threading.Condition()
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        """Complete batches in order, each when all its transfers have completed."""
        while True:
            with self.filled:
                while not self.queue:
                    self.filled.wait()
                batch = self.queue.popleft()
            try:
                for work in batch.inner:
                    work.wait()
            except RuntimeError:  # a peer is dead, which NCCL would not notice
                return
            if self.broken:
                batch.error = RuntimeError(self.broken)
            with self.filled:
                self.pending -= 1
            batch.completed.set()

    def break_with(self, text: str) -> None:
        """Let every work that completes from now on fail, as if a link were broken."""
        self.broken = text

    def _launch(self, batch: Batch) -> Batch:
        with self.filled:
            self.queue.append(batch)
            self.pending += 1
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
                batch.inner.append(self.gloo.send([batch.send_buffer(x)], peer, self._tag(True, peer)))
            else:
                batch.inner.append(self.gloo.recv([batch.receive_buffer(x)], peer, self._tag(False, peer)))
        except RuntimeError:  # a peer is dead: this operation never completes
            batch.inner.append(Never())

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside a batch creates a communicator"
        self._post(self.open, True, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside a batch creates a communicator"
        self._post(self.open, False, tensors[0], peer)

    def all_to_all_single(self, output, input_, output_splits, input_splits, options=None) -> Batch:
        assert not output_splits and not input_splits
        batch, size, own = Batch(self), self.size(), self.rank()
        targets, sources = output.chunk(size), input_.chunk(size)
        for peer in range(size):
            if peer == own:
                batch.receive_buffer(targets[own]).copy_(batch.send_buffer(sources[own]))
            else:
                self._post(batch, True, sources[peer], peer)
                self._post(batch, False, targets[peer], peer)
        return self._launch(batch)

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Batch:
        batch = Batch(self)
        (x,) = tensors
        value = x.clone()
        batch.receive_buffer(x)
        batch.received[-1] = (x, value)
        try:
            batch.inner.append(self.gloo.allreduce([value], options))
        except RuntimeError:
            batch.inner.append(Never())
        return self._launch(batch)

    def abort(self) -> None:
        self.history.append("abort")
        self.aborted.set()
        while any(group.pending and not group.aborted.is_set() for group in GROUPS):
            time.sleep(0.01)

    def shutdown(self) -> None:
        self.history.append("shutdown")
        while self.pending and not self.aborted.is_set():
            time.sleep(0.01)
        self.aborted.set()

    def getBackendName(self) -> str:  # noqa: N802, torch calls this name
        return NAME


class Never:
    def wait(self) -> None:
        raise RuntimeError("never")


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LikeNccl:
    return LikeNccl(store, rank, size, timeout)


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])

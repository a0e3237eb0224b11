"""A backend for CPUs that behaves like NCCL, built on gloo: code that relies on more than NCCL guarantees fails here.

- A communicator is made by its first operation, which waits for all members, without a limit: ``abort()`` does not end
  that wait.
- Tags are ignored: the nth send to a peer on a communicator matches the peer's nth receive.
- Operations between ``_start_coalescing`` and ``_end_coalescing`` are one batch with one work. The batches of a
  communicator complete in the order in which they were posted. The number of open batches is counted per thread: while
  one is open, nothing else of that thread is launched, although its work completes.
- Data arrives at its work's ``wait()``; until then a receive buffer holds NaN in every floating dtype.
- A send may read its buffer until ``wait()``, which raises if the buffer has changed.
- ``wait()`` never times out and raises only for the mistakes above, not for a dead peer. ``abort()`` ends it, and the
  buffer then holds what it held before.
- On a ``LazyStream`` nothing blocks the host: transfers and waits are queued among the kernels.
- A failed work (``break_with``) is *completed* without its data; ``exception()`` returns the error,
  ``get_future_result()`` its kind, and ``wait()`` does not raise.
- ``shutdown()`` waits for all pending work and then for all members to shut down, both without a limit, unless
  ``abort()`` was called first.
- ``abort()`` ends the kernel of the group's first pending work, which still passes on what its buffers hold. So the
  same work of a peer that has not aborted may complete, with stale bytes: of a message, what the receive buffer held
  before; of an all-reduce, the result of the one before (``LEAKS``).
- ``abort()`` waits for all work on the GPU: if two groups of a rank hang, aborting one returns only once the other is
  being aborted, too (NVIDIA/nccl#1013). Every operation on an aborted group raises ``DistBackendError``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests import lazy_stream

NAME = "like_nccl"
FOREVER = timedelta(hours=10)
GROUPS: list[LikeNccl] = []  # of this rank
OPEN_BATCHES = threading.local()  # .count
LEAKS = False  # True: an abort lets pending work of peers complete with stale bytes
ABORTS = multiprocessing.Value("i", 0)  # by all forked ranks, that have let work of peers complete


class Batch:
    """Operations with one work, launched together. Each pairs a tensor with the buffer that gloo uses."""

    def __init__(self, group: LikeNccl) -> None:
        self.group = group
        self.posts: list[Callable[[], dist.Work | Never]] = []
        self.inner: list[dist.Work | Never] = []
        self.received: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # and what it held before
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.targets: list[torch.Tensor] = []  # of receives
        self.peers: set[int] = set()  # of messages
        self.reduction = 0  # the number of an all-reduce
        self.completed = threading.Event()
        self.error: RuntimeError | None = None
        self.moved = self.waited = False

    def send_buffer(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        self.sent.append((x, copy))
        return copy

    def receive_buffer(self, x: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
        before = x.clone()
        self.received.append((x, torch.empty_like(x) if start is None else start, before))
        x.view(torch.uint8).fill_(0xFF)
        return self.received[-1][1]

    def post(self, operation: Callable[[], dist.Work]) -> None:
        def attempt() -> dist.Work | Never:
            try:
                return operation()
            except RuntimeError:  # a peer is dead: this operation never completes
                return Never()

        self.posts.append(attempt)

    def begin(self) -> None:
        """On the stream: read what is sent, and hand everything to gloo."""
        self.inner = [post() for post in self.posts]
        self.group._queue(self)

    def is_completed(self) -> bool:
        return self.completed.is_set() or self.group.leaks_into(self)

    def exception(self) -> RuntimeError | None:
        return self.error

    def get_future_result(self) -> torch.futures.Future[int]:
        """Complete at once only if the work has failed: NCCL's own watchdog sets the result of one that succeeded."""
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.error is not None:
            result.set_result(2)
        return result

    def wait(self, timeout: timedelta | None = None) -> bool:
        lazy_stream.run(self._wait, self.targets)
        return True

    def _wait(self) -> None:
        while not self.completed.wait(0.05) and not self.is_completed():
            if self.group.aborted.is_set():
                break
        if self.waited:
            return
        self.waited = True
        if not self.moved:
            for x, _, before in self.received:
                x.copy_(before)
            return
        for x, copy in self.sent:
            if not torch.equal(x.view(torch.uint8), copy.view(torch.uint8)):
                raise AssertionError(f"{x.numel()} bytes were overwritten before wait() on their send")
        for x, buffer, _ in self.received:
            if not bool((x.view(torch.uint8) == 0xFF).all()):
                raise AssertionError(f"{x.numel()} bytes were written before wait() on their receive")
            x.copy_(buffer)


class LikeNccl(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.timeout = store, timeout
        self.gloo: dist.ProcessGroupGloo | None = None
        self.counts: dict[tuple[bool, int], int] = defaultdict(int)
        self.open: Batch | None = None
        self.aborted = threading.Event()
        self.broken: str | None = None
        self.history: list[str] = []  # "abort" and "shutdown", in order
        self.pending = self.reductions = 0
        self.running: Batch | None = None
        self.reduced: torch.Tensor | None = None  # the result of the latest all-reduce
        GROUPS.append(self)
        self.queue: deque[Batch] = deque()
        self.filled = threading.Condition()
        threading.Thread(target=self._progress, daemon=True).start()

    def _communicator(self) -> dist.ProcessGroupGloo:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on this rank")
        if self.gloo is None:
            self.store.set(f"here {self.rank()}", "1")
            while not self.store.check([f"here {rank}" for rank in range(self.size())]):
                time.sleep(0.01)
            try:
                self.gloo = dist.ProcessGroupGloo(self.store, self.rank(), self.size(), self.timeout)
            except RuntimeError as error:
                raise dist.DistBackendError(f"NCCL error in ncclCommInitRank: {error}") from error
            self.gloo._set_default_timeout(FOREVER)
        return self.gloo

    def _progress(self) -> None:
        """Complete batches in order, each when all its transfers have completed."""
        while True:
            with self.filled:
                while not self.queue:
                    self.filled.wait()
                batch = self.running = self.queue.popleft()
            try:
                for work in batch.inner:
                    work.wait()
            except RuntimeError:  # a peer is dead, which NCCL would not notice
                return
            if batch.completed.is_set():  # with stale bytes
                return
            if self.broken:
                if self.ends_process:
                    os.abort()
                batch.error = RuntimeError(self.broken)
            batch.moved = batch.error is None and not self.aborted.is_set()
            if batch.reduction:
                self.reduced = batch.received[0][1].clone()
            with self.filled:
                self.pending -= 1
            batch.completed.set()

    def break_with(self, text: str, ends_process: bool = False) -> None:
        """Let every work that completes from now on fail, as if a link were broken. ``ends_process``: torch's watchdog
        finds the error first."""
        self.broken, self.ends_process = text, ends_process

    def _launch(self, batch: Batch) -> Batch:
        if open_batches():
            batch.completed.set()
            return batch
        with self.filled:
            self.pending += 1
        lazy_stream.run(batch.begin, batch.targets)
        return batch

    def _queue(self, batch: Batch) -> None:
        with self.filled:
            self.queue.append(batch)
            self.filled.notify()

    def _start_coalescing(self, device: torch.device) -> None:
        OPEN_BATCHES.count = open_batches() + 1
        self.open = Batch(self)

    def _end_coalescing(self, device: torch.device) -> Batch:
        OPEN_BATCHES.count -= 1
        batch, self.open = self.open, None
        assert batch is not None
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on this rank")
        return self._launch(batch)

    def _tag(self, send: bool, peer: int) -> int:
        self.counts[send, peer] += 1
        return self.counts[send, peer]

    def _post(self, batch: Batch, send: bool, x: torch.Tensor, peer: int) -> None:
        gloo, tag = self._communicator(), self._tag(send, peer)
        batch.peers.add(peer)
        if send:
            batch.post(lambda: gloo.send([batch.send_buffer(x)], peer, tag))
        else:
            batch.targets.append(x)
            batch.post(lambda: gloo.recv([batch.receive_buffer(x)], peer, tag))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside a batch creates a communicator"
        self._post(self.open, True, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.open is not None, "a message outside a batch creates a communicator"
        self._post(self.open, False, tensors[0], peer)

    def all_to_all_single(self, output, input_, output_splits, input_splits, options=None) -> Batch:
        assert not output_splits and not input_splits
        batch, size, own = Batch(self), self.size(), self.rank()
        self._communicator()
        targets, sources = output.chunk(size), input_.chunk(size)

        def copy_own() -> Done:
            batch.receive_buffer(targets[own], batch.send_buffer(sources[own]).clone())
            return Done()

        for peer in range(size):
            if peer == own:
                batch.targets.append(targets[own])
                batch.posts.append(copy_own)
            else:
                self._post(batch, True, sources[peer], peer)
                self._post(batch, False, targets[peer], peer)
        return self._launch(batch)

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Batch:
        batch, gloo = Batch(self), self._communicator()
        (x,) = tensors
        self.reductions += 1
        batch.reduction = self.reductions

        def reduce() -> dist.Work:
            return gloo.allreduce([batch.receive_buffer(x, x.clone())], options)

        batch.targets.append(x)
        batch.post(reduce)
        return self._launch(batch)

    def _leak(self) -> None:
        """Let the peers' parts of the work that runs complete."""
        if not LEAKS or self.running is None or self.running.completed.is_set():
            return
        for key in self._leak_keys(self.running, sends=True):
            self.store.set(key, "1")
        with ABORTS.get_lock():
            ABORTS.value += 1

    def _leak_keys(self, batch: Batch, sends: bool) -> list[str]:
        if batch.reduction:
            return [f"leak of all-reduce {batch.reduction}"]
        pairs = [(self.rank(), peer) if sends else (peer, self.rank()) for peer in batch.peers]
        return [f"leak from {source} to {target}" for source, target in pairs]

    def leaks_into(self, batch: Batch) -> bool:
        """Complete a batch with stale bytes if a peer that takes part has aborted its own while it ran."""
        if not ABORTS.value or batch is not self.running or self.aborted.is_set():
            return False
        if not any(self.store.check([key]) for key in self._leak_keys(batch, sends=False)):
            return False
        for index, (x, _, before) in enumerate(batch.received):
            stale = self.reduced if batch.reduction and self.reduced is not None else before
            batch.received[index] = x, stale.clone(), before
        batch.moved = True
        with self.filled:
            self.pending -= 1
        batch.completed.set()
        return True

    def abort(self) -> None:
        self.history.append("abort")
        self._leak()
        self.aborted.set()
        while any(group.pending and not group.aborted.is_set() for group in GROUPS):
            time.sleep(0.01)

    def shutdown(self) -> None:
        if self.gloo is not None and not self.aborted.is_set():
            while self.pending and not self.aborted.is_set():
                time.sleep(0.01)
            self.store.add("shut down", 1)
            while self.store.add("shut down", 0) < self.size() and not self.aborted.is_set():
                time.sleep(0.01)
        self.history.append("shutdown")
        self.aborted.set()

    def getBackendName(self) -> str:  # noqa: N802, torch calls this name
        return NAME


class Never:
    def wait(self) -> None:
        raise RuntimeError("never")


class Done:
    def wait(self) -> None:
        pass


def open_batches() -> int:
    return getattr(OPEN_BATCHES, "count", 0)


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LikeNccl:
    return LikeNccl(store, rank, size, timeout)


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])

"""Ranks on this machine: fork processes, join them with gloo over loopback, and collect what they return.

Forking needs a parent that has not used its OpenMP threads; ``torch.set_num_threads(1)`` in the parent sees to that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch._dynamo  # here once: the first custom op imports it, which would take a second on every rank
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from startrail.comm.timing import TIMING

Result = TypeVar("Result")
MOST_RANKS = 256
RANK_BYTES = 48 * 2**20  # what a forked rank has of its own, beside its part of the tensors
HOST = "127.0.0.1"


class RankError(RuntimeError):
    """A local rank failed; the text starts with its number and holds its traceback."""


def check_ranks(world: int, more: int = 0, what: str = "") -> None:
    """``ValueError`` if so many ranks should not be started on this machine: each is a process. ``more`` bytes are for
    ``what`` else is needed."""
    if world > MOST_RANKS:
        raise ValueError(f"{world:,} ranks, a process each: at most {MOST_RANKS} are started on one machine")
    ranks = world * RANK_BYTES
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if ranks + more > free:
        raise ValueError(
            f"{world} ranks need about {ranks / 2**30:.1f} GiB"
            + (f" and {what} {more / 2**30:.1f} GiB" if more else "")
            + f", but {free / 2**30:.1f} GiB are free: take less of one"
        )


def run_local(
    function: Callable[[int], Result],
    world: int,
    deadline: float | None = 300.0,
    expendable: frozenset[int] = frozenset(),
    timeout: float | None = None,
    look: Callable[[], None] | None = None,
) -> list[Result | None]:
    """Call ``function(rank)`` on ``world`` forked ranks of one thread each, and return what they return, by rank.

    >>> run_local(lambda rank: torch.tensor([rank]), 2)
    [tensor([0]), tensor([1])]

    The first rank that fails ends the others and is reported; so does the ``deadline`` in seconds. ``expendable``
    ranks are not waited for at the end and may die, in tests of what the others then do; they return None. ``timeout``
    is that of the ranks' process group, as long as the deadline unless said. ``look`` is called now and then while
    they run; whatever it raises ends them.
    """
    seconds = timeout or deadline
    if seconds is None:
        raise ValueError("without a deadline, ranks need a timeout")
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            join = partial(_join, rank, world, theirs, seconds)
            process = context.Process(target=serve, args=(function, rank, join, theirs, not expendable))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        # Here, so that it outlives any rank; and only now, or ranks would inherit its connections and keep them open.
        store = TCPStore(HOST, 0, world, True, wait_for_workers=False)
        for pipe in pipes:
            with suppress(OSError):  # a rank that has died is reported below
                pipe.send_bytes(str(store.port).encode())
        end = float("inf") if deadline is None else time.monotonic() + deadline
        return collect(pipes, processes, expendable, end, look)
    finally:
        for started in processes:
            if started.is_alive():
                started.kill()
            started.join()


def _join(rank: int, world: int, pipe: Connection, seconds: float) -> None:
    """Meet the others at the store, whose port comes through the pipe."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not pipe.poll(TIMING.first_message):
        raise RuntimeError("the process that started this rank is gone")
    limit = timedelta(seconds=seconds)
    store = TCPStore(HOST, int(pipe.recv_bytes()), world, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def collect(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    expendable: frozenset[int],
    end: float,
    look: Callable[[], None] | None = None,
) -> list[Result | None]:
    """What the ranks behind ``pipes`` return, until the monotonic time ``end``; see ``serve``."""
    world = len(pipes)
    results: dict[int, Result | None] = dict.fromkeys(expendable)
    while len(results) < world:
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        left = max(0.0, end - time.monotonic())
        ready = wait(
            list(open_pipes), timeout=left if look is None and left < float("inf") else min(left, TIMING.supervise)
        )
        if not ready and time.monotonic() >= end:
            raise RankError(f"ranks {sorted(open_pipes.values())} did not finish before the deadline")
        if look is not None:
            look()
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(_death(rank, processes[rank])) from None
            if not ok:
                del open_pipes[pipe]
                raise RankError(_death_of_another(open_pipes, processes) or f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(world)]


def _death(rank: int, process: BaseProcess) -> str:
    process.join(TIMING.last_message)
    if process.exitcode is not None and process.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
    return f"rank {rank} ended without a word (crashed, or left by itself)"


def _death_of_another(pipes: dict[Connection, int], processes: Sequence[BaseProcess]) -> str | None:
    """Whether a rank failed because another died: that one is to blame, though it says nothing."""
    end = time.monotonic() + TIMING.last_message
    waiting = dict(pipes)
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, end - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                pipe.recv_bytes()
            except EOFError:
                return _death(rank, processes[rank])
    return None


def serve(
    function: Callable[[int], Result], rank: int, join: Callable[[], None], pipe: Connection, together: bool
) -> None:
    """The life of a forked rank: join the others, call ``function``, send what it returns or its traceback, and end.

    Results travel as plain pickles: the pipe's own way to send tensors needs their process to live on.
    """
    try:
        torch.set_num_threads(1)  # before anything else: the parent's OpenMP threads did not survive the fork
        gc.freeze()  # or every rank's first full collection would go through, and copy, all that the parent had made
        join()
        message = pickle.dumps((True, function(rank)))
        if together:
            with suppress(RuntimeError):  # a peer that died is reported by its own end
                dist.barrier()  # nobody leaves while a peer still reads from it
        pipe.send_bytes(message)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        with suppress(OSError):  # nobody may listen any more
            sys.stdout.flush()
        os._exit(0)  # a forked child must not run the parent's exit handlers

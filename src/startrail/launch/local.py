"""Forks ranks on this machine, joins them with gloo over loopback and collects their results.

No other machine can reach ranks that communicate over loopback. The parent must not have used its OpenMP threads before
it forks; ``torch.set_num_threads(1)`` there ensures that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import socket
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
import torch.distributed as dist

from startrail._compat import Store, TCPStore, load_dynamo
from startrail.agreement.timing import TIMING

load_dynamo()

Result = TypeVar("Result")
HOST = "127.0.0.1"
MAX_RANKS = 256
RANK_BYTES = 48 * 2**20  # private memory of a forked rank, without its tensors


class RankError(RuntimeError):
    """A local rank failed; the text names it and includes its traceback."""


def check_ranks(world: int, extra_bytes: int = 0, extra_name: str = "") -> None:
    """Raise ``ValueError`` if this machine should not run ``world`` ranks, one process each. ``extra_bytes`` are needed
    for ``extra_name`` as well."""
    if world > MAX_RANKS:
        raise ValueError(f"{world:,} ranks need a process each, and one machine runs at most {MAX_RANKS}")
    ranks = world * RANK_BYTES
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if ranks + extra_bytes > free:
        raise ValueError(
            f"{world} ranks need about {ranks / 2**30:.1f} GiB"
            + (f" and {extra_name} {extra_bytes / 2**30:.1f} GiB" if extra_bytes else "")
            + f", but {free / 2**30:.1f} GiB are free: use fewer ranks"
            + (" or a shorter sequence" if extra_bytes else "")
        )


def run_local(
    function: Callable[[int], Result],
    world: int,
    deadline: float | None = 300.0,
    expendable: frozenset[int] = frozenset(),
    timeout: float | None = None,
    on_poll: Callable[[], None] | None = None,
) -> list[Result | None]:
    """Call ``function(rank)`` on ``world`` forked ranks of one thread each, and return their results by rank.

    >>> run_local(lambda rank: torch.tensor([rank]), 2)
    [tensor([0]), tensor([1])]

    The first rank that fails, or the ``deadline`` in seconds, ends all ranks and raises ``RankError``. ``expendable``
    ranks may die and return None: tests use them to see how the other ranks react. ``timeout`` is that of the ranks'
    process group; by default it is the deadline. ``on_poll`` is called regularly while the ranks run; an exception that
    it raises ends them.
    """
    seconds = timeout or deadline
    if seconds is None:
        raise ValueError("pass a deadline or a timeout")
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            pipe, rank_end = context.Pipe()
            join = partial(_join, rank, world, rank_end, seconds)
            process = context.Process(target=run_rank, args=(function, rank, join, rank_end, not expendable))
            process.start()
            rank_end.close()
            pipes.append(pipe)
            processes.append(process)
        # In the parent, so that it outlives any rank; after the forks, or ranks would inherit and keep its connections.
        store = loopback_store(world)
        for pipe in pipes:
            with suppress(OSError):  # a dead rank is reported below
                pipe.send_bytes(str(store.port).encode())
        end = float("inf") if deadline is None else time.monotonic() + deadline
        return collect_results(pipes, processes, expendable, end, on_poll)
    finally:
        for started in processes:
            if started.is_alive():
                started.kill()
            started.join()


def _join(rank: int, world: int, pipe: Connection, seconds: float) -> None:
    """Join the other ranks at the store, whose port arrives through the pipe."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not pipe.poll(TIMING.first_message):
        raise RuntimeError("the process that started this rank has died")
    limit = timedelta(seconds=seconds)
    store = join_loopback_store(world, int(pipe.recv_bytes()), limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def collect_results(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    expendable: frozenset[int],
    end: float,
    on_poll: Callable[[], None] | None = None,
) -> list[Result | None]:
    """Return the results that ``run_rank`` sends through ``pipes`` before the monotonic time ``end``."""
    world = len(pipes)
    results: dict[int, Result | None] = dict.fromkeys(expendable)
    while len(results) < world:
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        left = max(0.0, end - time.monotonic())
        polls = on_poll is not None or left == float("inf")
        ready = wait(list(open_pipes), timeout=min(left, TIMING.supervise) if polls else left)
        if not ready and time.monotonic() >= end:
            raise RankError(f"ranks {sorted(open_pipes.values())} did not finish before the deadline")
        if on_poll is not None:
            on_poll()
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(_exit_text(rank, processes[rank])) from None
            if not ok:
                del open_pipes[pipe]
                raise RankError(_dead_peer(open_pipes, processes) or f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(world)]


def _exit_text(rank: int, process: BaseProcess) -> str:
    process.join(TIMING.last_message)
    if process.exitcode is not None and process.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
    return f"rank {rank} ended without a result: it crashed or exited"


def _dead_peer(pipes: dict[Connection, int], processes: Sequence[BaseProcess]) -> str | None:
    """If a rank failed because another died: how that one ended, since it is the cause and reports nothing itself."""
    end = time.monotonic() + TIMING.last_message
    while pipes and (ready := wait(list(pipes), timeout=max(0.0, end - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                pipe.recv_bytes()
            except EOFError:
                return _exit_text(rank, processes[rank])
    return None


def run_rank(
    function: Callable[[int], Result], rank: int, join: Callable[[], None], pipe: Connection, barrier: bool
) -> None:
    """The main function of a forked rank: join the others, call ``function``, send its result or its traceback, exit.
    With ``barrier``, no rank exits while another may still read from it. Results are sent as plain pickles: the pipe's
    own protocol for tensors needs the sending process to stay alive."""
    try:
        torch.set_num_threads(1)  # before anything else: the parent's OpenMP threads did not survive the fork
        gc.freeze()  # or every rank's first full collection would visit, and so copy, all objects of the parent
        join()
        message = pickle.dumps((True, function(rank)))
        if barrier:
            with suppress(RuntimeError):  # a dead peer is reported by its own exit
                dist.barrier()
        pipe.send_bytes(message)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        with suppress(OSError):  # stdout may be closed
            sys.stdout.flush()
        os._exit(0)  # a forked child must not run the parent's exit handlers


# --- loopback


def loopback_store(world: int, port: int = 0) -> TCPStore:
    """A store that only this machine can reach; ``port`` 0 picks a free one. Given a host, torch's store listens on all
    interfaces; given a socket that is bound already, it uses that."""
    listener = socket.create_server((HOST, port), backlog=world)
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, world, True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_loopback_store(world: int, port: int, limit: timedelta) -> TCPStore:
    return TCPStore(HOST, port, world, False, limit, wait_for_workers=False)


def use_loopback() -> None:
    """Have the process groups that this process makes listen on loopback only, unless the user has chosen otherwise.
    (NCCL: not run on hardware.)"""
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")


def store_of_one_node(rank: int, limit: timedelta) -> Store | None:
    """The store in which the ranks of a torchrun-like launcher meet, if all are on this machine and rank 0 must make
    it. None if there are several nodes, or if the launcher has made it."""
    world = int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != world:
        return None
    use_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_PORT" not in os.environ:
        return None
    port = int(os.environ["MASTER_PORT"])
    return loopback_store(world, port) if rank == 0 else join_loopback_store(world, port, limit)

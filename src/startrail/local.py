"""Ranks on this machine: fork processes, join them with gloo over loopback, and collect what they return.

Forking needs a parent that has not used its OpenMP threads; ``torch.set_num_threads(1)`` in the parent sees to that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A local rank failed; the text starts with its number and holds its traceback."""


def run_local(
    function: Callable[[int], Result], world: int, deadline: float = 300.0, expendable: frozenset[int] = frozenset()
) -> list[Result | None]:
    """Call ``function(rank)`` on ``world`` forked ranks of one thread each, and return what they return, by rank.

    The first rank that fails ends the others and is reported; so does the ``deadline`` in seconds. ``expendable``
    ranks are not waited for at the end and may die, in tests of what the others then do; they return None.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="startrail-") as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            join = partial(_join, rank, world, folder, deadline)
            process = context.Process(target=serve, args=(function, rank, join, theirs, not expendable))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return collect(pipes, expendable, time.monotonic() + deadline)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _join(rank: int, world: int, folder: str, deadline: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline))


def collect(pipes: list[Connection], expendable: frozenset[int], end: float) -> list[Result | None]:
    """What the ranks behind ``pipes`` return, until the monotonic time ``end``; see ``serve``."""
    world = len(pipes)
    results: dict[int, Result | None] = dict.fromkeys(expendable)
    while len(results) < world:
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = sorted(set(range(world)) - set(results))
            raise RankError(f"ranks {late} did not finish before the deadline")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} ended without a word (killed or crashed)") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(world)]


def serve(
    function: Callable[[int], Result], rank: int, join: Callable[[], None], pipe: Connection, together: bool
) -> None:
    """The life of a forked rank: join the others, call ``function``, send what it returns or its traceback, and end."""
    try:
        torch.set_num_threads(1)  # before anything else: the parent's OpenMP threads did not survive the fork
        gc.freeze()  # or every rank's first full collection would go through, and copy, all that the parent had made
        join()
        result = function(rank)
        if together:
            dist.barrier()  # nobody leaves while a peer still reads from it
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        with suppress(OSError):  # nobody may listen any more
            sys.stdout.flush()
        os._exit(0)  # a forked child must not run the parent's exit handlers

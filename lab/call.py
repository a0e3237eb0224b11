"""Calls: a function on forked ranks. Imports torch, so that the ranks find it imported."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.job import Job, JobError
from startrail.local import RankError, _collect


class Call(Job):
    """A function called on forked ranks that share a gloo process group."""

    def __init__(
        self,
        function: Callable[[int], Any],
        environments: Sequence[Mapping[str, str]],
        enter: Callable[[int], None],
        store: Path,
        deadline: float,
        expendable: frozenset[int],
        sweep: Callable[[], None],
    ) -> None:
        super().__init__(deadline, sweep)
        self._expendable = expendable
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("fork")
        try:
            for rank, environment in enumerate(environments):
                ours, theirs = context.Pipe(duplex=False)
                together = not expendable
                arguments = (function, rank, environment, enter, store, theirs, deadline, together)
                process = context.Process(target=_rank_main, args=arguments)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def wait(self) -> list[Any]:
        """What the function returned, by rank."""
        with self:
            try:
                return _collect(self._pipes, self._expendable, self._end)
            except RankError as error:
                raise JobError(str(error)) from None
            finally:
                for pipe in self._pipes:
                    pipe.close()


def _rank_main(
    function: Callable[[int], Any],
    rank: int,
    environment: Mapping[str, str],
    enter: Callable[[int], None],
    store: Path,
    pipe: Connection,
    deadline: float,
    together: bool,
) -> None:
    try:
        os.setsid()  # Ctrl-C is the parent's to handle
        enter(rank)
        os.environ.update(environment)
        torch.set_num_threads(1)  # before anything else: the parent's OpenMP threads did not survive the fork
        world = int(environment["WORLD_SIZE"])
        # Forked ranks share a disk, so they meet in a file and the links carry nothing but gloo.
        files, timeout = dist.FileStore(str(store), world), timedelta(seconds=deadline)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timeout)
        result = function(rank)
        if together:
            dist.barrier()  # nobody leaves while a peer still reads from it
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # a forked child must not run the parent's exit handlers

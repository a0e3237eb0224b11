"""A function as a job of forked ranks. Imports torch, so that the ranks inherit it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from startrail._compat import FileStore
from startrail.launch.local import RankError, collect_results, run_rank
from workshop.lab.job import JobError, LabJob


class ForkedJob(LabJob):
    """A function called on forked ranks that share a gloo process group."""

    def __init__(
        self, function: Callable[[int], Any], environments: Sequence[Mapping[str, str]], enter: Callable[[int], None],
        store: Path, deadline: float, expendable: frozenset[int], kill_leftovers: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(deadline, kill_leftovers)
        self._expendable = expendable
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("fork")
        try:
            for rank, environment in enumerate(environments):
                receiver, sender = context.Pipe(duplex=False)
                join = partial(_join, rank, environment, enter, store, deadline)
                process = context.Process(target=run_rank, args=(function, rank, join, sender, not expendable))
                process.start()
                sender.close()
                self._pipes.append(receiver)
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def wait(self) -> list[Any]:
        """Wait for all ranks and return the function's results by rank."""
        self._check_running()
        with self:
            try:
                return collect_results(self._pipes, self._processes, self._expendable, self._end)
            except RankError as error:
                raise JobError(str(error)) from None
            finally:
                for pipe in self._pipes:
                    pipe.close()


def _join(
    rank: int, environment: Mapping[str, str], enter: Callable[[int], None], store: Path, deadline: float
) -> None:
    os.setsid()  # only the parent handles Ctrl-C
    enter(rank)
    os.environ.update(environment)
    world = int(environment["WORLD_SIZE"])
    # Forked ranks share a disk: with a file as the store, the links carry gloo traffic only.
    files, timeout = FileStore(str(store), world), timedelta(seconds=deadline)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timeout)

"""Starts a run on forked ranks of this machine, or joins it as one of torchrun's ranks.

The exit code is 0 when all steps are done, 2 for a mistake, and 1 for a failure during the run. If a signal stopped the
run and it was saved, it is 128 plus the signal's number, as in a shell: 143 for SIGTERM, 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from startrail.agreement.errors import is_peer_error
from startrail.launch.heartbeat import Heartbeat, HeartbeatMonitor, SharedMemoryBoard, WaitLimit, report_or_exit
from startrail.launch.local import RankError, check_ranks, run_local
from startrail.launch.signals import Stop, StoppedError
from startrail.launch.torchrun import JoinError, device_of_rank, group_timeout, join, store_host
from startrail.training.checkpoints.contents import checkpoints_of, steps_in
from startrail.training.display import make_display
from startrail.training.loop import Trainer
from startrail.training.ranks import TrainingError, log

if TYPE_CHECKING:
    from startrail.training.recipes import Recipe

MISTAKE, FAILED, STOPPED = 2, 1, 128 + signal.SIGTERM
Result = tuple[int, str]  # exit code, and the error to print


def start_local(recipe: Recipe) -> int:
    """Fork local ranks, forward signals to them, and print their errors."""
    check_ranks(recipe.ranks)
    torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
    board = SharedMemoryBoard(recipe.ranks)
    monitor = HeartbeatMonitor(board, _wait_limit(recipe))

    def check_heartbeats() -> None:
        if text := monitor.check():
            monitor.limit.log(text)
        if monitor.failure:
            raise RankError(monitor.failure)

    def on_rank(rank: int) -> Result:
        return _train(recipe, torch.device("cpu"), stop, Heartbeat(board, rank))

    try:
        with Stop() as stop:
            timeout = group_timeout(monitor.limit.seconds)
            results = run_local(on_rank, recipe.ranks, deadline=None, timeout=timeout, on_poll=check_heartbeats)
    except RankError as error:
        log(str(error))
        if steps := steps_in(checkpoints_of(recipe.out)):
            log(f"the same command continues from step {steps[-1]}")
        return FAILED
    assert results[0] is not None
    return _end(results[0], stop)


def join_job(recipe: Recipe) -> int:
    """Run as one of torchrun's ranks."""
    device, limit = device_of_rank(recipe.device), _wait_limit(recipe)
    with Stop() as stop:
        try:
            board = join(device, limit)
        except JoinError as error:
            return _end((FAILED, str(error)), stop)
        rank, monitor = dist.get_rank(), HeartbeatMonitor(board, limit)
        heartbeat = Heartbeat(board, rank, lambda: report_or_exit(monitor, rank), store_host(), limit)
        code, error_text = _train(recipe, device, stop, heartbeat)
        result = code, "" if rank else error_text  # rank 0 prints the error
        if code == FAILED:
            os._exit(_end(result, stop))  # peers may be gone, and a normal exit could wait for them forever
        dist.barrier()  # a peer may still be reading from this rank
        dist.destroy_process_group()
    return _end(result, stop)


def _wait_limit(recipe: Recipe) -> WaitLimit:
    return WaitLimit(60 * recipe.wait_minutes, "startrail train", "--wait-minutes")


def _train(recipe: Recipe, device: torch.device, stop: Stop, heartbeat: Heartbeat) -> Result:
    """Train on this rank."""
    display = make_display(dist.get_rank() == 0)
    try:
        finished = Trainer(recipe, device, display, stop, heartbeat).run()
    except ValueError as error:
        return MISTAKE, str(error)
    except StoppedError as error:
        return STOPPED, str(error)
    except TrainingError as error:
        return FAILED, str(error)
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        return FAILED, f"rank {dist.get_rank()} lost a peer: {str(error).strip().splitlines()[0]}"
    finally:
        display.close()
    return (0 if finished else STOPPED), ""


def _end(result: Result, stop: Stop) -> int:
    code, text = result
    if text:
        log(text)
    return 128 + signal.SIGINT if code == STOPPED and stop.interrupted else code

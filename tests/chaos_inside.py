"""Faults inside the ranks of a chaos run: a skipped batch, failed calls, collectives that ranks disagree about.

A run's ranks are forked from the test, so they inherit the ``Trainer`` that ``install`` has changed. Before every step
they look for an order, a file next to the run's folder, which names the fault, the rank and the step.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

import startrail
from startrail.training.loop import Trainer

AHEAD = 4  # steps between an order and its fault: all ranks must have read it


class _PlantedError(Exception):
    pass


def order(out: Path, fault: str, rank: int, step: int) -> None:
    path = _path(out)
    path.with_suffix(".new").write_text(json.dumps([fault, rank, step]))
    path.with_suffix(".new").rename(path)


def cancel(out: Path) -> None:
    """A run that continues from a checkpoint may come to that step again."""
    _path(out).unlink()


def _path(out: Path) -> Path:
    return out.with_name(f"{out.name}.order")


def install() -> None:
    original = Trainer._step
    if original.__name__ == "step_with_orders":
        return

    def step_with_orders(self: Trainer, step: int):
        try:
            fault, rank, at = json.loads(_path(Path(self.recipe.out)).read_text())
        except FileNotFoundError:  # nothing is ordered, or it has just been cancelled
            fault, rank, at = "", 0, -1
        if step == at:
            return FAULTS[fault](self, rank == dist.get_rank(), lambda: original(self, step))
        return original(self, step)

    Trainer._step = step_with_orders


def _skip_batch(trainer: Trainer, odd: bool, step):
    load = trainer.task.load
    if odd:
        trainer.task.load = lambda index, held_out=False: load(index + 1, held_out)
    return step()


def _fail_calls(trainer: Trainer, odd: bool, step):
    """One rank's own code fails before its call, then inside it, while the others wait; then all must be right."""
    group = trainer.sp.group
    sp = startrail.SequenceParallel(trainer.sp.plan, group=group, timeout=1.5)
    for place in ("", "before", "inside", "", ""):
        dist.barrier(group)
        sequence = sp.sequence(32, (0, 20, 32)).packed((0, 8, 20, 32))
        x = sequence.shard(torch.randn(1, 4, 32, 8, generator=torch.Generator().manual_seed(3)), 2)
        try:
            if odd and place == "before":
                raise _PlantedError
            sequence.attention(x, x, x, window=0 if odd and place == "inside" else 4)
            failed = False
        except (_PlantedError, ValueError, startrail.PeerError):
            failed = True
        assert failed == bool(place), f"{place}: {failed}"
    assert _refused(lambda: trainer.sp.sequence(32).attention(x, x, x, chunk=-1 if odd else 4))
    return step()


def _disagree(trainer: Trainer, odd: bool, step):
    sequence = trainer.sp.sequence(64)
    x = torch.ones(sequence.local, 2)
    assert _refused(lambda: sequence.unshard(x[:, :1] if odd else x, 0))
    assert _refused(lambda: sequence.roll(x, 1 if odd else -1, 0))
    parent = trainer.sp.sequence(64)
    parent.shard(torch.arange(64) + odd, 0)  # as if this rank had skipped a batch
    x = torch.ones(1, 4, parent.local, 8)
    assert _refused(lambda: parent.packed((0, 20, 64)).attention(x, x, x))
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2 + odd)]
    assert _refused(lambda: startrail.sum_gradients(parameters, trainer.sp.group))
    assert _refused(lambda: startrail.global_mean(torch.ones(2) if odd else torch.ones(()), 1, trainer.sp.group))
    return step()


def _refused(function) -> bool:
    try:
        function()
    except ValueError as error:
        return "rank" in str(error)
    return False


FAULTS = {"skip": _skip_batch, "fail": _fail_calls, "disagree": _disagree}

"""Checkpoints: written beside the training, complete or not there at all, readable on any plan and number of ranks.

A checkpoint is the folder ``step-00000050``: torch.distributed.checkpoint's files, and ``state.json`` with the step,
the recipe, the size of the data and that of every file. It is written under another name and renamed when all of it is
on the disk, so that a kill at any moment leaves the last good one:

    checkpoints/step-00000050      good
    checkpoints/.writing-00000100  being written; removed by the next run
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from startrail.training.all_ranks import agree
from startrail.training.recipes import Recipe

FORMAT = "startrail checkpoint 1"
_GOOD = re.compile(r"step-(\d{8,})")
SIZE = "data_size"  # tokens or images to train on, as they were found


class TrainingError(RuntimeError):
    """The run cannot go on, through no fault of its arguments; the text is one line."""


def steps_in(folder: Path) -> list[int]:
    """Steps of the good checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _GOOD.fullmatch(path.name)))


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def read_state(path: Path) -> dict[str, Any]:
    """The ``state.json`` of a checkpoint whose files are all there; ``ValueError`` if it is not ours or not whole."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{path} is not a checkpoint of startrail: state.json is missing or cannot be read") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint that this version reads: need format {FORMAT!r}")
    for name, size in state["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(
                f"checkpoint {path} is damaged: {name} {has}, {size} were written; remove it to use an older one"
            )
    return state


class Checkpoints:
    """The checkpoints of one run. All ranks make one and call its methods together."""

    def __init__(self, folder: Path, recipe: Recipe, data_size: int) -> None:
        self.folder, self.recipe, self.data_size = folder, recipe, data_size
        self._group = dist.new_group(backend="gloo")  # writing talks while training does
        self._lead = dist.get_rank() == 0
        self._writing: tuple[int, Future[None]] | None = None
        self._lock: TextIO | None = None

    def prepare(self, size: int) -> int:
        """The step to continue from, 0 for a fresh start; ``size`` is about what one checkpoint will take.

        Removes what a killed run left half-written.
        """
        problem, step = None, 0
        if self._lead:
            try:
                step = self._prepare(size)
            except (ValueError, OSError) as error:
                problem = str(error)
        agree(problem)
        found = [step]
        dist.broadcast_object_list(found)
        return found[0]

    def _prepare(self, size: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        step = self._step_to_continue()
        for path in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            shutil.rmtree(path)
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise ValueError(f"{self.folder} has {free / 1e9:.2f} GB left, a checkpoint needs about {size / 1e9:.2f}")
        return step

    def _take_lock(self) -> None:
        """Two runs in one folder would remove each other's files; the lock goes with the process that holds it."""
        self._lock = open(self.folder.parent / ".lock", "w")  # noqa: SIM115, held until ``release``
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {self.folder.parent}; choose another out") from None
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            self._lock.close()

    def _step_to_continue(self) -> int:
        recipe = self.recipe
        steps = steps_in(self.folder)
        if not steps:
            return 0
        if not recipe.resume:
            raise ValueError(f"{self.folder} has checkpoints up to step {steps[-1]}: resume, or choose another out")
        path = path_of(self.folder, steps[-1])
        state, new = read_state(path), recipe.as_dict()
        old = state["recipe"]
        for name in vars(recipe.config):
            if old.get(name) != new[name]:
                raise ValueError(f"checkpoint {path} is of a model with {name} {old.get(name)}, not {new[name]}")
        before, now = _order_of_samples(old, state.get(SIZE)), _order_of_samples(new, self.data_size)
        for name, value in now.items():
            if before[name] != value:
                print(f"startrail train: {name} was {before[name]}, is {value}: other samples from here on")
        return steps[-1]

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        path, problem = path_of(self.folder, step), None
        state = _saved_state(model, optimizer)
        try:
            load(state, checkpoint_id=str(path), process_group=self._group)
        except (Exception, CheckpointException) as error:  # unpickling a damaged file can raise anything
            problem = f"checkpoint {path} cannot be read: {first_line(error)}"
        agree(problem)
        decay = [group["weight_decay"] for group in optimizer.param_groups]
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, value in zip(optimizer.param_groups, decay, strict=True):
            group["weight_decay"] = value  # the recipe's, not the checkpoint's

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Start to write; the model may change as soon as this returns. Waits first for the one before."""
        self.wait()
        state = _saved_state(model, optimizer)
        target = self.folder / f".writing-{step:08d}"
        written: Any = async_save(state, checkpoint_id=str(target), process_group=self._group)
        finished: Future[None] = Future()
        written.add_done_callback(lambda written: self._after(written, finished, step))
        self._writing = step, finished

    def _after(self, written: Future[Any], finished: Future[None], step: int) -> None:
        error = written.exception()
        try:
            if self._lead and error is None:  # its own part ends last, when all ranks' files are there
                self._finish(step)
        except OSError as problem:
            error = problem
        if error is None:
            finished.set_result(None)
        else:
            finished.set_exception(error)

    def _finish(self, step: int) -> None:
        source = self.folder / f".writing-{step:08d}"
        files = {path.name: path.stat().st_size for path in sorted(source.iterdir())}
        with open(source / "state.json", "w") as file:
            state = {"format": FORMAT, "step": step, "recipe": self.recipe.as_dict(), SIZE: self.data_size}
            json.dump({**state, "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        source.rename(path_of(self.folder, step))
        for old in steps_in(self.folder)[: -self.recipe.keep_checkpoints]:
            gone = path_of(self.folder, old).rename(self.folder / f".removing-{old:08d}")
            shutil.rmtree(gone)

    @property
    def failed(self) -> bool:
        """Whether this rank knows that its last checkpoint could not be written; ``wait`` then raises."""
        return self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None

    def wait(self) -> None:
        """Until the checkpoint that is being written is there; ``TrainingError`` on all ranks if it cannot be."""
        if self._writing is None:
            return
        step, finished = self._writing
        self._writing = None
        error, problem = finished.exception(), None
        if error is not None:
            if self._lead:
                shutil.rmtree(self.folder / f".writing-{step:08d}", ignore_errors=True)
            good = steps_in(self.folder)
            kept = f"that of step {good[-1]} is kept" if good else "there is none before it"
            problem = f"the checkpoint of step {step} could not be written: {first_line(error)}; {kept}"
        agree(problem, TrainingError)


def _order_of_samples(recipe: dict[str, Any], data_size: int | None) -> dict[str, Any]:
    """What decides which samples a step has, by name. How many ranks share them does not."""
    same = {name: recipe.get(name) for name in ("data", "tokenizer", "packed", "length", "seed")}
    sequences = recipe["batch"] * recipe["accumulate"] * recipe["data_parallel"]
    return {**same, SIZE: data_size, "sequences in a step": sequences}


def _saved_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What is saved, as torch.distributed.checkpoint wants it: by name, each rank with its own part."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def first_line(error: BaseException) -> str:
    """The first line of what went wrong, on whatever rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__

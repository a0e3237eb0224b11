"""Checkpoints: written beside the training, complete or not there at all, readable on any plan and number of ranks.

A checkpoint is the folder ``step-00000050``: every rank's part of the tensors as bare numbers, ``state.json`` with the
step, the recipe, the size of the data and where each tensor lies, and ``SHA256SUMS`` with the checksum of every file.
Nothing in it is a program, and nothing of it is used before all checksums fit. It is written under another name and
renamed when all of it is on the disk, so that a kill at any moment leaves the last good one:

    checkpoints/step-00000050      good
    checkpoints/.writing-00000100  being written; removed by the next run
    checkpoints/unusable-00000100  was damaged when a run wanted to continue from it, and took the one before
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from startrail.comm.gather import gather_texts
from startrail.training.checkpoints.manifest import problem_with, read_sums, write_file, write_sums
from startrail.training.checkpoints.pieces import Index, merge, pack, read_into
from startrail.training.collectives import broadcast_text, raise_together
from startrail.training.recipes import CURVE, Recipe

FORMAT = "startrail checkpoint 2"
STATE = "state.json"
_GOOD = re.compile(r"step-(\d{8,})")
SIZE = "data_size"  # tokens or images to train on, as they were found


class TrainingError(RuntimeError):
    """The run cannot go on, through no fault of its arguments; the text is one line."""


def steps_in(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _GOOD.fullmatch(path.name)))


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def read_state(path: Path, share: slice = slice(None)) -> dict[str, Any]:
    """The ``state.json`` of a checkpoint that is ours and has a ``share`` of its files as they were written.

    ``ValueError`` names the first file that is not. Ranks look after a share each; together they look after all.
    """
    try:
        sums = read_sums(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole checkpoint of startrail: {error}") from None
    names = sorted(sums.keys() - {STATE})[share]
    if problem := problem_with(path, {name: sums[name] for name in (STATE, *names) if name in sums}):
        raise ValueError(f"checkpoint {path} is damaged: {problem}")
    try:
        state = json.loads((path / STATE).read_text())
        found = state["format"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not a checkpoint of startrail: it has no {STATE}") from None
    if STATE not in sums or found != FORMAT:
        raise ValueError(f"{path} is not a checkpoint that this version reads: need format {FORMAT!r}")
    state["files"] = sorted(sums)
    return state


class Checkpoints:
    """The checkpoints of one run. All ranks make one and call its methods together."""

    def __init__(self, folder: Path, recipe: Recipe, data_size: int) -> None:
        self.folder, self.recipe, self.data_size = folder, recipe, data_size
        self._group = dist.new_group(backend="gloo")  # writing talks while training does
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lead = self._rank == 0
        self._writing: tuple[int, Future[None]] | None = None
        self._lock: TextIO | None = None
        self._state: dict[str, Any] = {}

    # --- continuing

    def prepare(self, size: int) -> int:
        """The step to continue from, 0 for a fresh start; ``size`` is about what one checkpoint will take.

        Removes what a killed run left half-written, and sets damaged checkpoints aside if there is a good one.
        """
        problem = None
        if self._lead:
            try:
                self._open_folder(size)
            except ValueError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot write to out {self.recipe.out!r}: {error.strerror}; choose another --out"
        raise_together(problem)
        steps: list[int] = json.loads(broadcast_text(json.dumps(steps_in(self.folder))))
        if steps and not self.recipe.resume:
            raise ValueError(f"{self.folder} has checkpoints up to step {steps[-1]}: resume, or choose another out")
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            problem = self._problem_with(step)
            if problem is None:
                self._set_aside(damaged, step)
                raise_together(self._compare(step) if self._lead else None)
                return step
            damaged[step] = problem
        if damaged:
            text = next(iter(damaged.values()))
            raise ValueError(f"{text}; no other here is good: choose another out, or remove {self.folder}")
        return 0

    def _open_folder(self, size: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        for path in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            shutil.rmtree(path)
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise ValueError(f"{self.folder} has {free / 1e9:.2f} GB left, a checkpoint needs about {size / 1e9:.2f}")

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

    def _problem_with(self, step: int) -> str | None:
        """What is wrong with a checkpoint, by whichever rank finds it, the same on all ranks."""
        problem = ""
        try:
            self._state = read_state(path_of(self.folder, step), slice(self._rank, None, self._world))
        except ValueError as error:
            problem = str(error)
        return next((text for text in gather_texts(problem) if text), None)

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        if not self._lead:
            return
        for step, problem in damaged.items():
            aside = self.folder / f"unusable-{step:08d}"
            shutil.rmtree(aside, ignore_errors=True)
            path_of(self.folder, step).rename(aside)
            _say(f"{problem}; it is {aside.name} now, and the run continues from step {good}")

    def _compare(self, step: int) -> str | None:
        """Why the checkpoint cannot be continued with this recipe, or None; says what changes."""
        path, old, new = path_of(self.folder, step), self._state["recipe"], self.recipe.as_dict()
        for name in vars(self.recipe.config):
            if old.get(name) != new[name]:
                return f"checkpoint {path} is of a model with {name} {old.get(name)}, not {new[name]}"
        before, now = _order_of_samples(old, self._state.get(SIZE)), _order_of_samples(new, self.data_size)
        for name, value in now.items():
            if before[name] != value:
                _say(f"{name} was {before[name]}, is {value}: other samples from here on")
        begun = self.recipe.with_({name: old[name] for name in CURVE if name in old})
        if text := self.recipe.curve_change(begun, step):
            _say(text)
        return None

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take over what the checkpoint that ``prepare`` found holds."""
        state, problem = self._state, None
        path = path_of(self.folder, state["step"])
        of_model, of_optimizer = get_state_dict(model, optimizer)
        try:
            with torch.no_grad():
                read_into(_by_name(of_model, of_optimizer), state["tensors"], path, state["files"])
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            problem = f"checkpoint {path} cannot be read: {first_line(error)}"
        raise_together(problem)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    # --- writing

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Start to write; the model may change as soon as this returns. Waits first for the one before."""
        self.wait()
        file = f"part-{self._rank:05d}.bin"
        buffer, index = pack(_by_name(*get_state_dict(model, optimizer)), file, self._rank, self._world)
        finished: Future[None] = Future()
        threading.Thread(target=self._write, args=(step, file, buffer, index, finished), daemon=True).start()
        self._writing = step, finished

    def _write(self, step: int, file: str, buffer: bytearray, index: Index, finished: Future[None]) -> None:
        """In a thread of its own: this rank's part, and on the first rank, once all have theirs, the rest."""
        try:
            problem, value = "", ""
            try:
                folder = self.folder / f".writing-{step:08d}"
                folder.mkdir(exist_ok=True)
                value = write_file(folder / file, buffer)
            except OSError as error:
                problem = first_line(error)
            written = dict(problem=problem, file=file, value=value, index=index)
            parts = [json.loads(text) for text in gather_texts(json.dumps(written), self._group)]
            if problem := next((part["problem"] for part in parts if part["problem"]), ""):
                raise OSError(problem)
            if self._lead:
                self._finish(step, {part["file"]: part["value"] for part in parts}, merge(p["index"] for p in parts))
        except BaseException as error:
            finished.set_exception(error)
        else:
            finished.set_result(None)

    def _finish(self, step: int, sums: dict[str, str], index: Index) -> None:
        source = self.folder / f".writing-{step:08d}"
        state = {"format": FORMAT, "step": step, "recipe": self.recipe.as_dict(), SIZE: self.data_size}
        text = json.dumps({**state, "tensors": index}, indent=1)
        write_sums(source, {**sums, STATE: write_file(source / STATE, text.encode())})
        source.rename(path_of(self.folder, step))
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)  # the new name too
        os.close(descriptor)
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
        raise_together(problem, TrainingError)


def _order_of_samples(recipe: dict[str, Any], data_size: int | None) -> dict[str, Any]:
    """What decides which samples a step has, by name. How many ranks share them does not."""
    same = {name: recipe.get(name) for name in ("data", "tokenizer", "packed", "length", "seed")}
    sequences = recipe["batch"] * recipe["accumulate"] * recipe["data_parallel"]
    return {**same, SIZE: data_size, "sequences in a step": sequences}


def _by_name(of_model: dict[str, Any], of_optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """What is saved: parameters and what the optimizer keeps for each. Everything else is the recipe's."""
    found = {f"model.{name}": tensor for name, tensor in of_model.items()}
    for name, kept in of_optimizer["state"].items():
        found |= {f"optimizer.{name}.{what}": tensor for what, tensor in kept.items()}
    return found


def _say(text: str) -> None:
    print(f"startrail train: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of what went wrong."""
    text = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    return text[0] if text else type(error).__name__

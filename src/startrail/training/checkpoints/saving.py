"""Checkpoints: written in the background, atomic, readable with any plan and number of ranks.

A checkpoint is the folder ``step-00000050``: each rank's part of the tensors as raw numbers, ``state.json`` with the
step, the recipe, the size of the data and the location of each tensor, and ``SHA256SUMS`` with the checksum of every
file. It contains no code, and nothing is loaded before all checksums match. It is written under another name and
renamed when all of it is on disk, so a kill at any moment leaves the last good one:

    checkpoints/step-00000050      good
    checkpoints/.writing-00000100  being written; removed by the next run
    checkpoints/unusable-00000100  found damaged by a run that resumed from the one before
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from startrail.agreement.gather import gather_texts
from startrail.agreement.watchdog import start_thread
from startrail.launch.signals import Stop, StoppedError
from startrail.training.checkpoints.contents import (
    FORMAT,
    OWN_NAMES,
    STATE,
    SUMS,
    Index,
    SavedState,
    checkpoint_path,
    checkpoints_of,
    merge_indices,
    pack,
    read_state,
    steps_in,
)
from startrail.training.files import first_line, make_folder, open_regular, size_text
from startrail.training.ranks import TrainingError, broadcast_text, log, together
from startrail.training.recipes import Recipe


class Checkpoints:
    """The checkpoints of one run. All ranks make one and call its methods together."""

    def __init__(self, recipe: Recipe, data_size: int, stop: Stop) -> None:
        self.folder, self.recipe = checkpoints_of(recipe.out), recipe
        self.data_size, self._stop = data_size, stop
        self._group = dist.new_group(backend="gloo")  # the writing threads communicate while training does
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lead = self._rank == 0
        self._writing: tuple[int, Future[None]] | None = None
        self._lock: TextIO | None = None
        self._state: SavedState | None = None

    # --- resuming

    def prepare(self, size: int) -> int:
        """Return the step to resume from, 0 for a fresh start; ``size`` is about the bytes of one checkpoint. Removes
        incomplete checkpoints of killed runs, and sets damaged ones aside if there is a good one. A signal raises
        ``StoppedError``."""
        with together():
            if self._lead:
                self._open_folder(size)
        steps: list[int] = json.loads(broadcast_text(json.dumps(steps_in(self.folder))))
        if steps and not self.recipe.resume:
            raise ValueError(
                f"{self.folder} has checkpoints up to step {steps[-1]}: pass --resume true or another --out"
            )
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            problem = self._find_damage(step)
            if not problem:
                with together():
                    if self._lead:
                        self._set_aside(damaged, step)
                        self._compare()
                return step
            damaged[step] = problem
        if damaged:
            text = next(iter(damaged.values()))
            raise ValueError(f"{text}; no good checkpoint is left: choose another --out, or remove {self.folder}")
        return 0

    def _open_folder(self, size: int) -> None:
        try:
            make_folder(self.folder, own=1)
            self._take_lock()
            for path in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
                _remove(path)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise ValueError(
                f"cannot write to out {self.recipe.out!r}: {first_line(error)}; choose another --out"
            ) from None
        if free < size:
            raise ValueError(f"{self.folder} has {size_text(free)} left, a checkpoint needs about {size_text(size)}")

    def _take_lock(self) -> None:
        """Two runs in one folder would remove each other's files. The lock is released when its process ends."""
        descriptor = open_regular(self.folder.parent / ".lock", os.O_RDWR | os.O_CREAT)
        self._lock = open(descriptor, "w")  # noqa: SIM115, open until ``release``
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {self.folder.parent}: choose another --out") from None
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        """Unlock the folder for other runs."""
        if self._lock is not None:
            self._lock.close()

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise StoppedError("stopped while it was reading checkpoints, before the first step")

    def _find_damage(self, step: int) -> str:
        """The first problem that any rank finds with a checkpoint, the same on all ranks, or nothing."""
        problem = ""
        share = slice(self._rank, None, self._world)
        with together():
            try:
                self._state = read_state(checkpoint_path(self.folder, step), OWN_NAMES, share, self._check_stop)
            except ValueError as error:
                problem = str(error)
        return next(filter(None, gather_texts(problem)), "")

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        for step, problem in damaged.items():
            aside = self.folder / f"unusable-{step:08d}"
            _remove(aside)
            checkpoint_path(self.folder, step).rename(aside)
            log(f"{problem}; renamed it to {aside.name}; the run continues from step {good}")

    def _compare(self) -> None:
        """Raise ``ValueError`` if this recipe cannot resume the checkpoint; log what changes."""
        saved = self._state
        assert saved is not None
        for name, value in vars(self.recipe.config).items():
            before = getattr(saved.recipe.config, name, None)
            if before != value:
                raise ValueError(f"checkpoint {saved.path} has a model with {name} {before}, not {value}")
        before, now = _order_of_samples(saved.recipe, saved.data_size), _order_of_samples(self.recipe, self.data_size)
        for name, value in now.items():
            if before[name] != value:
                log(f"{name} was {before[name]}, is {value}: the samples differ from here on")
        if text := self.recipe.curve_change(saved.recipe, saved.step):
            log(text)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Load the checkpoint that ``prepare`` found. A signal raises ``StoppedError``."""
        assert self._state is not None
        model_state, optimizer_state = get_state_dict(model, optimizer)
        with together(), torch.no_grad():
            self._state.read_into(_named_tensors(model_state, optimizer_state), self._check_stop)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    # --- writing

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Start writing a checkpoint, after the previous one is done; the model may change as soon as this returns."""
        self.wait()
        file = f"part-{self._rank:05d}.bin"
        buffer, index = pack(_named_tensors(*get_state_dict(model, optimizer)), file, self._rank, self._world)
        finished: Future[None] = Future()
        write = partial(self._write, step, file, buffer, index, finished)
        start_thread(write, "startrail-checkpoint")  # joined at exit: it would return to a Python that is gone
        self._writing = step, finished

    def _write(self, step: int, file: str, buffer: bytearray, index: Index, finished: Future[None]) -> None:
        """Runs in a thread: write this rank's part, and on rank 0, once all ranks have theirs, the rest."""
        try:
            problem, checksum = "", ""
            try:
                folder = self.folder / f".writing-{step:08d}"
                make_folder(folder, OWN_NAMES)
                checksum = _write_file(folder / file, buffer)
            except (OSError, ValueError) as error:
                problem = first_line(error)
            written = dict(problem=problem, file=file, checksum=checksum, index=index)
            parts = [json.loads(text) for text in gather_texts(json.dumps(written), self._group)]
            if problem := next((part["problem"] for part in parts if part["problem"]), ""):
                raise OSError(problem)
            if self._lead:
                sums = {part["file"]: part["checksum"] for part in parts}
                self._finish(step, sums, merge_indices(part["index"] for part in parts))
        except BaseException as error:
            finished.set_exception(error)
        else:
            finished.set_result(None)

    def _finish(self, step: int, sums: dict[str, str], index: Index) -> None:
        source = self.folder / f".writing-{step:08d}"
        state = dict(format=FORMAT, step=step, recipe=self.recipe.as_dict(), data_size=self.data_size, tensors=index)
        sums[STATE] = _write_file(source / STATE, json.dumps(state).encode())
        lines = (f"{checksum}  {name}\n" for name, checksum in sorted(sums.items()))
        _write_file(source / SUMS, "".join(lines).encode())
        source.rename(checkpoint_path(self.folder, step))
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)  # so that the new name is on disk too
        os.close(descriptor)
        for old in steps_in(self.folder)[: -self.recipe.keep_checkpoints]:
            _remove(checkpoint_path(self.folder, old).rename(self.folder / f".removing-{old:08d}"))

    @property
    def failed(self) -> bool:
        """True if this rank's last checkpoint could not be written; ``wait`` then raises."""
        return self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None

    def has(self, step: int) -> bool:
        return step in steps_in(self.folder)

    def wait(self) -> None:
        """Wait until the pending checkpoint is written; raise ``TrainingError`` on all ranks if it cannot be."""
        if self._writing is None:
            return
        step, finished = self._writing
        self._writing = None
        with together():
            error = finished.exception()
            if error is not None:
                if self._lead:
                    with suppress(OSError):
                        _remove(self.folder / f".writing-{step:08d}")
                steps = steps_in(self.folder)
                kept = f"the one of step {steps[-1]} is kept" if steps else "there is no earlier one"
                raise TrainingError(
                    f"the checkpoint of step {step} could not be written: {first_line(error)}; {kept}"
                ) from None


def _write_file(path: Path, contents: bytes | bytearray) -> str:
    """Write and fsync a file; return the checksum of ``contents``, not of what the disk holds."""
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(contents).hexdigest()


def _order_of_samples(recipe: Recipe, data_size: int) -> dict[str, object]:
    """The settings that decide which samples a step has. The number of ranks is not one of them."""
    same = {name: getattr(recipe, name) for name in ("data", "tokenizer", "packed", "length", "seed")}
    sequences = recipe.batch * recipe.accumulate * recipe.data_parallel
    return {**same, "data_size": data_size, "sequences per step": sequences}


def _named_tensors(model_state: dict[str, Any], optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors to save, by name: parameters and their optimizer state. The recipe decides everything else."""
    tensors = {f"model.{name}": tensor for name, tensor in model_state.items()}
    for name, entries in optimizer_state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entries.items()}
    return tensors


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one but not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)

"""Metrics of a run for other programs: one JSON line per step, and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from startrail.training.files import make_folder, open_regular
from startrail.training.recipes import Recipe

Metrics = dict[str, Any]
LONGEST_LINE_BYTES = 1 << 20


class MetricsFile:
    """``metrics.jsonl``, one line per step, and TensorBoard events if the recipe asks for them. A resumed run appends;
    if a step occurs twice, the later line counts. Nothing is written before ``open``. If a line cannot be written,
    ``problem`` is the reason, which the ranks then raise together."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def open(self, folder: Path, recipe: Recipe, begin: int) -> None:
        if recipe.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                raise ValueError("tensorboard true needs the package: pip install 'startrail[tensorboard]'") from None
            make_folder(folder / "tensorboard", own=1)
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=begin + 1)
        self._path = folder / "metrics.jsonl"
        descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = self._file = open(descriptor, "r+b")  # noqa: SIM115, open until ``close``
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE_BYTES))
        complete = file.read().rfind(b"\n") + 1
        if start and not complete:
            raise ValueError(f"{self._path} does not end in lines of metrics: remove it")
        file.truncate(start + complete)  # without a line that a kill or a full disk cut off

    def write(self, metrics: Metrics) -> None:
        if self._file is None:
            return
        try:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
            self._file.write(json.dumps(finite).encode() + b"\n")  # JSON has no NaN
            self._file.flush()
        except OSError as error:
            self.problem = f"{self._path} could not be written: {error.strerror}"
        if self._writer is not None:
            for name, value in metrics.items():
                if isinstance(value, float):
                    self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            with suppress(OSError):  # closing retries the write that failed; ``problem`` has the reason
                self._file.close()
        if self._writer is not None:
            self._writer.close()

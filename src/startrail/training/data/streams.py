"""Token streams: documents in memory-mapped files, one after the other.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     one, two = Path(folder, "one"), Path(folder, "two")
...     _ = one.write_text("abc"), two.write_text("de")
...     stream = bytes_of([one, two])
...     stream.ends, bytes(stream.read(1, 4).tolist())       # bytes 1 to 3 of "abcde"
([3, 5], b'bcd')
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from startrail.training.data.sources import HELD_OUT, held_out


@dataclass(frozen=True)
class Document:
    """``count`` tokens of the file ``path``, from token ``start`` on."""

    path: Path
    start: int
    count: int


@dataclass(frozen=True)
class Stream:
    """Documents one after the other; ``dtype`` is the type of a token in their files."""

    documents: tuple[Document, ...]
    dtype: torch.dtype

    @cached_property
    def ends(self) -> list[int]:
        """The end of each document."""
        return list(accumulate(document.count for document in self.documents))

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def ends_within(self, start: int, stop: int) -> list[int]:
        """The document ends in (start, stop]."""
        return self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, stop)]

    def read(self, start: int, stop: int) -> Tensor:
        """The tokens in [start, stop); nothing else is read from disk."""
        parts = [torch.empty(0, dtype=torch.long)]
        number = bisect_right(self.ends, start)
        while start < stop:
            document = self.documents[number]
            first = start - (self.ends[number] - document.count)
            count = min(document.count - first, stop - start)
            parts.append(_read(document.path, document.start + first, count, self.dtype))
            start, number = start + count, number + 1
        return torch.cat(parts)


def _read(path: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    first, last = start * dtype.itemsize, (start + count) * dtype.itemsize
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < last:
                raise ValueError(f"{path} has changed: it has {size} bytes, expected at least {last}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                return torch.frombuffer(bytearray(memory[first:last]), dtype=dtype).long()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def bytes_of(files: Sequence[Path]) -> Stream:
    """A stream with one document per file and one token per byte."""
    return Stream(tuple(Document(file, 0, file.stat().st_size) for file in files), torch.uint8)


def split_stream(stream: Stream, names: Sequence[str], split: str) -> Stream:
    """The documents of a split: whole files, or parts of every file if files are too large for that. Empty documents
    are dropped."""
    chosen = held_out(names, [document.count for document in stream.documents])
    taken = []
    for number, whole in enumerate(stream.documents):
        held = (whole.count if number in chosen else 0) if chosen else whole.count // HELD_OUT
        border = whole.count - held
        start, stop = (0, border) if split == "train" else (border, whole.count)
        if start < stop:
            taken.append(Document(whole.path, whole.start + start, stop - start))
    return Stream(tuple(taken), stream.dtype)

"""Tokens in memory-mapped files: documents, and streams of them.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     one, two = Path(folder, "one"), Path(folder, "two")
...     _ = one.write_text("abc"), two.write_text("de")
...     stream = bytes_of([one, two])
...     stream.ends, bytes(stream.read(1, 4).tolist())       # the 2nd to the 4th byte of "abcde"
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
    """``count`` tokens from the ``start``-th on of the file ``path``."""

    path: Path
    start: int
    count: int


@dataclass(frozen=True)
class Stream:
    """Documents one behind the other; ``dtype`` is what a token is in their files."""

    documents: tuple[Document, ...]
    dtype: torch.dtype

    @cached_property
    def ends(self) -> list[int]:
        """Where each document ends."""
        return list(accumulate(document.count for document in self.documents))

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def ends_within(self, start: int, stop: int) -> list[int]:
        """Ends of documents after ``start``, up to and including ``stop``."""
        return self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, stop)]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens from ``start`` up to ``stop``; nothing else is read from disk."""
        found = [torch.empty(0, dtype=torch.long)]
        number = bisect_right(self.ends, start)
        while start < stop:
            document = self.documents[number]
            first = start - (self.ends[number] - document.count)
            count = min(document.count - first, stop - start)
            found.append(_read(document.path, document.start + first, count, self.dtype))
            start, number = start + count, number + 1
        return torch.cat(found)


def _read(path: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    first, last = start * dtype.itemsize, (start + count) * dtype.itemsize
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < last:
                raise ValueError(f"{path} has changed: it has {size} bytes, and had at least {last}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                return torch.frombuffer(bytearray(memory[first:last]), dtype=dtype).long()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def bytes_of(files: Sequence[Path]) -> Stream:
    """Every file a document, every byte a token."""
    return Stream(tuple(Document(file, 0, file.stat().st_size) for file in files), torch.uint8)


def split_stream(stream: Stream, names: Sequence[str], split: str) -> Stream:
    """The documents to train on, or those held out; or if single files are too large for that, parts of all of them.

    Documents without tokens are left out.
    """
    chosen = held_out(names, [document.count for document in stream.documents])
    taken = []
    for number, whole in enumerate(stream.documents):
        if chosen:
            start, stop = (0, whole.count) if (number in chosen) == (split == "held-out") else (0, 0)
        else:
            border = whole.count - whole.count // HELD_OUT
            start, stop = (0, border) if split == "train" else (border, whole.count)
        if start < stop:
            taken.append(Document(whole.path, whole.start + start, stop - start))
    return Stream(tuple(taken), stream.dtype)

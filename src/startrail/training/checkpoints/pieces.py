"""Named tensors as bytes in files: every rank writes its own part of each, and reads what its part needs, whoever wrote
it. Files hold numbers and nothing else, so that reading one runs no code; where each piece lies is plain data.

>>> buffer, index = pack({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, "part.bin", rank=0, world=1)
>>> len(buffer), index
(16, {'a': {'dtype': 'float32', 'shape': [2, 2], 'pieces': [['part.bin', 0, [0, 0], [2, 2]]]}})

A piece is [file, first byte, first element in each dimension, elements in each dimension].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Index = dict[str, dict[str, Any]]
ALIGNED = 16  # bytes, so that every dtype begins where the processor likes it to


def pack(tensors: Mapping[str, Tensor], file: str, rank: int, world: int) -> tuple[bytearray, Index]:
    """A copy of what this rank writes to ``file``, and where it lies there. Of tensors that all ranks hold whole, each
    rank writes some."""
    boxes, index, size = [], {}, 0
    for number, (name, tensor) in enumerate(tensors.items()):
        part, first = _own_part(tensor)
        writes = isinstance(tensor, DTensor) or number % world == rank
        pieces: list[list[object]] = []
        if writes and part.numel():
            pieces.append([file, size, list(first), list(part.shape)])
            boxes.append((size, part))
            size += part.nbytes + -part.nbytes % ALIGNED
        index[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "pieces": pieces,
        }
    buffer = bytearray(size)
    for start, part in boxes:
        _view(buffer, part.dtype, part.shape, start).copy_(part)
    return buffer, index


def merge(indices: Iterable[Index]) -> Index:
    """One index of what all ranks wrote."""
    merged: Index = {}
    for index in indices:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
    return merged


def read_into(tensors: Mapping[str, Tensor], index: Index, folder: Path, files: Iterable[str]) -> None:
    """Fill the tensors, each rank its own part, from pieces in ``files`` of ``folder``; ``ValueError`` if they do not
    fit."""
    known = frozenset(files)
    for name, tensor in tensors.items():
        entry = index.get(name)
        if entry is None or entry["shape"] != list(tensor.shape):
            found = "is missing" if entry is None else f"has shape {tuple(entry['shape'])}"
            raise ValueError(f"{name} {found}, the model has {tuple(tensor.shape)}")
        part, first = _own_part(tensor)
        missing = part.numel()
        for file, start, offsets, sizes in entry["pieces"]:
            if file not in known:
                raise ValueError(f"{name} is in {file!r}, which is no file of this checkpoint")
            both = _overlap(first, part.shape, offsets, sizes)
            if both is not None:
                piece = _read(folder / file, start, getattr(torch, entry["dtype"]), sizes)
                mine = part[tuple(slice(a - i, b - i) for (a, b), i in zip(both, first, strict=True))]
                mine.copy_(piece[tuple(slice(a - i, b - i) for (a, b), i in zip(both, offsets, strict=True))])
                missing -= mine.numel()
        if missing:
            raise ValueError(f"{name}: {missing} elements are in no file")


def empty_tensors(index: Index, prefix: str) -> dict[str, Tensor]:
    """Whole tensors to read into, of all names that begin with ``prefix``."""
    return {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in index.items()
        if name.startswith(prefix)
    }


def _own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, as a view, and its first element in each dimension."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return tensor.to_local(), tuple(chunk.offsets)
    return tensor, (0,) * tensor.dim()


def _overlap(
    first: Iterable[int], shape: Iterable[int], offsets: Iterable[int], sizes: Iterable[int]
) -> list[tuple[int, int]] | None:
    """Where two boxes meet, from and to in each dimension."""
    both = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(first, shape, offsets, sizes, strict=True)]
    return both if all(start < stop for start, stop in both) else None


def _read(path: Path, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    buffer = bytearray(prod(shape) * dtype.itemsize)
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(buffer) != len(buffer):
            raise ValueError(f"{path} is too short")
    return _view(buffer, dtype, shape, 0)


def _view(buffer: bytearray, dtype: torch.dtype, shape: Iterable[int], start: int) -> Tensor:
    shape = tuple(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=start).view(shape)

"""Named tensors as bytes in files. Each rank writes its part of every tensor, and reads its part from any rank's files.

Files hold only numbers, so reading one runs no code; an index of plain data locates each piece.

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
ALIGNMENT_BYTES = 16  # enough for every dtype


def pack(tensors: Mapping[str, Tensor], file: str, rank: int, world: int) -> tuple[bytearray, Index]:
    """Return a copy of the bytes that this rank writes to ``file``, and their index. Replicated tensors are divided
    among the ranks."""
    parts, index, size = [], {}, 0
    for number, (name, tensor) in enumerate(tensors.items()):
        part, first = _local_part(tensor)
        writes = isinstance(tensor, DTensor) or number % world == rank
        pieces: list[list[object]] = []
        if writes and part.numel():
            pieces.append([file, size, list(first), list(part.shape)])
            parts.append((size, part))
            size += part.nbytes + -part.nbytes % ALIGNMENT_BYTES
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "pieces": pieces}
    buffer = bytearray(size)
    for start, part in parts:
        _view(buffer, part.dtype, part.shape, start).copy_(part)
    return buffer, index


def merge_indices(indices: Iterable[Index]) -> Index:
    """Merge the indices of all ranks."""
    merged: Index = {}
    for index in indices:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
    return merged


def check_index(index: Index, files: Iterable[str]) -> None:
    """Raise ``ValueError`` unless the pieces of every tensor, which are in ``files``, cover each element exactly once.

    >>> check_index({"a": {"dtype": "float32", "shape": [4], "pieces": [["f", 0, [0], [3]], ["f", 0, [2], [1]]]}}, "f")
    Traceback (most recent call last):
    ValueError: pieces of a overlap at element [2]
    """
    known = frozenset(files)
    for name, entry in index.items():
        shape, pieces = entry["shape"], entry["pieces"]
        if not isinstance(getattr(torch, str(entry["dtype"]), None), torch.dtype):
            raise ValueError(f"dtype {entry['dtype']!r} of {name} does not exist")
        boxes = []
        for file, start, offsets, sizes in pieces:
            if file not in known:
                raise ValueError(f"{name} is in {file!r}, which is not a file of this checkpoint")
            inside = all(a >= 0 and n > 0 and a + n <= m for a, n, m in zip(offsets, sizes, shape, strict=True))
            if not inside or start < 0:
                raise ValueError(f"a piece of {name} at {offsets} with sizes {sizes} is outside its shape {shape}")
            boxes.append((offsets, sizes))
        boxes.sort()
        for number, (offsets, sizes) in enumerate(boxes):
            for others, other_sizes in boxes[number + 1 :]:
                if shape and others[0] >= offsets[0] + sizes[0]:
                    break
                if (overlap := _overlap(offsets, sizes, others, other_sizes)) is not None:
                    raise ValueError(f"pieces of {name} overlap at element {[start for start, _ in overlap]}")
        missing = prod(shape) - sum(prod(sizes) for _, sizes in boxes)
        if missing:
            raise ValueError(f"{name}: {missing} elements are not in any file")


def read_into(tensors: Mapping[str, Tensor], index: Index, folder: Path) -> None:
    """Fill this rank's part of the tensors from the files in ``folder``, by an index that ``check_index`` has accepted.
    Raise ``ValueError`` if tensors do not fit it."""
    for name, tensor in tensors.items():
        entry = index.get(name)
        if entry is None or entry["shape"] != list(tensor.shape):
            saved = "is missing" if entry is None else f"has shape {tuple(entry['shape'])}"
            raise ValueError(f"{name} {saved}; in the model its shape is {tuple(tensor.shape)}")
        part, first = _local_part(tensor)
        for file, start, offsets, sizes in entry["pieces"]:
            overlap = _overlap(first, part.shape, offsets, sizes)
            if overlap is not None:
                piece = _read(folder / file, start, getattr(torch, entry["dtype"]), sizes)
                target = part[tuple(slice(a - i, b - i) for (a, b), i in zip(overlap, first, strict=True))]
                target.copy_(piece[tuple(slice(a - i, b - i) for (a, b), i in zip(overlap, offsets, strict=True))])


def empty_tensors(index: Index, prefix: str) -> dict[str, Tensor]:
    """Uninitialized full tensors for all names that start with ``prefix``."""
    return {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in index.items()
        if name.startswith(prefix)
    }


def _local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A view of this rank's part of a tensor, and the part's offset in each dimension."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return tensor.to_local(), tuple(chunk.offsets)
    return tensor, (0,) * tensor.dim()


def _overlap(
    first: Iterable[int], shape: Iterable[int], offsets: Iterable[int], sizes: Iterable[int]
) -> list[tuple[int, int]] | None:
    """The intersection of two boxes as (start, stop) per dimension, or None if it is empty."""
    overlap = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(first, shape, offsets, sizes, strict=True)]
    return overlap if all(start < stop for start, stop in overlap) else None


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

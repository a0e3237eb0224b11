"""Named tensors as bytes in files. Each rank writes its part of every tensor, and reads its part from any rank's files.

Files hold only numbers, so reading one runs no code; an index of plain data locates each piece.

>>> buffer, index = pack({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, "part.bin", rank=0, world=1)
>>> len(buffer), index
(16, {'a': {'dtype': 'float32', 'shape': [2, 2], 'pieces': [['part.bin', 0, [0, 0], [2, 2]]]}})

A piece is [file, first byte, first element in each dimension, elements in each dimension]. It has some rows of a
tensor, all elements of each; a number counts as one row.

>>> read_index(index, ["part.bin"])
({'a': SavedTensor(dtype=torch.float32, shape=(2, 2), pieces=[Piece(file='part.bin', start=0, row=0, rows=2)])}, \
{'part.bin': 16})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from startrail.training.files import Folder

Index = dict[str, dict[str, Any]]
ALIGNMENT_BYTES = 16  # enough for every dtype
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class Piece(NamedTuple):
    """``rows`` rows of a tensor, from ``row`` on, at the byte ``start`` of a file."""

    file: str
    start: int
    row: int
    rows: int


class SavedTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


def pack(tensors: Mapping[str, Tensor], file: str, rank: int, world: int) -> tuple[bytearray, Index]:
    """Return a copy of the bytes that this rank writes to ``file``, and their index. Replicated tensors are divided
    among the ranks."""
    parts, index, size = [], {}, 0
    for number, (name, tensor) in enumerate(tensors.items()):
        part, first = _local_part(tensor)
        writes = isinstance(tensor, DTensor) or number % world == rank
        pieces: list[list[object]] = []
        if writes and part.numel():
            pieces.append([file, size, first, list(part.shape)])
            parts.append((size, part))
            size += _aligned(part.nbytes)
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "pieces": pieces}
    buffer = bytearray(size)
    for start, part in parts:
        numbers = torch.frombuffer(buffer, dtype=part.dtype, count=part.numel(), offset=start)
        numbers.view(part.shape).copy_(part)
    return buffer, index


def merge_indices(indices: Iterable[Index]) -> Index:
    """Merge the indices of all ranks."""
    merged: Index = {}
    for index in indices:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
    return merged


def read_index(index: Any, files: Iterable[str]) -> tuple[dict[str, SavedTensor], dict[str, int]]:
    """Read an index that may say anything: return its tensors, and the size of each of the ``files`` that they are in.
    Raises ``ValueError`` unless every element has one place, and the pieces in a file follow each other.

    >>> entry = {"dtype": "float32", "shape": [4], "pieces": [["f", 0, [0], [3]], ["f", 16, [2], [1]]]}
    >>> read_index({"a": entry}, ["f"])
    Traceback (most recent call last):
    ValueError: pieces of a overlap or leave a gap at row 3
    """
    if not isinstance(index, dict):
        raise ValueError("tensors must be a table")
    sizes = dict.fromkeys(files, 0)
    tensors: dict[str, SavedTensor] = {}
    by_start: list[tuple[Piece, int]] = []
    for name, entry in index.items():
        try:
            saved = tensors[name] = _saved_tensor(entry)
        except (TypeError, KeyError):
            raise ValueError(f"the entry of {name} has no dtype, shape and list of pieces, or others") from None
        except ValueError as error:
            raise ValueError(f"{error}, in the entry of {name}") from None
        row = 0
        for piece in saved.pieces:
            if piece.file not in sizes:
                raise ValueError(f"{name} is in {piece.file!r}, which is not a file of this checkpoint")
            if piece.row != row:
                raise ValueError(f"pieces of {name} overlap or leave a gap at row {row}")
            row += piece.rows
            by_start.append((piece, piece.rows * saved.row_bytes))
        rows = saved.shape[0] if saved.shape else 1
        if row != (rows if prod(saved.shape) else 0):
            raise ValueError(f"pieces of {name} have {row} rows of {rows}")
    for piece, size in sorted(by_start):
        if piece.start != sizes[piece.file]:
            raise ValueError(f"pieces in {piece.file} overlap or leave a gap at byte {sizes[piece.file]}")
        sizes[piece.file] += _aligned(size)
    return tensors, sizes


def _saved_tensor(entry: Any) -> SavedTensor:
    dtype, shape = entry["dtype"], _counts(entry["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    pieces = []
    for file, start, offsets, lengths in map(_four_values, entry["pieces"]):
        offsets, lengths = _counts(offsets), _counts(lengths)
        all_of_each_row = offsets[1:] == (0,) * len(shape[1:]) and lengths[1:] == shape[1:]
        if not len(offsets) == len(lengths) == len(shape) or not all_of_each_row or 0 in lengths:
            raise ValueError(f"a piece at {offsets} with sizes {lengths} is not rows of a tensor of shape {shape}")
        row, rows = (offsets[0], lengths[0]) if shape else (0, 1)
        (first_byte,) = _counts([start])
        pieces.append(Piece(str(file), first_byte, row, rows))
    return SavedTensor(DTYPES[dtype], shape, sorted(pieces, key=attrgetter("row")))


def _four_values(piece: Any) -> list[Any]:
    if not isinstance(piece, list) or len(piece) != 4:
        raise ValueError(f"a piece is {piece!r}, not [file, first byte, first element, elements]")
    return piece


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} is not a list of integers of at least 0")
    return tuple(values)


def read_into(tensors: Mapping[str, Tensor], saved: Mapping[str, SavedTensor], folder: Folder) -> None:
    """Fill this rank's part of the tensors from the files in ``folder``. Raise ``ValueError`` if tensors do not fit
    what is saved."""
    for name, tensor in tensors.items():
        entry = saved.get(name)
        if entry is None or entry.shape != tuple(tensor.shape):
            found = "is missing" if entry is None else f"has shape {entry.shape}"
            raise ValueError(f"{name} {found}; in the model its shape is {tuple(tensor.shape)}")
        part, offsets = _local_part(tensor)
        if not tensor.dim():
            part, offsets = part.unsqueeze(0), [0]
        for piece in entry.pieces:
            low, high = max(offsets[0], piece.row), min(offsets[0] + len(part), piece.row + piece.rows)
            if low < high:
                start = piece.start + (low - piece.row) * entry.row_bytes
                rows = part[low - offsets[0] : high - offsets[0]]
                contents = folder.read(piece.file, start, (high - low) * entry.row_bytes)
                rows.copy_(torch.frombuffer(contents, dtype=entry.dtype).view(rows.shape))


def empty_tensors(saved: Mapping[str, SavedTensor], prefix: str) -> dict[str, Tensor]:
    """Uninitialized full tensors for all names that start with ``prefix``."""
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in saved.items() if name.startswith(prefix)
    }


def _local_part(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """A view of this rank's part of a tensor, and the part's offset in each dimension."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return tensor.to_local(), list(chunk.offsets)
    return tensor, [0] * tensor.dim()


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES

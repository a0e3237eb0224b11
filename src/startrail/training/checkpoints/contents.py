"""What a checkpoint holds: named tensors as bytes in files, and the text that says where. Both are read without trust.

Each rank writes its part of every tensor, and reads its part from any rank's files. Files hold only numbers, so reading
one runs no code; an index of plain data locates each piece.

>>> buffer, index = pack({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, "part.bin", rank=0, world=1)
>>> len(buffer), index
(16, {'a': {'dtype': 'float32', 'shape': [2, 2], 'pieces': [['part.bin', 0, [0, 0], [2, 2]]]}})

A piece is [file, first byte, first element in each dimension, elements in each dimension]. It has some rows of a
tensor, all elements of each; a number counts as one row.

>>> read_index(index, ["part.bin"])
({'a': SavedTensor(dtype=torch.float32, shape=(2, 2), pieces=[Piece(file='part.bin', start=0, row=0, rows=2)])}, \
{'part.bin': 16})

A checkpoint may be damaged or crafted. Links in it are not followed, the size of every file follows from
``state.json``, and a file is read only once it has that size. The docstring of ``saving`` shows its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from startrail._compat import dtype_name, shard_offsets
from startrail.training.files import Folder, first_line
from startrail.training.recipes import Recipe

FORMAT = "startrail checkpoint 2"
STATE = "state.json"
SUMS = "SHA256SUMS"  # ``sha256sum -c`` reads it too
MOST_BYTES = 2**30  # of a text file; more than 10,000 ranks need
OWN_NAMES = 2  # of a checkpoint's path: "checkpoints" and "step-00000050" belong to the run
_COMPLETE = re.compile(r"step-([0-9]{8,18})")
_SUM = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")
Index = dict[str, dict[str, Any]]
ALIGNMENT_BYTES = 16  # enough for every dtype
DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


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
        index[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "pieces": pieces}
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
    Raises ``ValueError`` unless every row has one place, and the pieces in a file follow each other.

    >>> entry = {"dtype": "float32", "shape": [4], "pieces": [["f", 0, [0], [3]], ["f", 16, [2], [1]]]}
    >>> read_index({"a": entry}, ["f"])
    Traceback (most recent call last):
    ValueError: pieces of a overlap or leave a gap at row 3
    """
    if not isinstance(index, dict):
        raise ValueError("tensors is not a table")
    sizes = dict.fromkeys(files, 0)
    tensors: dict[str, SavedTensor] = {}
    by_start: list[tuple[Piece, int]] = []
    for name, entry in index.items():
        try:
            saved = tensors[name] = _saved_tensor(entry)
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"the entry of {name} is not a dtype, a shape and pieces of whole rows") from None
        row = 0
        for piece in saved.pieces:
            if piece.file not in sizes:
                raise ValueError(f"{name} is in {piece.file!r}, which is not a file of this checkpoint")
            if piece.row != row:
                raise ValueError(f"pieces of {name} overlap or leave a gap at row {row}")
            row += piece.rows
            by_start.append((piece, piece.rows * saved.row_bytes))
        if prod(saved.shape) and row != (saved.shape[0] if saved.shape else 1):
            raise ValueError(f"pieces of {name} with shape {saved.shape} end at row {row}")
    for piece, size in sorted(by_start):
        if piece.start != sizes[piece.file]:
            raise ValueError(f"pieces in {piece.file} overlap or leave a gap at byte {sizes[piece.file]}")
        sizes[piece.file] += _aligned(size)
    return tensors, sizes


def _saved_tensor(entry: Any) -> SavedTensor:
    """Raises one of several errors if ``entry`` is anything else."""
    shape = [_count("size", size) for size in entry["shape"]]
    pieces = []
    for file, start, offsets, sizes in entry["pieces"]:
        (row, *skipped), (rows, *others) = (offsets, sizes) if shape else ([0], [1])
        if any(skipped) or others != shape[1:]:
            raise ValueError("not whole rows")
        pieces.append(Piece(str(file), _count("start", start), _count("row", row), _count("rows", rows)))
    return SavedTensor(DTYPES[entry["dtype"]], tuple(shape), sorted(pieces, key=attrgetter("row")))


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} {value!r} is not an integer of at least 0")
    return value


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
        return tensor.to_local(), shard_offsets(tensor)
    return tensor, [0] * tensor.dim()


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES


# --- a whole checkpoint


class SavedState(NamedTuple):
    """What a checkpoint holds: of which step and recipe, of how many tokens or images, and where its tensors are. For
    ``own`` see `Folder`."""

    path: Path
    own: int
    step: int
    recipe: Recipe
    data_size: int
    tensors: dict[str, SavedTensor]

    def read_into(self, tensors: Mapping[str, Tensor], check_stop: Callable[[], None] = lambda: None) -> None:
        """Fill this rank's part of the tensors. Raises ``ValueError`` if that is not possible."""
        try:
            with Folder(self.path, self.own, check_stop) as folder:
                read_into(tensors, self.tensors, folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"checkpoint {self.path} cannot be read: {first_line(error)}") from None


def checkpoints_of(out: Path | str) -> Path:
    """The folder of a run's checkpoints."""
    return Path(out, "checkpoints")


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, sorted."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name)))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def read_state(
    path: Path, own: int = OWN_NAMES, share: slice = slice(None), check_stop: Callable[[], None] = lambda: None
) -> SavedState:
    """Return the state of a checkpoint after verifying a ``share`` of its files: each rank verifies one, together they
    verify all. Raises ``ValueError`` that names the first bad file. For ``own`` and ``check_stop`` see `Folder`."""
    try:
        with Folder(path, own, check_stop) as folder:
            sums = _read_sums(folder)
            text = _read_text(folder, STATE)
            _check_sum(STATE, hashlib.sha256(text).hexdigest(), sums.pop(STATE))
            state, sizes = _parse(text, list(sums), path, own)
            if (named := _COMPLETE.fullmatch(path.name)) and int(named[1]) != state.step:
                raise ValueError(f"{STATE} is of step {state.step}")
            for name in sorted(sums)[share]:
                if (actual := folder.size(name)) != sizes[name]:
                    raise ValueError(f"{name} has {actual:,} bytes, not {sizes[name]:,}")
                _check_sum(name, folder.sha256(name), sums[name])
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path} cannot be used: {first_line(error)}") from None
    return state


def _read_sums(folder: Folder) -> dict[str, str]:
    """The expected checksum of each file. Names cannot be paths that lead out of the folder."""
    try:
        *lines, rest = _read_text(folder, SUMS).decode().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{SUMS} is not text") from None
    matches = [_SUM.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in matches if match}
    if rest or STATE not in sums or len(sums) < len(lines):
        raise ValueError(f"{SUMS} is not a list of checksums with one of {STATE}")
    return sums


def _read_text(folder: Folder, name: str) -> bytearray:
    size = folder.size(name)
    if size > MOST_BYTES:
        raise ValueError(f"{name} has {size:,} bytes, at most {MOST_BYTES:,} are read")
    return folder.read(name, 0, size)


def _check_sum(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ValueError(f"{name} has changed since it was written")


def _parse(text: bytearray, files: list[str], path: Path, own: int) -> tuple[SavedState, dict[str, int]]:
    """Return what the text of ``state.json`` says, and the size that each of the ``files`` must have."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} is not a JSON table")
    if state.get("format") != FORMAT:
        raise ValueError(f"its format is {state.get('format')!r}, this version reads {FORMAT!r}")
    try:
        if not isinstance(state.get("recipe"), dict):
            raise ValueError("recipe is not a table")
        recipe = Recipe.of_dict(state["recipe"])
        tensors, sizes = read_index(state.get("tensors"), files)
        step, data_size = _count("step", state.get("step")), _count("data_size", state.get("data_size"))
        return SavedState(path, own, step, recipe, data_size, tensors), sizes
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None

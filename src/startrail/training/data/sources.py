"""What text and images share: finding files, holding some out, random numbers by key, checked arguments."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

SPLITS = ("train", "held-out")
HELD_OUT = 20  # one in 20 tokens or images is held out
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


def find_files(source: str) -> list[Path]:
    """The files in a folder and its subfolders (except hidden ones), those a glob matches, or one file; sorted by path.
    ``"stdlib"`` is the Python source of the interpreter's standard library, without its tests (``"./stdlib"`` is a
    folder with that name)."""
    if not isinstance(source, str) or not source:
        raise ValueError(f"source {source!r} is not the name of a folder, a file or a glob")
    try:
        files = _search(source)
    except OSError as error:
        raise ValueError(f"source {source!r} cannot be searched: {error.strerror}: {error.filename}") from error
    if not files:
        raise ValueError(f"source {source!r} has no files")
    return sorted(files)


def _search(source: str) -> list[Path]:
    if source == "stdlib":
        return [file for file in _walk(Path(sysconfig.get_path("stdlib")), NOT_STDLIB) if file.suffix == ".py"]
    path = Path(source).expanduser()
    if path.is_dir():
        return _walk(path)
    if path.is_file():
        return [path]
    if path.exists() or not glob.has_magic(source):
        raise ValueError(f"source {source!r} is not an existing folder, file or glob")
    names = set(glob.glob(str(path), recursive=True))
    return [Path(name) for name in names if os.path.isfile(name)]


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    def fail(error: OSError) -> None:  # os.walk would silently skip an unreadable folder
        raise error

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file()]
    return files


def names_of(files: Sequence[Path]) -> list[str]:
    """The files' paths relative to their common folder, so that a corpus has the same names on every machine.

    >>> names_of([Path("/data/books/a/one.txt"), Path("/data/books/b/two.txt")])
    ['a/one.txt', 'b/two.txt']
    """
    shared = os.path.commonpath([file.absolute().parent for file in files])
    return [file.absolute().relative_to(shared).as_posix() for file in files]


def held_out(names: Sequence[str], sizes: Sequence[int]) -> set[int]:
    """Indices of the files to hold out: in order of their names' hashes, as many as fit into a twentieth of the total.

    Empty if they would fill less than half of that; then a part of every file must be held out instead.

    >>> len(held_out([f"{i}.txt" for i in range(100)], [10] * 100))
    5
    >>> held_out(["large.txt", "small.txt"], [1000, 1])      # a twentieth is 50: one file is too large, one too small
    set()
    """
    budget = sum(sizes) // HELD_OUT
    chosen, total = set(), 0
    hashes = [hashlib.sha256(name.encode(errors="surrogateescape")).digest() for name in names]
    for i in sorted(range(len(names)), key=lambda i: hashes[i]):
        if 0 < sizes[i] <= budget - total:
            chosen.add(i)
            total += sizes[i]
    return chosen if 2 * total >= budget else set()


def generator_of(*key: int | str) -> torch.Generator:
    """A generator seeded by a hash of ``key``, so that neighbouring keys give unrelated numbers. (With ``seed +
    epoch``, the second epoch of seed 0 would repeat the first epoch of seed 1.)"""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} {value!r} must be an integer of at least {least}")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")

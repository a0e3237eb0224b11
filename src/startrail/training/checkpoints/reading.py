"""Reads checkpoints, which may be damaged or crafted. The docstring of ``saving`` shows the folder of one.

Nothing in it is believed: links are not followed, the size of every file follows from ``state.json``, and a file is
read only once it has that size.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from startrail.training.checkpoints.pieces import SavedTensor, read_index
from startrail.training.files import Folder, first_line
from startrail.training.recipes import Recipe

FORMAT = "startrail checkpoint 2"
STATE = "state.json"
SUMS = "SHA256SUMS"  # ``sha256sum -c`` reads it too
MOST_BYTES = 2**30  # of a text file; more than 10,000 ranks need
OWN_NAMES = 2  # of a checkpoint's path: "checkpoints" and "step-00000050" belong to the run
_COMPLETE = re.compile(r"step-([0-9]{8,18})")
_SUM = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


class SavedState(NamedTuple):
    """What a checkpoint holds: of which step and recipe, of how many tokens or images, and where its tensors are."""

    step: int
    recipe: Recipe
    data_size: int
    tensors: dict[str, SavedTensor]


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
            state, sizes = _parse(text, list(sums))
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


def _parse(text: bytearray, files: list[str]) -> tuple[SavedState, dict[str, int]]:
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
        return SavedState(_count(state, "step"), recipe, _count(state, "data_size"), tensors), sizes
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None


def _count(state: dict[str, object], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} {value!r} is not an integer of at least 0")
    return value

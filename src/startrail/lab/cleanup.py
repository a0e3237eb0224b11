"""What clusters leave behind whose parent, holder and reaper were all killed, and its removal at the next start.

A cluster's folder says who owns it and which namespaces it has. If none of the owners lives any more, whoever still
lives in those namespaces is killed and the folder goes; with its last process the kernel removes a namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from startrail.lab.namespaces import kill_all, living_in

PREFIX = "startrail-lab-"
OWNERS = "owners.json"
MARK = "STARTRAIL_LAB"  # every rank has its cluster's folder in this variable, and so has whatever it starts


def new_folder() -> str:
    """A folder for a cluster of this process, once what dead ones left is gone."""
    remove_leftovers()
    return tempfile.mkdtemp(prefix=PREFIX)


def describe_owners(folder: str, owners: Collection[int], networks: Collection[int]) -> None:
    lives = {str(pid): start for pid in owners if (start := _start_of(pid)) is not None}
    Path(folder, OWNERS).write_text(json.dumps({"owners": lives, "networks": list(networks)}))


def remove_leftovers() -> None:
    """End and remove what is left of this user's clusters whose owners are all dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # another user's, being made, or being removed
            if folder.stat().st_uid != os.geteuid():
                continue
            known = json.loads((folder / OWNERS).read_text())
            if any(_start_of(int(pid)) == start for pid, start in known["owners"].items()):
                continue
            # a number of a namespace may be used again, for one that is not ours: only if somebody in it bears the mark
            ours = {network for network in known["networks"] if _bears(folder, living_in({network}))}
            kill_all(ours)
            shutil.rmtree(folder)


def _bears(folder: Path, processes: Collection[int]) -> bool:
    mark = f"{MARK}={folder}".encode()
    for pid in processes:
        with suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
    return False


def _start_of(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, which tells it from a later one of the same number; None if it is
    gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return fields[19]
    return None

"""Removal of clusters whose parent, supervisor and reaper were all killed. It runs when the next cluster starts.

A cluster's folder lists its owners and its namespaces. If no owner is alive, the processes in those namespaces are
killed and the folder is removed; the kernel removes a namespace with its last process.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from workshop.lab.namespaces import kill_all, processes_in

PREFIX = "startrail-lab-"
OWNERS_FILE = "owners.json"
FOLDER_VARIABLE = "STARTRAIL_LAB"  # set to the cluster's folder in every rank and its children


def new_folder() -> str:
    """Remove what dead clusters left, then make a folder for a new one."""
    remove_leftovers()
    return tempfile.mkdtemp(prefix=PREFIX)


def write_owners(folder: str, owners: Collection[int], networks: Collection[int]) -> None:
    start_times = {str(pid): start for pid in owners if (start := _start_time(pid)) is not None}
    Path(folder, OWNERS_FILE).write_text(json.dumps({"owners": start_times, "networks": list(networks)}))


def remove_leftovers() -> None:
    """Kill the processes and remove the folders of this user's clusters whose owners are all dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # another user's, or being made or removed
            if folder.stat().st_uid != os.geteuid():
                continue
            record = json.loads((folder / OWNERS_FILE).read_text())
            if any(_start_time(int(pid)) == start for pid, start in record["owners"].items()):
                continue
            # The kernel reuses inode numbers: a namespace is this cluster's only if a process in it has the variable.
            networks = {network for network in record["networks"] if _any_has_variable(folder, processes_in({network}))}
            kill_all(networks)
            shutil.rmtree(folder)


def _any_has_variable(folder: Path, processes: Collection[int]) -> bool:
    entry = f"{FOLDER_VARIABLE}={folder}".encode()
    for pid in processes:
        with suppress(OSError):
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
    return False


def _start_time(pid: int) -> str | None:
    """Start of a process in kernel ticks, which tells it from a later process with the same pid; None if it is dead."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return fields[19]
    return None

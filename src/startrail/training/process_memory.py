"""What this process has in memory: now, at its peak, and how to give back what it no longer uses."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

import torch

M_MMAP_THRESHOLD = -3  # from malloc.h


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def return_large() -> None:
    """Let every tensor of 1 MiB or more go back to the system when it is freed (glibc; elsewhere nothing changes).

    Otherwise malloc keeps holes of all sizes for later, and a process that needs 75 MiB at once holds twice that.
    """
    with suppress(OSError, AttributeError):
        _libc().mallopt(M_MMAP_THRESHOLD, 2**20)


def return_small() -> None:
    """Give back the holes that small tensors have left; between steps, since it takes milliseconds."""
    with suppress(OSError, AttributeError):
        _libc().malloc_trim(0)


def resident_bytes() -> int:
    """What this process has in memory now (Linux; elsewhere 0)."""
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most that this process has had in memory since ``reset_peak``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # not Linux: nothing is measured
            file.write("5")


def _status(name: str) -> int:
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except OSError:
        return 0

"""The memory of this process: what it holds, its peak, and what it gives back."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

M_MMAP_THRESHOLD = -3  # from malloc.h


def return_large_blocks() -> None:
    """Make malloc return every tensor of 1 MiB or more to the system when it is freed (glibc only). Otherwise it keeps
    holes of all sizes, and a process whose tensors take 75 MiB holds twice that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def trim_heap() -> None:
    """Return the holes left by small tensors to the system. Takes milliseconds, so call it between steps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process (Linux; 0 elsewhere)."""
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process since ``reset_peak``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # without Linux, nothing is measured
            file.write("5")


def _status(name: str) -> int:
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except OSError:
        return 0

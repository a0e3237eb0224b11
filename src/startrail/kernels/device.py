"""CUDA's current device and stream, which matter regardless of where a call's tensors are.

Triton's launches, events and graph capture use the current device. Work on one stream is not ordered with work on
another until they synchronize. On CPUs all of this is a no-op.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current one if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current_stream_id(device: torch.device) -> int:
    """Identifies the current stream among those of a device; 0 on CPUs."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # otherwise the tensors are fake
    return torch.cuda.current_stream(device).cuda_stream if on_gpu else 0


def record_event(device: torch.device) -> torch.Event | None:
    """An event after everything on the device's current stream; None on CPUs, which have done it by now."""
    if device.type != "cuda":
        return None
    event = torch.Event("cuda")
    event.record()
    return event


def on_this_stream(device: torch.device) -> AbstractContextManager[Any]:
    """For another thread: makes this thread's current stream of a GPU, and the GPU, the current ones."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.stream(torch.cuda.current_stream(device)) if on_gpu else nullcontext()


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """The stream of this process for one ``purpose``, for which the current one must not wait, or which must not wait
    for the current one; None without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    if (device, purpose) not in _side_streams:
        _side_streams[device, purpose] = torch.cuda.Stream(device)
    return _side_streams[device, purpose]


_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Makes ``stream`` the current one, if it is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def used_on(x: Tensor, stream: torch.cuda.Stream) -> None:
    """The allocator hands out the memory of ``x`` again only after the work that ``stream`` has now."""
    x.record_stream(stream)


def ints_on(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Copies whole numbers from the host to a device. The host does not wait; only the current stream is ordered after
    the copy."""
    pinned = device.type == "cuda" and torch.cuda.is_initialized()  # a copy from pageable memory blocks the host
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)

"""What CUDA takes from the *current* device and stream, whatever the tensors of a call say.

Triton's launches, events and capture belong to the current device, and each stream has an order of its own: what one
stream has been given is of no use to another until both have met. On CPUs all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """With ``device`` as the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_of(device: torch.device) -> int:
    """What tells the current stream of a device apart from its others; a CPU has one."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # else it is a fake one
    return torch.cuda.current_stream(device).cuda_stream if on_gpu else 0


def numbers_on(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Whole numbers of the host on a device. The host does not wait for it; streams but the current one may not see
    them yet."""
    pinned = device.type == "cuda" and torch.cuda.is_initialized()  # from elsewhere a copy stops the host
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)

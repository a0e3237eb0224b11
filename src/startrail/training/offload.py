"""Offloading: what the backward pass will need waits in host memory, not on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def saved_in_host_memory(offload: bool = True) -> AbstractContextManager[Any]:
    """A context in which autograd saves its tensors in host memory, pinned where there is a GPU to copy them back to.

    ``offload=False`` changes nothing, for code that offloads only if it is asked to.
    """
    if not offload:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())

"""Saved activations in host memory, copied on a stream of their own while the GPU computes.

torch's ``save_on_cpu`` copies on the stream that computes, so every layer waits for two copies. Here a block's tensors
leave while the next block computes, and come back while the block after it is in its backward pass.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from startrail.kernels.device import on_device, used_on


class _Saved:
    """A tensor in pinned host memory, and on the GPU from the start of its copy to its last use."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream, block: _SavedBlock) -> None:
        self.device, self.stream, self.block = x.device, stream, block
        self.host = torch.empty_like(x, device="cpu", pin_memory=torch.cuda.is_available())
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self.host.copy_(x, non_blocking=True)
        used_on(x, stream)
        self.back: Tensor | None = None

    def fetch(self) -> Tensor:
        """Start the copy to the GPU, if it has not started."""
        if self.back is None:
            with torch.cuda.stream(self.stream):
                self.back = self.host.to(self.device, non_blocking=True, copy=True)
        return self.back

    def take(self) -> Tensor:
        """The tensor for work on the current stream. Starts to copy those of the block before."""
        back, current = self.fetch(), torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)  # not for what is fetched next
        used_on(back, current)
        self.back = None
        self.block.fetch_before()
        return back


class _SavedBlock:
    """What one block of the model saves."""

    def __init__(self, before: _SavedBlock | None) -> None:
        self.saved: list[weakref.ref[_Saved]] = []  # the graph keeps them alive
        self._before = None if before is None else weakref.ref(before)

    def fetch_before(self) -> None:
        weak, self._before = self._before, None  # once
        before = None if weak is None else weak()
        for entry in () if before is None else before.saved:
            if (saved := entry()) is not None:
                saved.fetch()


class HostOffload(saved_tensors_hooks):
    """Keeps tensors that autograd saves inside this context in host memory. Enter it once per block of a model; the
    backward pass then fetches one block ahead. Tensors on the CPU stay where they are."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._block: _SavedBlock | None = None

    def __enter__(self) -> None:
        self._block = _SavedBlock(self._block)
        super().__enter__()

    def _pack(self, x: Tensor) -> Tensor | _Saved:
        if not _is_on_gpu(x):
            return x
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)
        assert self._block is not None
        with on_device(x.device):  # pinned memory belongs to the current device's context
            saved = _Saved(x, self._streams[x.device], self._block)
        self._block.saved.append(weakref.ref(saved))
        return saved


def _unpack(packed: Tensor | _Saved) -> Tensor:
    return packed.take() if isinstance(packed, _Saved) else packed


def _is_on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"

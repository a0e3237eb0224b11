"""Buffers for messages, reused by later passes, and the input pieces that lie in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from startrail.kernels.device import current_stream_id

KEPT_PASSES = 64
KEPT_VIEWS = 8


class Buffer:
    """Bytes, and the transfers to wait for before they may be read (``arrivals``) or overwritten (``sends``).

    Views of the bytes are cached, because a buffer is reused for the same kind of piece. If the pool had no
    buffer of this size, ``whole`` is the larger one that these bytes are the start of. ``stream`` is the stream that
    reads and writes them.
    """

    def __init__(self, flat: Tensor, whole: Buffer | None = None, stream: int = 0) -> None:
        self.flat, self.whole, self.stream = flat, whole, stream
        self.arrivals: list[Callable[[], None]] = []
        self.sends: list[Callable[[], None]] = []
        self.last_pass = 0  # the pass that returned it to the pool
        self._views: dict[object, tuple[Tensor, ...]] = {}

    def views(self, key: object, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The result of ``make`` for these bytes, cached by ``key``."""
        if key not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            self._views[key] = make(self.flat)
        return self._views[key]

    def arrive(self) -> None:
        arrivals, self.arrivals = self.arrivals, []
        for wait in arrivals:
            wait()


def append_new(waits: list[Callable[[], None]], wait: Callable[[], None]) -> None:
    """Append a wait, unless it is the last one already."""
    if not waits or waits[-1] != wait:
        waits.append(wait)


class InputPiece:
    """An input piece that this rank holds or is about to receive: views of the user's tensors, or a buffer.

    ``prepared`` holds its tensors in the form that the kernel takes.
    """

    def __init__(self, tensors: tuple[Tensor, ...], buffer: Buffer | None = None, pooled: bool = False) -> None:
        self.tensors, self.buffer = tensors, buffer
        self.pooled = pooled  # the buffer goes back to the pool when the piece is released
        self.joins: list[Callable[[], None]] = []  # join the parts that came over heads
        self.prepared: tuple[Tensor, ...] = ()

    def arrive(self) -> None:
        if self.buffer is not None:
            self.buffer.arrive()
        joins, self.joins = self.joins, []
        for join in joins:
            join()


Key = tuple[int, torch.device, int]


class BufferPool:
    """Flat byte buffers, reused within a pass and by later ones. A buffer whose send is pending is handed out only once
    the send has completed. A buffer that was not used in the last ``KEPT_PASSES`` passes is dropped.

    Only the stream that waited for a send is ordered after it, so a buffer is reused only on its own stream.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[Buffer]] = {}
        self._pass = 0
        self.allocated = 0

    def get(self, nbytes: int, device: torch.device) -> Buffer:
        """The smallest free buffer of 1 to 2 times ``nbytes`` (of equals, the one returned first), or a new one."""
        stream = current_stream_id(device)
        free = self._free.get((nbytes, device, stream)) or self._larger(nbytes, device, stream)
        if not free:
            self.allocated += nbytes
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, device=device), stream=stream)
        buffer = free.pop(0)
        for wait in buffer.sends:
            wait()
        buffer.sends = []
        return buffer if buffer.flat.numel() == nbytes else Buffer(buffer.flat[:nbytes], buffer, stream)

    def _larger(self, nbytes: int, device: torch.device, stream: int) -> list[Buffer] | None:
        sizes = [size for (size, *where), free in self._free.items() if free and where == [device, stream]]
        size = min((size for size in sizes if nbytes < size <= 2 * nbytes), default=0)
        return self._free.get((size, device, stream))

    def put(self, buffer: Buffer) -> None:
        whole = buffer.whole or buffer
        whole.sends, whole.last_pass = buffer.sends, self._pass
        self._free.setdefault((whole.flat.numel(), whole.flat.device, whole.stream), []).append(whole)

    def settle(self) -> None:
        """Drop buffers that are no longer used. Call this after a pass, once all its sends have completed."""
        self._pass += 1
        for key, free in list(self._free.items()):
            kept = [buffer for buffer in free if buffer.last_pass > self._pass - KEPT_PASSES]
            for buffer in kept:
                buffer.sends = []
            self._free[key] = kept
            if not kept:
                del self._free[key]

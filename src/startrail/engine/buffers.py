"""Buffers: bytes on their way in or out, used again by later passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from startrail.kernels.device import current_stream_id

KEPT_PASSES = 64
KEPT_VIEWS = 8


class Buffer:
    """Bytes, and what must end before they may be read (``arrivals``) or written again (``sends``).

    Views of the bytes are remembered: a buffer is used again and again for the same kind of piece. ``whole`` is the
    buffer that these bytes are the beginning of, if the pool had none of their size. ``stream`` is the one in whose
    order it is written and read.
    """

    def __init__(self, flat: Tensor, whole: Buffer | None = None, stream: int = 0) -> None:
        self.flat, self.whole, self.stream = flat, whole, stream
        self.arrivals: list[Callable[[], None]] = []
        self.sends: list[Callable[[], None]] = []
        self.used = 0  # in which pass the pool got it back
        self._views: dict[object, tuple[Tensor, ...]] = {}

    def views(self, key: object, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``make`` makes of the bytes, made once for each ``key``."""
        if key not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            self._views[key] = make(self.flat)
        return self._views[key]

    def arrive(self) -> None:
        arrivals, self.arrivals = self.arrivals, []
        for wait in arrivals:
            wait()


Key = tuple[int, torch.device, int]


class BufferPool:
    """Flat byte buffers that are used again, also by the next call. A buffer whose send is under way is handed out
    only once the send has ended; one that nobody has used in the last ``KEPT_PASSES`` goes.

    That a send has ended is known to the stream that waited for it, and to no other: a buffer is used again on its own
    stream only.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[Buffer]] = {}
        self._pass = 0
        self.allocated = 0

    def get(self, nbytes: int, device: torch.device) -> Buffer:
        """The smallest free buffer that is large enough but not wastefully so; the one that waits longest if equal."""
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
        whole.sends, whole.used = buffer.sends, self._pass
        self._free.setdefault((whole.flat.numel(), whole.flat.device, whole.stream), []).append(whole)

    def settle(self) -> None:
        """A pass is over, and so are all its sends: forget them, and buffers of sizes that are no longer asked for."""
        self._pass += 1
        for key, free in list(self._free.items()):
            kept = [buffer for buffer in free if buffer.used > self._pass - KEPT_PASSES]
            for buffer in kept:
                buffer.sends = []
            self._free[key] = kept
            if not kept:
                del self._free[key]

"""Buffers for messages, reused by later passes, the input pieces that lie in them, and bundles of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from startrail.kernels.device import current_stream_id, ints_on
from startrail.schedule.values import Bundle
from startrail.transport.interface import Pending

Views = TypeVar("Views")

KEPT_PASSES = 64
KEPT_VIEWS = 8


class Buffer:
    """Bytes, and the transfers to wait for before they may be read (``arrivals``) or overwritten (``sends``).

    Views of the bytes are cached, because a buffer is reused for the same kind of piece. If the pool had no
    buffer of this size, ``whole`` is the larger one that these bytes are the start of.
    """

    def __init__(self, flat: Tensor, whole: Buffer | None = None) -> None:
        self.flat, self.whole, self.nbytes = flat, whole, flat.numel()
        self.arrivals: list[Pending] = []
        self.sends: list[Pending] = []
        self.last_pass = 0  # the pass that returned it to the pool
        self._views: dict[object, Any] = {}

    def views(self, key: object, make: Callable[[Tensor], Views]) -> Views:
        """The result of ``make`` for these bytes, cached by ``key``."""
        if key not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            self._views[key] = make(self.flat)
        views: Views = self._views[key]
        return views

    def arrive(self) -> None:
        if not self.arrivals:
            return
        arrivals, self.arrivals = self.arrivals, []
        for transfer in arrivals:
            if not transfer.is_waited_for:
                transfer.wait()


class InputPiece:
    """An input piece that this rank holds or is about to receive: views of the user's tensors, or of a buffer's bytes
    (``in_bytes``), as they travel. ``prepared`` holds its tensors in the form that the kernel takes.
    """

    def __init__(self, tensors: tuple[Tensor, ...], buffer: Buffer | None = None, pooled: bool = False) -> None:
        self.tensors, self.buffer, self.in_bytes = tensors, buffer, buffer is not None
        self.pooled = pooled  # the buffer goes back to the pool when the piece is released
        self.joins: list[Callable[[], None]] = []  # join the parts that came over heads
        self.prepared: tuple[Tensor, ...] = ()

    def hold(self, other: InputPiece) -> None:
        """Take over what ``other`` holds."""
        self.tensors, self.buffer = other.tensors, other.buffer
        self.in_bytes, self.pooled = other.in_bytes, other.pooled

    def arrive(self) -> None:
        if self.buffer is not None:
            self.buffer.arrive()
        joins, self.joins = self.joins, []
        for join in joins:
            join()


class StreamBuffers:
    """Flat byte buffers of one stream, reused within a pass and by later ones. A buffer whose send is pending is handed
    out only once the send has completed. A buffer that was not used in the last ``KEPT_PASSES`` passes is dropped."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self.device, self.stream = device, stream
        self.free: dict[int, list[Buffer]] = {}  # by size
        self.allocated = self.num_passes = 0

    def get(self, nbytes: int) -> Buffer:
        """The smallest free buffer of 1 to 2 times ``nbytes`` (of equals, the one returned first), or a new one."""
        free = self.free.get(nbytes) or self._larger(nbytes)
        if not free:
            self.allocated += nbytes
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        buffer = free.pop(0)
        for transfer in buffer.sends:
            if not transfer.is_waited_for:
                transfer.wait()
        buffer.sends = []
        return buffer if buffer.nbytes == nbytes else Buffer(buffer.flat[:nbytes], buffer)

    def _larger(self, nbytes: int) -> list[Buffer] | None:
        fits = [size for size, free in self.free.items() if free and nbytes < size <= 2 * nbytes]
        return self.free[min(fits)] if fits else None

    def put(self, buffer: Buffer) -> None:
        whole = buffer.whole or buffer
        whole.sends, whole.last_pass = buffer.sends, self.num_passes
        self.free.setdefault(whole.nbytes, []).append(whole)

    def drop_unused(self) -> None:
        """Drop buffers that no pass uses any more. Call this after a pass, once all its sends have completed."""
        self.num_passes += 1
        for size, free in list(self.free.items()):
            kept = [buffer for buffer in free if buffer.last_pass > self.num_passes - KEPT_PASSES]
            for buffer in kept:
                buffer.sends = []
            self.free[size] = kept
            if not kept:
                del self.free[size]


class BufferPool:
    """The buffers of all streams. Only the stream that waited for a send is ordered after it, so a buffer is reused
    only on its own stream."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], StreamBuffers] = {}

    def on(self, device: torch.device) -> StreamBuffers:
        """Those of the current stream of a device."""
        key = device, current_stream_id(device)
        if key not in self._streams:
            self._streams[key] = StreamBuffers(*key)
        return self._streams[key]

    @property
    def allocated(self) -> int:
        return sum(stream.allocated for stream in self._streams.values())

    def drop_unused(self) -> None:
        for stream in self._streams.values():
            stream.drop_unused()


class BundleCopies:
    """Copies tokens between a bundle, which is one message, and the pieces at its sender that they belong to:
    ``shards``.

    >>> from startrail.schedule.values import Source
    >>> bundle = BundleCopies(Bundle(((0, 1), (2, 2)), (Source(5, 0, 1), Source(5, 4, 2))), torch.device("cpu"))
    >>> bundle.shards
    (5,)
    >>> tokens = torch.arange(6.0).view(1, 1, 6, 1)
    >>> packed = torch.empty(1, 1, 3, 1)
    >>> bundle.pack(5, tokens, packed)
    >>> packed.flatten().tolist()
    [0.0, 4.0, 5.0]
    >>> bundle.add(5, packed, tokens)                # gradients come back and are added where the tokens came from
    >>> tokens.flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 8.0, 10.0]
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        at, indices = 0, dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]]()
        for shard, start, count in bundle.sources:
            inside, outside = indices.setdefault(shard, ([], []))
            inside.append((at, count))
            outside.append((start, count))
            at += count
        self.shards = tuple(indices)
        self._indices = {
            shard: (_slice_or_tensor(inside, device), _slice_or_tensor(outside, device))
            for shard, (inside, outside) in indices.items()
        }

    def pack(self, shard: int, tokens: Tensor, bundle: Tensor) -> None:
        """Copy the tokens of one piece (batch, heads, tokens, dim) into the bundle."""
        inside, outside = self._indices[shard]
        taken = tokens[:, :, outside] if isinstance(outside, slice) else tokens.index_select(2, outside)
        if isinstance(inside, slice):
            bundle[:, :, inside].copy_(taken)
        else:
            bundle.index_copy_(2, inside, taken.to(bundle.dtype))

    def add(self, shard: int, bundle: Tensor, tokens: Tensor) -> None:
        """Add the bundle to the tokens of one piece."""
        inside, outside = self._indices[shard]
        part = bundle[:, :, inside] if isinstance(inside, slice) else bundle.index_select(2, inside)
        if isinstance(outside, slice):
            tokens[:, :, outside].add_(part)
        else:
            tokens.index_add_(2, outside, part.to(tokens.dtype))


def _slice_or_tensor(runs: list[tuple[int, int]], device: torch.device) -> slice | Tensor:
    first, last, total = runs[0][0], sum(runs[-1]), sum(count for _, count in runs)
    if last - first == total:  # they only grow
        return slice(first, last)
    return ints_on(device, [at for start, count in runs for at in range(start, start + count)], torch.int64)

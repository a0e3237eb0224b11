"""One program of a pass: handles the events of its walk with buffers, messages and kernels.

Transfers are posted before the blocks that hide them and awaited when something needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from startrail._compat import is_profiling
from startrail.engine.buffers import Buffer, InputPiece, append_new
from startrail.engine.bundles import BundleCopies
from startrail.engine.exchange import Exchange
from startrail.engine.wire import Wire
from startrail.geometry.tiles import Tile
from startrail.kernels import Kernel, Partial, Sums, block_max_logits, surrogate_out
from startrail.kernels.device import current_stream_id
from startrail.schedule.program import Program
from startrail.schedule.values import BACKWARD, FORWARD, INPUTS, RESULTS, Piece
from startrail.schedule.walk import (
    Await,
    Combine,
    Compute,
    Finish,
    Message,
    Post,
    Prepare,
    WalkStep,
    handlers_of,
    walk_of,
)
from startrail.transport.base import Compare, Posting

if TYPE_CHECKING:
    from startrail.engine.executor import Executor


Inputs = Mapping[str, tuple[Tensor, ...]]


class PassPart(NamedTuple):
    """What one program of a pass runs with. ``kept`` maps each kept piece to its slice of the kept bytes, ``tiles`` a
    row and a column to what is visible of their block. The program's tokens begin at ``start`` of the rank's. A direct
    program uses the direct lanes of ``direct_level`` and further in."""

    program: Program
    wire: Wire
    kept: Mapping[Piece, slice]
    tiles: Callable[[int, int], tuple[Tile, ...]]
    start: int
    direct_level: int | None
    copies: dict[tuple[int, int], BundleCopies]  # of the bundles that it sends, by number and stream


@dataclass
class PassContext:
    """The settings of one pass of an attention call: its parts, the order (part, step) in which they run, and when the
    call is compared with the other ranks."""

    parts: Sequence[PassPart]
    order: Sequence[tuple[int, int]]
    kernel: Kernel
    scale: float
    compare: Compare
    device: torch.device
    # (batch, heads) the largest logits so far, or empty if the caller does not ask for them
    largest: Tensor = field(default_factory=partial(torch.empty, 0, 0))


class PartRun:
    """One program of a pass: handles the events of its walk."""

    def __init__(self, executor: Executor, context: PassContext, part: int, inputs: Inputs, kept: Tensor) -> None:
        self.executor, self.context, self.inputs = executor, context, inputs
        self.transport, self.part = executor.transport, part
        self.program, self.wire, slices, self.tiles, _, _, self.copies = context.parts[part]
        self.place, self.pool = self.program.place, executor.pool
        self.walk, self.handlers = walk_of(self.program), handlers_of(self)
        self.over_heads = self.place.num_heads > 1
        self.pieces: dict[Piece, InputPiece] = {}
        self.rows: dict[Piece, tuple[Tensor, Tensor, Tensor]] = {}  # dout, out, lse as the backward kernel takes them
        self.results: dict[Piece, Partial | Sums] = {}
        self.partials: dict[int, Buffer] = {}  # partial results in flight, by message
        self.arrived: dict[Piece, Buffer] = {}  # sums of a peer, to which ours are added when they are sent on
        self.exchanges: list[Exchange] = []  # bring the results of our own tokens from the ranks of all heads
        self.early: dict[tuple[Piece, ...], Exchange] = {}  # those whose receives are posted already
        self.open_sends: list[Callable[[], None]] = []
        self.released: list[Buffer] = []  # reusable from the next step on: this step may still send them
        self.step = 0
        self.kept = {piece: kept[part] for piece, part in slices.items()}
        self._take_inputs()

    # --- the walk

    def run_step(self, number: int) -> None:
        self.step = number
        step = self.walk.steps[number]
        if is_profiling():
            with record_function(step.label):
                self._handle(step)
        else:
            self._handle(step)

    def close(self) -> None:
        """Drop references to this object, so that no tensor has to wait for the garbage collector: pieces that have not
        arrived hold one."""
        self.pieces.clear()
        self.handlers.clear()

    def _handle(self, step: WalkStep) -> None:
        hook, start = self.executor.counters.on_event, time.perf_counter()
        for event in step.events:
            self.handlers[type(event)](event)
            if hook is not None:
                end = time.perf_counter()
                hook(self.program, step.number, event, start, end)
                start = end
        for piece in self.program.last_uses[step.number]:
            self._release(piece)
        for buffer in self.released:
            self.pool.put(buffer)
        self.released.clear()

    def finish(self) -> dict[str, tuple[Tensor, ...]]:
        """Local results in the user's layout and dtype. Every transfer of this part has ended when it returns."""
        start = time.perf_counter()
        results = {kind: self.wire.local_results(kind, self.context.device) for kind in self.program.pass_.results}
        for exchange in self.exchanges:
            exchange.take_results({piece: results[piece.kind] for piece in exchange.open if piece.kind in RESULTS})
        for piece in () if self.over_heads else self.walk.results:
            for target, source in zip(results[piece.kind], self._final(piece), strict=True):
                self.wire.shares(target, piece)[0].copy_(source)
        for wait in self.open_sends:
            wait()
        if (hook := self.executor.counters.on_event) is not None:
            hook(self.program, len(self.walk.steps), Finish(self.walk.home), start, time.perf_counter())
        return results

    # --- inputs

    def _take_inputs(self) -> None:
        """Own pieces are views of the user's tensors, copies if they are kept, or whole pieces in buffers if heads are
        exchanged."""
        for piece in self.program.given:
            if piece not in self.program.own_inputs:
                self.pieces[piece] = self._in_buffer(piece, Buffer(self.kept[piece]))
            elif self.over_heads:
                self.pieces[piece] = self._new_piece(piece)
            else:
                tensors = tuple(self.wire.shares(x, piece)[0] for x in self.inputs[piece.kind])
                self.pieces[piece] = self._kept_copy(piece, tensors) if piece in self.kept else InputPiece(tensors)

    def _kept_copy(self, piece: Piece, tensors: Sequence[Tensor]) -> InputPiece:
        held = self._in_buffer(piece, Buffer(self.kept[piece]))
        for view, tensor in zip(held.tensors, tensors, strict=True):
            view.copy_(tensor)
        return held

    def _in_buffer(self, piece: Piece, buffer: Buffer, pooled: bool = False) -> InputPiece:
        return InputPiece(self._views(buffer, piece), buffer, pooled)

    def _tokens(self, piece: Piece) -> int:
        bundle = self.program.bundles.get(piece.shard)
        return self.wire.sizes.tokens if bundle is None else bundle.tokens

    def _views(self, buffer: Buffer, piece: Piece) -> tuple[Tensor, ...]:
        tokens = self._tokens(piece)
        views = partial(self.wire.views, kind=piece.kind, tokens=tokens)
        return buffer.views((piece.kind, tokens, self.wire.format), views)

    def _new_piece(self, piece: Piece) -> InputPiece:
        """A piece to be received: in the kept bytes if it is to be kept, else in a buffer from the pool."""
        if self.program.pass_ is FORWARD and piece in self.kept:
            return self._in_buffer(piece, Buffer(self.kept[piece]))
        return self._in_buffer(piece, self._new_buffer(piece), pooled=True)

    def _new_buffer(self, piece: Piece) -> Buffer:
        return self.pool.get(self.wire.bytes_of(piece.kind, self._tokens(piece)), self.context.device)

    # --- transfers

    def arrive(self, event: Await) -> None:
        self.pieces[event.piece].arrive()

    def post(self, event: Post) -> None:
        """Post a step's messages. Payloads are looked up first: a receive may bring a new version of the same piece."""
        is_early = event.exchanged in self.early
        messages = [m for m in event.messages if m.send or m.head is None or not is_early]
        exchange = self._exchange(event.exchanged) if event.exchanged else None
        if exchange is not None and self.transport.posts_receives_early and self.place.num_shards == 1:
            messages += self._early_receives()
        payloads = [self._payload(m) if m.send and m.head is None else None for m in messages]
        buffers, postings = [], []
        for message, payload in zip(messages, payloads, strict=True):
            if message.head is not None:
                made = self.early.get(message.pieces, exchange)
                assert made is not None
                parts = made.leaving if message.send else made.coming
                buffer, sent = parts.buffer, parts.of_rank[message.head]
            else:
                buffer = self._receive_buffer(message) if payload is None else payload
                sent = buffer.flat
            buffers.append(buffer)
            postings.append(Posting(message, sent, buffer))
        at_once = exchange is not None and exchange.at_once
        pending = self.transport.post(self.walk.steps[self.step], self.part, postings, at_once)
        for message, buffer, transfer in zip(messages, buffers, pending, strict=True):
            if message.send:  # receives are awaited when their pieces are needed
                append_new(self.open_sends, transfer.wait)
            append_new(buffer.sends if message.send else buffer.arrivals, transfer.wait)
        for message, payload in zip(messages, payloads, strict=True):  # the pool waits for their sends
            if payload is not None and message.pieces[0].kind in RESULTS:
                self.pool.put(payload)
        if exchange is not None:
            self.pool.put(exchange.leaving.buffer)

    def _early_receives(self) -> list[Message]:
        """Those of the results, to be posted while the inputs are on their way."""
        event = self.walk.next_results(self.step)
        if event is None or event.exchanged in self.early:
            return []
        self.early[event.exchanged] = self._new_exchange(event.exchanged)
        return [m for m in event.messages if m.head is not None and not m.send]

    def _exchange(self, pieces: tuple[Piece, ...]) -> Exchange:
        """Pack the parts that go out over heads. Parts that come in are taken out when they are needed."""
        exchange = self.early.pop(pieces, None) or self._new_exchange(pieces)
        exchange.inputs = {piece: self.pieces[piece].tensors for piece in pieces if piece.kind in INPUTS}
        results = {piece: self._final(piece) for piece in pieces if piece.kind in RESULTS}
        exchange.pack({piece: self.inputs[piece.kind] for piece in exchange.inputs}, results)
        for piece in exchange.inputs:
            self.pieces[piece].joins.append(exchange.take_inputs)
        self.exchanges += [exchange] if results else []
        return exchange

    def _new_exchange(self, pieces: tuple[Piece, ...]) -> Exchange:
        all_to_all = self.place.all_to_all_lane is not None and self.transport.has_all_to_all
        return Exchange(self.wire, pieces, self.pool, self.context.device, self.place.head, all_to_all)

    def _payload(self, message: Message) -> Buffer:
        """The bytes to send: an input piece, or a result, which is no longer ours afterwards."""
        (piece,) = message.pieces
        if piece.kind in RESULTS:
            result, arrived = self._result(piece), self.arrived.pop(piece, None)
            del self.results[piece]
            if arrived is None:
                return self._packed(piece, result.tensors())
            assert isinstance(result, Sums)
            result.add_to(self._views(arrived, piece))
            return arrived
        if piece.shard in self.program.bundles:
            self.pieces[piece] = self._bundle(piece)
        held = self.pieces[piece]
        if message.packs and held.buffer is None:
            held.buffer, held.pooled = self._packed(piece, held.tensors), True
        assert held.buffer is not None
        return held.buffer

    def _packed(self, piece: Piece, tensors: Sequence[Tensor]) -> Buffer:
        buffer = self._new_buffer(piece)
        for view, tensor in zip(self._views(buffer, piece), tensors, strict=True):
            view.copy_(tensor)
        return buffer

    def _bundle(self, piece: Piece) -> InputPiece:
        """A bundle to be sent, packed from the pieces that hold its tokens."""
        made, copies = self._new_piece(piece), self._copies(piece.shard)
        for shard in copies.shards:
            for view, tensor in zip(made.tensors, self.pieces[piece._replace(shard=shard)].tensors, strict=True):
                copies.pack(shard, tensor, view)
        return made

    def _copies(self, number: int) -> BundleCopies:
        key, device = (number, current_stream_id(self.context.device)), self.context.device
        if key not in self.copies:
            self.copies[key] = BundleCopies(self.program.bundles[number], device)
        return self.copies[key]

    def _receive_buffer(self, message: Message) -> Buffer:
        (piece,) = message.pieces
        if piece.kind in RESULTS:
            buffer = self.partials[message.number] = self._new_buffer(piece)
            return buffer
        self._release(piece)  # if we hold it, this message brings a new version
        self.pieces[piece] = held = self._new_piece(piece)
        assert held.buffer is not None
        return held.buffer

    def _release(self, piece: Piece) -> None:
        held = self.pieces.pop(piece, None)
        self.rows.pop(piece, None)
        if held is not None and held.pooled and held.buffer is not None:
            self.released.append(held.buffer)

    # --- compute

    def prepare(self, event: Prepare) -> None:
        """Convert a piece to the form that the kernel takes."""
        held, kernel = self.pieces[event.piece], self.context.kernel
        # lse and delta, one number per row, stay in the accumulation dtype, as kernels expect
        prepare = kernel.prepare_dout if event.piece.kind == "do" else kernel.prepare
        held.prepared = tuple(x if x.dim() == 3 else prepare(x) for x in held.tensors)
        if event.piece.kind == "do":
            lse, delta, dout = held.prepared
            self.rows[event.piece] = dout, kernel.prepare(surrogate_out(dout, delta)), lse

    def compute(self, event: Compute) -> None:
        if self.program.pass_ is FORWARD:
            self._forward(event)
        else:
            self._backward(event)

    def _forward(self, event: Compute) -> None:
        queries, keys = event.needs
        (q,), (k, v) = self.pieces[queries].prepared, self.pieces[keys].prepared
        (made,) = FORWARD.makes(event.block)
        partial_out = self._result(made)
        assert isinstance(partial_out, Partial)
        visible = self.tiles(event.block.row, event.block.column)
        self.context.kernel.forward(q, k, v, visible, self.context.scale, partial_out)
        if self.context.largest.numel():
            mine = self.wire.shares(self.context.largest, made)[self.place.head]
            mine.copy_(torch.maximum(mine, block_max_logits(q, k, visible, self.context.scale)))

    def _backward(self, event: Compute) -> None:
        queries, gradient, keys = event.needs
        (q,), (k, v) = self.pieces[queries].prepared, self.pieces[keys].prepared
        dout, out, lse = self.rows[gradient]
        by_row, by_key = map(self._result, BACKWARD.makes(event.block))
        assert isinstance(by_row, Sums)
        assert isinstance(by_key, Sums)
        (dq,), (dk, dv) = by_row.sums, by_key.sums
        visible = self.tiles(event.block.row, event.block.column)
        self.context.kernel.backward(dout, q, k, v, out, lse, visible, self.context.scale, (dq, dk, dv))

    def _result(self, piece: Piece) -> Partial | Sums:
        """The accumulator of a result, created on first use."""
        if piece not in self.results:
            shapes, acc = self.wire.result_shapes(piece.kind, self._tokens(piece)), self.wire.acc
            device = self.context.device
            self.results[piece] = Partial(shapes[0], acc, device) if piece.kind == "out" else Sums(shapes, acc, device)
        return self.results[piece]

    def _final(self, piece: Piece) -> tuple[Tensor, ...]:
        """The tensors of a result to which nothing more is added."""
        result, arrived = self._result(piece), self.arrived.pop(piece, None)
        if arrived is not None:
            result.take(self._views(arrived, piece))
            self.pool.put(arrived)
        return result.tensors()

    def combine(self, event: Combine) -> None:
        buffer, piece = self.partials.pop(event.message), event.piece
        buffer.arrive()
        views = self._views(buffer, piece)
        if piece.shard in self.program.bundles:
            copies = self._copies(piece.shard)
            for shard in copies.shards:
                result = self._result(piece._replace(shard=shard))
                assert isinstance(result, Sums)
                for total, view in zip(result.values(), views, strict=True):
                    copies.add(shard, view, total)
        elif isinstance(result := self._result(piece), Sums) and piece not in self.arrived:
            self.arrived[piece] = buffer
            return
        else:
            result.take(views)
        self.pool.put(buffer)

"""The executor: runs one rank's program over torch.distributed.

It handles the events of a walk (`startrail.schedule.walk`) with buffers, messages and kernels, and does no rank
arithmetic: the program says which peer comes when. Transfers are posted before the blocks that hide them and awaited
when something needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from startrail._compat import is_profiling
from startrail.comm.consensus import Consensus
from startrail.comm.counters import Counters
from startrail.comm.lanes import Lanes
from startrail.comm.transfers import PendingTransfer, TransferContext, TransferMonitor
from startrail.comm.watchdog import watch
from startrail.engine.buffers import Buffer, BufferPool
from startrail.engine.exchange import Exchange
from startrail.engine.wire import Wire
from startrail.geometry.tiles import Tile
from startrail.kernels import Kernel, Partial, Sums, block_max_logits, surrogate_out
from startrail.kernels.device import on_device
from startrail.schedule.program import Program
from startrail.schedule.values import BACKWARD, FORWARD, INPUTS, RESULTS, Piece
from startrail.schedule.walk import (
    Await,
    Combine,
    Compute,
    Handlers,
    Message,
    Post,
    Prepare,
    WalkStep,
    handlers_of,
    walk_of,
)


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


@dataclass
class PassContext:
    """The settings of one pass of an attention call. ``kept`` maps each kept piece to its slice of the kept bytes."""

    wire: Wire
    kept: Mapping[Piece, slice]
    kernel: Kernel
    tiles: Callable[[int, int], tuple[Tile, ...]]
    scale: float
    tag: int
    device: torch.device
    # (batch, heads) the largest logits so far, or empty if the caller does not ask for them
    largest: Tensor = field(default_factory=partial(torch.empty, 0, 0))


class Executor:
    """Runs programs for one rank. It keeps only buffers between calls. After an error it must not be used again: its
    lanes may be closed, and transfers may still write to its buffers."""

    def __init__(self, lanes: Lanes | None, consensus: Consensus, counters: Counters) -> None:
        self._transfers = None if lanes is None else TransferContext(lanes, consensus, counters)
        self.counters = counters
        self.pool = BufferPool()
        self.running = False  # a pass has begun and not ended
        self.monitor = TransferMonitor(self.transfers) if lanes is not None and lanes.is_monitored else None
        if self.monitor is not None:
            watch(self.monitor)

    @property
    def device(self) -> torch.device | None:
        """The device of the lanes; None without lanes."""
        return None if self._transfers is None else self._transfers.lanes.device

    @property
    def transfers(self) -> TransferContext:
        assert self._transfers is not None, "a single rank has no peers"
        return self._transfers

    @property
    def lanes(self) -> Lanes:
        return self.transfers.lanes

    def abandon(self, error: BaseException) -> None:
        """Clean up after an error, before the executor is dropped.

        Where waits never fail, this ends transfers that might otherwise never end: those of a pass that broke off, and
        all transfers if a peer may be gone. In any other case transfers of earlier passes still arrive.
        """
        if self.monitor is not None and (self.running or not isinstance(error, ValueError)):
            self.monitor.abandon()

    def run(
        self, context: PassContext, program: Program, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        """Run one pass. ``inputs`` are this rank's local tensors by kind: q, kv = (k, v), do = (lse, delta, dout).

        The forward pass leaves pieces in ``kept`` for its backward pass. Returns local results by kind:
        out = (lse, out), dq, dkv = (dk, dv).
        """
        with on_device(context.device):
            return self._run(context, program, inputs, kept)

    def _run(
        self, context: PassContext, program: Program, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        if context.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("attention over several ranks cannot be captured in a CUDA graph: its buffers move on")
        total, device = self.counters.total, context.device
        start = total.start(device)
        self.running = True
        if self.monitor is not None:
            self.monitor.begin_pass(context.tag + 1, program)
        run = _PassRun(self, context, program, inputs, kept)
        try:
            results = run.walk()
        finally:
            run.pieces.clear()  # pieces that have not arrived hold a reference to the pass
        if self._transfers is not None:
            self.lanes.mark_if_aborted([context.largest, *(x for tensors in results.values() for x in tensors)])
        if self.monitor is not None and (reason := self.monitor.end_pass()):
            raise self.transfers.explain(program, len(program.steps) - 1, "comparing calls", RuntimeError(reason))
        self.pool.settle()
        total.stop(start, device)
        self.running = False
        return results


class _PassRun:
    """One pass: handles the events of its program's walk."""

    def __init__(
        self,
        executor: Executor,
        context: PassContext,
        program: Program,
        inputs: Mapping[str, tuple[Tensor, ...]],
        kept: Tensor,
    ) -> None:
        self.executor, self.context, self.program = executor, context, program
        self.wire, self.place, self.pool = context.wire, program.place, executor.pool
        self.inputs = inputs
        self.over_heads = self.place.num_heads > 1
        self.pieces: dict[Piece, InputPiece] = {}
        self.rows: dict[Piece, tuple[Tensor, Tensor, Tensor]] = {}  # dout, out, lse as the backward kernel takes them
        self.results: dict[Piece, Partial | Sums] = {}
        self.partials: dict[int, Buffer] = {}  # partial results in flight, by message
        self.exchanges: dict[Piece, Exchange] = {}  # bring the results of our own tokens from the ranks of all heads
        self.open_sends: list[Callable[[], None]] = []
        self.released: list[Buffer] = []  # reusable from the next step on: this step may still send them
        self.step = 0
        self.kept = {piece: kept[part] for piece, part in context.kept.items()}
        self._take_inputs()

    # --- the walk

    def walk(self) -> dict[str, tuple[Tensor, ...]]:
        walk, handlers = walk_of(self.program), handlers_of(self)
        for step, released in zip(walk.steps, self.program.last_uses, strict=True):
            self.step = step.number
            if is_profiling():
                with record_function(step.label):
                    self._step(step, released, handlers)
            else:
                self._step(step, released, handlers)
        return self._finish(walk.results)

    def _step(self, step: WalkStep, released: Sequence[Piece], handlers: Handlers) -> None:
        for event in step.events:
            handlers[type(event)](event)
        for piece in released:
            self._release(piece)
        for buffer in self.released:
            self.pool.put(buffer)
        self.released.clear()

    def _finish(self, pieces: Sequence[Piece]) -> dict[str, tuple[Tensor, ...]]:
        """Local results in the user's layout and dtype. Every transfer of this pass has ended when it returns."""
        results = {kind: self.wire.local_results(kind, self.context.device) for kind in self.program.pass_.results}
        for piece in pieces:
            local = results[piece.kind]
            if self.over_heads:
                self.exchanges[piece].take_results(piece, local)
                continue
            for target, source in zip(local, self._result(piece).tensors(), strict=True):
                self.wire.shares(target, piece)[0].copy_(source)
        for wait in self.open_sends:
            wait()
        return results

    # --- inputs

    def _take_inputs(self) -> None:
        """Own pieces are views of the user's tensors, or whole pieces in buffers if heads are exchanged."""
        for piece in self.program.given:
            if piece not in self.program.own_inputs:
                self.pieces[piece] = self._in_buffer(piece, Buffer(self.kept[piece]))
            elif self.over_heads:
                self.pieces[piece] = self._new_piece(piece)
            else:
                tensors = tuple(self.wire.shares(x, piece)[0] for x in self.inputs[piece.kind])
                self.pieces[piece] = InputPiece(tensors)

    def _in_buffer(self, piece: Piece, buffer: Buffer, pooled: bool = False) -> InputPiece:
        return InputPiece(self._views(buffer, piece.kind), buffer, pooled)

    def _views(self, buffer: Buffer, kind: str) -> tuple[Tensor, ...]:
        return buffer.views((kind, self.wire.format), partial(self.wire.views, kind=kind))

    def _new_piece(self, piece: Piece) -> InputPiece:
        """A piece to be received: in the kept bytes if it is to be kept, else in a buffer from the pool."""
        if self.program.pass_ is FORWARD and piece in self.kept:
            return self._in_buffer(piece, Buffer(self.kept[piece]))
        return self._in_buffer(piece, self._new_buffer(piece.kind), pooled=True)

    def _new_buffer(self, kind: str) -> Buffer:
        return self.pool.get(self.wire.nbytes[kind], self.context.device)

    # --- transfers

    def arrive(self, event: Await) -> None:
        self.pieces[event.piece].arrive()

    def post(self, event: Post) -> None:
        """Post a step's messages. Payloads are looked up first: a receive may bring a new version of the same piece."""
        messages, lanes = event.messages, self.executor.lanes
        exchange = self._exchange(event.exchanged) if event.exchanged else None
        payloads = [self._payload(m) if m.send and m.head is None else None for m in messages]
        buffers, bytes_of = [], []
        for message, payload in zip(messages, payloads, strict=True):
            if message.head is not None:
                assert exchange is not None
                parts = exchange.leaving if message.send else exchange.coming
                buffers.append(parts.buffer)
                bytes_of.append(parts.of_rank[message.head])
            else:
                buffers.append(self._receive_buffer(message) if payload is None else payload)
                bytes_of.append(buffers[-1].flat)
        all_to_all = None
        if exchange is not None and exchange.at_once and self.place.all_to_all_lane is not None:
            all_to_all = self.place.all_to_all_lane, exchange.coming.buffer.flat, exchange.leaving.buffer.flat
        try:
            works = lanes.post(messages, bytes_of, self.context.tag, all_to_all)
        except RuntimeError as error:
            names = ", ".join(map(lanes.describe, messages))
            raise self.executor.transfers.explain(self.program, self.step, f"posting {names}", error) from error
        self._track(messages, buffers, bytes_of, works)
        for message, payload in zip(messages, payloads, strict=True):  # the pool waits for their sends
            if payload is not None and message.pieces[0].kind in RESULTS:
                self.pool.put(payload)
        if exchange is not None:
            self.pool.put(exchange.leaving.buffer)

    def _track(
        self, messages: Sequence[Message], buffers: list[Buffer], bytes_of: list[Tensor], works: list[dist.Work]
    ) -> None:
        """Attach waits to the buffers, and count the bytes sent."""
        executor, last = self.executor, None
        for message, flat, buffer, work in zip(messages, bytes_of, buffers, works, strict=True):
            if last is None or last.work is not work:
                last = PendingTransfer(executor.transfers, self.program, self.step, work)
                if executor.monitor is not None:
                    executor.monitor.pending.append(last)
            last.messages.append(message)
            if message.send:
                if not (self.open_sends and self.open_sends[-1] == last.wait):
                    self.open_sends.append(last.wait)  # receives are awaited when their pieces are needed
                buffer.sends.append(last.wait)
                executor.counters.count_send(executor.lanes.names[message.lane], flat.numel())
            else:
                buffer.arrivals.append(last.wait)

    def _exchange(self, pieces: tuple[Piece, ...]) -> Exchange:
        """Pack the parts that go out over heads. Parts that come in are taken out when they are needed."""
        all_to_all = self.place.all_to_all_lane is not None and not self.executor.lanes.has_tags
        exchange = Exchange(self.wire, pieces, self.pool, self.context.device, self.place.head, all_to_all)
        for piece in pieces:
            if piece.kind in INPUTS:
                exchange.send_inputs(piece, self.inputs[piece.kind])
                held = self.pieces[piece]
                held.joins.append(partial(exchange.take_inputs, piece, held.tensors))
            else:
                exchange.send_results(piece, self._result(piece).tensors())
                self.exchanges[piece] = exchange
        return exchange

    def _payload(self, message: Message) -> Buffer:
        """The bytes to send: an input piece, or a result, which is no longer ours afterwards."""
        (piece,) = message.pieces
        if piece.kind in RESULTS:
            result = self._result(piece)
            del self.results[piece]
            return self._packed(piece.kind, result.tensors())
        held = self.pieces[piece]
        if message.packs:
            held.buffer, held.pooled = self._packed(piece.kind, held.tensors), True
        assert held.buffer is not None
        return held.buffer

    def _packed(self, kind: str, tensors: Sequence[Tensor]) -> Buffer:
        buffer = self._new_buffer(kind)
        for view, tensor in zip(self._views(buffer, kind), tensors, strict=True):
            view.copy_(tensor)
        return buffer

    def _receive_buffer(self, message: Message) -> Buffer:
        (piece,) = message.pieces
        if piece.kind in RESULTS:
            buffer = self.partials[message.number] = self._new_buffer(piece.kind)
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
        visible = self.context.tiles(event.block.row, event.block.column)
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
        visible = self.context.tiles(event.block.row, event.block.column)
        self.context.kernel.backward(dout, q, k, v, out, lse, visible, self.context.scale, (dq, dk, dv))

    def _result(self, piece: Piece) -> Partial | Sums:
        """The accumulator of a result, created on first use."""
        if piece not in self.results:
            shapes, acc, device = self.wire.result_shapes(piece.kind), self.wire.acc, self.context.device
            self.results[piece] = Partial(shapes[0], acc, device) if piece.kind == "out" else Sums(shapes, acc, device)
        return self.results[piece]

    def combine(self, event: Combine) -> None:
        buffer = self.partials.pop(event.message)
        buffer.arrive()
        self._result(event.piece).take(self._views(buffer, event.piece.kind))
        self.pool.put(buffer)

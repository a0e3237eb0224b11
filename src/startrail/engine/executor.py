"""The executor: walks one rank's program over torch.distributed.

It knows pieces, buffers and messages, and repeats no rank arithmetic: whom to talk to and in which order is in the
program. Transfers are posted before the blocks that hide them and waited for when something needs them.
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
from startrail.comm.lanes import Lanes, Message
from startrail.comm.transfers import PendingTransfer, TransferContext, TransferMonitor
from startrail.comm.watchdog import watch
from startrail.engine.buffers import Buffer, BufferPool
from startrail.engine.exchange import Exchange
from startrail.engine.lowering import CompiledBlock, CompiledStep, compile_program, heads_of
from startrail.engine.wire import Wire
from startrail.geometry.tiles import Tile
from startrail.kernels import Kernel, Partial, Sums, block_max_logits, surrogate_out
from startrail.kernels.device import on_device
from startrail.schedule.program import Program
from startrail.schedule.values import FORWARD, INPUTS, RESULTS, Merge, Piece


class InputPiece:
    """An input piece that this rank has, or is about to receive: views of the user's tensors, or a buffer of its own.

    ``arrivals`` bring what the tensors hold; ``prepared`` are these tensors as the kernel takes them.
    """

    def __init__(self, tensors: tuple[Tensor, ...], buffer: Buffer | None = None, pooled: bool = False) -> None:
        self.tensors, self.buffer = tensors, buffer
        self.pooled = pooled  # whether the buffer goes back to the pool when the piece is no longer needed
        self.joins: list[Callable[[], None]] = []  # parts that came over heads
        self.prepared: tuple[Tensor, ...] | None = None

    def arrive(self) -> None:
        if self.buffer is not None:
            self.buffer.arrive()
        joins, self.joins = self.joins, []
        for join in joins:
            join()


@dataclass
class PassContext:
    """What one pass of an attention call is run with. ``kept`` says where in the kept bytes each piece lies."""

    wire: Wire
    kept: Mapping[Piece, slice]
    kernel: Kernel
    tiles: Callable[[int, int], tuple[Tile, ...]]
    scale: float
    tag: int
    device: torch.device
    # (batch, heads) the largest logits so far, or empty if nobody asks for them
    largest: Tensor = field(default_factory=partial(torch.empty, 0, 0))


class Executor:
    """Runs programs for one rank. Keeps buffers between calls, nothing else; after an error it must not be used again,
    since its lanes may be closed and its buffers still be written to."""

    def __init__(self, lanes: Lanes | None, consensus: Consensus, counters: Counters) -> None:
        self._context = None if lanes is None else TransferContext(lanes, consensus, counters)
        self.counters = counters
        self.pool = BufferPool()
        self.running = False  # whether a pass has begun and not ended
        self.monitor = TransferMonitor(self.context) if lanes is not None and lanes.is_monitored else None
        if self.monitor is not None:
            watch(self.monitor)

    @property
    def device(self) -> torch.device | None:
        """The device that the lanes are for; None where there are none."""
        return None if self._context is None else self._context.lanes.device

    @property
    def context(self) -> TransferContext:
        assert self._context is not None, "a single rank has no lanes"
        return self._context

    @property
    def lanes(self) -> Lanes:
        return self.context.lanes

    def abandon(self, error: BaseException) -> None:
        """After an error, before it is dropped. Where waits never fail, transfers that may never end are ended: those
        of a pass that broke off, and all if a peer may be gone. Without either, those of earlier passes arrive."""
        if self.monitor is not None and (self.running or not isinstance(error, ValueError)):
            self.monitor.abandon()

    def run(
        self, job: PassContext, program: Program, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        """One pass. ``inputs`` are this rank's local tensors by kind: q, kv = (k, v), do = (lse, delta, dout).

        ``kept`` is the buffer in which the forward pass leaves what its backward pass finds. Returns local results by
        kind: out = (lse, out), dq, dkv = (dk, dv).
        """
        with on_device(job.device):
            return self._run(job, program, inputs, kept)

    def _run(
        self, job: PassContext, program: Program, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        if job.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("attention over several ranks cannot be captured in a CUDA graph: its buffers move on")
        total, device = self.counters.total, job.device
        start = total.start(device)
        self.running = True
        if self.monitor is not None:
            self.monitor.begin_pass(job.tag + 1)
        run = _PassRun(self, job, program, inputs, kept)
        try:
            run.walk()
            results = run.finish()
        finally:
            run.pieces.clear()  # what has not arrived knows its pass
        if self.monitor is not None and (reason := self.monitor.end_pass()):
            raise self.context.explain(program, len(program.steps) - 1, "comparing calls", RuntimeError(reason))
        self.pool.settle()
        total.stop(start, device)
        self.running = False
        return results


class _PassRun:
    """One pass on its way through its program."""

    def __init__(
        self,
        executor: Executor,
        job: PassContext,
        program: Program,
        inputs: Mapping[str, tuple[Tensor, ...]],
        kept: Tensor,
    ) -> None:
        self.executor, self.job, self.program = executor, job, program
        self.wire, self.place, self.pool = job.wire, program.place, executor.pool
        self.inputs = inputs
        self.exchanges = self.place.num_heads > 1
        self.pieces: dict[Piece, InputPiece] = {}
        self.rows: dict[Piece, tuple[Tensor, Tensor, Tensor]] = {}  # dout, out, lse as the backward kernel takes them
        self.results: dict[Piece, Partial | Sums] = {}
        self.incoming: dict[tuple[Piece, int], list[Buffer]] = {}
        self.coming_home: list[tuple[Piece, Exchange]] = []  # results of our own tokens, from the ranks of all heads
        self.open: list[Callable[[], None]] = []
        self.released: list[Buffer] = []  # may be used again from the next step on: this one may still send them
        self.index = 0
        self.kept = {piece: kept[part] for piece, part in job.kept.items()}
        self._take_inputs()

    # --- the walk

    def walk(self) -> None:
        compute = self._forward if self.program.pass_ is FORWARD else self._backward
        for index, compiled in enumerate(compile_program(self.program)):
            self.index = index
            if is_profiling():
                with record_function(compiled.label):
                    self._step(compiled, compute)
            else:
                self._step(compiled, compute)

    def _step(self, compiled: CompiledStep, compute: Callable[[CompiledBlock], None]) -> None:
        for piece in compiled.step.after:
            self.pieces[piece].arrive()
        if compiled.messages:
            self._post(compiled)
        for block in compiled.blocks:
            compute(block)
        for merge in compiled.step.merges:
            self._merge(merge)
        for piece in compiled.done:
            self._release(piece)
        for buffer in self.released:
            self.pool.put(buffer)
        self.released.clear()

    def finish(self) -> dict[str, tuple[Tensor, ...]]:
        """Local results in the user's layout and dtype; every transfer of this pass has ended."""
        kinds = self.program.pass_.results
        results = {kind: self.wire.local_results(kind, self.job.device) for kind in kinds}
        for piece, exchange in self.coming_home:
            exchange.take_results(piece, results[piece.kind])
        for piece in () if self.exchanges else self.program.own(kinds):
            whole = self._result(piece).tensors()
            for target, source in zip(results[piece.kind], whole, strict=True):
                self.wire.shares(target, piece)[0].copy_(source)
        for wait in self.open:
            wait()
        return results

    # --- inputs

    def _take_inputs(self) -> None:
        """Own pieces are views of the user's tensors; after an exchange over heads they are whole pieces of their
        own."""
        for piece in self.program.given:
            if piece not in self.program.own_inputs:
                self.pieces[piece] = self._held(piece, Buffer(self.kept[piece]))
            elif self.exchanges:
                self.pieces[piece] = self._new_held(piece)
            else:
                tensors = tuple(self.wire.shares(x, piece)[0] for x in self.inputs[piece.kind])
                self.pieces[piece] = InputPiece(tensors)

    def _held(self, piece: Piece, buffer: Buffer, pooled: bool = False) -> InputPiece:
        return InputPiece(self._views(buffer, piece.kind), buffer, pooled)

    def _views(self, buffer: Buffer, kind: str) -> tuple[Tensor, ...]:
        return buffer.views((kind, self.wire.format), partial(self.wire.views, kind=kind))

    def _new_held(self, piece: Piece) -> InputPiece:
        """Room for a piece: in the kept buffer if it is to be kept, else from the pool."""
        if self.program.pass_ is FORWARD and piece in self.kept:
            return self._held(piece, Buffer(self.kept[piece]))
        return self._held(piece, self._new_buffer(piece.kind), pooled=True)

    def _new_buffer(self, kind: str) -> Buffer:
        return self.pool.get(self.wire.nbytes[kind], self.job.device)

    # --- transfers

    def _post(self, compiled: CompiledStep) -> None:
        """Post a step's messages. What is sent is looked up first: a receive may bring the same piece anew."""
        messages, lanes = compiled.messages, self.executor.lanes
        exchange = self._exchange(compiled) if compiled.exchanged else None
        leaving = [self._payload(m.pieces[0]) if m.send and not m.over_heads else None for m in messages]
        buffers, bytes_of, heads = [], [], heads_of(self.program)
        for message, payload in zip(messages, leaving, strict=True):
            if message.over_heads:
                assert exchange is not None
                parts = exchange.leaving if message.send else exchange.coming
                buffers.append(parts.buffer)
                bytes_of.append(parts.of_rank[heads[message.peer]])
            else:
                buffers.append(self._room_for(message) if payload is None else payload)
                bytes_of.append(buffers[-1].flat)
        at_once = None
        if exchange is not None and exchange.at_once and compiled.all_to_all is not None:
            at_once = compiled.all_to_all, exchange.coming.buffer.flat, exchange.leaving.buffer.flat
        try:
            works = lanes.post(messages, bytes_of, self.job.tag, at_once)
        except RuntimeError as error:
            names = ", ".join(map(lanes.describe, messages))
            raise self.executor.context.explain(self.program, self.index, f"posting {names}", error) from error
        self._follow(messages, buffers, bytes_of, works)
        for message, payload in zip(messages, leaving, strict=True):  # packed results: free once their sends have ended
            if payload is not None and message.pieces[0].kind in RESULTS:
                self.pool.put(payload)
        if exchange is not None:
            self.pool.put(exchange.leaving.buffer)

    def _follow(
        self, messages: Sequence[Message], buffers: list[Buffer], bytes_of: list[Tensor], works: list[dist.Work]
    ) -> None:
        """Remember what must be waited for, and count what was sent."""
        executor, last = self.executor, None
        for message, flat, buffer, work in zip(messages, bytes_of, buffers, works, strict=True):
            if last is None or last.work is not work:
                last = PendingTransfer(executor.context, self.program, self.index, work)
                if executor.monitor is not None:
                    executor.monitor.pending.append(last)
            last.messages.append(message)
            if message.send:
                if not (self.open and self.open[-1] == last.wait):
                    self.open.append(last.wait)  # what is received is waited for by whoever needs it
                buffer.sends.append(last.wait)
                executor.counters.count_send(executor.lanes.names[message.lane], flat.numel())
            else:
                buffer.arrivals.append(last.wait)

    def _exchange(self, compiled: CompiledStep) -> Exchange:
        """What goes out over heads is packed now; what comes in is taken when it is needed."""
        pieces, at_once = compiled.exchanged, compiled.all_to_all is not None and not self.executor.lanes.has_tags
        exchange = Exchange(self.wire, pieces, self.pool, self.job.device, self.place.head, at_once)
        for piece in pieces:
            if piece.kind in INPUTS:
                exchange.send_inputs(piece, self.inputs[piece.kind])
                held = self.pieces[piece]
                held.joins.append(partial(exchange.take_inputs, piece, held.tensors))
            else:
                exchange.send_results(piece, self._result(piece).tensors())
                self.coming_home.append((piece, exchange))
        return exchange

    def _payload(self, piece: Piece) -> Buffer:
        """The bytes to send: of a piece that we hold, or of a result that leaves us."""
        if piece.kind in RESULTS:
            leaving = self._result(piece)
            del self.results[piece]
            return self._packed(piece.kind, leaving.tensors())
        held = self.pieces[piece]
        held.arrive()
        if held.buffer is None:
            held.buffer, held.pooled = self._packed(piece.kind, held.tensors), True
        return held.buffer

    def _packed(self, kind: str, tensors: Sequence[Tensor]) -> Buffer:
        buffer = self._new_buffer(kind)
        for view, tensor in zip(self._views(buffer, kind), tensors, strict=True):
            view.copy_(tensor)
        return buffer

    def _room_for(self, message: Message) -> Buffer:
        (piece,) = message.pieces
        if piece.kind in RESULTS:
            buffer = self._new_buffer(piece.kind)
            self.incoming.setdefault((piece, message.peer), []).append(buffer)
            return buffer
        self._release(piece)  # a piece that comes anew
        self.pieces[piece] = held = self._new_held(piece)
        assert held.buffer is not None
        return held.buffer

    def _release(self, piece: Piece) -> None:
        held = self.pieces.pop(piece, None)
        self.rows.pop(piece, None)
        if held is not None and held.pooled and held.buffer is not None:
            self.released.append(held.buffer)

    # --- compute

    def _ready(self, piece: Piece) -> tuple[Tensor, ...]:
        """A piece's tensors as the kernel takes them."""
        held = self.pieces[piece]
        if held.prepared is None:
            held.arrive()
            # lse and delta, one number a row, stay as wide as sums are: kernels take them so
            held.prepared = tuple(x if x.dim() == 3 else self.job.kernel.prepare(x) for x in held.tensors)
        return held.prepared

    def _forward(self, block: CompiledBlock) -> None:
        (q,), (k, v) = map(self._ready, block.needs)
        (made,) = block.makes
        partial_out = self._result(made)
        assert isinstance(partial_out, Partial)
        visible = self.job.tiles(block.row, block.column)
        self.job.kernel.forward(q, k, v, visible, self.job.scale, partial_out)
        if self.job.largest.numel():
            mine = self.wire.shares(self.job.largest, made)[self.place.head]
            mine.copy_(torch.maximum(mine, block_max_logits(q, k, visible, self.job.scale)))

    def _backward(self, block: CompiledBlock) -> None:
        queries, gradient, keys = block.needs
        (q,), (k, v) = self._ready(queries), self._ready(keys)
        if gradient not in self.rows:
            lse, delta, dout = self._ready(gradient)
            self.rows[gradient] = dout, self.job.kernel.prepare(surrogate_out(dout, delta)), lse
        dout, out, lse = self.rows[gradient]
        by_row, by_key = map(self._result, block.makes)
        assert isinstance(by_row, Sums)
        assert isinstance(by_key, Sums)
        (dq,), (dk, dv) = by_row.sums, by_key.sums
        visible = self.job.tiles(block.row, block.column)
        self.job.kernel.backward(dout, q, k, v, out, lse, visible, self.job.scale, (dq, dk, dv))

    def _result(self, piece: Piece) -> Partial | Sums:
        """The accumulator of a result, made when it is first needed."""
        if piece not in self.results:
            shapes, acc, device = self.wire.result_shapes(piece.kind), self.wire.acc, self.job.device
            self.results[piece] = Partial(shapes[0], acc, device) if piece.kind == "out" else Sums(shapes, acc, device)
        return self.results[piece]

    def _merge(self, merge: Merge) -> None:
        buffer = self.incoming[merge.piece, merge.peer].pop(0)
        buffer.arrive()
        self._result(merge.piece).take(self._views(buffer, merge.piece.kind))
        self.pool.put(buffer)

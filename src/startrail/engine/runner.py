"""``PassRunner``: turns the events of compiled programs into buffers, messages and calls of a kernel.

It does no rank arithmetic: a program says which peer comes when. What depends only on the compiled call is computed
once (``PreparedPass``): which action handles each event, and where pieces, messages and their sizes are found.
Transfers are posted before the blocks that hide them, and awaited when something needs them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from startrail._compat import is_profiling
from startrail.compile.call import CompiledCall, Part
from startrail.engine.buffers import Buffer, BufferPool, BundleCopies, InputPiece
from startrail.engine.exchange import Exchange
from startrail.engine.wire import Tensors, Wire
from startrail.kernels import Partial, Sums
from startrail.kernels.device import current_stream_id, on_device
from startrail.schedule.program import Program
from startrail.schedule.values import Block, Pass, Piece
from startrail.schedule.walk import (
    Await,
    Combine,
    Compute,
    Event,
    Finish,
    Message,
    Post,
    Prepare,
    WalkStep,
    walk_of,
)
from startrail.transport.counters import Counters
from startrail.transport.interface import Compare, MessageSet, Pending, Rehearsal, Transport

PartInputs = Mapping[str, Tensors]  # a part's tensors by kind, of this rank's tokens
PartResults = dict[str, Tensors]


class BlockKernel(ABC):
    """The torch side of a kind of call: what its compute events run."""

    compiles = False  # the first pass of a kind compiles kernels, which may take minutes

    def for_rehearsal(self) -> BlockKernel:
        """A kernel that launches the same, and whose other results do not count."""
        return self

    @abstractmethod
    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        """The tensors of an input piece as ``block`` takes them. All blocks that read the piece share them."""

    @abstractmethod
    def new_result(self, kind: str, shapes: Sequence[Sequence[int]]) -> Partial | Sums:
        """An empty running result, as blocks add to it."""

    @abstractmethod
    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        """Compute one block from its prepared inputs, and add to its results; both in the order of the pass."""

    extra_results: Sequence[Tensor] = ()  # other tensors that blocks write

    @abstractmethod
    def outputs(self, part: PreparedPart, kind: str) -> Tensors:
        """Empty tensors for a result of this rank's own tokens, as the caller gets it."""


# --- what is computed once for each compiled call


class Slot(NamedTuple):
    """Where a part's run holds a piece, and its size."""

    number: int
    piece: Piece
    tokens: int
    nbytes: int
    views: tuple[object, Callable[[Tensor], Tensors]]  # how its bytes are viewed, with the key of the views' cache
    shapes: list[tuple[int, ...]]  # of the sums that it is accumulated in, if it is a result
    kept: slice | None


class PlainMessage(NamedTuple):
    """A message that carries one whole piece, or a bundle."""

    message: Message
    slot: Slot
    is_result: bool
    is_bundle: bool


class ExchangedPieces(NamedTuple):
    """What a step exchanges over heads: pieces, and the messages that carry their parts."""

    pieces: tuple[Piece, ...]
    inputs: tuple[tuple[int, Slot], ...]  # with their places among the pieces
    results: tuple[tuple[int, Slot], ...]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    nbytes: int  # of one message


class PreparedPost:
    """What a step posts. ``early`` are results whose receives may be posted with this exchange."""

    def __init__(
        self, step: WalkStep, plain: Sequence[PlainMessage], exchanged: ExchangedPieces | None,
        early: ExchangedPieces | None,
    ) -> None:  # fmt: skip
        self.step, self.exchanged, self.early = step, exchanged, early
        self.receives = [each for each in plain if not each.message.send]
        self.sends = [each for each in plain if each.message.send]
        self._sets: dict[tuple[bool, bool], MessageSet] = {}

    def messages(self, sends_only: bool, with_early: bool) -> MessageSet:
        """The messages: those of the exchange, without its receives if these are posted already; receives of early
        results; whole pieces. Each kind of the first three lies in a buffer of its own."""
        key = sends_only, with_early
        if key not in self._sets:
            parts: list[tuple[Sequence[Message], int]] = []  # with the bytes of each message
            if self.exchanged is not None:
                parts += [(() if sends_only else self.exchanged.receives, self.exchanged.nbytes)]
                parts += [(self.exchanged.sends, self.exchanged.nbytes)]
            if with_early and self.early is not None:
                parts += [(self.early.receives, self.early.nbytes)]
            parts += [((plain.message,), plain.slot.nbytes) for plain in (*self.receives, *self.sends)]
            parts = [(messages, nbytes) for messages, nbytes in parts if messages]
            self._sets[key] = MessageSet(
                [message for messages, _ in parts for message in messages],
                [nbytes for messages, nbytes in parts for _ in messages],
                [number for number, (messages, _) in enumerate(parts) for _ in messages],
            )
        return self._sets[key]


Action = tuple[Callable[..., None], Any, Event]  # a method of PartRun, its argument, and the event that it handles


class PreparedStep(NamedTuple):
    actions: tuple[Action, ...]
    released: tuple[Slot, ...]  # inputs that no later step uses
    walk: WalkStep


class PreparedPart:
    """One program of a pass, ready to run."""

    def __init__(self, part: Part, number: int, program: Program, wire: Wire, kept: Mapping[Piece, slice]) -> None:
        self.part, self.number, self.program, self.wire, self.kept = part, number, program, wire, kept
        self.place, self.walk = program.place, walk_of(program)
        self.over_heads = self.place.num_heads > 1
        self.copies: dict[tuple[int, int], BundleCopies] = {}  # of bundles, by number and stream
        self._slots: dict[Piece, Slot] = {}
        self.given = [(self.slot(piece), piece in program.own_inputs) for piece in program.given]
        self.steps = [self._step(step) for step in self.walk.steps]
        self.results = [self.slot(piece) for piece in (() if self.over_heads else self.walk.results)]
        self.num_slots = len(self._slots)

    def slot(self, piece: Piece) -> Slot:
        if piece not in self._slots:
            tokens = self.part.tokens_of(self.program, piece)
            views = (piece.kind, tokens, self.wire.format), partial(self.wire.views, kind=piece.kind, tokens=tokens)
            nbytes = self.part.sizes.nbytes_of(piece.kind, tokens)
            shapes, kept = self.part.sizes.shapes(piece.kind, tokens), self.kept.get(piece)
            self._slots[piece] = Slot(len(self._slots), piece, tokens, nbytes, views, shapes, kept)
        return self._slots[piece]

    def _hold_sources(self, bundle: Piece) -> None:
        """Give slots to the pieces that a bundle's tokens belong to; no event may name them before it is sent."""
        for source in self.program.bundles[bundle.shard].sources if bundle.shard in self.program.bundles else ():
            self.slot(bundle._replace(shard=source.shard))

    def _step(self, step: WalkStep) -> PreparedStep:
        released = tuple(self.slot(piece) for piece in self.program.last_uses[step.number])
        return PreparedStep(tuple(self._action(event, step.number) for event in step.events), released, step)

    def _action(self, event: Event, step: int) -> Action:
        match event:
            case Await():
                return PartRun.arrive, self.slot(event.piece), event
            case Post():
                return PartRun.post, self._post(event, step), event
            case Prepare():
                return PartRun.prepare, self.slot(event.piece), event
            case Compute():
                needs = tuple(self.slot(piece) for piece in event.needs)
                makes = tuple(self.slot(piece) for piece in self.program.pass_.makes(event.block))
                return PartRun.compute, (event.block, needs, makes), event
            case Combine():
                self._hold_sources(event.piece)
                return PartRun.combine, (event.message, self.slot(event.piece)), event

    def _post(self, event: Post, step: int) -> PreparedPost:
        results, bundles = self.program.pass_.results, self.program.bundles
        plain = []
        for message in event.messages:
            if message.head is None:
                (piece,) = message.pieces
                self._hold_sources(piece)
                plain.append(PlainMessage(message, self.slot(piece), piece.kind in results, piece.shard in bundles))
        exchanged, early = self._exchanged(event), None
        if exchanged is not None and self.place.num_shards == 1:
            early = self._exchanged(self.walk.next_results(step))
        return PreparedPost(self.walk.steps[step], plain, exchanged, early)

    def _exchanged(self, event: Post | None) -> ExchangedPieces | None:
        if event is None or not event.exchanged:
            return None
        results = self.program.pass_.results
        slots = [(at, self.slot(piece)) for at, piece in enumerate(event.exchanged)]
        messages = [message for message in event.messages if message.head is not None]
        return ExchangedPieces(
            event.exchanged,
            tuple((at, slot) for at, slot in slots if slot.piece.kind not in results),
            tuple((at, slot) for at, slot in slots if slot.piece.kind in results),
            tuple(message for message in messages if not message.send),
            tuple(message for message in messages if message.send),
            sum(slot.nbytes // self.place.num_heads for _, slot in slots),
        )  # fmt: skip


class PreparedPass:
    """One pass of a compiled call, ready to run: its parts, and the order (part, step) of their steps."""

    def __init__(self, call: CompiledCall, pass_: Pass, wires: Sequence[Wire]) -> None:
        self.call, self.pass_, self.order = call, pass_, call.order(pass_)
        self.parts = [
            PreparedPart(part, number, part.program(pass_), wire, kept)
            for number, (part, wire, kept) in enumerate(zip(call.parts, wires, call.kept, strict=True))
        ]
        self.demand_levels = [part.demand_level for part in call.parts if part.demand_level is not None]


# --- one pass


class PartRun:
    """One program of a pass: its actions, and what they hold."""

    def __init__(self, runner: PassRunner, part: PreparedPart, kernel: BlockKernel, kept: Tensor) -> None:
        self.runner, self.part, self.kernel, self.kept = runner, part, kernel, kept
        self.program, self.wire, self.device = part.program, part.wire, kept.device
        self.pool = runner.pool.on(kept.device)
        self.inputs: PartInputs = {}
        self.pieces: list[InputPiece | None] = [None] * part.num_slots
        self.results: list[Partial | Sums | None] = [None] * part.num_slots
        self.partials: dict[int, Buffer] = {}  # partial results in flight, by message
        self.arrived: dict[int, Buffer] = {}  # sums of a peer by slot, to which ours are added when they are sent on
        # those that bring the results of our own tokens from the ranks of all heads
        self.exchanges: list[tuple[Exchange, Sequence[tuple[int, Slot]]]] = []
        self.outputs: PartResults = {}  # made when the first of them arrives
        self.early: dict[tuple[Piece, ...], Exchange] = {}  # those whose receives are posted already
        self.open_transfers: list[Pending] = []
        self.released: list[Buffer] = []  # reusable from the next step on: this step may still send them
        self.step = 0

    def begin(self, inputs: PartInputs) -> None:
        """Own pieces are views of the caller's tensors, or copies if they are kept. If heads are exchanged, they are
        made once their parts have arrived."""
        self.inputs = inputs
        for slot, is_own in self.part.given:
            if not is_own:
                assert slot.kept is not None
                self.pieces[slot.number] = self._in_buffer(slot, Buffer(self.kept[slot.kept]))
            elif self.part.over_heads:
                self.pieces[slot.number] = InputPiece(())
            else:
                tensors = tuple(self.wire.share(x, slot.piece) for x in inputs[slot.piece.kind])
                held = InputPiece(tensors)
                if slot.kept is not None:
                    held = self._in_buffer(slot, Buffer(self.kept[slot.kept]))
                    self.wire.pack(slot.piece.kind, held.tensors, tensors)
                self.pieces[slot.number] = held

    def run_step(self, number: int) -> None:
        self.step = number
        step = self.part.steps[number]
        if is_profiling():
            with record_function(step.walk.label):
                self._run(step)
        else:
            self._run(step)

    def _run(self, step: PreparedStep) -> None:
        hook = self.runner.counters.on_event
        if hook is None:
            for action, argument, _ in step.actions:
                action(self, argument)
        else:
            start = time.perf_counter()
            for action, argument, event in step.actions:
                action(self, argument)
                end = time.perf_counter()
                hook(self.program, step.walk.number, event, start, end)
                start = end
        for slot in step.released:
            self._release(slot)
        for buffer in self.released:
            self.pool.put(buffer)
        self.released.clear()

    def finish(self) -> PartResults:
        """Local results in the caller's layout and dtype. Every transfer of this part has ended when it returns."""
        start = time.perf_counter()
        self._take_results(self.exchanges)
        results = {kind: self._output(kind) for kind in self.program.pass_.results}
        for slot in self.part.results:
            self._store(slot, [self.wire.share(x, slot.piece) for x in results[slot.piece.kind]])
        for transfer in self.open_transfers:
            if not transfer.is_waited_for:
                transfer.wait()
        if (hook := self.runner.counters.on_event) is not None:
            home = Finish(self.part.walk.home)
            hook(self.program, len(self.part.steps), home, start, time.perf_counter())
        return results

    def close(self) -> None:
        """Drop references to this object, so that no tensor has to wait for the garbage collector, and no lane to be
        closed: pieces that have not arrived hold one, and each other."""
        for held in self.pieces:
            if held is not None:
                held.joins.clear()
        self.pieces.clear()

    # --- pieces and their bytes

    def _held(self, slot: Slot) -> InputPiece:
        held = self.pieces[slot.number]
        assert held is not None
        return held

    def _in_buffer(self, slot: Slot, buffer: Buffer, pooled: bool = False) -> InputPiece:
        return InputPiece(buffer.views(*slot.views), buffer, pooled)

    def _new_piece(self, slot: Slot) -> InputPiece:
        """A piece to be received: in the kept bytes if it is to be kept, else in a buffer from the pool."""
        if slot.kept is not None and self.program.pass_.is_forward:
            return self._in_buffer(slot, Buffer(self.kept[slot.kept]))
        return self._in_buffer(slot, self.pool.get(slot.nbytes), pooled=True)

    def _packed(self, slot: Slot, tensors: Tensors) -> Buffer:
        buffer = self.pool.get(slot.nbytes)
        self.wire.pack(slot.piece.kind, buffer.views(*slot.views), tensors)
        return buffer

    def _unpacked(self, slot: Slot, buffer: Buffer) -> Tensors:
        return self.wire.decoded(slot.piece.kind, buffer.views(*slot.views))

    def _release(self, slot: Slot) -> None:
        held = self.pieces[slot.number]
        self.pieces[slot.number] = None
        if held is not None and held.pooled and held.buffer is not None:
            self.released.append(held.buffer)

    def _copies(self, number: int) -> BundleCopies:
        key = number, current_stream_id(self.device)
        if key not in self.part.copies:
            self.part.copies[key] = BundleCopies(self.program.bundles[number], self.device)
        return self.part.copies[key]

    # --- transfers

    def arrive(self, slot: Slot) -> None:
        self._held(slot).arrive()

    def post(self, post: PreparedPost) -> None:
        """Post a step's messages. Payloads are looked up first: a receive may bring a new version of the same piece."""
        transport, exchange, exchanged = self.runner.transport, None, post.exchanged
        sends_only = with_early = False
        payloads: list[Tensor] = []
        buffers: list[Buffer] = []
        if exchanged is not None:
            sends_only = exchanged.pieces in self.early
            exchange = self._exchange(exchanged)
            if not sends_only:
                payloads += exchange.receiving(exchanged.receives)
                buffers.append(exchange.coming_bytes)
            payloads += exchange.sending(exchanged.sends)
            buffers.append(exchange.leaving_bytes)
            early = post.early
            if transport.posts_receives_early and early is not None and early.pieces not in self.early:
                with_early, coming = True, self._new_exchange(early)
                self.early[early.pieces] = coming
                payloads += coming.receiving(early.receives)
                buffers.append(coming.coming_bytes)
        sent = [self._payload(plain) for plain in post.sends]
        whole = [self._receive_buffer(plain) for plain in post.receives] + sent
        buffers += whole
        payloads += [buffer.flat for buffer in whole]
        at_once = None
        if exchange is not None and exchange.at_once:
            at_once = exchange.coming_bytes.flat, exchange.leaving_bytes.flat
        messages = post.messages(sends_only, with_early)
        pending = transport.post(post.step, self.part.number, messages, payloads, at_once)
        for buffer, (is_sent, groups) in zip(buffers, transport.together(messages).of_buffer, strict=True):
            for group in groups:
                (buffer.sends if is_sent else buffer.arrivals).append(pending[group])
        self.open_transfers += pending
        for plain, payload in zip(post.sends, sent, strict=True):
            if plain.is_result:
                self.pool.put(payload)  # which waits for its send
        if exchange is not None:
            self.pool.put(exchange.leaving_bytes)

    def _exchange(self, exchanged: ExchangedPieces) -> Exchange:
        """Pack the parts that go out over heads. Parts that come in are taken out when they are needed, and those of
        earlier groups' results when there are others: buffers of one group at a time serve all."""
        if exchanged.results:
            group = exchanged.pieces[0].group
            earlier = [each for each in self.exchanges if each[0].pieces[0].group < group]
            self.exchanges = [each for each in self.exchanges if each not in earlier]
            self._take_results(earlier)
        exchange = self.early.pop(exchanged.pieces, None) or self._new_exchange(exchanged)
        inputs = [self._held(slot) for _, slot in exchanged.inputs]
        own = [(at, self.inputs[slot.piece.kind]) for at, slot in exchanged.inputs]
        exchange.pack(own, [(at, self._final(slot)) for at, slot in exchanged.results])
        for held in inputs:
            held.joins.append(partial(self._take_inputs, exchange, exchanged.inputs, inputs))
        if exchanged.results:
            self.exchanges.append((exchange, exchanged.results))
            for _, slot in exchanged.results:
                self.results[slot.number] = None
        return exchange

    def _take_inputs(
        self, exchange: Exchange, numbered: Sequence[tuple[int, Slot]], pieces: Sequence[InputPiece]
    ) -> None:
        """When the first input is needed, join the parts of all."""
        if not pieces[0].tensors:
            for (_, slot), held in zip(numbered, pieces, strict=True):
                held.hold(self._new_piece(slot))
            exchange.take_inputs([(at, held.tensors) for (at, _), held in zip(numbered, pieces, strict=True)])

    def _take_results(self, exchanges: Sequence[tuple[Exchange, Sequence[tuple[int, Slot]]]]) -> None:
        for exchange, numbered in exchanges:
            exchange.take_results([(at, self._output(slot.piece.kind)) for at, slot in numbered])

    def _output(self, kind: str) -> Tensors:
        """The results of this rank's tokens, of all groups."""
        if kind not in self.outputs:
            self.outputs[kind] = self.kernel.outputs(self.part, kind)
        return self.outputs[kind]

    def _new_exchange(self, exchanged: ExchangedPieces) -> Exchange:
        at_once = self.runner.transport.has_all_to_all and self.part.place.all_to_all_lane is not None
        return Exchange(self.wire, exchanged.pieces, exchanged.nbytes, self.pool, self.part.place.head, at_once)

    def _payload(self, plain: PlainMessage) -> Buffer:
        """The bytes to send: an input piece, or a result, which is no longer ours afterwards."""
        slot = plain.slot
        if plain.is_result:
            result, arrived = self._result(slot), self.arrived.pop(slot.number, None)
            self.results[slot.number] = None
            if arrived is None:
                return self._packed(slot, result.tensors())
            assert isinstance(result, Sums)
            self.wire.add(slot.piece.kind, arrived.views(*slot.views), result)
            return arrived
        if plain.is_bundle:
            self.pieces[slot.number] = self._bundle(slot)
        held = self._held(slot)
        if plain.message.packs and held.buffer is None:
            held.buffer, held.pooled = self._packed(slot, held.tensors), True
        assert held.buffer is not None
        return held.buffer

    def _bundle(self, slot: Slot) -> InputPiece:
        """A bundle to be sent, packed from the pieces that hold its tokens."""
        made, copies = self._new_piece(slot), self._copies(slot.piece.shard)
        for shard in copies.shards:
            source = self._held(self.part.slot(slot.piece._replace(shard=shard)))
            tensors = source.tensors if source.in_bytes else self.wire.encoded(slot.piece.kind, source.tensors)
            for view, tensor in zip(made.tensors, tensors, strict=True):
                copies.pack(shard, tensor, view)
        return made

    def _receive_buffer(self, plain: PlainMessage) -> Buffer:
        if plain.is_result:
            buffer = self.partials[plain.message.number] = self.pool.get(plain.slot.nbytes)
            return buffer
        self._release(plain.slot)  # if we hold it, this message brings a new version
        held = self.pieces[plain.slot.number] = self._new_piece(plain.slot)
        assert held.buffer is not None
        return held.buffer

    # --- compute

    def prepare(self, slot: Slot) -> None:
        """Convert a piece to the form that the kernel takes."""
        held, kind = self._held(slot), slot.piece.kind
        tensors = self.wire.decoded(kind, held.tensors) if held.in_bytes else held.tensors
        held.prepared = self.kernel.prepare(kind, tensors)

    def compute(self, event: tuple[Block, Sequence[Slot], Sequence[Slot]]) -> None:
        block, needs, makes = event
        inputs = [self._held(slot).prepared for slot in needs]
        self.kernel.block(self.part, block, inputs, [self._result(slot) for slot in makes])

    def _result(self, slot: Slot) -> Partial | Sums:
        """The running result of a piece, made on first use."""
        result = self.results[slot.number]
        if result is None:
            result = self.results[slot.number] = self.kernel.new_result(slot.piece.kind, slot.shapes)
        return result

    def _final(self, slot: Slot) -> Tensors:
        """The tensors of a result to which nothing more is added."""
        result, arrived = self._result(slot), self.arrived.pop(slot.number, None)
        if arrived is not None:
            result.take(self._unpacked(slot, arrived))
            self.pool.put(arrived)
        return result.tensors()

    def _store(self, slot: Slot, targets: Sequence[Tensor]) -> None:
        """Write a result to which nothing more is added."""
        result, arrived = self._result(slot), self.arrived.pop(slot.number, None)
        if isinstance(result, Sums):
            result.store(targets, None if arrived is None else self._unpacked(slot, arrived))
            if arrived is not None:
                self.pool.put(arrived)
            return
        for target, source in zip(targets, result.tensors(), strict=True):
            target.copy_(source)

    def combine(self, event: tuple[int, Slot]) -> None:
        number, slot = event
        buffer = self.partials.pop(number)
        buffer.arrive()
        tensors = self._unpacked(slot, buffer)
        if slot.piece.shard in self.program.bundles:
            copies = self._copies(slot.piece.shard)
            for shard in copies.shards:
                result = self._result(self.part.slot(slot.piece._replace(shard=shard)))
                assert isinstance(result, Sums)
                for total, bundle in zip(result.values(), tensors, strict=True):
                    copies.add(shard, bundle, total)
        elif isinstance(result := self._result(slot), Sums) and slot.number not in self.arrived:
            self.arrived[slot.number] = buffer
            return
        else:
            result.take(tensors)
        self.pool.put(buffer)


class PassRunner:
    """Runs passes for one rank. It keeps only buffers between calls. After an error it must not be used again: its
    transport may be closed, and transfers may still write to its buffers."""

    def __init__(self, transport: Transport, counters: Counters) -> None:
        self.transport, self.counters = transport, counters
        self.pool = BufferPool()

    def rehearse(
        self, prepared: PreparedPass, kernel: BlockKernel, inputs: Sequence[PartInputs], kept: Tensor
    ) -> None:  # fmt: skip
        """Run a pass without messages, so that all its kernels are compiled."""
        PassRunner(Rehearsal(self.transport), Counters()).run(
            prepared, kernel.for_rehearsal(), inputs, kept, Compare.NEVER
        )

    def run(
        self, prepared: PreparedPass, kernel: BlockKernel, inputs: Sequence[PartInputs], kept: Tensor, compare: Compare
    ) -> list[PartResults]:
        """Run one pass. ``inputs`` are this rank's tensors of each part, by kind. The forward pass leaves pieces in
        ``kept`` for its backward pass. Returns the results of this rank's tokens of each part, by kind."""
        with on_device(kept.device):
            return self._run(prepared, kernel, inputs, kept, compare)

    def _run(
        self, prepared: PreparedPass, kernel: BlockKernel, inputs: Sequence[PartInputs], kept: Tensor, compare: Compare
    ) -> list[PartResults]:
        device, total = kept.device, self.counters.total
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("attention over several ranks cannot be captured in a CUDA graph: its buffers change")
        start = total.start(device)
        self.transport.begin_pass(prepared.parts[0].program, compare, prepared.demand_levels)
        runs = [PartRun(self, part, kernel, kept) for part in prepared.parts]
        try:
            for run, of_part in zip(runs, inputs, strict=True):
                run.begin(of_part)
            for part, step in prepared.order:
                runs[part].run_step(step)
            results = [run.finish() for run in runs]
        finally:
            for run in runs:
                run.close()
        made = [x for of_part in results for tensors in of_part.values() for x in tensors]
        self.transport.end_pass(prepared.parts[-1].program, [*made, *kernel.extra_results])
        self.pool.drop_unused()
        total.stop(start, device)
        return results

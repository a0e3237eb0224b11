"""The executor: walks one rank's program over torch.distributed.

It knows pieces, buffers and messages, and repeats no rank arithmetic: whom to talk to and in which order is in the
program. Transfers are posted before the blocks that hide them and waited for when something needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from startrail.agree import Agreement
from startrail.kernels import Kernel, Partial, Sums, stand_in_out
from startrail.lanes import TAGS_A_PAIR, BufferPool, Counters, Lanes, PeerError, Traffic
from startrail.mask import Tile
from startrail.schedule import INPUTS, RESULTS, Merge, Piece, Program, Step, Transfer, last_uses
from startrail.wire import Shapes


@dataclass(frozen=True)
class CompiledStep:
    step: Step
    label: str
    tags: tuple[int, ...]
    done: tuple[Piece, ...]


@lru_cache(maxsize=256)
def compile_program(program: Program) -> tuple[CompiledStep, ...]:
    """Labels, tags (a count of the messages between two ranks) and lifetimes, worked out once."""
    counts: dict[tuple[bool, int, int], int] = {}
    compiled = []
    for index, (step, done) in enumerate(zip(program.steps, last_uses(program), strict=True)):
        tags = []
        for post in step.posts:
            key = (post.send, post.lane, post.peer)
            counts[key] = counts.get(key, 0) + 1
            tags.append(counts[key] % TAGS_A_PAIR)
        text = str(step)
        label = f"startrail {program.direction} {index}: {text if len(text) < 160 else text[:157] + '...'}"
        compiled.append(CompiledStep(step, label, tuple(tags), done))
    return tuple(compiled)


class Held:
    """A piece that this rank has, or is about to receive: its bytes, its tensors, and what is still under way."""

    def __init__(self, tensors: tuple[Tensor, ...] | None = None, flat: Tensor | None = None, pooled: bool = False):
        self.tensors, self.flat = tensors, flat
        self.pooled = pooled  # whether the bytes go back to the pool when the piece is no longer needed
        self.arrivals: list[Callable[[], None]] = []
        self.sends: list[Callable[[], None]] = []
        self.prepared: tuple[Tensor, ...] | None = None


@dataclass
class Call:
    """What stays the same for all passes of one attention call."""

    shapes: Shapes
    kernel: Kernel
    tiles: Callable[[int, int], tuple[Tile, ...]]
    scale: float
    tag: int
    device: torch.device


class Executor:
    """Runs programs for one rank. Keeps buffers between calls, nothing else; after an error it must not be used again,
    since its lanes may be closed and its buffers still be written to."""

    def __init__(self, lanes: Lanes | None, agreement: Agreement, counters: Counters) -> None:
        self.lanes, self.agreement, self.counters = lanes, agreement, counters
        self.pool = BufferPool()

    def run(
        self, call: Call, program: Program, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        """One pass. ``inputs`` are this rank's local tensors by kind: q, kv = (k, v), do = (lse, delta, dout).

        ``kept`` is the buffer in which the forward pass leaves what its backward pass finds. Returns local results by
        kind: out = (lse, out), dq, dkv = (dk, dv).
        """
        start = time.perf_counter()
        run = _Pass(self, call, program, inputs, kept)
        try:
            run.walk()
            results = run.finish()
        finally:
            run.pieces.clear()  # what has not arrived knows its pass
        self.pool.settle()
        self.counters.total += time.perf_counter() - start
        return results

    def name(self, post: Transfer) -> str:
        assert self.lanes is not None
        way, rank = "to" if post.send else "from", self.lanes.ranks[post.peer]
        return f"{post.piece} {way} rank {post.peer} (global rank {rank}) over {self.lanes.names[post.lane]}"

    def failure(self, program: Program, index: int, what: str, error: RuntimeError) -> Exception:
        """Why a transfer failed: the ranks disagree about this call, or else a peer is gone or late."""
        if disagreement := self.agreement.disagreement():
            return ValueError(disagreement)
        return PeerError(
            f"rank {program.place.rank}, {program.direction} step {index} of plan {program.plan}: "
            f"{what} failed: {str(error).splitlines()[0]}"
        )


class _UnderWay:
    """A transfer: waits once, counts the seconds, and says who waited for what if it fails.

    It does not know its pass. Buffers remember their last sends until they are used again, and would keep all tensors
    of the pass alive.
    """

    def __init__(self, executor: Executor, program: Program, index: int, post: Transfer, work: dist.Work) -> None:
        self.executor, self.program, self.index, self.post = executor, program, index, post
        self.work: dist.Work | None = work

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is None:
            return
        executor = self.executor
        assert executor.lanes is not None
        start = time.perf_counter()
        executor.agreement.waiting(executor.lanes.end_waits)
        try:
            work.wait()
        except RuntimeError as error:
            verb = f"{'sending' if self.post.send else 'receiving'} {executor.name(self.post)}"
            raise executor.failure(self.program, self.index, verb, error) from error
        finally:
            executor.agreement.arrived()
            executor.counters.waiting += time.perf_counter() - start


class _Pass:
    def __init__(
        self,
        executor: Executor,
        call: Call,
        program: Program,
        inputs: Mapping[str, tuple[Tensor, ...]],
        kept: Tensor,
    ) -> None:
        self.executor, self.call, self.program = executor, call, program
        self.shapes, self.place, self.pool = call.shapes, program.place, executor.pool
        self.inputs = inputs
        self._exchanges = self.place.plan.heads > 1
        self.pieces: dict[Piece, Held] = {}
        self.rows: dict[Piece, tuple[Tensor, Tensor, Tensor]] = {}  # dout, out, lse as the backward kernel takes them
        self.results: dict[Piece, Partial | Sums] = {}
        self.incoming: dict[tuple[Piece, int], list[Held]] = {}
        self.parts: list[tuple[Piece, Held]] = []  # results of our own tokens, from the ranks of all heads
        self.open: list[Callable[[], None]] = []
        self.released: list[Held] = []  # may be used again from the next step on: this one may still send them
        self.index, self.step = 0, Step()
        slices = self.shapes.kept_slices(self._kept_pieces())
        self.kept = {piece: kept[part] for piece, part in slices.items()}
        self._take_inputs()

    # --- the walk

    def walk(self) -> None:
        for index, compiled in enumerate(compile_program(self.program)):
            self.index, self.step = index, compiled.step
            with record_function(compiled.label):
                self._post(compiled)
                for block in compiled.step.blocks:
                    visible = self.call.tiles(block.row, block.column)
                    if self.program.direction == "forward":
                        self._forward(block.row, block.column, block.group, visible)
                    else:
                        self._backward(block.row, block.column, block.group, visible)
                for merge in compiled.step.merges:
                    self._merge(merge)
                for piece in compiled.done:
                    self._release(piece)
                for held in self.released:
                    assert held.flat is not None
                    self.pool.put(held.flat, held.sends)
                self.released.clear()

    def finish(self) -> dict[str, tuple[Tensor, ...]]:
        """Local results in the user's layout and dtype; every transfer of this pass has ended."""
        shapes = self.shapes
        results: dict[str, tuple[Tensor, ...]] = {
            kind: tuple(
                torch.empty(shape, dtype=dtype, device=self.call.device) for shape, dtype in self._local_fields(kind)
            )
            for kind in self.program.results
        }
        for piece, held in self.parts:
            self._arrive(held)
            for target, parts in zip(results[piece.kind], self._parts(held, piece), strict=True):
                shapes.shares(target, piece.group).copy_(parts)
            assert held.flat is not None
            self.pool.put(held.flat, [])
        if not self._exchanges:
            for kind, group in product(self.program.results, self.program.groups):
                whole = self._tensors_of(Piece(kind, self.program.shard, group))
                for target, source in zip(results[kind], whole, strict=True):
                    shapes.shares(target, group)[0].copy_(source)
        for wait in self.open:
            wait()
        return results

    # --- inputs

    def _kept_pieces(self) -> tuple[Piece, ...]:
        if self.program.direction == "forward":
            return self.program.kept
        return tuple(piece for piece in self.program.given if not self._is_input(piece))

    def _is_input(self, piece: Piece) -> bool:
        return piece.shard == self.program.shard and piece.kind in self.inputs

    def _take_inputs(self) -> None:
        """Own pieces are views of the user's tensors; after a Ulysses exchange they are whole pieces of their own."""
        for piece in self.program.given:
            if not self._is_input(piece):
                flat = self.kept[piece]
                self.pieces[piece] = Held(self.shapes.views(flat, piece.kind), flat)
            elif self._exchanges:
                self.pieces[piece] = held = self._new_held(piece)
                assert held.flat is not None
                held.tensors = self.shapes.views(held.flat, piece.kind)
            else:
                self.pieces[piece] = Held(tuple(self.shapes.shares(x, piece.group)[0] for x in self.inputs[piece.kind]))

    def _new_held(self, piece: Piece) -> Held:
        """Room for a piece: in the kept buffer if it is to be kept, else from the pool."""
        if self.program.direction == "forward" and piece in self.kept:
            return Held(flat=self.kept[piece])
        return Held(flat=self.pool.get(self.shapes.nbytes(piece.kind), self.call.device), pooled=True)

    # --- transfers

    def _post(self, compiled: CompiledStep) -> None:
        """Post a step's transfers. What is sent is looked up first: a receive may bring the same piece anew."""
        if not compiled.step.posts:
            return
        lanes = self.executor.lanes
        assert lanes is not None
        posts = compiled.step.posts
        leaving: dict[Piece, Held] = {}  # parts of pieces that are exchanged over heads, those of all ranks together
        coming: dict[Piece, Held] = {}
        for piece in {post.piece: None for post in posts if post.lane == self.place.heads_lane}:
            leaving[piece] = self._split(piece)
            coming[piece] = self._room_for_parts(piece, leaving[piece])
        payloads = {
            index: self._payload(post.piece)
            for index, post in enumerate(posts)
            if post.send and post.lane != self.place.heads_lane
        }
        batch, helds = [], []
        for index, (post, tag) in enumerate(zip(posts, compiled.tags, strict=True)):
            if post.lane == self.place.heads_lane:
                held = (leaving if post.send else coming)[post.piece]
                flat = self._part_for(held, post)
            else:
                held = payloads[index] if post.send else self._room_for(post)
                assert held.flat is not None
                flat = held.flat
            batch.append((post, flat, self.call.tag + tag))
            helds.append(held)
        try:
            works = lanes.post(batch)
        except RuntimeError as error:
            names = ", ".join(self.executor.name(post) for post in compiled.step.posts)
            raise self.executor.failure(self.program, self.index, f"posting {names}", error) from error
        for (post, flat, _), held, work in zip(batch, helds, works, strict=True):
            wait = _UnderWay(self.executor, self.program, self.index, post, work).wait
            self.open.append(wait)
            if post.send:
                held.sends.append(wait)
                traffic = self.executor.counters.traffic.setdefault(lanes.names[post.lane], Traffic())
                traffic.bytes += flat.numel()
                traffic.hops += 1
            else:
                held.arrivals.append(wait)
        results = [payloads[index] for index in payloads if posts[index].piece.kind in RESULTS]
        for held in (*leaving.values(), *results):  # packed copies: free once their sends have ended
            assert held.flat is not None
            self.pool.put(held.flat, held.sends)

    # --- the Ulysses exchange: parts of a piece, those of all head ranks side by side in one buffer

    def _split(self, piece: Piece) -> Held:
        """What each head rank gets of our inputs, or gets back of the results of its tokens; our own part included."""
        shapes, held = self.shapes, self._new_parts(piece)
        parts = self._parts(held, piece)
        if piece.kind in INPUTS:
            for target, x in zip(parts, self.inputs[piece.kind], strict=True):
                target.copy_(shapes.shares(x, piece.group))
        else:
            for target, whole in zip(parts, self._tensors_of(piece), strict=True):
                shapes.split(whole, target)
        return held

    def _room_for_parts(self, piece: Piece, leaving: Held) -> Held:
        """Room for what comes, with our own part in it already. Inputs are joined when the first block needs them."""
        held, head = self._new_parts(piece), self.place.head
        for room, ours in zip(self._parts(held, piece), self._parts(leaving, piece), strict=True):
            room[head] = ours[head]
        if piece.kind in RESULTS:
            self.parts.append((piece, held))
        else:
            self.pieces[piece].arrivals.append(lambda: self._join(piece, held))
        return held

    def _join(self, piece: Piece, held: Held) -> None:
        self._arrive(held)
        for whole, parts in zip(self.pieces[piece].tensors or (), self._parts(held, piece), strict=True):
            self.shapes.join(whole, parts)
        assert held.flat is not None
        self.pool.put(held.flat, [])

    def _parts(self, held: Held, piece: Piece) -> tuple[Tensor, ...]:
        assert held.flat is not None
        return self.shapes.parts(held.flat, piece.kind)

    def _new_parts(self, piece: Piece) -> Held:
        size = self.place.plan.heads * self.shapes.part_stride(piece.kind)
        return Held(flat=self.pool.get(size, self.call.device))

    def _part_for(self, held: Held, post: Transfer) -> Tensor:
        """The bytes that go to one head rank, or come from it."""
        assert held.flat is not None
        start = self.place.lane_ranks(post.lane).index(post.peer) * self.shapes.part_stride(post.piece.kind)
        return held.flat[start : start + self.shapes.part_bytes(post.piece.kind)]

    # --- whole pieces

    def _payload(self, piece: Piece) -> Held:
        """The bytes to send: of a piece that we hold, or of a result that leaves us."""
        if piece.kind in RESULTS:
            return self._pack(piece.kind, self._tensors_of(piece, leaving=True))
        held = self.pieces[piece]
        self._arrive(held)
        if held.flat is None:
            assert held.tensors is not None
            held.flat, held.pooled = self._pack(piece.kind, held.tensors).flat, True
        return held

    def _pack(self, kind: str, tensors: tuple[Tensor, ...]) -> Held:
        held = Held(flat=self.pool.get(self.shapes.nbytes(kind), self.call.device))
        assert held.flat is not None
        for view, tensor in zip(self.shapes.views(held.flat, kind), tensors, strict=True):
            view.copy_(tensor)
        return held

    def _room_for(self, post: Transfer) -> Held:
        piece = post.piece
        if piece.kind in RESULTS:
            held = Held(flat=self.pool.get(self.shapes.nbytes(piece.kind), self.call.device))
            self.incoming.setdefault((piece, post.peer), []).append(held)
            return held
        self._release(piece)  # a piece that comes anew
        self.pieces[piece] = self._new_held(piece)
        return self.pieces[piece]

    def _arrive(self, held: Held) -> None:
        arrivals, held.arrivals = held.arrivals, []
        for wait in arrivals:
            wait()

    def _release(self, piece: Piece) -> None:
        held = self.pieces.pop(piece, None)
        self.rows.pop(piece, None)
        if held is not None and held.pooled and held.flat is not None:
            self.released.append(held)

    # --- compute

    def _ready(self, piece: Piece) -> tuple[Tensor, ...]:
        """A piece's tensors as the kernel takes them."""
        held = self.pieces[piece]
        self._arrive(held)
        if held.prepared is None:
            if held.tensors is None:
                assert held.flat is not None
                held.tensors = self.shapes.views(held.flat, piece.kind)
            held.prepared = tuple(self.call.kernel.prepare(x) for x in held.tensors)
        return held.prepared

    def _forward(self, row: int, column: int, group: int, visible: tuple[Tile, ...]) -> None:
        (q,) = self._ready(Piece("q", row, group))
        k, v = self._ready(Piece("kv", column, group))
        partial = self._result(Piece("out", row, group))
        assert isinstance(partial, Partial)
        self.call.kernel.forward(q, k, v, visible, self.call.scale, partial)

    def _backward(self, row: int, column: int, group: int, visible: tuple[Tile, ...]) -> None:
        (q,) = self._ready(Piece("q", row, group))
        k, v = self._ready(Piece("kv", column, group))
        gradient = Piece("do", row, group)
        if gradient not in self.rows:
            lse, delta, dout = self._ready(gradient)
            self.rows[gradient] = dout, stand_in_out(dout, delta), lse
        dout, out, lse = self.rows[gradient]
        by_row, by_key = self._result(Piece("dq", row, group)), self._result(Piece("dkv", column, group))
        assert isinstance(by_row, Sums)
        assert isinstance(by_key, Sums)
        (dq,), (dk, dv) = by_row.parts, by_key.parts
        self.call.kernel.backward(dout, q, k, v, out, lse, visible, self.call.scale, (dq, dk, dv))

    def _result(self, piece: Piece) -> Partial | Sums:
        """The accumulator of a result, made when it is first needed."""
        if piece not in self.results:
            shapes = [shape for shape, _ in self.shapes.fields(piece.kind, self.shapes.tokens) if len(shape) == 4]
            acc, device = self.shapes.acc, self.call.device
            self.results[piece] = Partial(shapes[0], acc, device) if piece.kind == "out" else Sums(shapes, acc, device)
        return self.results[piece]

    def _tensors_of(self, piece: Piece, leaving: bool = False) -> tuple[Tensor, ...]:
        result = self._result(piece)
        if leaving:
            del self.results[piece]
        return result.tensors()

    def _merge(self, merge: Merge) -> None:
        held = self.incoming[merge.piece, merge.peer].pop(0)
        self._arrive(held)
        assert held.flat is not None
        self._result(merge.piece).take(self.shapes.views(held.flat, merge.piece.kind))
        self.pool.put(held.flat, [])

    def _local_fields(self, kind: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shapes = self.shapes
        rows = (shapes.batch, shapes.q_heads, shapes.layout.local)
        if kind == "out":
            return [(rows, shapes.acc), ((*rows, shapes.head_dim), shapes.dtype)]
        if kind == "dq":
            return [((*rows, shapes.head_dim), shapes.dtype)]
        keys = (shapes.batch, shapes.kv_heads * shapes.copies, shapes.layout.local, shapes.head_dim)
        return [(keys, shapes.acc if shapes.copies > 1 else shapes.dtype)] * 2

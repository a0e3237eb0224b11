"""The runtime behind the op, one per ``SequenceParallel``. It knows the plan, the ranks and the lanes, makes sure that
the ranks agree, and hands each pass to the executor.

A call is compared with those of the other ranks only when its kind or its sequence is new. After that a layer pays for
its kernels and its transfers only. After an error on any rank all ranks raise, and all can continue: their next calls
are compared as if they were the first.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from startrail.agreement.consensus import Consensus, RejoinError, rejoining
from startrail.agreement.digest import fold
from startrail.agreement.ledger import CallRecord
from startrail.engine.batch import BatchGeometry, Boundaries, PreparedCall
from startrail.engine.call import AttentionCall
from startrail.engine.data_digest import DigestRecorder
from startrail.engine.executor import Executor
from startrail.engine.op_key import OpKey, SequenceNumbers, SequenceState
from startrail.engine.part_run import Inputs, PassContext
from startrail.engine.parts import inputs_of, join_parts, make_parts, sm_margin
from startrail.engine.settings import Settings
from startrail.engine.validate import check_tensors, describe_tensor
from startrail.geometry.layout import Layout
from startrail.geometry.mask import Mask
from startrail.geometry.zones import ZoneLevel, make_layout
from startrail.kernels import accumulator, kernel_for, nudge_zero_rows, row_sums
from startrail.routing.route import ZoneRoute
from startrail.schedule.parts import run_order
from startrail.schedule.program import build_program, programs_inside
from startrail.schedule.sizes import ALIGN, Sizes
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Pass
from startrail.schedule.walk import MAX_PARTS
from startrail.transport.base import Compare
from startrail.transport.counters import Counters
from startrail.transport.opening import open_transport, transport_class
from startrail.transport.process_groups import sends_nothing

RECENT_SEQUENCES = 16  # whose tiles are kept for later batches
PREPARED_CALLS = 64  # kept per sequence


class Runtime:
    """``ranks`` are the global ranks of the sequence-parallel group, ``rank`` this one's place among them."""

    def __init__(self, settings: Settings, ranks: tuple[int, ...], rank: int) -> None:
        self.settings, self.plan, self.ranks, self.rank = settings, settings.plan, ranks, rank
        self.world = len(ranks)
        self.place = self.plan.place(self.world, rank)
        self._program = partial(build_program, self.plan, self.world, rank)  # by pass
        self.counters, self._busy, self.closed = Counters(), threading.Lock(), False
        self._zone_levels = [ZoneLevel(*level) for level in self.plan.zone_levels(self.world)]
        self._sequences: WeakValueDictionary[Boundaries, BatchGeometry] = WeakValueDictionary()
        self._recent: deque[BatchGeometry] = deque(maxlen=RECENT_SEQUENCES)
        self._lock = threading.Lock()
        self._numbers = SequenceNumbers()
        self._states: WeakValueDictionary[int, SequenceState] = WeakValueDictionary()  # by ticket
        self._digests = DigestRecorder()
        self._last: tuple[Tensor, BatchGeometry, OpKey] | None = None
        self._num_made = 0  # sequences
        self._num_started = 0  # sequences since the last error
        self._after_error: int | None = None  # the sequence of that error, until a call succeeds
        name = f"startrail/{ranks[0]}-{zlib.crc32(repr(ranks).encode()):x}"
        group = None if self.world == 1 or sends_nothing() else name
        self.consensus = Consensus(group, ranks, rank, settings.timeout, settings.check_every_call)
        self._executor: Executor | None = None

    # --- sequences

    def expect_windows(self) -> None:
        if not self._num_made:
            self.settings = replace(self.settings, windows=True)
            self._zone_levels = [level.in_rank_order() for level in self._zone_levels]

    def make_sequence(self, boundaries: Boundaries) -> SequenceState:
        with self._lock:  # data loaders make sequences in their own threads
            self._num_made += 1
            number, ticket = self._numbers.next(boundaries), self._num_made
            state = SequenceState(self._geometry(boundaries), number, ticket, self._digests.maker())
            self._states[ticket] = state
            return state

    def record_digest(self, sequence: SequenceState, x: Tensor) -> None:
        """Add a digest of a tensor that is sharded to its sequence's key."""
        if self.consensus.ledger is not None and x.device.type != "meta" and x.numel():
            self._digests.record(sequence, x)

    def layout_of(self, boundaries: Boundaries) -> Layout:
        return make_layout(self.settings.layout, self._zone_levels, boundaries.placement or boundaries.documents)

    def _geometry(self, boundaries: Boundaries) -> BatchGeometry:
        """The geometry of a sequence. Those in use and the most recent ones are kept. Call it under ``_lock``."""
        geometry = self._sequences.get(boundaries)
        if geometry is None:
            self._sequences[boundaries] = geometry = BatchGeometry(self.rank, self.layout_of(boundaries), boundaries)
        self._recent.append(geometry)
        return geometry

    def _lookup_sequence(self, op_key: Tensor) -> tuple[BatchGeometry, OpKey]:
        """The sequence that the op is called with. All layers of a batch bring the same tensor."""
        last = self._last
        if last is None or (last[0].data_ptr(), last[0].shape) != (op_key.data_ptr(), op_key.shape):
            key = OpKey.from_tensor(op_key)
            self._num_started += 1
            with self._lock:
                key = key._replace(number=self._numbers.relative(key.boundaries, key.number))
                self._last = last = op_key, self._geometry(key.boundaries), key
        return last[1:]

    # --- sizes

    def sizes_of(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> Sizes:
        """The sizes of a call with such shards. Raises ``ValueError`` if the plan cannot run it."""
        wire = self._wire_dtype(q.dtype)
        shape = (q.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3])
        return Sizes(self.plan, *shape, q.dtype.itemsize, wire.itemsize, None if v is None else v.shape[3])

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of messages. A single rank sends nothing and rounds nothing."""
        return dtype if self.world == 1 else self.settings.wire_dtype or dtype

    def kept_bytes(self, sizes: Sizes) -> int:
        """What a forward pass keeps at most: what the plan keeps if all ranks share all tokens, and some room."""
        pieces = () if self.plan.family.by_mask else self._program(FORWARD).kept
        return sizes.kept_bytes(pieces) + MAX_PARTS * len(pieces) * ALIGN

    # --- passes

    @rejoining
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """out, lse, the bytes kept for the backward pass, the call's number, and this rank's largest logits."""
        with self._exclusive_call():
            self._digests.count_forward()
            context = self._context(FORWARD, q, k, v, op_key, call, None)
            kept = torch.empty(self.kept_bytes(self.sizes_of(q, k, v)), dtype=torch.uint8, device=q.device)
            results = [part["out"] for part in self._run(context, {"q": (q,), "kv": (k, v)}, kept)]
            if not call.mask.steps:  # rows of such a mask may see nothing
                geometry, _ = self._lookup_sequence(op_key)
                for route, (lse, out) in zip(self.routes(geometry, q, k, v, call.mask), results, strict=True):
                    geometry.poison_hidden_rows(route, out, lse)
            lse, out = join_parts(results)
            return out, lse, kept, torch.tensor(self.consensus.call_id, device="cpu"), context.largest

    @rejoining
    def backward(
        self, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
        kv_heads: int, head_dim: int, op_key: Tensor, call: AttentionCall, dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk, dv. ``qkv`` is empty if ``kept`` holds them, which it does after a head exchange. ``dlse`` is the
        cotangent of lse. Each logit gets its weight's share of it, so it is subtracted from delta."""
        # without q, k, v only their shapes matter here
        q = qkv[0] if qkv else out.new_empty(()).expand(*out.shape[:3], head_dim)
        k, v = qkv[1:] if qkv else (q[:, :kv_heads], out[:, :kv_heads])
        with self._exclusive_call():
            context = self._context(BACKWARD, q, k, v, op_key, call, number)
            wire = context.parts[0].wire
            dout = wire.rounded(dout)
            delta = row_sums(dout, out, wire.acc)
            if dlse is not None:
                delta = delta - dlse
                dout = nudge_zero_rows(dout, delta)
            inputs: dict[str, tuple[Tensor, ...]] = {"do": (lse, delta, dout)}
            if qkv:
                inputs |= {"q": (q,), "kv": (k, v)}
            results = self._run(context, inputs, kept)
            pairs = zip(context.parts, results, strict=True)
            dq, dk, dv = join_parts([(*r["dq"], *part.wire.without_copies(*r["dkv"])) for part, r in pairs])
            return dq, dk, dv

    @contextmanager
    def _exclusive_call(self) -> Iterator[None]:
        """One call at a time: calls are numbered in the order in which they begin, which two threads would not keep on
        all ranks. An error ends the call on all ranks."""
        if self.closed:
            raise ValueError("this SequenceParallel is closed")
        self.consensus.check_process()
        if not self._busy.acquire(blocking=False):
            raise ValueError("two threads call one SequenceParallel at the same time: use one instance per thread")
        try:
            yield
            self._after_error = None
        except BaseException as error:
            # ranks decide themselves where to continue; the note lets them see if they failed in different batches
            self._after_error = error.sequence if isinstance(error, RejoinError) else self._num_started
            self.consensus.abandon(error, self._num_started)
            if self._executor is not None:
                self._executor.transport.abandon(error)
            self._executor = None  # its lanes may be closed, here and at the peers: the next call opens new ones
            self._last, self._num_started = None, 0
            self._numbers.restart()
            raise
        finally:
            self._busy.release()

    def _context(
        self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, call: AttentionCall, forward: Tensor | None
    ) -> PassContext:
        """Check the arguments, compare them with the other ranks if they are new, and find what runs them. ``forward``
        is the number of the forward call that a backward call belongs to.

        All that ranks must agree on is part of the record, and so of the messages' tags: ranks that disagree never
        receive each other's messages.
        """
        geometry, sequence = self._lookup_sequence(op_key)
        key = (pass_, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, call)
        prepared = geometry.prepared.get(key)
        if prepared is None:
            if len(geometry.prepared) >= PREPARED_CALLS:
                geometry.prepared.clear()
            geometry.prepared[key] = prepared = self._prepare(pass_, q, k, v, geometry, call)
        backward_of = "" if forward is None else ".".join(map(str, forward.tolist()))
        data, device_digest = (sequence.digest, None) if forward is not None else self._data_digest(sequence, q.device)
        after_error = None if data else self._after_error
        record = CallRecord(prepared.detail, sequence.number, data, backward_of, after_error)
        self.consensus.start(record._replace(gradients=forward is None and call.gradients), device_digest)
        # without the number of tokens, which may change with the documents
        kind = (pass_, q.shape[:2], q.shape[3], k.shape[1], v.shape[3], q.dtype, q.device.type, call, call.gradients)
        is_new = forward is None and self.consensus.is_new(sequence)
        has_new_boundaries = is_new and self.consensus.is_new(geometry.boundaries)
        compare = Compare.NEVER
        if self._has_to_compare(kind, is_new):
            compare = Compare.BEFORE if has_new_boundaries else Compare.DURING
        shape = q.shape[:2] if call.max_logits else (0, 0)
        max_logits = q.new_full(shape, float("-inf"), dtype=accumulator(q.dtype))
        return PassContext(
            prepared.parts, prepared.order, prepared.kernel, prepared.scale, compare, q.device, max_logits
        )

    def _data_digest(self, sequence: OpKey, device: torch.device) -> tuple[int, Tensor | None]:
        """The digest of a batch's data, and that of data on a device if comparing it makes no host wait."""
        state = self._states.get(sequence.ticket) if sequence.ticket else None
        if state is None or (on_device := state.device_digest) is None:
            return sequence.digest, None
        if transport_class(device).compares_on_device and not self.consensus.recovering:
            return sequence.digest, on_device
        return fold(sequence.digest, int(on_device)), None

    def _has_to_compare(self, kind: object, is_new: bool) -> bool:
        """Compare the call that has started with the other ranks through the store if it is the first of its ``kind``,
        or if it ``is_new`` in another way and there are no lanes. True if it still has to be compared over these."""
        consensus = self.consensus
        if not consensus.has_agreed(kind):
            consensus.compare([kind])
            return False
        if is_new and self._executor is None:
            consensus.compare()
            return False
        return is_new

    @rejoining
    def agree(self, operation: str, arguments: str, kind: object, op_key: Tensor, gradients: bool) -> None:
        """Raise ``ValueError`` on every rank unless all ranks are about to run a collective of a sequence with the same
        arguments. Ranks that differ would crash each other, or wait for each other."""
        if self.consensus.ledger is None:
            return
        with self._exclusive_call():
            geometry, sequence = self._lookup_sequence(op_key)
            call = f"{operation} of {arguments}, {geometry.boundaries}, {self.settings}"
            after_error = None if sequence.digest else self._after_error
            record = CallRecord(call, sequence.number, sequence.digest, "", after_error, kind=operation)
            self.consensus.start(record._replace(gradients=gradients))
            if self._has_to_compare(kind, True) and self._executor is not None:
                self._executor.transport.compare_call()

    def _prepare(
        self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, geometry: BatchGeometry, call: AttentionCall
    ) -> PreparedCall:
        """What a new kind of call runs with. Raises ``ValueError`` on every rank if it cannot run."""
        settings, layout = self.settings, geometry.layout
        try:
            check_tensors(q, k, v)
            kernel = kernel_for(q.device, q.dtype, max(q.shape[3], v.shape[3]), call.softcap)
            if q.shape[2] != layout.local:
                hint = "shard with sequence.shard(), which pads"
                if q.shape[1] == layout.local:
                    fix = "transpose(1, 2) makes them (batch, heads, tokens, dim)"
                    hint = f"these look like (batch, tokens, heads, dim): {fix}"
                raise ValueError(
                    f"length {layout.length} on {layout.world} ranks gives {layout.local} local tokens per rank "
                    f"({settings.layout}), but this rank has {q.shape[2]}; {hint}"
                )
            routes = self.routes(geometry, q, k, v, call.mask)
        except ValueError as error:
            self._refuse(str(error))
        shards = f"q {describe_tensor(q)}, k {describe_tensor(k)}, v {describe_tensor(v)}"
        detail = f"{pass_}: {shards}, {call.without_gradients()}, {geometry.boundaries}, {settings}"
        parts = make_parts(geometry, routes, pass_, call.mask, kernel, q.dtype, self._wire_dtype(q.dtype))
        order, kernel.sm_margin = run_order([part.program for part in parts]), sm_margin(parts)
        return PreparedCall(detail, parts, order, kernel, call.scale_for(q.shape[3]))

    def routes(
        self, geometry: BatchGeometry, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask
    ) -> tuple[ZoneRoute, ...]:
        """How a call with such shards and this mask is computed. Raises ``ValueError`` if it cannot be."""
        return geometry.routes(self.plan, mask, self.sizes_of(q, k, v), self.settings.sparse)

    @rejoining
    def refuse(self, problem: str, op_key: Tensor | None = None) -> NoReturn:
        """Raise ``ValueError`` here, and on every other rank when it starts the same call. ``op_key`` is that of the
        call's sequence, if it was made."""
        if self._busy.locked() or self.consensus.is_forked:  # by another thread or process, perhaps of a data loader
            raise ValueError(problem)
        with self._exclusive_call():
            if op_key is None:
                self._num_started += 1
            else:
                self._lookup_sequence(op_key)
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        self.consensus.start(CallRecord(problem=problem))
        self.consensus.compare()
        raise AssertionError("ranks with a problem never agree")

    def _run(self, context: PassContext, inputs: Inputs, kept: Tensor) -> list[dict[str, tuple[Tensor, ...]]]:
        """Run a pass on each part's tokens of ``inputs``."""
        executor = self.executor_on(context.device)
        return executor.run(context, [inputs_of(part, inputs) for part in context.parts], kept)

    def executor_on(self, device: torch.device) -> Executor:
        """The executor for this device, with its lanes. Another type of device gets a new one."""
        executor = self._executor
        if executor is None or executor.transport.device.type != device.type:
            name = f"{self.consensus.enter()}/lanes {self.consensus.epoch} {device.type}"
            programs = [p for pass_ in PASSES for p in programs_inside(self.plan, self.world, self.rank, pass_)]
            timeout, counters = self.settings.timeout, self.counters
            transport = open_transport(self.consensus, counters, self.place, name, timeout, device, programs)
            self._executor = executor = Executor(transport, counters)
        return executor

    def check(self) -> None:
        """Wait until all passes so far have completed on all ranks. Raise if any of them was aborted."""
        if self._executor is not None:
            with self._exclusive_call():
                self._executor.transport.confirm()

    def close(self, error: BaseException | None = None) -> None:
        """Close the lanes, together with all ranks. After an ``error`` on this rank, close them without the others, and
        tell those that wait."""
        if self.consensus.is_forked:  # the lanes are the parent's
            self.closed = True
            return
        if error is None:
            self.check()
        else:
            self.consensus.abandon(error, self._num_started)
        self.closed, executor, self._executor = True, self._executor, None
        if executor is not None:
            executor.transport.close(error)
        self.consensus.close()

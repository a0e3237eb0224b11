"""The runtime behind the op, one per ``SequenceParallel``. It knows the plan, the ranks and the lanes, makes sure that
the ranks agree, and hands each pass to the executor.

A call is compared with those of the other ranks only when its signature or its sequence is new. After that a layer pays
for its kernels and its transfers only. After an error on any rank all ranks raise, and all can continue: their next
calls are compared as if they were the first.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from startrail._compat import PrefixStore, default_store
from startrail.comm.consensus import Consensus
from startrail.comm.counters import Counters
from startrail.comm.digest import digest
from startrail.comm.lanes import Lanes, call_tag, links_used
from startrail.comm.ledger import CallLedger, CallRecord, WaitRegistry
from startrail.engine.batch import BatchGeometry, Boundaries, PreparedCall, wire_of
from startrail.engine.call import AttentionCall
from startrail.engine.executor import Executor
from startrail.engine.op_key import OpKey, SequenceState
from startrail.engine.part_run import Inputs, PassContext, PassPart
from startrail.engine.validate import check_tensors, describe_tensor
from startrail.geometry.mask import Mask
from startrail.geometry.zones import ZoneLevel, make_layout
from startrail.kernels import kernel_for, nudge_zero_rows, row_sums
from startrail.routing.route import ZoneRoute
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program
from startrail.schedule.sizes import ALIGN, Sizes, aligned
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Pass
from startrail.schedule.walk import MAX_PARTS

RECENT_SEQUENCES = 16  # whose tiles are kept for later batches
PREPARED_CALLS = 64  # kept per sequence
COUNTERS = 1 << 12  # of sequences made, by a digest of their boundaries
DEVICE_DIGESTS = 8  # of ids on a device: each makes the host wait

_num_instances: dict[tuple[int, ...], Iterator[int]] = {}  # by the ranks of their group


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``SequenceParallel``, except for its group."""

    plan: Plan
    layout: str
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool
    sparse: bool


class Runtime:
    """``ranks`` are the global ranks of the sequence-parallel group, ``rank`` this one's place among them."""

    def __init__(self, settings: Settings, ranks: tuple[int, ...], rank: int) -> None:
        self.settings, self.plan, self.ranks, self.rank = settings, settings.plan, ranks, rank
        self.world = len(ranks)
        self.place = self.plan.place(self.world, rank)
        self._program = partial(build_program, self.plan, self.world, rank)  # by pass
        self.counters = Counters()
        self._group_name = f"startrail/{ranks[0]}-{zlib.crc32(repr(ranks).encode()):x}"
        self._number = next(_num_instances.setdefault(ranks, itertools.count()))
        self._zone_levels = [ZoneLevel(*level) for level in self.plan.zone_levels(self.world)]
        self._sequences: WeakValueDictionary[Boundaries, BatchGeometry] = WeakValueDictionary()
        self._recent: deque[BatchGeometry] = deque(maxlen=RECENT_SEQUENCES)
        self._lock = threading.Lock()
        self._counts = _no_counts()
        self._last: tuple[Tensor, BatchGeometry, OpKey] | None = None
        self._num_started = 0  # sequences since the last error
        self._after_error: int | None = None  # the sequence of that error, until a call succeeds
        register_wait = partial(_register_wait, self._group_name, rank, self.world, self._number + 1)
        self.consensus = Consensus(self._ledger(), register_wait, settings.check_every_call)
        self.consensus.watch_waits()
        self._busy = threading.Lock()
        self._thread, self._num_forwards, self._device_digests = threading.get_ident(), 0, DEVICE_DIGESTS
        self._executor: Executor | None = None

    @property
    def _name(self) -> str:
        """This instance's key in the store: each instance of each group has its own ledger and lanes."""
        return f"{self._group_name}/{self._number}"

    def _ledger(self) -> CallLedger | None:
        """Where the ranks of this group compare their calls; None without other ranks."""
        if self.world == 1 or dist.get_backend() == "fake":
            return None
        return CallLedger(PrefixStore(self._name, default_store()), self.rank, self.world, self.settings.timeout)

    # --- sequences

    def make_sequence(self, boundaries: Boundaries) -> SequenceState:
        with self._lock:  # data loaders make sequences in their own threads
            index = zlib.crc32(repr(boundaries).encode()) % COUNTERS
            self._counts[index] += 1
            return SequenceState(self._geometry(boundaries), self._counts[index])

    def record_digest(self, sequence: SequenceState, ids: Tensor) -> None:
        """Add a digest of the batch's ids to the sequence's key, so that a rank that skips a batch, or gets another
        one, finds out at its next call although numbers and shapes match.

        The first ids count. If a sequence is reused, so do the first ids after each call, but only in the thread that
        makes the calls: a loader's thread may run further ahead on some ranks than on others.
        """
        own_thread = threading.get_ident() == self._thread
        done = sequence.digested_at == self._num_forwards if own_thread else sequence.key.digest != 0
        if done or self.consensus.ledger is None or ids.device.type == "meta":
            return
        if ids.device.type != "cpu":
            if self._device_digests == 0:
                return
            self._device_digests -= 1
        batch_digest = int(digest(ids)) % 2**32
        if own_thread:
            sequence.digested_at = self._num_forwards
        if batch_digest != sequence.key.digest:
            sequence.set_key(sequence.key._replace(digest=batch_digest))

    def _geometry(self, boundaries: Boundaries) -> BatchGeometry:
        """The geometry of a sequence. Those in use and the most recent ones are kept. Call it under ``_lock``."""
        geometry = self._sequences.get(boundaries)
        if geometry is None:
            documents = boundaries.placement or boundaries.documents
            layout = make_layout(self.settings.layout, self._zone_levels, documents)
            self._sequences[boundaries] = geometry = BatchGeometry(self.rank, layout, boundaries)
        self._recent.append(geometry)
        return geometry

    def _lookup_sequence(self, op_key: Tensor) -> tuple[BatchGeometry, OpKey]:
        """The sequence that the op is called with. All layers of a batch bring the same tensor."""
        last = self._last
        if last is None or (last[0].data_ptr(), last[0].shape) != (op_key.data_ptr(), op_key.shape):
            key = OpKey.from_tensor(op_key)
            self._num_started += 1
            with self._lock:
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
        """An upper bound of what a forward pass keeps, whatever the documents and the mask: what the plan keeps if all
        ranks share all tokens, and some room between the pieces."""
        pieces = () if self.plan.family.by_mask else self._program(FORWARD).kept
        return sizes.kept_bytes(pieces) + MAX_PARTS * len(pieces) * ALIGN

    # --- passes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """out, lse, the bytes kept for the backward pass, the call's number, and the largest logits that this rank
        computed."""
        with self._exclusive_call():
            self._num_forwards += 1
            context = self._context(FORWARD, q, k, v, op_key, call, None)
            kept = torch.empty(self.kept_bytes(self.sizes_of(q, k, v)), dtype=torch.uint8, device=q.device)
            results = [part["out"] for part in self._run(context, {"q": (q,), "kv": (k, v)}, kept)]
            if not call.mask.steps:  # rows of such a mask may see nothing
                geometry, _ = self._lookup_sequence(op_key)
                for route, (lse, out) in zip(self.routes(geometry, q, k, v, call.mask), results, strict=True):
                    geometry.poison_hidden_rows(route, out, lse)
            lse, out = _joined(results)
            return out, lse, kept, torch.tensor(self.consensus.call_id, device="cpu"), context.largest

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
            dq, dk, dv = _joined([(*r["dq"], *part.wire.without_copies(*r["dkv"])) for part, r in pairs])
            return dq, dk, dv

    @contextmanager
    def _exclusive_call(self) -> Iterator[None]:
        """One call at a time: calls are numbered in the order in which they begin, which two threads would not keep on
        all ranks. An error ends the call on all ranks."""
        if not self._busy.acquire(blocking=False):
            raise ValueError("two threads call one SequenceParallel at the same time: use one instance per thread")
        try:
            yield
            self._after_error = None
        except BaseException as error:
            self.consensus.abandon(error)
            if self._executor is not None:
                self._executor.abandon(error)
            self._executor = None  # its lanes may be closed, here and at the peers: the next call opens new ones
            # ranks decide themselves where to continue; the note lets them see if they failed in different batches
            self._after_error, self._num_started = self._num_started, 0
            with self._lock:
                self._counts = _no_counts()
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
        record = CallRecord(prepared.detail, sequence.number, sequence.digest, backward_of, self._after_error)
        self.consensus.start(record)
        keys = prepared.signature, geometry.boundaries
        if not self.consensus.has_agreed(*keys):
            self.consensus.compare(keys)
        tag = call_tag(f"{self.consensus.call_id} {record}")
        max_logits = q.new_full(q.shape[:2] if call.max_logits else (0, 0), float("-inf"), dtype=torch.float32)
        return PassContext(prepared.parts, prepared.order, prepared.kernel, prepared.scale, tag, q.device, max_logits)

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
        parts: list[PassPart] = []
        start = 0  # of the part's kept bytes
        for route in routes:
            program, wire = route.program(pass_), wire_of(route, q.dtype, self._wire_dtype(q.dtype))
            tiles = geometry.tiles(call.mask, kernel.costs, route, program)
            kept = route.sizes.kept_slices(program.kept, start)
            start = max((aligned(part.stop) for part in kept.values()), default=start)
            direct_level = None if route.fetches is None else route.zone.level
            parts.append(PassPart(program, wire, kept, tiles, route.start, direct_level, {}))
        signature = f"{pass_}: q {describe_tensor(q)}, k {describe_tensor(k)}, v {describe_tensor(v)}, {call}"
        detail = f"{signature}, {geometry.boundaries}, plan {self.plan}, {settings.layout}, wire {settings.wire_dtype}"
        order = run_order([part.program for part in parts])
        return PreparedCall(signature, detail, tuple(parts), order, kernel, call.scale_for(q.shape[3]))

    def routes(
        self, geometry: BatchGeometry, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask
    ) -> tuple[ZoneRoute, ...]:
        """How a call with such shards and this mask is computed. Raises ``ValueError`` if it cannot be."""
        return geometry.routes(self.plan, mask, self.sizes_of(q, k, v), self.settings.sparse)

    def refuse(self, problem: str, op_key: Tensor | None = None) -> NoReturn:
        """Raise ``ValueError`` here, and on every other rank when it starts the same call. ``op_key`` is that of the
        call's sequence, if it was made."""
        if self._busy.locked():  # by another thread: this one, a loader's perhaps, starts no call
            raise ValueError(problem)
        with self._exclusive_call():
            if op_key is None:
                self._num_started += 1
            else:
                self._lookup_sequence(op_key)
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        self.consensus.start(CallRecord(problem=problem))
        self.consensus.compare(())
        raise AssertionError("ranks with a problem never agree")

    def _run(self, context: PassContext, inputs: Inputs, kept: Tensor) -> list[dict[str, tuple[Tensor, ...]]]:
        """Run a pass on each part's tokens of ``inputs``."""
        of_parts = []
        for part in context.parts:
            wire, tokens = part.wire, part.wire.sizes.local
            own = {kind: tuple(x.narrow(2, part.start, tokens) for x in xs) for kind, xs in inputs.items()}
            if "q" in own:
                q, (k, v) = wire.rounded(own["q"][0]), map(wire.rounded, own["kv"])
                own |= {"q": (q,), "kv": wire.with_copies(k, v)}
            of_parts.append(own)
        executor = self.executor_on(context.device)
        for part in context.parts:
            if part.direct_level is not None:
                executor.lanes.open_direct(part.direct_level)
        return executor.run(context, of_parts, kept)

    def executor_on(self, device: torch.device) -> Executor:
        """The executor for this device, with its lanes. Another type of device gets a new one."""
        executor = self._executor
        if executor is None or (executor.device is not None and executor.device.type != device.type):
            lanes = None
            if self.world > 1:
                name = f"{self._name}/lanes {self.consensus.epoch} {device.type}"
                programs = [program for pass_ in PASSES for program in self._programs(pass_)]
                lanes = Lanes(self.place, self.ranks, name, self.settings.timeout, device, links_used(programs))
            self._executor = executor = Executor(lanes, self.consensus, self.counters)
        return executor

    def _programs(self, pass_: Pass) -> Iterator[Program]:
        """This rank's programs of the plan, for all zones that it can be in."""
        for level, slots in self._zone_levels:
            if not (plan := self.plan.inside(level)).family.by_mask:
                first = self.rank // len(slots) * len(slots)
                yield build_program(plan, len(slots), self.rank - first, pass_, first)


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of all tokens from those of each part."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))


def _no_counts() -> array[int]:
    return array("q", bytes(8 * COUNTERS))


def _register_wait(group_name: str, rank: int, world: int, number: int, key: str) -> WaitRegistry:
    """Where ranks find out that they wait for each other in different instances, or at different calls."""
    store = PrefixStore(group_name, default_store())
    return WaitRegistry(store, rank, world, f"call {key} of number {number} of their SequenceParallels")

"""What runs behind the op: one ``Runtime`` a ``SequenceParallel``. It knows the plan, the ranks and the lanes, finds
out whether the ranks agree, and hands each pass to the executor.

A call costs a comparison with the other ranks the first time that its signature or its sequence is new, and never
again: in the steady state a layer pays for its kernels and its transfers only. After an error on any rank all ranks
raise, and all may go on: their next calls meet as if they were the first.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from startrail.comm.consensus import CallLedger, Consensus, WaitRegistry
from startrail.comm.counters import Counters
from startrail.comm.lanes import Lanes, call_tag, links_used
from startrail.comm.sanity import digest
from startrail.engine.batch import BatchGeometry, PreparedCall
from startrail.engine.call import AttentionCall, check_tensors, describe_tensor
from startrail.engine.executor import Executor, PassContext
from startrail.engine.wire import Wire
from startrail.geometry.layout import LAYOUTS
from startrail.kernels import kernel_for, nudge_zero_rows, row_sums
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Pass

REMEMBERED = 16  # sequences whose tiles are kept for further batches
READY = 64  # kinds of calls on one sequence that are kept ready
COUNTERS = 1 << 12  # of sequences made, by a digest of their documents
LOOKS = 8  # batches of ids on a device that are looked at: the host waits for it each time

_instances: dict[tuple[int, ...], Iterator[int]] = {}  # how many each group of ranks has made so far


@dataclass(frozen=True)
class Settings:
    """What a ``SequenceParallel`` was made with, beside its group."""

    plan: Plan
    layout: str
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool


class Runtime:
    """``ranks`` are the global ranks of the sequence-parallel group, ``rank`` this one's place among them."""

    def __init__(self, settings: Settings, ranks: tuple[int, ...], rank: int) -> None:
        self.settings, self.plan, self.ranks, self.rank = settings, settings.plan, ranks, rank
        self.world = len(ranks)
        self.place = self.plan.place(self.world, rank)
        self.counters = Counters()
        self._group_name = f"startrail/{ranks[0]}-{zlib.crc32(repr(ranks).encode()):x}"
        self._number = next(_instances.setdefault(ranks, itertools.count()))
        self._slots = self.plan.slots(self.world)
        self._alive: WeakValueDictionary[tuple[int, ...], BatchGeometry] = WeakValueDictionary()
        self._latest: deque[BatchGeometry] = deque(maxlen=REMEMBERED)
        self._making = threading.Lock()
        self._made = _no_counts()
        self._last: tuple[Tensor, BatchGeometry, str] | None = None
        self._begun, self._after = 0, ""  # sequences since the last error, and where that was
        lobby = partial(_lobby, self._group_name, rank, self.world, self._number + 1)
        self.agreement = Consensus(self._board(), lobby, settings.check_every_call)
        self.agreement.watch()
        self._busy = threading.Lock()
        self._thread, self._forwards, self._looks = threading.get_ident(), 0, LOOKS
        self._executor: Executor | None = None

    @property
    def _name(self) -> str:
        """This instance in the store: each group and each instance has a board and lanes of its own."""
        return f"{self._group_name}/{self._number}"

    def _board(self) -> CallLedger | None:
        """Where the ranks of this group compare their calls."""
        if self.world == 1 or dist.get_backend() == "fake":  # nobody else is there
            return None
        store = dist.distributed_c10d._get_default_store()
        return CallLedger(PrefixStore(self._name, store), self.rank, self.world, self.settings.timeout)

    # --- sequences

    def sequence(self, marks: tuple[int, ...]) -> tuple[BatchGeometry, Tensor]:
        """What is known of the sequence with these documents and blocks, and the tensor by which the op knows it: how
        many like it this rank has made, so that batches that look alike are told apart, room for a digest of its data,
        and the marks."""
        with self._making:  # data loaders make sequences in threads of their own
            tokens = self._tokens(marks)
            digest = zlib.crc32(repr(marks).encode()) % COUNTERS
            self._made[digest] += 1
            return tokens, torch.tensor((self._made[digest], 0, *marks), device="cpu")

    def look_at(self, ids: Tensor, known: bool, looked: int | None) -> tuple[int, int | None] | None:
        """A digest of a batch's ids, which all ranks should have in common, and if the thread that calls took it, when.
        None if nothing is to be added to what the sequence has: whether a digest is ``known``, and when it ``looked``
        last.

        So a rank that leaves out a batch, or was given another, is told at its next call, though numbers and shapes
        are those of the others. The first ids count, and on a sequence that is used again the first after a call; but
        only in the thread that also calls, since a loader's thread may be ahead by more on some ranks.
        """
        own = threading.get_ident() == self._thread
        if self.agreement.board is None or ids.device.type == "meta" or (looked == self._forwards if own else known):
            return None
        if ids.device.type != "cpu":
            if self._looks == 0:
                return None
            self._looks -= 1
        return int(digest(ids)) % 2**32, self._forwards if own else None

    def _tokens(self, marks: tuple[int, ...]) -> BatchGeometry:
        """The last few, and all in use, are remembered."""
        tokens = self._alive.get(marks)
        if tokens is None:
            layout = LAYOUTS[self.settings.layout](self._slots, max(marks))
            self._alive[marks] = tokens = BatchGeometry(self.place, layout, marks)
        self._latest.append(tokens)
        return tokens

    def _known(self, sequence: Tensor) -> tuple[BatchGeometry, str]:
        """The sequence that the op is called with, and what tells it from others that look alike; all layers of a batch
        bring the same one."""
        last = self._last
        if last is None or (last[0].data_ptr(), last[0].shape) != (sequence.data_ptr(), sequence.shape):
            number, data, *marks = sequence.tolist()
            self._begun += 1
            name = f"sequence {number} of that kind" + (f", data with digest {data:08x}" if data else "")
            with self._making:
                self._last = last = sequence, self._tokens(tuple(marks)), name
        return last[1:]

    # --- sizes

    def sizes_of(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> Sizes:
        """The sizes of a call with such shards; ``ValueError`` if the plan cannot run it."""
        wire = self._travels(q.dtype)
        shape = (q.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3])
        return Sizes(self.plan, *shape, q.dtype.itemsize, wire.itemsize, None if v is None else v.shape[3])

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        """What is sent; one rank alone sends nothing, and need not round anything."""
        return dtype if self.world == 1 else self.settings.wire_dtype or dtype

    def kept_bytes(self, sizes: Sizes) -> int:
        return sizes.kept_bytes(build_program(self.plan, self.world, self.rank, FORWARD).kept)

    # --- passes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """out, lse, the bytes that are kept for the backward pass, the call's number, by which that knows it, and the
        largest logits that this rank computed."""
        with self._alone():
            self._forwards += 1
            job = self._job(FORWARD, q, k, v, sequence, call, None)
            kept = torch.empty(self.kept_bytes(job.wire.sizes), dtype=torch.uint8, device=q.device)
            q, k, v = map(job.wire.rounded, (q, k, v))
            lse, out = self._run(job, FORWARD, {"q": (q,), "kv": job.wire.with_copies(k, v)}, kept)["out"]
            if not call.steps:  # whose rows may see nothing
                self._known(sequence)[0].spoil_hidden_rows(out, lse)
            return out, lse, kept, torch.tensor(self.agreement.number, device="cpu"), job.largest

    def backward(
        self,
        dout: Tensor,
        qkv: list[Tensor],
        out: Tensor,
        lse: Tensor,
        kept: Tensor,
        number: Tensor,
        kv_heads: int,
        head_dim: int,
        sequence: Tensor,
        call: AttentionCall,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv. ``qkv`` is empty where ``kept`` holds them: after an exchange over heads. ``dlse`` is the
        cotangent of lse: each logit gets its weight's share of it, so it comes off delta."""
        # without them, only their shapes matter here
        q = qkv[0] if qkv else out.new_empty(()).expand(*out.shape[:3], head_dim)
        k, v = qkv[1:] if qkv else (q[:, :kv_heads], out[:, :kv_heads])
        with self._alone():
            job = self._job(BACKWARD, q, k, v, sequence, call, number)
            q, k, v, dout = map(job.wire.rounded, (q, k, v, dout))
            delta = row_sums(dout, out, job.wire.acc)
            if dlse is not None:
                delta = delta - dlse
                dout = nudge_zero_rows(dout, delta)
            inputs: dict[str, tuple[Tensor, ...]] = {"do": (lse, delta, dout)}
            if qkv:
                inputs |= {"q": (q,), "kv": job.wire.with_copies(k, v)}
            results = self._run(job, BACKWARD, inputs, kept)
            (dq,), (dk, dv) = results["dq"], results["dkv"]
            return dq, *job.wire.without_copies(dk, dv)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call. They are numbered in the order in which they begin, which two threads would not keep on all ranks.
        Whatever ends a call ends it for all ranks."""
        if not self._busy.acquire(blocking=False):
            raise ValueError("two threads call one SequenceParallel at once: give each thread an instance of its own")
        try:
            yield
            self._after = ""
        except BaseException as error:
            self.agreement.give_up(error)
            if self._executor is not None:
                self._executor.give_up(error)
            self._executor = None  # its lanes may be closed, here and at the peers: the next call makes new ones
            # where ranks go on is their program's business, but they are told if they failed in different batches
            self._after, self._begun = f", after an error in sequence {self._begun}", 0
            with self._making:
                self._made = _no_counts()
            raise
        finally:
            self._busy.release()

    def _job(
        self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, sequence: Tensor, call: AttentionCall, of: Tensor | None
    ) -> PassContext:
        """Check the arguments, agree on them with the other ranks if they are new, and find what runs them. ``of`` is
        the number of the forward call that a backward call belongs to.

        What ranks must agree on is in the detail, and so in the messages' tags: ranks that disagree about anything
        never take each other's messages.
        """
        tokens, name = self._known(sequence)
        key = (pass_, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, call)
        ready = tokens.ready.get(key)
        if ready is None:
            if len(tokens.ready) >= READY:
                tokens.ready.clear()
            tokens.ready[key] = ready = self._prepare(pass_, q, k, v, tokens, call)
        belongs = "" if of is None else f", backward of call {'.'.join(map(str, of.tolist()))}"
        detail = f"{ready.detail}, {name}{belongs}{self._after}"
        self.agreement.start(detail)
        keys = ready.signature, tokens.marks
        if not self.agreement.knows(*keys):
            self.agreement.confirm(keys, None)
        scale, tag = call.scale_of(q.shape[3]), call_tag(f"{self.agreement.number} {detail}")
        tiles = partial(tokens.tiles, call, ready.kernel.costs)
        largest = q.new_full(q.shape[:2] if call.largest else (0, 0), float("-inf"), dtype=torch.float32)
        return PassContext(ready.wire, ready.kept, ready.kernel, tiles, scale, tag, q.device, largest)

    def _prepare(
        self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, tokens: BatchGeometry, call: AttentionCall
    ) -> PreparedCall:
        """What a new call is run with; ``ValueError`` on every rank if it cannot be."""
        settings, layout = self.settings, tokens.layout
        try:
            check_tensors(q, k, v)
            kernel = kernel_for(q.device, q.dtype, max(q.shape[3], v.shape[3]), call.softcap)
            call.mask(None, tokens.blocks).check_length(layout.length)  # a window must be one
            if q.shape[2] != layout.local:
                raise ValueError(
                    f"length {layout.length} on {layout.world} ranks gives {layout.local} local tokens a rank "
                    f"({settings.layout}, {len(layout.chunks[0])} x {layout.chunk}), but this rank has {q.shape[2]}"
                    + (
                        "; these look like (batch, tokens, heads, dim): transpose(1, 2) makes them (batch, heads, "
                        "tokens, dim)"
                        if q.shape[1] == layout.local
                        else "; shard with sequence.shard(), which pads"
                    )
                )
            sizes = self.sizes_of(q, k, v)
        except ValueError as error:
            self._refuse(str(error))
        wire = Wire(sizes, q.dtype, self._travels(q.dtype), layout.chunk, tokens.places())
        signature = f"{pass_}: q {describe_tensor(q)}, k {describe_tensor(k)}, v {describe_tensor(v)}, {call}"
        detail = f"{signature}, {tokens}, plan {self.plan}, {settings.layout}, wire {settings.wire_dtype}"
        kept = sizes.kept_slices(build_program(self.plan, self.world, self.rank, pass_).kept)
        return PreparedCall(signature, detail, wire, kept, kernel)

    def refuse(self, problem: str, sequence: Tensor | None = None) -> NoReturn:
        """Raise on every rank: the others learn of it when they begin the same call. ``sequence`` is what it would have
        been on, if it was made."""
        if self._busy.locked():  # in another thread, as a loader's: no call of ours begins here
            raise ValueError(problem)
        with self._alone():
            if sequence is None:
                self._begun += 1
            else:
                self._known(sequence)
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        self.agreement.start(problem)
        self.agreement.confirm((), problem)
        raise AssertionError("ranks that have a problem never agree")

    def _run(
        self, job: PassContext, pass_: Pass, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        program = build_program(self.plan, self.world, self.rank, pass_)
        return self.executor_on(job.device).run(job, program, inputs, kept)

    def executor_on(self, device: torch.device) -> Executor:
        """What runs passes on this device, with lanes for it; made anew for another kind of device."""
        executor = self._executor
        if executor is None or (executor.device is not None and executor.device.type != device.type):
            lanes = None
            if self.world > 1:
                name = f"{self._name}/lanes {self.agreement.epoch} {device.type}"
                programs = [build_program(self.plan, self.world, self.rank, pass_) for pass_ in PASSES]
                lanes = Lanes(self.place, self.ranks, name, self.settings.timeout, device, links_used(programs))
            self._executor = executor = Executor(lanes, self.agreement, self.counters)
        return executor


def _no_counts() -> array[int]:
    return array("q", bytes(8 * COUNTERS))


def _lobby(group_name: str, rank: int, world: int, number: int, place: str) -> WaitRegistry:
    """A rank's entry where ranks see that they wait for each other in different instances, or at different calls."""
    store = PrefixStore(group_name, dist.distributed_c10d._get_default_store())
    return WaitRegistry(store, rank, world, f"call {place} of number {number} of their SequenceParallels")

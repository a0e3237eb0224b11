"""What runs behind the op: one ``Runtime`` a ``SequenceParallel``. It knows the plan, the ranks and the lanes, finds
out whether the ranks agree, and hands each pass to the executor.

A call costs a comparison with the other ranks the first time that its signature or its sequence is new, and never
again: in the steady state a layer pays for its kernels and its transfers only.
"""

from __future__ import annotations

import itertools
import threading
import zlib
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

from startrail.agree import Agreement, Board
from startrail.arguments import Call, check_tensors, describe
from startrail.executor import Executor, Job
from startrail.kernels import kernel_for, lifted_rows, row_sums
from startrail.lanes import Counters, Lanes, tag_of
from startrail.layout import LAYOUTS
from startrail.plan import Plan
from startrail.schedule.build import build_program
from startrail.schedule.values import BACKWARD, FORWARD, Pass
from startrail.sizes import Sizes
from startrail.tokens import Ready, Tokens
from startrail.watch import digest
from startrail.wire import Wire

REMEMBERED = 16  # sequences whose tiles are kept for further batches

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
        members = zlib.crc32(repr(ranks).encode())
        number = next(_instances.setdefault(ranks, itertools.count()))
        self._board_name = f"startrail/{ranks[0]}-{members:x}/{number}"
        self._lanes_made = 0
        self._slots = self.plan.slots(self.world)
        self._alive: WeakValueDictionary[tuple[int, ...], Tokens] = WeakValueDictionary()
        self._latest: deque[Tokens] = deque(maxlen=REMEMBERED)
        self._making = threading.Lock()
        self._last: tuple[Tensor, Tokens] | None = None
        self.agreement = Agreement(self._board(), settings.check_every_call)
        self.agreement.watch()
        self._busy = threading.Lock()
        self._data: int | None = 0  # a digest of the first batch's ids, until the first call has compared it
        self._executor: Executor | None = None

    def _board(self) -> Board | None:
        """Where the ranks of this group compare their calls; each group and each instance has a board of its own."""
        if self.world == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        return Board(PrefixStore(self._board_name, store), self.rank, self.world, self.settings.timeout)

    # --- sequences

    def tokens(self, marks: tuple[int, ...]) -> Tokens:
        """What is known of the sequence with these documents and blocks; the last few, and all in use, are
        remembered."""
        with self._making:  # data loaders make sequences in threads of their own
            tokens = self._alive.get(marks)
            if tokens is None:
                layout = LAYOUTS[self.settings.layout](self._slots, max(marks))
                self._alive[marks] = tokens = Tokens(self.place, layout, marks)
            self._latest.append(tokens)
            return tokens

    def _tokens_of(self, documents: Tensor) -> Tokens:
        """The same for the tensor by which the op knows a sequence; all layers of a batch bring the same one."""
        last = self._last
        if last is None or (last[0].data_ptr(), last[0].shape) != (documents.data_ptr(), documents.shape):
            self._last = last = documents, self.tokens(tuple(documents.tolist()))
        return last[1]

    def note_data(self, ids: Tensor) -> None:
        """Remember what all ranks should have in common: the first call compares it, so that a loader that gives each
        rank other data is found before it trains anything."""
        if self._data is not None and self.world > 1 and ids.device.type != "meta":
            self._data = (31 * self._data + int(digest(ids))) % 2**32

    def _data_text(self) -> str:
        """What the first call says of the data; nothing later on."""
        data, self._data = self._data, None
        return f", data with digest {data:08x}" if data else ""

    # --- sizes

    def sizes_of(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> Sizes:
        """The sizes of a call with such shards; ``ValueError`` if the plan cannot run it."""
        wire = self.settings.wire_dtype or q.dtype
        shape = (q.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3])
        return Sizes(self.plan, *shape, q.dtype.itemsize, wire.itemsize, None if v is None else v.shape[3])

    def kept_bytes(self, sizes: Sizes) -> int:
        return sizes.kept_bytes(build_program(self.plan, self.world, self.rank, FORWARD).kept)

    # --- passes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, lse, the bytes that are kept for the backward pass, and the largest logits that this rank computed."""
        with self._alone():
            job = self._job(FORWARD, q, k, v, documents, call)
            kept = torch.empty(self.kept_bytes(job.wire.sizes), dtype=torch.uint8, device=q.device)
            lse, out = self._run(job, FORWARD, {"q": (q,), "kv": job.wire.with_copies(k, v)}, kept)["out"]
            return out, lse, kept, job.largest

    def backward(
        self,
        dout: Tensor,
        qkv: list[Tensor],
        out: Tensor,
        lse: Tensor,
        kept: Tensor,
        kv_heads: int,
        documents: Tensor,
        call: Call,
        dlse: Tensor | None = None,
        head_dim: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv. ``qkv`` is empty where ``kept`` holds them: after an exchange over heads. ``dlse`` is the
        cotangent of lse: each logit gets its weight's share of it, so it comes off delta."""
        # without them, only their shapes matter here
        q = qkv[0] if qkv else out.new_empty(()).expand(*out.shape[:3], head_dim)
        k, v = qkv[1:] if qkv else (q[:, :kv_heads], out[:, :kv_heads])
        with self._alone():
            job = self._job(BACKWARD, q, k, v, documents, call)
            if self.plan.heads > 1:  # kernels get dout as it travelled, so delta must be of that
                dout = dout.to(job.wire.travels)
            delta = row_sums(dout, out, job.wire.acc)
            if dlse is not None:
                delta = delta - dlse
                dout = lifted_rows(dout, delta)
            inputs: dict[str, tuple[Tensor, ...]] = {"do": (lse, delta, dout)}
            if qkv:
                inputs |= {"q": (q,), "kv": job.wire.with_copies(k, v)}
            results = self._run(job, BACKWARD, inputs, kept)
            (dq,), (dk, dv) = results["dq"], results["dkv"]
            return dq, *job.wire.without_copies(dk, dv)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Calls are numbered in the order in which they begin, which two threads would not keep on all ranks."""
        if not self._busy.acquire(blocking=False):
            raise ValueError("two threads call one SequenceParallel at once: give each thread an instance of its own")
        try:
            yield
        finally:
            self._busy.release()

    def _job(self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, call: Call) -> Job:
        """Check the arguments, agree on them with the other ranks if they are new, and find what runs them.

        What ranks must agree on is in the detail, and so in the messages' tags: ranks that disagree about anything
        never take each other's messages.
        """
        tokens = self._tokens_of(documents)
        key = (pass_, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, call)
        ready = tokens.ready.get(key) or self._prepare(pass_, q, k, v, tokens, call)
        tokens.ready[key] = ready
        data = self._data_text()
        number = self.agreement.start(ready.detail + data)
        if data or not (tokens.agreed and self.agreement.knows(ready.signature)):
            self._confirm(ready.signature, None)
            tokens.agreed = True
        scale, tag = call.scale_of(q.shape[3]), tag_of(f"{number} {ready.detail}")
        largest = q.new_full(q.shape[:2] if call.largest else (0, 0), float("-inf"), dtype=torch.float32)
        return Job(ready.wire, ready.kept, ready.kernel, partial(tokens.tiles, call), scale, tag, q.device, largest)

    def _prepare(self, pass_: Pass, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, call: Call) -> Ready:
        """What a new call is run with; ``ValueError`` on every rank if it cannot be."""
        settings, layout = self.settings, tokens.layout
        try:
            check_tensors(q, k, v)
            kernel = kernel_for(q.device, q.dtype, q.shape[3])
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
            self.refuse(str(error))
        wire = Wire(sizes, q.dtype, settings.wire_dtype or q.dtype, layout.chunk, tokens.places())
        signature = f"{pass_}: q {describe(q)}, k {describe(k)}, v {describe(v)}, {call}"
        detail = f"{signature}, {tokens}, plan {self.plan}, {settings.layout}, wire {settings.wire_dtype}"
        kept = sizes.kept_slices(build_program(self.plan, self.world, self.rank, pass_).kept)
        return Ready(signature, detail, wire, kept, kernel)

    def refuse(self, problem: str) -> NoReturn:
        """Raise on every rank: the others learn of it when they begin the same call."""
        self.agreement.start(problem)
        self._confirm(problem, problem)
        raise AssertionError("ranks that have a problem never agree")

    def _confirm(self, signature: str, problem: str | None) -> None:
        try:
            self.agreement.confirm(signature, problem)
        except ValueError:
            self._executor = None  # ranks that were already sending may have closed the lanes
            raise

    def _run(
        self, job: Job, pass_: Pass, inputs: Mapping[str, tuple[Tensor, ...]], kept: Tensor
    ) -> dict[str, tuple[Tensor, ...]]:
        program = build_program(self.plan, self.world, self.rank, pass_)
        try:
            return self.executor.run(job, program, inputs, kept)
        except BaseException:
            self._executor = None  # its lanes may be closed: the next call makes new ones
            raise

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            lanes = None
            if self.world > 1:
                self._lanes_made += 1
                name = f"{self._board_name}/{self._lanes_made}"
                lanes = Lanes(self.place, self.ranks, name, self.settings.timeout)
            self._executor = Executor(lanes, self.agreement, self.counters)
        return self._executor

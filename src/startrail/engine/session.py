"""``Session``: the calls of one ``SequenceParallel`` on one rank. It identifies each call's batch, makes sure that all
ranks agree, runs the call, and recovers after an error.

A call is compared with those of the other ranks only when its kind or its sequence is new. After that a layer pays for
its kernels and its transfers only. After an error on any rank all ranks raise, and all can continue: their next calls
are compared as if they were the first.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from startrail.agreement.consensus import Consensus, RejoinError, rejoining
from startrail.agreement.digest import fold
from startrail.agreement.ledger import CallRecord
from startrail.compile.problem import Boundaries, Split
from startrail.engine.batch import Batch
from startrail.engine.op_key import DigestRecorder, OpKey, SequenceNumbers, SequenceState
from startrail.engine.runner import BlockKernel, PartInputs, PartResults, PassRunner, PreparedPass
from startrail.schedule.values import Pass
from startrail.transport.counters import Counters
from startrail.transport.interface import Compare
from startrail.transport.opening import open_transport, transport_class
from startrail.transport.process_groups import sends_nothing

RECENT_BATCHES = 16  # kept for later ones with the same boundaries


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``SequenceParallel``, except for its group. ``str()`` has those that all ranks must share."""

    split: Split
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool

    def __str__(self) -> str:
        return f"{self.split}, wire {self.wire_dtype}" + (", check_every_call=True" if self.check_every_call else "")


class Prepared(Protocol):
    """What a request runs with. ``detail`` is what its ranks must agree on."""

    @property
    def detail(self) -> str: ...

    @property
    def passes(self) -> dict[Pass, PreparedPass]: ...


P = TypeVar("P", bound=Prepared, covariant=True)


class Request(Protocol, Generic[P]):
    """One pass of a call, as an op got it. Requests with one ``key`` prepare alike. ``kind`` leaves out the number of
    tokens, which may change with the documents. ``gradients``: a backward pass follows. ``forward_number`` is
    that of the forward call that a backward call belongs to."""

    pass_: Pass
    device: torch.device
    gradients: bool
    forward_number: Tensor | None

    @property
    def key(self) -> object: ...

    @property
    def kind(self) -> object: ...

    def prepare(self, session: Session, batch: Batch) -> P:
        """Compile the call. Raises ``ValueError`` if it cannot run."""
        ...


class StartedPass(NamedTuple, Generic[P]):
    """A pass that all ranks are about to run."""

    request: Request[P]
    prepared: P
    compare: Compare
    runner: PassRunner
    consensus: Consensus
    is_first: bool  # of its kind

    @property
    def number(self) -> Tensor:
        """That of the call, to which its backward pass refers."""
        return torch.tensor(self.consensus.call_id, device="cpu")

    def run(self, kernel: BlockKernel, inputs: Sequence[PartInputs], kept: Tensor | None = None) -> list[PartResults]:
        """Run it on each part's ``inputs``. A forward pass leaves in ``kept`` what its backward pass needs. The first
        time, kernels are compiled before any message is sent: ranks may take minutes longer than others, for which
        these would wait until their timeout."""
        prepared = self.prepared.passes[self.request.pass_]
        if kept is None:
            kept = torch.empty(0, dtype=torch.uint8, device=self.request.device)
        if self.is_first and kernel.compiles and self.consensus.ledger is not None:
            self.runner.rehearse(prepared, kernel, inputs, kept)
            self.consensus.wait_until_all_are_ready()
        return self.runner.run(prepared, kernel, inputs, kept, self.compare)


class Session:
    """``ranks`` are the global ranks of the sequence-parallel group, ``rank`` this one's place among them."""

    def __init__(self, settings: Settings, ranks: tuple[int, ...], rank: int) -> None:
        self.settings, self.ranks, self.rank, self.world = settings, ranks, rank, len(ranks)
        self.place = settings.split.plan.place(self.world, rank)
        self.counters, self._busy, self.closed = Counters(), threading.Lock(), False
        self._batches: WeakValueDictionary[Boundaries, Batch] = WeakValueDictionary()
        self._recent: deque[Batch] = deque(maxlen=RECENT_BATCHES)
        self._lock = threading.Lock()
        self._numbers = SequenceNumbers()
        self._states: WeakValueDictionary[int, SequenceState] = WeakValueDictionary()  # by ticket
        self._digests = DigestRecorder()
        self._last: tuple[Tensor, Batch, OpKey] | None = None
        self._num_made = 0  # sequences
        self.largest_share = 1.0  # of any rank in any sequence, as a multiple of this one's
        self._num_started = 0  # sequences since the last error
        self._after_error: int | None = None  # the sequence of that error, until a call succeeds
        name = f"startrail/{ranks[0]}-{zlib.crc32(repr(ranks).encode()):x}"
        group = None if self.world == 1 or sends_nothing() else name
        self.consensus = Consensus(group, ranks, rank, settings.timeout, settings.check_every_call)
        self._runner: PassRunner | None = None

    # --- sequences

    def expect_windows(self) -> None:
        """Keep neighbouring tokens on neighbouring ranks, in all sequences; too late once there are some."""
        if not self._num_made:
            self.settings = replace(self.settings, split=replace(self.settings.split, in_rank_order=True))

    def make_sequence(self, boundaries: Boundaries, parent: SequenceState | None = None) -> SequenceState:
        """``parent``: the sequence whose tokens these are, if it is cut into other documents."""
        batch = self._batch(boundaries)
        with self._lock:  # data loaders make sequences in their own threads
            self._num_made += 1
            number, ticket = self._numbers.next(boundaries), self._num_made
            maker = self._digests.maker(parent is not None)
            state = SequenceState(batch, number, ticket, maker, parent)
            self._states[ticket] = state
            if shares := boundaries.shares:
                self.largest_share = max(self.largest_share, max(shares) / shares[self.rank])
            return state

    def record_digest(self, sequence: SequenceState, x: Tensor) -> None:
        """Add a digest of a tensor that is sharded to its sequence's key."""
        if self.consensus.ledger is not None and x.device.type != "meta" and x.numel():
            with self._lock:  # other threads cut sequences into documents meanwhile
                self._digests.record(sequence, x)

    def _batch(self, boundaries: Boundaries) -> Batch:
        """The batch with these boundaries. Those in use and the most recent ones are kept."""
        with self._lock:
            batch = self._batches.get(boundaries)
        if batch is None:
            batch = Batch(self.rank, self.settings.split.layout_of(boundaries), boundaries)
        with self._lock:  # another thread may have been faster: all layers of a batch share one
            batch = self._batches.setdefault(boundaries, batch)
            self._recent.append(batch)
        return batch

    def _lookup(self, op_key: Tensor) -> tuple[Batch, OpKey]:
        """The sequence that an op is called with. All layers of a batch bring the same tensor."""
        last = self._last
        if last is None or (last[0].data_ptr(), last[0].shape) != (op_key.data_ptr(), op_key.shape):
            key = OpKey.from_tensor(op_key)
            self._num_started += 1
            number = self._numbers.relative(key.boundaries, key.number)
            self._last = last = op_key, self._batch(key.boundaries), key._replace(number=number)
        return last[1:]

    # --- calls

    @contextmanager
    def call(self) -> Iterator[None]:
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
            self._recover(error)
            raise
        finally:
            self._busy.release()

    def _recover(self, error: BaseException) -> None:
        """Ranks decide themselves where to continue; a note lets them see if they failed in different batches."""
        self._after_error = error.sequence if isinstance(error, RejoinError) else self._num_started
        self.consensus.abandon(error, self._num_started)
        if self._runner is not None:
            self._runner.transport.abandon(error)
        self._runner = None  # its lanes may be closed, here and at the peers: the next call opens new ones
        self._last, self._num_started = None, 0
        self._numbers.restart()

    def start_pass(self, request: Request[P], op_key: Tensor) -> StartedPass[P]:
        """Check a request, compare it with the other ranks if it is new, and find what runs it.

        All that ranks must agree on is part of the record, and so of the messages' tags: ranks that disagree never
        receive each other's messages.
        """
        is_forward = request.forward_number is None
        if is_forward:
            self._digests.count_forward()
        batch, sequence = self._lookup(op_key)
        try:
            prepared = self.prepared(request, batch)
        except ValueError as error:
            self._refuse(str(error))
        data, device_digest = self._data_digest(sequence, request.device) if is_forward else (sequence.digest, None)
        backward_of = "" if request.forward_number is None else ".".join(map(str, request.forward_number.tolist()))
        gradients = is_forward and request.gradients
        detail = f"{request.pass_}: {prepared.detail}"
        after_error = None if data else self._after_error
        record = CallRecord(detail, sequence.number, data, backward_of, after_error, gradients=gradients)
        self.consensus.start(record, device_digest, self._num_started)
        is_new = is_forward and self.consensus.is_new(sequence)
        has_new_boundaries = is_new and self.consensus.is_new(batch.boundaries)
        kind = request.pass_, request.device.type, request.kind, gradients
        compare, is_first = Compare.NEVER, not self.consensus.knows(kind)
        if self._has_to_compare(kind, is_new):
            compare = Compare.BEFORE if has_new_boundaries else Compare.DURING
        runner = self.runner_on(request.device)
        return StartedPass(request, prepared, compare, runner, self.consensus, is_first)

    def prepared(self, request: Request[P], batch: Batch) -> P:
        """What a request runs with, compiled once for each batch. Raises ``ValueError`` if it cannot run."""
        prepared: P | None = batch.prepared.get(request.key)
        if prepared is None:
            prepared = request.prepare(self, batch)
            batch.remember(request.key, prepared)
        return prepared

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
        if is_new and self._runner is None:
            consensus.compare()
            return False
        return is_new

    @rejoining
    def agree(self, operation: str, arguments: str, kind: object, op_key: Tensor, gradients: bool) -> None:
        """Raise ``ValueError`` on every rank unless all ranks are about to run a collective of a sequence with the same
        arguments. Ranks that differ would crash each other, or wait for each other."""
        if self.consensus.ledger is None:
            return
        with self.call():
            batch, sequence = self._lookup(op_key)
            call = f"{operation} of {arguments}, {batch.boundaries}, {self.settings}"
            after_error = None if sequence.digest else self._after_error
            record = CallRecord(call, sequence.number, sequence.digest, "", after_error, kind=operation)
            self.consensus.start(record._replace(gradients=gradients), num_sequences=self._num_started)
            if self._has_to_compare(kind, True) and self._runner is not None:
                self._runner.transport.compare_call()

    @rejoining
    def refuse(self, problem: str, op_key: Tensor | None = None) -> NoReturn:
        """Raise ``ValueError`` here, and on every other rank when it starts the same call. ``op_key`` is that of the
        call's sequence, if it was made."""
        if self._busy.locked() or self.consensus.is_forked:  # by another thread or process, perhaps of a data loader
            raise ValueError(problem)
        with self.call():
            if op_key is None:
                self._num_started += 1
            else:
                self._lookup(op_key)
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        self.consensus.start(CallRecord(problem=problem))
        self.consensus.compare()
        raise AssertionError("ranks with a problem never agree")

    def runner_on(self, device: torch.device) -> PassRunner:
        """The runner for this device, with its lanes. Another type of device gets a new one."""
        if self._runner is None or self._runner.transport.device.type != device.type:
            name = f"{self.consensus.enter()}/lanes {self.consensus.epoch} {device.type}"
            programs = self.settings.split.programs(self.rank)
            timeout, counters = self.settings.timeout, self.counters
            transport = open_transport(self.consensus, counters, self.place, name, timeout, device, programs)
            self._runner = PassRunner(transport, counters)
        return self._runner

    # --- the end

    def check(self) -> None:
        """Wait until all passes so far have completed on all ranks. Raise if any of them was aborted."""
        if self._runner is not None:
            with self.call():
                self._runner.transport.confirm()

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
        self.closed, runner, self._runner = True, self._runner, None
        if runner is not None:
            runner.transport.close(error)
        self.consensus.close()

"""NCCL, between GPUs, and backends like it: they match messages by order alone, and their waits never fail.

The messages of one step on a lane are one batch with one work. A wait only orders streams. The host gets no error: a
wait for a peer that died, or that made another call, returns immediately on a GPU and never on a CPU. So lanes connect
all pairs when they are made, a digest of every call is compared between all ranks while the call runs, and the
watchdog's thread checks pending transfers. One that takes longer than the timeout, or belongs to a call that the ranks
disagree about, aborts all transfers. The program raises after its next wait, or at the end of its pass; what was queued
on the device meanwhile is NaN.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from startrail import _compat
from startrail.agreement.comparison import DIGEST_LIMIT, DigestComparison
from startrail.agreement.consensus import RejoinError, StartedCall
from startrail.agreement.errors import PeerError, in_short
from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import Looks, run_within, watch
from startrail.kernels.device import on_device, on_stream, on_this_stream, record_event, side_stream, used_on
from startrail.schedule.program import Program
from startrail.transport import process_groups
from startrail.transport.interface import Compare, MessageSet, Together, nothing_usable, unusable
from startrail.transport.lanes import Lanes, PendingTransfer, call_tag

if TYPE_CHECKING:
    from startrail.schedule.walk import Message


class InFlight(Protocol):
    """A posted operation. ``str()`` describes it."""

    @property
    def work(self) -> dist.Work: ...


class Waiting(NamedTuple):
    """An operation in flight, and when the device comes to it: after everything that was queued on its current stream
    before. The host may be minutes ahead, which is no one's delay."""

    operation: InFlight
    begun: DeviceClock


class DeviceClock:
    """How long ago the device came to this point of its current stream, as far as calls of ``seconds`` have seen."""

    def __init__(self, device: torch.device) -> None:
        self._event = record_event(device)
        self._since = time.monotonic() if self._event is None else math.inf

    def since(self) -> float:
        """When that was; infinity until the device is there."""
        if self._event is not None and self._since == math.inf and self._event.query():
            self._since = time.monotonic()
        return self._since

    def seconds(self) -> float:
        """0 until the device is there."""
        return max(0.0, time.monotonic() - self.since())


class Link(NamedTuple):
    """A direction between this rank and a peer on a lane."""

    send: bool
    lane: int
    peer: int


def links_used(programs: Sequence[Program]) -> list[Link]:
    """All links that the programs' messages use, in an order that both ends share."""
    posts = (post for program in programs for step in program.steps for post in step.posts)
    return sorted({Link(post.send, post.lane, post.peer) for post in posts})


def is_done(work: dist.Work) -> bool:
    """True if a work has ended. Raises ``RuntimeError`` if it failed, which NCCL counts as completed, too."""
    if not work.is_completed():
        return False
    if (error := _compat.work_error(work)) is not None:
        raise RuntimeError(in_short(error))
    return True


def check_error_handling() -> None:
    """Raises ``ValueError`` if torch's watchdog may abort transfers and let the program go on: they would look
    complete, and our flag would not be set."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "2":
            raise ValueError(f"{name}=2 lets torch abort transfers, whose results then look valid: unset it, or set 1")


class AbortFlag:
    """Tells the device that transfers were aborted: 0, or NaN from then on.

    A wait on a GPU returns at once, and everything that needs the transfer is queued behind it, up to the optimizer's
    step. An abort ends the wait on the device, and the queue runs on with whatever the buffers hold. So each pass ends
    by reading the flag *on the device* and adding it to its results. The flag lies in pinned memory, which the device
    reads when the copy runs, not when it is queued, and it is set before the first transfer is aborted.
    """

    def __init__(self) -> None:
        self._value = torch.zeros((), pin_memory=torch.cuda.is_initialized())

    def set(self) -> None:
        self._value.fill_(float("nan"))

    def mark(self, results: Iterable[Tensor], device: torch.device) -> None:
        """Add the flag to one element of every row of every head: NaN reaches all that is computed from the row."""
        value = self._value.to(device, non_blocking=True)
        for x in results:
            if x.numel():
                (x[..., :1] if x.dim() == 4 else x).add_(value)


class DeviceComparison(DigestComparison):
    """A comparison whose result no host waits for: it is read at a later call. It includes the digest of the call's
    data on a device, if it has one."""

    def __init__(self, group: dist.ProcessGroup, digest: int, device: torch.device, call: StartedCall | None) -> None:
        self.call, self.device = call, device
        self._event: torch.Event | None = None
        self._is_read = False
        self.begun = DeviceClock(device)
        super().__init__([group], digest, device)

    def _digests(self, digest: int, device: torch.device | str) -> Tensor:
        digests = super()._digests(digest, device)
        if self.call is None or self.call.device_digest is None:
            return digests
        data = self.call.device_digest.to(device, non_blocking=True)
        return digests + torch.stack((-data, data)) * DIGEST_LIMIT

    def __str__(self) -> str:
        return "comparing the call with all ranks"

    def start_read(self) -> None:
        """Copy the result to the host, on a stream of its own: it needs all ranks to have begun the pass, for which
        nothing else on this rank's device should wait."""
        stream = side_stream(self.device, "reading")
        if stream is not None:
            used_on(self.extremes, stream)
        with on_stream(stream):
            self.work.wait()
            self.extremes = self.extremes.to("cpu", non_blocking=True)
            self._event = record_event(self.device)
        self._is_read = True

    def least(self) -> int:
        """The smallest digest of all ranks. Waits for it."""
        self.start_read()
        if self._event is not None:
            self._event.synchronize()
        return -int(self.extremes[0])

    def is_mismatch(self) -> bool | None:
        """None while the result is unknown."""
        if not self._is_read or not (self._event is None or self._event.query()):
            return None
        return not self.is_same()


class Batches(Lanes):
    """Posts messages in batches, and marks the results of transfers that were aborted."""

    has_all_to_all = True
    compares_on_device = True

    def __init__(self, *arguments: Any) -> None:
        self._flag = AbortFlag()
        super().__init__(*arguments)

    def _open_lanes(self) -> None:
        hidden = process_groups.hidden_lanes(self.programs)
        for lane in range(len(self.place.sizes)):
            channels = hidden.get(lane, process_groups.EXPOSED_CHANNELS)
            self._open_lane(lane, self.place.lane_ranks(lane), str(lane), channels)

    def begin_pass(self, program: Program, compare: Compare, direct_levels: Iterable[int] = ()) -> None:
        self.begin_call()
        for level in direct_levels:
            self.open_direct(level)

    def together(self, messages: MessageSet) -> Together:
        return messages.by_lane

    def _post(
        self, messages: MessageSet, payloads: Sequence[Tensor], first_tag: int, at_once: tuple[Tensor, Tensor] | None
    ) -> list[list[dist.Work]]:
        groups = messages.by_lane.groups
        works: list[list[dist.Work]] = [[] for _ in groups]
        # in the same order on every rank: where a GPU has no room for the kernels of two lanes, they run one by one
        for lane, number in messages.lanes:
            of_lane = [messages.messages[index] for index in groups[number]]
            if at_once is not None and of_lane[0].head is not None:
                works[number].append(_compat.all_to_all(self.lanes[lane].group, *at_once))
            else:
                works[number].append(self._post_batch(of_lane, [payloads[index] for index in groups[number]]))
        return works

    def _post_batch(self, messages: Sequence[Message | Link], payloads: Sequence[Tensor]) -> dist.Work:
        """Post messages of one lane as one batch, which completes as a whole."""
        group, places = self.lanes[messages[0].lane]
        posts = [
            partial(group.send if message.send else group.recv, [payload], places[message.peer], self.tag)
            for message, payload in zip(messages, payloads, strict=True)
        ]
        return _compat.post_batch(group, self.device, posts)

    def end_pass(self, program: Program, results: Iterable[Tensor]) -> None:
        self._flag.mark(results, self.device)

    def _end_transfers(self) -> None:
        self._flag.set()  # before any wait ends: what runs on the device after it must find the flag set
        super()._end_transfers()


class Fake(Batches):
    """torch's "fake" backend sends nothing, and no transfer of it ever completes. With it, a process can play one rank
    of many, to measure or count what it does."""


class Nccl(Batches):
    closes_together = True

    def __init__(self, *arguments: Any) -> None:
        self.pending: deque[Waiting] = deque()  # transfers
        self.comparisons: deque[DeviceComparison] = deque()
        self._looks = Looks()
        super().__init__(*arguments)
        watch(self)

    def _open_lanes(self) -> None:
        if self._backend == "nccl":
            check_error_handling()
        super()._open_lanes()
        self.all_ranks = self._open_group(self.ranks, "all", 1)
        with on_stream(side_stream(self.device, "connecting")):
            self._connect(links_used(self.programs))

    # --- connections

    def _connect(self, links: Sequence[Link]) -> None:
        """Send one byte over every link, and compare a digest. Communicators and connections are made on first use;
        inside a pass, that would wait for ranks that are late.

        The host waits for the end, so this runs on a stream with nothing else before it: the program's may have minutes
        of work, which is no one's delay."""
        outgoing, incoming = (torch.zeros(len(links), 1, dtype=torch.uint8, device=self.device) for _ in range(2))
        comparisons: list[DeviceComparison] = []

        def compare_parked() -> dist.Work:
            digest = 1 + process_groups.num_parked(self.ranks)
            comparisons.append(DeviceComparison(self.all_ranks, digest, self.device, None))
            return comparisons[0].work

        starts: dict[str, Callable[[], dist.Work]] = {"all ranks": compare_parked}
        for lane in sorted({link.lane for link in links}):
            on_lane = [(index, link) for index, link in enumerate(links) if link.lane == lane]
            payloads = [(outgoing if link.send else incoming)[index] for index, link in on_lane]
            peers = ", ".join(str(self.ranks[link.peer]) for _, link in on_lane if not link.send)
            starts[f"{self.names[lane]} to global ranks {peers}"] = partial(
                self._post_batch, [link for _, link in on_lane], payloads
            )
        self._reach(starts)
        if comparisons[0].least() > 1:
            try:
                process_groups.close_parked(self.ranks, self.opened.name, self.timeout)
            except RuntimeError as error:
                raise self._lost("the store", error) from error

    def _connect_lane(self, lane: int) -> None:
        """Make the communicator now: inside a pass, that would wait for late ranks."""
        with on_stream(side_stream(self.device, "connecting")):
            flag = [torch.zeros(1, device=self.device)]
            self._reach({self.names[lane]: partial(self.lanes[lane].group.allreduce, flag, dist.AllreduceOptions())})

    def _reach(self, starts: Mapping[str, Callable[[], dist.Work]]) -> None:
        """Start the first transfers to each target and wait for all. Raises ``PeerError`` if one fails or is late."""
        end, target = time.monotonic() + self.timeout.total_seconds(), ""
        works = {}
        try:
            for target, start in starts.items():
                works[target] = self._start(start, end - time.monotonic())
            for target in works:
                while not is_done(works[target]):
                    if time.monotonic() > end:
                        raise RuntimeError("timed out")
                    time.sleep(TIMING.poll)
                works[target].wait()
        except RuntimeError as error:
            raise self._lost(target, error) from error

    def _start(self, start: Callable[[], dist.Work], seconds: float) -> dist.Work:
        """The work of ``start``, called in a thread that is abandoned after some ``seconds``: NCCL makes a communicator
        before its first transfer, and waits for all its ranks without a timeout."""
        made, stream = list[dist.Work](), on_this_stream(self.device)

        def run() -> None:
            with stream:
                made.append(start())

        if not run_within(seconds, run):
            raise RuntimeError("timed out while a communicator is made")
        return made[0]

    def _lost(self, target: str, error: RuntimeError) -> PeerError:
        """Abort all transfers: a target was not reached."""
        self.abort(f"no connection over {target}")
        return PeerError(
            f"global rank {dist.get_rank()}: no connection over {target} within {self.timeout}: {in_short(error)}"
        )

    # --- passes

    def begin_pass(self, program: Program, compare: Compare, direct_levels: Iterable[int] = ()) -> None:
        self.running = True
        try:
            self._compare(self.begin_call() + 1, self.consensus.current)
            for level in direct_levels:
                self.open_direct(level)
        except RuntimeError as error:
            raise self.explain(program, 0, "starting the pass", error) from error

    def _watch(self, transfers: Iterable[PendingTransfer]) -> None:
        begun = DeviceClock(self.device)
        self.pending += [Waiting(transfer, begun) for transfer in transfers]

    def end_pass(self, program: Program, results: Iterable[Tensor]) -> None:
        super().end_pass(program, results)
        self._end_comparison()
        if self.aborted:
            error = RuntimeError(self.aborted)
            raise self.explain(program, len(program.steps) - 1, "comparing calls", error)
        self.running = False

    def compare_call(self) -> None:
        try:
            with on_device(self.device):
                self._compare(self.begin_call() + 1, self.consensus.current)
                self._end_comparison()
            if self.aborted:
                raise RuntimeError(self.aborted)
        except RuntimeError as error:
            what = f"rank {self.place.rank}: {self.consensus.current.record.kind} failed"
            raise self.explain_wait(what, error) from error

    def confirm(self) -> None:
        """All ranks keep what they have computed, or all drop it.

        Each rank waits for its own device first, and only then takes part in a comparison with all ranks. So the first
        rank that sees it complete knows that no rank has aborted a pass. The first rank that says in the store whether
        the comparison was complete decides for all: a rank that gave up on waiting for it keeps its results if another
        one has seen it complete, and a rank that sees it complete drops them if another one gave up before.
        """
        check, has_results, error = self.consensus.start_check(), False, None
        try:
            with on_device(self.device):
                self._wait_for_device()
                has_results = True
                self._compare_and_wait(call_tag(check) + 2)  # unlike the digests of calls
        except RuntimeError as failure:
            error = failure
        try:
            if self.consensus.decide(error is None) and has_results:
                return
        except PeerError as unknown:
            raise unusable(error or unknown) from unknown
        explained = self.explain_wait(nothing_usable(), error or RuntimeError("another rank has dropped it"))
        if isinstance(explained, RejoinError):  # what this rank has computed without the others is lost
            explained = unusable(explained)
        raise explained from error

    def _wait_for_device(self) -> None:
        """Wait until the device has ended all passes. Raises ``RuntimeError`` if one of them was aborted."""
        event = record_event(self.device)
        while not (event is None or event.query() or self.aborted):
            time.sleep(TIMING.poll)
        self._read_known()
        if self.aborted:
            raise RuntimeError(self.aborted)

    def _compare_and_wait(self, digest: int) -> None:
        """Compare ``digest`` with all ranks, and wait. Then the results of all earlier comparisons are known as well.
        Raises ``RuntimeError`` if they differ, or if the wait was aborted."""
        comparison = self._compare(digest, None)
        while not (is_done(comparison.work) or self.aborted):
            time.sleep(TIMING.poll)
        if not self.aborted:
            comparison.least()
            self._read_known()
        if self.aborted:
            raise RuntimeError(self.aborted)

    def abandon(self, error: BaseException) -> None:
        """This ends transfers that might otherwise never end: those of a pass that broke off, and all transfers if a
        peer may be gone. In any other case transfers of earlier passes still arrive."""
        if self.running or not isinstance(error, ValueError):
            self.abort("aborted after an earlier error on this rank")
        self.pending.clear()  # they refer to this object, and would keep its groups open
        self.comparisons.clear()

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self.abort("aborted after an earlier error on this rank")
        super().close(error)

    # --- comparing calls

    def _compare(self, digest: int, call: StartedCall | None) -> DeviceComparison:
        if self.aborted:  # since the last pass
            raise RuntimeError(self.aborted)
        comparison = DeviceComparison(self.all_ranks, digest, self.device, call)
        self.comparisons.append(comparison)
        return comparison

    def _end_comparison(self) -> None:
        """Read the result of the latest comparison when it is there, and those that are there."""
        self.comparisons[-1].start_read()
        self._read_known()

    def _read_known(self) -> None:
        """Forget transfers that have ended, and compare the calls whose comparisons have."""
        while self.pending and self._is_done(self.pending[0].operation):
            self.pending.popleft()
        comparisons = self.comparisons
        while not self.aborted and comparisons and (mismatch := comparisons[0].is_mismatch()) is not None:
            comparison = comparisons.popleft()
            if mismatch:
                self._abort_mismatch(comparison)

    def _abort_mismatch(self, comparison: DeviceComparison | None = None) -> None:
        if comparison is not None and comparison.call is not None:
            self.consensus.suspect(comparison.call)  # this rank may have made later calls already
        self.abort("ranks made different calls", mismatch=True)

    # --- the watchdog's thread

    def _is_done(self, transfer: InFlight) -> bool:
        """True if it has ended. A failed one aborts all others: NCCL reports the failure nowhere else."""
        try:
            return is_done(transfer.work)
        except RuntimeError as error:
            if not self.aborted:
                self.abort(f"{transfer} failed: {error}")
            return True

    def check(self) -> None:
        """Called by the watchdog's thread, which has no current device: querying an event would initialize GPU 0."""
        if self.aborted:
            return
        with on_device(self.device):
            if self.device.type == "cuda":
                _compat.ignore_captures_of_other_threads()
            if mismatch := next((each for each in list(self.comparisons) if each.is_mismatch()), None):
                self._abort_mismatch(mismatch)
                return
            posted = [*self.pending, *(Waiting(each, each.begun) for each in list(self.comparisons))]
            unfinished = [each for each in posted if not self._is_done(each.operation)]
            if unfinished and not self.aborted:  # with several streams, the device may have come to a later one first
                self._check_wait(min(unfinished, key=lambda each: each.begun.since()))

    def _check_wait(self, oldest: Waiting) -> None:
        """End a wait that has become too long, or that can never end by itself."""
        seconds = oldest.begun.seconds()
        if seconds > self.timeout.total_seconds():
            self.abort(f"{oldest.operation} did not end within {self.timeout}")
        elif self._looks.is_due(oldest.begun, seconds):
            if isinstance(reason := self.consensus.find_reason(), ValueError):
                self._abort_mismatch()
            elif reason is not None:
                self.abort(str(reason))

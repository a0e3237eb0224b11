"""What all transports share: one process group per lane, waiting for messages, and the errors of failed transfers."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.agreement.consensus import Consensus, RejoinError
from startrail.agreement.errors import PeerError, in_short
from startrail.agreement.timing import TIMING
from startrail.schedule.places import Place
from startrail.schedule.program import Program, lane_names
from startrail.schedule.walk import TAGS_PER_PAIR, TAGS_PER_PART, Message, WalkStep
from startrail.transport import process_groups
from startrail.transport.counters import Counters
from startrail.transport.interface import MessageSet, Transport


def call_tag(signature: str) -> int:
    """The first tag of a call: a digest of everything that its ranks must agree on.

    Ranks that call with other shapes or documents therefore never receive each other's messages, which would crash
    them or give nonsense. They wait, and the ledger explains why.
    """
    return zlib.crc32(signature.encode()) % 0xFFFFF * TAGS_PER_PAIR  # below process_groups.UNUSED_TAG


class Lane(NamedTuple):
    """``places``: each rank's rank in the group."""

    group: dist.ProcessGroup
    places: dict[int, int]


class Lanes(Transport):
    """A transport with peers.

    ``programs`` are those that the lanes will carry; direct ones use lanes of their own. ``aborted`` is the reason once
    transfers have been aborted, ``mismatch`` whether it is that ranks made different calls.
    """

    backend: ClassVar[str] = ""  # by default that of the default process group
    closes_together: ClassVar[bool] = False  # closing a group waits for its other ranks

    def __init__(
        self, consensus: Consensus, counters: Counters, place: Place, name: str, timeout: timedelta,
        device: torch.device, programs: Sequence[Program],
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.consensus, self.counters, self.place, self.timeout = consensus, counters, place, timeout
        self.ranks, self.programs = consensus.ranks, programs
        self.names = 2 * lane_names(place)  # those of the plan's levels, and the direct ones
        self.lanes: dict[int, Lane] = {}
        self.aborted: str | None = None
        self.mismatch = False
        self.tag = 0  # of the current pass
        self._backend = self.backend or process_groups.backend_for(device)
        self._lock = threading.Lock()
        self.opened = process_groups.OpenGroups(name, self.ranks, self.closes_together)
        self._finalizer = weakref.finalize(self, self.opened.release)
        self._finalizer.atexit = False
        self._open_lanes()

    # --- groups

    def _open_lanes(self) -> None:
        """Open the lanes of the plan's levels."""
        raise NotImplementedError

    def _open_group(self, members: Sequence[int], suffix: str, channels: int) -> dist.ProcessGroup:
        name = f"{self.opened.name}/{suffix}"
        group = process_groups.make_group(list(members), name, self._backend, self.timeout, channels)
        self.opened.groups.append(group)
        return group

    def _open_lane(
        self, lane: int, ranks: Sequence[int], name: str, channels: int = process_groups.EXPOSED_CHANNELS
    ) -> None:
        """A lane that connects some ``ranks``, if these are several."""
        if len(ranks) > 1:
            members = [self.ranks[rank] for rank in ranks]
            group = self._open_group(members, f"{name}-{members[0]}", channels)
            self.lanes[lane] = Lane(group, {rank: index for index, rank in enumerate(ranks)})

    def open_direct(self, level: int) -> None:
        """Open the lanes that programs of the plan ``direct`` use, unless they exist: the lane of each level from
        ``level`` on connects all ranks that differ only there and further in. All of these ranks call it."""
        levels = len(self.place.sizes)
        for number in range(level, levels):
            if levels + number not in self.lanes and self.place.sizes[number] > 1 and not self.aborted:
                self._open_lane(levels + number, self.place.inner_ranks(number), f"direct {number}")
                self._connect_lane(levels + number)

    def _connect_lane(self, lane: int) -> None:
        """Make the connections of a new lane, where that would wait inside a pass."""

    def abort(self, reason: str, mismatch: bool = False) -> None:
        """End all pending transfers, here and at the peers. The lanes cannot be used afterwards. Only the first call
        counts: a pass and the watchdog may both find a reason."""
        with self._lock:
            if self.aborted:
                return
            self.aborted, self.mismatch = reason, mismatch
        self._end_transfers()

    def _end_transfers(self) -> None:
        self.opened.abort()

    def close(self, error: BaseException | None) -> None:
        self._finalizer.detach()
        self.opened.close()

    # --- messages

    def begin_call(self) -> int:
        """The first tag of the messages of the call that the consensus has started."""
        self.tag = call_tag(f"{self.consensus.call_id} {self.consensus.current.record}")
        return self.tag

    def post(
        self, step: WalkStep, part: int, messages: MessageSet, payloads: Sequence[Tensor],
        at_once: tuple[Tensor, Tensor] | None = None,
    ) -> list[PendingTransfer]:  # fmt: skip
        try:
            works = self._post(messages, payloads, self.tag + part * TAGS_PER_PART, at_once)
        except RuntimeError as error:
            names = ", ".join(map(self.describe, messages.messages))
            raise self.explain(step.program, step.number, f"posting {names}", error) from error
        for lane, nbytes, number in messages.sent:
            self.counters.count_sends(self.names[lane], nbytes, number)
        groups = self.together(messages).groups
        transfers = [
            PendingTransfer(self, step, messages.messages, group, of_group)
            for group, of_group in zip(groups, works, strict=True)
        ]
        self._watch(transfers)
        return transfers

    def _post(
        self, messages: MessageSet, payloads: Sequence[Tensor], first_tag: int, at_once: tuple[Tensor, Tensor] | None
    ) -> list[list[dist.Work]]:
        """Post messages. Returns the works of each group that is awaited together."""
        raise NotImplementedError

    def _watch(self, transfers: Iterable[PendingTransfer]) -> None:
        """Called with everything that was posted."""

    def describe(self, message: Message) -> str:
        pieces, direction = " ".join(map(str, message.pieces)), "to" if message.send else "from"
        rank = self.ranks[message.peer]
        return f"{pieces} {direction} rank {message.peer} (global rank {rank}) over {self.names[message.lane]}"

    # --- errors

    def explain(self, program: Program, step: int, operation: str, error: RuntimeError) -> Exception:
        """The error to raise for a failed transfer of a pass."""
        where = f"rank {program.place.rank}, {program.pass_} step {step} of plan {program.plan}"
        return self.explain_wait(f"{where}: {operation} failed", error)

    def explain_wait(self, what: str, error: RuntimeError) -> Exception:
        """The error to raise for a failed transfer: ranks made different calls, or a peer is gone, failed or late, or
        this rank was late itself. ``what`` it means for the program."""
        reason, end = self.consensus.find_reason(), time.monotonic() + TIMING.explanation
        while reason is None and self.mismatch and time.monotonic() < end:
            time.sleep(TIMING.longest_poll)  # the other ranks are about to write their records
            reason = self.consensus.find_reason()
        if isinstance(reason, ValueError | RejoinError):
            return reason
        if reason is not None:
            return PeerError(f"{what}: {str(reason).splitlines()[0]}")
        others = self.consensus.describe_others()
        if self.aborted:
            return PeerError(f"{what}: {self.aborted.splitlines()[0]}{others}")
        return PeerError(f"{what}{others}: {in_short(error)}")


class PendingTransfer:
    """Messages that are awaited together: all of one work, or each with its own.

    ``wait()`` blocks once, adds the time to the counters, and raises a ``PeerError`` that names the rank, the step and
    the messages that failed.

    It deliberately holds no reference to the pass that posted it: pooled buffers keep their last sends until they are
    reused, and would otherwise keep every tensor of that pass alive.
    """

    def __init__(
        self, transport: Lanes, step: WalkStep, messages: Sequence[Message], group: Sequence[int],
        works: Sequence[dist.Work],
    ) -> None:  # fmt: skip
        self.transport, self.step, self.messages, self.group, self.works = transport, step, messages, group, works
        self.is_waited_for = False
        self._current = 0  # the work that ``wait()`` waits for

    @property
    def work(self) -> dist.Work:
        """The only one: that of a whole batch, or of a single message."""
        (work,) = self.works
        return work

    def __str__(self) -> str:
        return f"{self.step.program.pass_} step {self.step.number}, {self._description}"

    @property
    def _description(self) -> str:
        described = self.group if len(self.works) == 1 else [self.group[self._current]]
        messages = (self.messages[index] for index in described)
        texts = (f"{'sending' if each.send else 'receiving'} {self.transport.describe(each)}" for each in messages)
        return "; ".join(texts)

    def _abort(self) -> None:
        self.transport.abort("aborted after an error on another rank")

    def wait(self) -> None:
        if self.is_waited_for:
            return
        self.is_waited_for = True
        transport, consensus, waiting = self.transport, self.transport.consensus, self.transport.counters.waiting
        start, failed = waiting.start(transport.device), True
        consensus.begin_wait(self, self._abort)
        try:
            for index, work in enumerate(self.works):
                self._current = index
                work.wait()
            if transport.aborted:  # its bytes may be missing, and NCCL's wait would not raise
                raise RuntimeError(transport.aborted)
            failed = False
        except RuntimeError as error:
            raise transport.explain(self.step.program, self.step.number, self._description, error) from error
        finally:
            consensus.end_wait(failed)
            waiting.stop(start, transport.device)

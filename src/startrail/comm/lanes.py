"""Lanes carry messages: one process group per lane, so that a slow link never queues a fast one.

Two kinds of backends carry them. *gloo* matches messages by tag, and its waits fail when a peer is gone or late. It has
a connection for each pair of ranks and a thread for each group, so all lanes over heads share one group. *NCCL*
and similar backends take the messages of one step on a lane as one batch with one work and match them by order alone.
Their waits only order streams and never fail. There, lanes connect all pairs when they are made, a digest of every call
is compared between all ranks while the call runs (``DigestComparison``), and ``Lanes.aborted`` tells whether a wait
ended because its transfers were aborted.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from startrail import _compat
from startrail.comm import process_groups
from startrail.comm.consensus import StartedCall
from startrail.comm.errors import PeerError
from startrail.comm.timing import TIMING
from startrail.kernels.device import record_event
from startrail.schedule.places import Place
from startrail.schedule.program import Program, lane_names
from startrail.schedule.values import Piece
from startrail.schedule.walk import TAGS_PER_PAIR, Message


def call_tag(signature: str) -> int:
    """The first tag of a call: a digest of everything that its ranks must agree on.

    Ranks that call with other shapes or documents therefore never receive each other's messages, which would crash
    them or give nonsense. They wait, and the ledger explains why.
    """
    return zlib.crc32(signature.encode()) % 0xFFFFF * TAGS_PER_PAIR  # below process_groups.UNUSED_TAG


class Link(NamedTuple):
    """A direction between this rank and a peer on a lane."""

    send: bool
    lane: int
    peer: int


def links_used(programs: Sequence[Program]) -> list[Link]:
    """All links that the programs' messages use, in an order that both ends share."""
    posts = (post for program in programs for step in program.steps for post in step.posts)
    return sorted({Link(post.send, post.lane, post.peer) for post in posts})


def hidden_lanes(programs: Sequence[Program]) -> set[int]:
    """The lanes with a message that is on its way while a block is computed which does not wait for it."""
    hidden: set[int] = set()
    for program in programs:
        coming: dict[Piece, int] = {}  # pieces on their way, with their lanes
        for step in program.steps:
            for piece in step.after:
                coming.pop(piece, None)
            coming |= {post.piece: post.lane for post in step.posts if not post.send}
            for block in step.blocks:
                for piece in program.pass_.needs(block):
                    coming.pop(piece, None)
                hidden.update(coming.values())
            for merge in step.merges:
                coming.pop(merge.piece, None)
    return hidden


def is_done(work: dist.Work) -> bool:
    """True if a work has ended. Raises ``RuntimeError`` if it failed, which NCCL counts as completed, too."""
    if not work.is_completed():
        return False
    if (error := _compat.work_error(work)) is not None:
        raise RuntimeError(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    return True


def max_over_ranks(group: dist.ProcessGroup, numbers: Tensor) -> dist.Work:
    """Start replacing ``numbers`` with their maxima over the ranks of a lane."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return group.allreduce([numbers], options)


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


class DigestComparison:
    """Finds out while a ``call`` runs whether all ranks run the same one: an all-reduce of the maxima of its digest and
    of the negative. On a GPU the host never waits for the result, but reads it at a later call."""

    def __init__(self, work: dist.Work, extremes: Tensor, call: StartedCall | None) -> None:
        self.work, self.extremes, self.call = work, extremes, call
        self.posted = time.monotonic()
        self._event: torch.Event | None = None
        self._is_read = False

    def __str__(self) -> str:
        return "comparing the call with all ranks"

    def start_read(self) -> None:
        """Copy the result to the host after everything on the current stream."""
        self.work.wait()
        device, self.extremes = self.extremes.device, self.extremes.to("cpu", non_blocking=True)
        self._event = record_event(device)
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
        low, high = self.extremes.tolist()
        return low + high != 0


class Lanes:
    """The process groups of all lanes, for one kind of device.

    ``ranks`` are the global ranks of the sequence-parallel group. ``programs`` are those that the lanes will carry: all
    links that they use are connected at once. ``aborted`` is the reason once transfers have been aborted, ``mismatch``
    whether it is that ranks made different calls.
    """

    def __init__(
        self, place: Place, ranks: tuple[int, ...], name: str, timeout: timedelta, device: torch.device,
        programs: Sequence[Program],
    ) -> None:  # fmt: skip
        self.place, self.ranks, self.timeout, self.device = place, ranks, timeout, device
        self.names = 2 * lane_names(place)  # those of the plan's levels, and the direct ones
        backend = process_groups.backend_for(device)
        self.has_tags = backend == "gloo"
        self.is_monitored = backend not in ("gloo", "fake")  # no transfer of a fake group ever ends
        self.groups: list[dist.ProcessGroup | None] = []
        self.local_ranks: list[dict[int, int]] = []  # per lane: rank -> its rank in the lane's group
        self.direct: dict[int, tuple[dist.ProcessGroup, dict[int, int]]] = {}  # the same for direct lanes
        self.aborted: str | None = None
        self.mismatch = False
        self._flag = AbortFlag()
        self._lock = threading.Lock()
        self._open = opened = process_groups.OpenGroups(name, ranks, collective=self.is_monitored)
        self._finalizer = weakref.finalize(self, opened.release)
        self._finalizer.atexit = False

        def make(members: list[int], suffix: str, channels: int) -> dist.ProcessGroup:
            opened.groups.append(process_groups.make_group(members, f"{name}/{suffix}", backend, timeout, channels))
            return opened.groups[-1]

        self._make, hidden = make, hidden_lanes(programs)
        for lane in range(len(place.sizes)):
            if self.has_tags and lane in place.head_lanes[1:]:  # the outermost one's group has these ranks, too
                self.groups.append(self.groups[place.head_lanes[0]])
                self.local_ranks.append(self.local_ranks[place.head_lanes[0]])
                continue
            channels = process_groups.HIDDEN_CHANNELS if lane in hidden else process_groups.EXPOSED_CHANNELS
            group, local_ranks = self._make_lane(place.lane_ranks(lane), str(lane), channels)
            self.groups.append(group)
            self.local_ranks.append(local_ranks)
        self.all_ranks = make(list(ranks), "all", 1) if self.is_monitored else None
        if self.is_monitored:
            self._connect(links_used(programs))

    def _make_lane(
        self, lane_ranks: Sequence[int], name: str, channels: int
    ) -> tuple[dist.ProcessGroup | None, dict[int, int]]:
        members = [self.ranks[rank] for rank in lane_ranks]
        group = self._make(members, f"{name}-{members[0]}", channels) if len(members) > 1 else None
        return group, {rank: index for index, rank in enumerate(lane_ranks)}

    def open_direct(self, level: int) -> None:
        """Make the lanes that programs of the plan ``direct`` use, unless they exist: the lane of each level from
        ``level`` on connects all ranks that differ only there and further in. All of these ranks call it."""
        levels = len(self.place.sizes)
        for number in range(level, levels if not self.aborted else level):  # the pass itself will raise
            lane = levels + number
            if lane in self.direct or self.place.sizes[number] == 1:
                continue
            ranks, channels = self.place.inner_ranks(number), process_groups.EXPOSED_CHANNELS
            group, local_ranks = self._make_lane(ranks, f"direct {number}", channels)
            assert group is not None
            self.direct[lane] = group, local_ranks
            if self.is_monitored:  # makes the communicator now: inside a pass, that would wait for late ranks
                flag = [torch.zeros(1, device=self.device)]
                self._reach({self.names[number]: partial(group.allreduce, flag, dist.AllreduceOptions())})

    def abort(self, reason: str, mismatch: bool = False) -> None:
        """End all pending transfers, here and at the peers. The lanes cannot be used afterwards. Only the first call
        counts: a pass and the watchdog may both find a reason."""
        with self._lock:
            if self.aborted:
                return
            self.aborted, self.mismatch = reason, mismatch
        self._flag.set()  # before any wait ends: what runs on the device after it must find the flag set
        self._open.abort()

    def mark_if_aborted(self, results: Iterable[Tensor]) -> None:
        """Make the results of a pass NaN, on the device, if its transfers are aborted before they complete there."""
        if not self.has_tags:  # a wait on gloo raises
            self._flag.mark(results, self.device)

    def close(self) -> None:
        """Close the groups. All ranks must do this together, unless the lanes are aborted."""
        self._finalizer.detach()
        self._open.close()

    def _connect(self, links: Sequence[Link]) -> None:
        """Send one byte over every link, and compare a digest. Communicators and connections are made on first use;
        inside a pass, that would wait for ranks that are late."""
        outgoing, incoming = (torch.zeros(len(links), 1, dtype=torch.uint8, device=self.device) for _ in range(2))
        comparisons: list[DigestComparison] = []

        def compare_parked() -> dist.Work:
            comparisons.append(self.compare_digest(1 + process_groups.num_parked(self.ranks)))
            return comparisons[0].work

        starts: dict[str, Callable[[], dist.Work]] = {"all ranks": compare_parked}
        for lane in sorted({link.lane for link in links}):
            on_lane = [(index, link) for index, link in enumerate(links) if link.lane == lane]
            payloads = [(outgoing if link.send else incoming)[index] for index, link in on_lane]
            peers = ", ".join(str(self.ranks[link.peer]) for _, link in on_lane if not link.send)
            starts[f"{self.names[lane]} to global ranks {peers}"] = partial(
                self._post_batch, [link for _, link in on_lane], payloads, 0
            )
        self._reach(starts)
        if comparisons[0].least() > 1:
            try:
                process_groups.close_parked(self.ranks, self._open.name, self.timeout)
            except RuntimeError as error:
                raise self._lost("the store", error) from error

    def _reach(self, starts: Mapping[str, Callable[[], dist.Work]]) -> None:
        """Start the first transfers to each target and wait for all. Raises ``PeerError`` if one fails or is late."""
        end, target = time.monotonic() + self.timeout.total_seconds(), ""
        works = {}
        try:
            for target, start in starts.items():
                works[target] = start()
            for target in works:
                while not is_done(works[target]):
                    if time.monotonic() > end:
                        raise RuntimeError("timed out")
                    time.sleep(TIMING.poll)
                works[target].wait()
        except RuntimeError as error:
            raise self._lost(target, error) from error

    def _lost(self, target: str, error: RuntimeError) -> PeerError:
        """Abort all transfers: a target was not reached."""
        self.abort(f"no connection over {target}")
        return PeerError(
            f"global rank {dist.get_rank()}: no connection over {target} within {self.timeout}: "
            f"{str(error).splitlines()[0]}"
        )

    def compare_digest(self, digest: int, call: StartedCall | None = None) -> DigestComparison:
        """Start comparing a ``digest`` (at least 1), and that of the call's data on a device, between all ranks."""
        extremes = torch.arange(-digest, digest + 1, 2 * digest, device=self.device)
        if call is not None and call.device_digest is not None:
            data = call.device_digest.to(self.device, non_blocking=True)
            extremes = extremes + torch.stack((-data, data)) * 2**31
        assert self.all_ranks is not None, "gloo's tags find a mismatch without a comparison"
        return DigestComparison(max_over_ranks(self.all_ranks, extremes), extremes, call)

    def post(
        self, messages: Sequence[Message], payloads: Sequence[Tensor], first_tag: int,
        all_to_all: tuple[int, Tensor, Tensor] | None = None,
    ) -> list[dist.Work]:  # fmt: skip
        """Post messages with their payloads, as one batch per lane. Returns one work per message, in order.

        ``all_to_all``: a lane whose messages exchange equal parts between all its ranks, including this one, with the
        tensors that receive and send them.
        """
        if self.has_tags:  # directly to the backend: torch's own checks cost more than a small message
            return [
                (group.send if message.send else group.recv)(
                    [payload], local_ranks[message.peer], first_tag + message.tag
                )
                for message, payload in zip(messages, payloads, strict=True)
                for group, local_ranks in (self._lane(message.lane),)
            ]
        works = {}
        # in the same order on every rank: where a GPU has no room for the kernels of two lanes, they run one by one
        for lane in sorted({message.lane for message in messages}):
            if all_to_all is not None and lane == all_to_all[0]:
                works[lane] = _compat.all_to_all(self._lane(lane)[0], *all_to_all[1:])
                continue
            on_lane = [index for index, message in enumerate(messages) if message.lane == lane]
            works[lane] = self._post_batch([messages[i] for i in on_lane], [payloads[i] for i in on_lane], first_tag)
        return [works[message.lane] for message in messages]

    def _post_batch(self, messages: Sequence[Message | Link], payloads: Sequence[Tensor], tag: int) -> dist.Work:
        """Post messages of one lane as one batch, which completes as a whole."""
        group, local_ranks = self._lane(messages[0].lane)
        posts = [
            partial(group.send if message.send else group.recv, [payload], local_ranks[message.peer], tag)
            for message, payload in zip(messages, payloads, strict=True)
        ]
        return _compat.post_batch(group, self.device, posts)

    def _lane(self, lane: int) -> tuple[dist.ProcessGroup, dict[int, int]]:
        """A lane's group, and each rank's rank in it."""
        if lane in self.direct:
            return self.direct[lane]
        group = self.groups[lane]
        assert group is not None, f"lane {lane} has one rank"
        return group, self.local_ranks[lane]

    def describe(self, message: Message) -> str:
        pieces, direction = " ".join(map(str, message.pieces)), "to" if message.send else "from"
        rank = self.ranks[message.peer]
        return f"{pieces} {direction} rank {message.peer} (global rank {rank}) over {self.names[message.lane]}"

"""Messages: one process group a lane, so that a slow link never queues a fast one.

Two kinds of backends carry them. *gloo* matches messages by tag, and its waits fail when a peer is gone or late. *NCCL*
and what behaves like it takes what one step posts on a lane as one batch with one work, matches messages by their order
and nothing else, and its waits only say what must come before what: they never fail. There, lanes connect all
their pairs when they are made, one number of every call is compared between all ranks while the call runs
(``DigestComparison``), and a wait that was ended from outside is known by ``Lanes.ended``.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.comm import process_groups as groups
from startrail.comm.errors import PeerError
from startrail.comm.timing import TIMING
from startrail.schedule.places import Place
from startrail.schedule.program import Program, lane_names
from startrail.schedule.values import Piece

TAGS_PER_PAIR = 1 << 11


def call_tag(signature: str) -> int:
    """The first tag of a call: a digest of everything that its ranks must agree on. Ranks that call with other shapes
    or documents then never take each other's messages: they run into the deadline, which names the peer, instead of
    aborting or computing nonsense."""
    return zlib.crc32(signature.encode()) % 0xFFFFF * TAGS_PER_PAIR  # below the tag that nobody uses


class Message(NamedTuple):
    """What two ranks send each other at once: a piece, or over heads the parts of all pieces of one step."""

    send: bool
    lane: int
    peer: int
    pieces: tuple[Piece, ...]
    over_heads: bool
    tag: int  # a count of the messages between the two


class Link(NamedTuple):
    """Something goes to a peer over a lane, or comes from it."""

    send: bool
    lane: int
    peer: int


def links_used(programs: Sequence[Program]) -> list[Link]:
    """Every way that the programs' messages take, in an order that both ends share."""
    posts = (post for program in programs for step in program.steps for post in step.posts)
    return sorted({Link(post.send, post.lane, post.peer) for post in posts})


def is_done(work: dist.Work) -> bool:
    """Whether a work has ended; ``RuntimeError`` if it failed, which NCCL counts as completed, too."""
    if not work.is_completed():
        return False
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    return True


class DigestComparison:
    """Whether all ranks have begun the same call, found out while it runs: the largest of ``digest`` and of its
    negative over all ranks. On a GPU the host never waits for the answer; it looks when it comes by again."""

    def __init__(self, work: dist.Work, both: Tensor) -> None:
        self.work, self.both = work, both
        self.posted = time.monotonic()
        self._event: torch.Event | None = None
        self._ordered = False

    def __str__(self) -> str:
        return "comparing the call with all ranks"

    def order(self) -> None:
        """Have the answer on its way to the host, behind what the current stream has been given so far."""
        self.work.wait()
        if self.both.device.type == "cuda":
            self.both = self.both.to("cpu", non_blocking=True)
            self._event = torch.Event("cuda")
            self._event.record()
        self._ordered = True

    def differs(self) -> bool | None:
        """None as long as nobody knows."""
        if not self._ordered or not (self._event is None or self._event.query()):
            return None
        low, high = self.both.tolist()
        return low + high != 0


class Lanes:
    """One process group a lane, made once for one kind of device. ``ranks`` are the global ranks of the
    sequence-parallel group, ``links`` what the messages will use. ``ended`` says why no transfer goes on any more."""

    def __init__(
        self,
        place: Place,
        ranks: tuple[int, ...],
        name: str,
        timeout: timedelta,
        device: torch.device,
        links: Sequence[Link],
    ) -> None:
        self.place, self.ranks, self.timeout, self.device = place, ranks, timeout, device
        self.names = lane_names(place)
        backend = groups.backend_for(device)
        self.tagged = backend == "gloo"
        self.watched = backend not in ("gloo", "fake")  # nothing of a fake group ever ends
        self.groups: list[dist.ProcessGroup | None] = []
        self.places: list[dict[int, int]] = []
        self.ended: str | None = None
        self._ending = threading.Lock()
        made: list[dist.ProcessGroup] = []
        weakref.finalize(self, groups.destroy, made).atexit = False

        def make(members: list[int], suffix: str) -> dist.ProcessGroup:
            made.append(groups.make_group(members, f"{name}/{suffix}", backend, timeout))
            return made[-1]

        for lane in range(len(self.names)):
            there = place.lane_ranks(lane)
            self.places.append({rank: index for index, rank in enumerate(there)})
            members = [ranks[member] for member in there]
            self.groups.append(make(members, f"{lane}-{members[0]}") if len(members) > 1 else None)
        self.everyone = make(list(ranks), "all") if self.watched else None
        if self.watched:
            self._connect(links)

    def end(self, why: str) -> None:
        """Make every transfer under way end at once, here and at the peers; once, though a pass and the watching thread
        may both find a reason. The lanes are of no use afterwards."""
        with self._ending:
            if self.ended:
                return
            self.ended = why
        groups.abort([group for group in (*self.groups, self.everyone) if group is not None])

    def end_waits(self) -> None:
        self.end("ended by another rank's word")

    def _connect(self, links: Sequence[Link]) -> None:
        """One byte over every link, and a comparison: communicators and connections are made by their first use, which
        would otherwise be inside a pass, and would wait there for whoever comes late."""
        hello, room = (torch.zeros(len(links), 1, dtype=torch.uint8, device=self.device) for _ in range(2))
        end = time.monotonic() + self.timeout.total_seconds()
        what = "all ranks"
        try:
            works = {what: self.compare(1).work}
            for lane in sorted({link.lane for link in links}):
                here = [(index, link) for index, link in enumerate(links) if link.lane == lane]
                flats = [(hello if link.send else room)[index] for index, link in here]
                peers = ", ".join(str(self.ranks[link.peer]) for _, link in here if not link.send)
                what = f"{self.names[lane]} to global ranks {peers}"
                works[what] = self._batch([link for _, link in here], flats, 0)
            for what in works:
                while not is_done(works[what]):
                    if time.monotonic() > end:
                        raise RuntimeError("nobody came")
                    time.sleep(TIMING.poll)
                works[what].wait()
        except RuntimeError as error:
            self.end(f"no connection over {what}")
            raise PeerError(
                f"global rank {dist.get_rank()}: no connection over {what} within {self.timeout}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def compare(self, digest: int) -> DigestComparison:
        """Begin to find out whether all ranks bring the same ``digest`` (at least 1)."""
        both = torch.arange(-digest, digest + 1, 2 * digest, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        assert self.everyone is not None, "only where nobody is told of a mistake"
        return DigestComparison(self.everyone.allreduce([both], options), both)

    def post(
        self,
        messages: Sequence[Message],
        bytes_of: Sequence[Tensor],
        first_tag: int,
        at_once: tuple[int, Tensor, Tensor] | None = None,
    ) -> list[dist.Work]:
        """Post messages with their bytes as one batch a lane; a work for each, in order. ``at_once``: a lane whose
        messages are an exchange of equal parts with everybody on it, our own included; where these come to, and from
        where they leave."""
        if self.tagged:  # straight to the backend: what torch checks on the way costs more than a small message
            return [
                (group.send if message.send else group.recv)([flat], places[message.peer], first_tag + message.tag)
                for message, flat in zip(messages, bytes_of, strict=True)
                for group, places in (self._lane(message.lane),)
            ]
        works = {}
        # in the same order on every rank: where a GPU has no room for two lanes' kernels, one runs behind the other
        for lane in sorted({message.lane for message in messages}):
            if at_once is not None and lane == at_once[0]:
                group, _ = self._lane(lane)
                works[lane] = group.all_to_all_single(*at_once[1:], [], [], dist.AllToAllOptions())
                continue
            here = [index for index, message in enumerate(messages) if message.lane == lane]
            works[lane] = self._batch([messages[i] for i in here], [bytes_of[i] for i in here], first_tag)
        return [works[message.lane] for message in messages]

    def _batch(self, messages: Sequence[Message | Link], flats: Sequence[Tensor], tag: int) -> dist.Work:
        """Messages of one lane that are posted together, and end together."""
        group, places = self._lane(messages[0].lane)
        group._start_coalescing(self.device)
        for message, flat in zip(messages, flats, strict=True):
            (group.send if message.send else group.recv)([flat], places[message.peer], tag)
        return group._end_coalescing(self.device)

    def _lane(self, lane: int) -> tuple[dist.ProcessGroup, dict[int, int]]:
        """A lane's group, and where each rank stands in it."""
        group = self.groups[lane]
        assert group is not None, f"nobody else is on lane {lane}"
        return group, self.places[lane]

    def name(self, message: Message) -> str:
        pieces, way = " ".join(map(str, message.pieces)), "to" if message.send else "from"
        rank = self.ranks[message.peer]
        return f"{pieces} {way} rank {message.peer} (global rank {rank}) over {self.names[message.lane]}"

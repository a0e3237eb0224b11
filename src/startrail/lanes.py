"""Messages: one process group a lane, buffers that are used again, and counters of what was sent."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from startrail.agree import PeerError
from startrail.schedule.build import lane_names
from startrail.schedule.places import Place
from startrail.schedule.values import Piece

TAGS_A_PAIR = 1 << 11
UNUSED_TAG = (1 << 31) - 1  # above those of every call


def tag_of(signature: str) -> int:
    """The first tag of a call: a digest of everything that its ranks must agree on. Ranks that call with other shapes
    or documents then never take each other's messages: they run into the deadline, which names the peer, instead of
    aborting or computing nonsense."""
    return zlib.crc32(signature.encode()) % 0xFFFFF * TAGS_A_PAIR  # below UNUSED_TAG


@dataclass
class Traffic:
    """What this rank has sent over one lane."""

    bytes: int = 0
    hops: int = 0


@dataclass
class Counters:
    """Totals: traffic by lane, and seconds."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    waiting: float = 0.0
    total: float = 0.0

    def reset(self) -> None:
        self.traffic, self.waiting, self.total = {}, 0.0, 0.0


KEPT_PASSES = 64
KEPT_VIEWS = 8


class Message(NamedTuple):
    """What two ranks send each other at once: a piece, or over heads the parts of all pieces of one step."""

    send: bool
    lane: int
    peer: int
    pieces: tuple[Piece, ...]
    over_heads: bool
    tag: int  # a count of the messages between the two


class Buffer:
    """Bytes, and what must end before they may be read (``arrivals``) or written again (``sends``).

    Views of the bytes are remembered: a buffer is used again and again for the same kind of piece. ``whole`` is the
    buffer that these bytes are the beginning of, if the pool had none of their size.
    """

    def __init__(self, flat: Tensor, whole: Buffer | None = None) -> None:
        self.flat, self.whole = flat, whole
        self.arrivals: list[Callable[[], None]] = []
        self.sends: list[Callable[[], None]] = []
        self.used = 0  # in which pass the pool got it back
        self._views: dict[object, tuple[Tensor, ...]] = {}

    def views(self, key: object, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``make`` makes of the bytes, made once for each ``key``."""
        if key not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            self._views[key] = make(self.flat)
        return self._views[key]

    def arrive(self) -> None:
        arrivals, self.arrivals = self.arrivals, []
        for wait in arrivals:
            wait()


class BufferPool:
    """Flat byte buffers that are used again, also by the next call. A buffer whose send is under way is handed out
    only once the send has ended; one that nobody has used in the last ``KEPT_PASSES`` goes."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[Buffer]] = {}
        self._pass = 0
        self.allocated = 0

    def get(self, nbytes: int, device: torch.device) -> Buffer:
        """The smallest free buffer that is large enough but not wastefully so; the one that waits longest if equal."""
        free = self._free.get((nbytes, device)) or self._larger(nbytes, device)
        if not free:
            self.allocated += nbytes
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, device=device))
        buffer = free.pop(0)
        for wait in buffer.sends:
            wait()
        buffer.sends = []
        return buffer if buffer.flat.numel() == nbytes else Buffer(buffer.flat[:nbytes], buffer)

    def _larger(self, nbytes: int, device: torch.device) -> list[Buffer] | None:
        sizes = [size for (size, where), free in self._free.items() if free and where == device]
        size = min((size for size in sizes if nbytes < size <= 2 * nbytes), default=0)
        return self._free.get((size, device))

    def put(self, buffer: Buffer) -> None:
        whole = buffer.whole or buffer
        whole.sends, whole.used = buffer.sends, self._pass
        self._free.setdefault((whole.flat.numel(), whole.flat.device), []).append(whole)

    def settle(self) -> None:
        """A pass is over, and so are all its sends: forget them, and buffers of sizes that are no longer asked for."""
        self._pass += 1
        for key, free in list(self._free.items()):
            kept = [buffer for buffer in free if buffer.used > self._pass - KEPT_PASSES]
            for buffer in kept:
                buffer.sends = []
            self._free[key] = kept
            if not kept:
                del self._free[key]


class Lanes:
    """One process group a lane, made once. ``ranks`` are the global ranks of the sequence-parallel group."""

    def __init__(self, place: Place, ranks: tuple[int, ...], name: str, timeout: timedelta) -> None:
        self.place, self.ranks = place, ranks
        self.names = lane_names(place)
        self.groups: list[dist.ProcessGroup | None] = []
        self.places: list[dict[int, int]] = []
        for lane in range(len(self.names)):
            there = place.lane_ranks(lane)
            self.places.append({rank: index for index, rank in enumerate(there)})
            members = [ranks[member] for member in there]
            group = _named_group(members, f"{name}/{lane}-{members[0]}", timeout) if len(members) > 1 else None
            self.groups.append(group)

        made = [group for group in self.groups if group is not None]
        self.coalesces = any(dist.get_backend(group) != "gloo" for group in made)
        weakref.finalize(self, _destroy, made).atexit = False

    def end_waits(self) -> None:
        """Make every transfer under way fail at once, here and at the peers. The lanes are of no use afterwards."""
        for group in self.groups:
            if group is None:
                continue
            backend = dist.get_backend(group)  # such as cpu:gloo,cuda:nccl
            if "nccl" in backend:
                group.abort()
            if "gloo" not in backend:
                continue
            # gloo cannot be aborted, but a receive that times out closes all its connections; from a peer that has
            # closed its own already it cannot be posted
            for peer in (rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()):
                with contextlib.suppress(RuntimeError):
                    receive = dist.irecv(torch.empty(1), peer, group, tag=UNUSED_TAG)
                    assert receive is not None
                    receive.wait(timedelta(milliseconds=1))

    def post(self, messages: Sequence[Message], bytes_of: Sequence[Tensor], first_tag: int) -> list[dist.Work]:
        """Post messages with their bytes as one batch a lane; a work for each, in order."""
        if not self.coalesces:  # straight to the backend: what torch checks on the way costs more than a small message
            return [
                (group.send if message.send else group.recv)([flat], places[message.peer], first_tag + message.tag)
                for message, flat in zip(messages, bytes_of, strict=True)
                for group, places in (self._lane(message.lane),)
            ]
        works: dict[int, dist.Work] = {}
        for lane in dict.fromkeys(message.lane for message in messages):
            group, _ = self._lane(lane)
            here = [index for index, message in enumerate(messages) if message.lane == lane]
            ops = []
            for index in here:
                message = messages[index]
                op = dist.isend if message.send else dist.irecv
                peer, tag = self.ranks[message.peer], first_tag + message.tag
                ops.append(dist.P2POp(op, bytes_of[index], peer, group, tag))
            posted = dist.batch_isend_irecv(ops)
            for place, index in enumerate(here):  # a backend that coalesces gives one work for the whole batch
                works[index] = posted[place] if len(posted) == len(here) else posted[0]
        return [works[index] for index in range(len(messages))]

    def _lane(self, lane: int) -> tuple[dist.ProcessGroup, dict[int, int]]:
        """A lane's group, and where each rank stands in it."""
        group = self.groups[lane]
        assert group is not None, f"nobody else is on lane {lane}"
        return group, self.places[lane]

    def name(self, message: Message) -> str:
        pieces, way = " ".join(map(str, message.pieces)), "to" if message.send else "from"
        rank = self.ranks[message.peer]
        return f"{pieces} {way} rank {message.peer} (global rank {rank}) over {self.names[message.lane]}"


def _named_group(members: list[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group under a name of our own, made by its members alone.

    ``new_group`` would name it by how many groups this process has made so far, so that ranks that have made different
    numbers of them wait for each other in vain.
    """
    store = PrefixStore(f"{name}/", c10d._get_default_store())
    config = dist.get_backend_config()  # such as cpu:gloo,cuda:gloo
    kinds = {part.rpartition(":")[2] for part in config.split(",")}
    backend = c10d.Backend(kinds.pop() if len(kinds) == 1 else config)  # one name, or torch warns when the group ends
    index = members.index(dist.get_rank())
    try:
        group, _ = c10d._new_process_group_helper(
            len(members), index, members, backend, store, group_name=c10d.GroupName(name), timeout=timeout
        )
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise PeerError(
            f"global rank {dist.get_rank()}: no connection to ranks {members} within {timeout}: {first}"
        ) from error
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    with contextlib.suppress(ValueError, AssertionError):  # the whole world may be gone already
        for group in groups:
            dist.destroy_process_group(group)

"""The process groups behind lanes: their backend, their settings, and how they end.

NCCL's communicators end collectively: ``ncclCommDestroy`` waits for the other ranks of the node. Garbage collection
comes at a different time on every rank, so the groups of lanes that are dropped without an error are *parked*, and
closed when their ranks meet the next time (``OpenGroups``, ``close_parked``).

All settings of NCCL's communicators are here:

- *high priority streams*: attention kernels that become ready together with a transfer would take every
  multiprocessor, and the transfer that they should hide would run after them;
- *few channels for lanes that run under compute*, as the plan says: each takes a multiprocessor from attention, and
  these transfers have the time of a block. They start one by one: a cluster of four, the default from Hopper on, needs
  four free multiprocessors in one part of the GPU, and those that attention leaves may lie anywhere. *Many for lanes
  that run while nothing else does*, such as the exchange over heads: it takes about 2 per NVLink to fill them, and an
  H100 has 18 (NVIDIA/nccl#1703);
- *never split from the world's communicator*. torch does that if the default group is bound to a device: lazily, inside
  the first transfer, and with all ranks of the world, most of which do not take part;
- *a longer timeout for NCCL's own watchdog*, which kills the process without naming the peer, and counts the time that
  the host is ahead of the device: ``TIMING.nccl_grace`` more than ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from startrail._compat import PrefixStore, default_store, make_named_group, nccl_options
from startrail.agreement.errors import PeerError, in_short
from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import run_all_within
from startrail.schedule.program import Program
from startrail.schedule.values import Piece

EXPOSED_CHANNELS = 32
UNUSED_TAG = (1 << 31) - 1  # above the tags of every call

log = logging.getLogger("startrail")


def backend_for(device: torch.device) -> str:
    """The name of the backend with which the default process group moves tensors of this device."""
    config = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    backends = dict(part.split(":") for part in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"the process group ({config}) cannot move tensors on {device.type}; initialize it with a backend that can"
        )
    return backends[device.type]


def sends_nothing() -> bool:
    """True for torch's "fake" backend, with which a process plays one rank of many without the others."""
    return str(dist.get_backend()) == "fake"


def gpus_use_nccl() -> bool:
    """True if the default process group moves a GPU's tensors with NCCL. It reads the backend's config, because torch
    calls the default backend 'undefined'."""
    return "cuda:nccl" in dist.get_backend_config()


def channels_under_compute(programs: Sequence[Program]) -> int:
    """The channels, and so the multiprocessors of a GPU, that transfers of these programs hold while blocks are
    computed."""
    return sum(hidden_lanes(programs).values())


def hidden_lanes(programs: Sequence[Program]) -> dict[int, int]:
    """The lanes that carry a message while a block is computed that does not need it, and their channels."""
    hidden: dict[int, int] = {}
    for program in programs:
        coming: dict[Piece, int] = {}  # pieces in flight, with their lanes
        for step in program.steps:
            for piece in step.after:
                coming.pop(piece, None)
            coming |= {post.piece: post.lane for post in step.posts if not post.send}
            for block in step.blocks:
                for piece in program.pass_.needs(block):
                    coming.pop(piece, None)
                hidden |= {lane: program.plan.channels_at(lane) for lane in coming.values()}
            for merge in step.merges:
                coming.pop(merge.piece, None)
    return hidden


def make_group(
    members: list[int], name: str, backend: str, timeout: timedelta, channels: int = EXPOSED_CHANNELS
) -> dist.ProcessGroup:
    """A process group of global ranks, made by its members alone under a name that they share."""
    options = None
    if backend == "nccl":
        timeout += timedelta(seconds=TIMING.nccl_grace)
        options = nccl_options(timeout, channels, clusters=channels >= EXPOSED_CHANNELS)
    try:
        return make_named_group(members, name, backend, PrefixStore(f"{name}/", default_store()), options, timeout)
    except RuntimeError as error:
        raise PeerError(
            f"global rank {dist.get_rank()}: no connection to ranks {members} within {timeout}: {in_short(error)}"
        ) from error


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """End all pending transfers, here and at the peers. The groups cannot be used afterwards.

    All groups are aborted in parallel: NCCL's abort of one waits for everything on the GPU, including transfers of
    another group that hang until that one is aborted too (NVIDIA/nccl#1013).
    """
    if not run_all_within(TIMING.abort, [partial(_abort, group) for group in groups]):
        log.warning("pending transfers of a process group could not be aborted within %.0f seconds", TIMING.abort)


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # the other groups are aborted all the same
        if dist.get_backend(group) != "gloo":
            group.abort()
            return
        # gloo has no abort, but a receive that times out closes all connections. One from any peer can be posted even
        # if peers have closed their ends.
        group.recv_anysource([torch.empty(1)], UNUSED_TAG).wait(timedelta(milliseconds=1))


class OpenGroups:
    """The groups of one instance's lanes. ``name`` is the same on all ``ranks``. ``collective``: closing a group waits
    for its other ranks, as NCCL does."""

    def __init__(self, name: str, ranks: tuple[int, ...], collective: bool) -> None:
        self.name, self.ranks, self.collective = name, ranks, collective
        self.groups: list[dist.ProcessGroup] = []
        self.aborted = False
        self._process = os.getpid()

    def abort(self) -> None:
        self.aborted = True
        abort(self.groups)

    def close(self) -> None:
        """Close the groups after their pending transfers have arrived. ``abort`` groups first whose transfers may
        never."""
        groups, self.groups = self.groups, []
        for group in groups:
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # the default group may be gone already
                dist.destroy_process_group(group)

    def release(self) -> None:
        """Close the groups if that waits for no other rank, else park them. Called by garbage collection, also that of
        forked processes, which share the connections."""
        if os.getpid() != self._process:
            return
        if self.aborted or not self.collective:
            self.close()
        else:
            _parked[self.name] = self


_parked: dict[str, OpenGroups] = {}


def num_parked(ranks: tuple[int, ...]) -> int:
    return sum(parked.ranks == ranks for parked in list(_parked.values()))


def close_parked(ranks: tuple[int, ...], meeting: str, timeout: timedelta) -> None:
    """Close the groups that all ``ranks`` have parked. All of them must call this together, under one ``meeting``."""
    mine = [name for name, parked in list(_parked.items()) if parked.ranks == ranks]
    store = PrefixStore(f"{meeting}/parked", default_store())
    store.set(str(dist.get_rank()), json.dumps(mine))
    keys = [str(rank) for rank in ranks]
    store.wait(keys, timeout)
    on_all = set(mine).intersection(*(json.loads(store.get(key)) for key in keys))
    if store.add("read", 1) == len(ranks):  # no rank reads them any more
        for key in (*keys, "read"):
            store.delete_key(key)
    for name in sorted(on_all):
        _parked.pop(name).close()

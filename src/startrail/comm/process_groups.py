"""The process groups behind lanes: their backend, their settings, and how they end.

All settings of NCCL's communicators are here:

- *high priority streams*: attention kernels that become ready together with a transfer would take every
  multiprocessor, and the transfer that they should hide would run after them;
- *few channels*: each costs a thread block that attention could use, and eight fill the links of a node;
- *never split from the world's communicator*. torch does that if the default group is bound to a device: lazily, inside
  the first transfer, and with all ranks of the world, most of which do not take part;
- *a longer timeout for NCCL's own watchdog*, which kills the process without naming the peer: ``TIMING.nccl_grace``
  more than ours.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from startrail._compat import PrefixStore, default_store, make_named_group, nccl_options
from startrail.comm.errors import PeerError
from startrail.comm.timing import TIMING
from startrail.comm.watchdog import run_all_within

MAX_CHANNELS = 8
UNUSED_TAG = (1 << 31) - 1  # above the tags of every call

log = logging.getLogger("startrail")


def backend_for(device: torch.device) -> str:
    """The name of the backend with which the default process group moves tensors of this device."""
    config = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    backends = dict(part.split(":") for part in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"the process group ({config}) cannot move tensors on {device.type}; initialize it with a backend for them"
        )
    return backends[device.type]


def make_group(members: list[int], name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of global ranks, made by its members alone under a name that they share."""
    options = None
    if backend == "nccl":
        timeout += timedelta(seconds=TIMING.nccl_grace)
        options = nccl_options(timeout, MAX_CHANNELS)
    try:
        return make_named_group(members, name, backend, PrefixStore(f"{name}/", default_store()), options, timeout)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise PeerError(
            f"global rank {dist.get_rank()}: no connection to ranks {members} within {timeout}: {first}"
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
        # gloo has no abort, but a receive that times out closes all its connections. It cannot be posted from a peer
        # that has closed its own end already.
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


def destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """Close groups after their pending transfers have arrived. ``abort`` groups first whose transfers may never."""
    for group in groups:
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # the default group may be gone already
            dist.destroy_process_group(group)

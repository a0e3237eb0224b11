"""The process groups behind lanes: which backend carries a device's tensors, with which settings, and how they end.

Settings of NCCL's communicators, all here:

- *high priority streams*: attention kernels that become ready together with a transfer take every multiprocessor, and
  the transfer that should hide under them would run behind them;
- *few channels*: each costs a thread block that attention could use, and eight fill the links of a node;
- *never split from the world's communicator*, which torch does where the default group is bound to a device: lazily,
  inside the first transfer, and with all ranks of the world, most of which are not there;
- *a watchdog that comes second*: NCCL's ends the whole process without saying who waited for whom, so it gets
  ``TIMING.nccl_grace`` more than our own deadline.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from startrail.comm.errors import PeerError
from startrail.comm.timing import TIMING
from startrail.comm.watchdog import run_all_within

CHANNELS = 8

log = logging.getLogger("startrail")


def backend_for(device: torch.device) -> str:
    """The name of the backend by which the default process group moves this device's tensors."""
    config = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    kinds = dict(part.split(":") for part in config.split(","))
    if device.type not in kinds:
        raise ValueError(
            f"the process group ({config}) cannot move tensors on {device.type}; start it with a backend for them"
        )
    return kinds[device.type]


def make_group(members: list[int], name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of global ranks under a name of our own, made by its members alone.

    ``new_group`` would name it by how many groups this process has made so far, so that ranks that have made different
    numbers of them wait for each other in vain.
    """
    store = PrefixStore(f"{name}/", c10d._get_default_store())
    options = None
    if backend == "nccl":
        timeout += timedelta(seconds=TIMING.nccl_grace)
        options = _nccl_options(timeout)
    index = members.index(dist.get_rank())
    try:
        with unbound():
            group, _ = c10d._new_process_group_helper(
                len(members), index, members, c10d.Backend(backend), store, c10d.GroupName(name), options, timeout
            )
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise PeerError(
            f"global rank {dist.get_rank()}: no connection to ranks {members} within {timeout}: {first}"
        ) from error
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def _nccl_options(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = CHANNELS
    return options


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """The default group, as if it were bound to no device."""
    default = dist.group.WORLD
    assert default is not None
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Make every transfer under way end at once, here and at the peers. The groups are of no use afterwards.

    All at the same time: NCCL's abort of one waits for all that the GPU does, also for the transfers of another that
    hang until it is aborted too (NVIDIA/nccl#1013).
    """
    if not run_all_within(TIMING.abort, [partial(_abort, group) for group in groups]):
        log.warning("transfers of a process group could not be ended within %.0f seconds", TIMING.abort)


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # whatever one says of its end, the others end as well
        if dist.get_backend(group) == "gloo":
            _close(group)
        else:
            group.abort()


def _close(group: dist.ProcessGroup) -> None:
    # gloo cannot be aborted, but a receive that times out closes all its connections; from a peer that has closed its
    # own already it cannot be posted
    unused = (1 << 31) - 1  # a tag above those of every call
    for peer in (place for place in range(group.size()) if place != group.rank()):
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, unused).wait(timedelta(milliseconds=1))


def destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """Close groups, once what is under way has arrived; where it never may, ``abort`` them first."""
    for group in groups:
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # the whole world may be gone already
            dist.destroy_process_group(group)

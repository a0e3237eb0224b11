"""Measures the cluster of this process group: kernels, copies and the links of each level, in a few seconds.

All ranks measure at the same time, so that shared cores and links are as slow as in the job. The result is a
`ClusterSpec`, the same on every rank, and is cached by topology in ``~/.cache/startrail``.

A GPU is measured with work of the size of a job's, many calls in a row between two events on its stream: single small
calls would measure how fast the host launches them. Its links are measured through a group with the settings of lanes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from startrail._compat import default_timeout, dtype_name
from startrail.agreement.gather import gather_texts
from startrail.geometry.tiles import Tile
from startrail.kernels import kernel_for
from startrail.planner.cluster import ClusterSpec, cluster_text, read_cluster
from startrail.planner.live.placement import own_device
from startrail.planner.live.summary import Measured, describe, find_outliers, shares_of
from startrail.planner.topology import Machine
from startrail.planner.units import parse_text
from startrail.schedule.plan import CHANNELS
from startrail.transport.process_groups import (
    EXPOSED_CHANNELS,
    OpenGroups,
    backend_for,
    make_group,
)

REPEATS = 5
LOOP = 20  # calls between two events on a GPU
LAUNCHES = 200
MORE_ROUNDS = 2  # of measurements while there are outliers, which may be chance; the best of each rank counts
LOAD_SECONDS = 0.3  # over which a machine's load is measured
Progress = Callable[[str, float], None]


class Probe(NamedTuple):
    """What is timed on one type of device. Small blocks come in batches, so that they fill a GPU as large ones do.
    ``messages`` are numbers of bytes; the last two give a link's bandwidth. ``channels`` are those of NCCL's lanes: of
    lanes that run while nothing else does and, where these differ, of lanes that run under compute."""

    blocks: tuple[int, ...]  # tokens along one side
    tokens: int  # at least, of all blocks of a call
    heads: int
    head_dim: int
    product: int  # rows and columns of a matrix product
    copied: int  # bytes
    messages: tuple[int, ...]
    channels: tuple[int, ...] = (EXPOSED_CHANNELS,)


CPU_PROBE = Probe((128, 512), 1, 4, 64, 512, 2**23, (2**18,))
GPU_PROBE = Probe((512, 2048, 8192), 8192, 16, 128, 8192, 2**28, (2**24, 2**26), (EXPOSED_CHANNELS, CHANNELS))


def probe_for(device: torch.device) -> Probe:
    return GPU_PROBE if device.type == "cuda" else CPU_PROBE


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"one thread of {cpu_name()}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_of(device: torch.device, local_ranks: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(local_ranks, 1)


def no_progress(text: str, share: float) -> None:
    pass


def measure(group: dist.ProcessGroup | None, machine: Machine, progress: Progress = no_progress) -> Measured:
    """All ranks of ``group`` must call this together; a single process needs no group."""
    device = own_device()
    progress("load", 0.0)
    if group is not None:
        dist.barrier(group)  # ranks that still start up are not load
    mine: dict[str, Any] = {"host": platform.node(), "load": load_share()}
    for round_ in range(1 + MORE_ROUNDS):
        progress("kernels", 0.1 + 0.3 * round_)
        found = _rates(device)
        if group is not None:
            progress("links", 0.2 + 0.3 * round_)
            found |= _links(group, machine, device)
        mine = _best(mine, found)
        texts = gather_texts(json.dumps(mine), group, own_device())
        everyone: list[dict[str, Any]] = [json.loads(text) for text in texts]
        if not list(find_outliers(everyone)):
            break
    progress("done", 1.0)
    about = device_name(device), memory_of(device, machine.ranks_per_node), device.type == "cuda"
    return describe(machine, everyone, *about)


def measure_shares(group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """The share of the tokens that suits each rank's speed, the same on all ranks of ``group``, which call this
    together. Measured now, since what makes a rank slow may have come since the last time."""
    mine: dict[str, Any] = {}
    for _ in range(1 + MORE_ROUNDS):
        if group is not None:
            dist.barrier(group)
        mine = _best(mine, _rates(own_device()))
    return shares_of([json.loads(text) for text in gather_texts(json.dumps(mine), group, own_device())])


def cached_or_measured(group: dist.ProcessGroup | None, machine: Machine) -> tuple[ClusterSpec, str]:
    """The cluster from the cache, or measured now, and which of the two."""
    device = own_device()
    backend = dist.get_backend_config(group) if group is not None else "none"
    key = f"{machine} {backend} {device_name(device)} {os.cpu_count()} {torch.__version__} {platform.node()} "
    key += f"{probe_for(device)}"  # another version of startrail may measure with other work
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "startrail"
    path = folder / f"cluster-{hashlib.sha256(key.encode()).hexdigest()[:12]}.toml"
    first = group is None or dist.get_rank(group) == 0
    cached = gather_texts(_read_cached(path) if first else "", group, own_device())[0]
    if cached:
        try:
            return read_cluster(parse_text(cached, path), "this cluster", path.name), f"measured before, {path}"
        except ValueError:
            pass  # written by another version: measure again
    measured = measure(group, machine)
    cluster = measured.cluster
    if first and not measured.loaded:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(cluster_text(cluster, f"Measured by startrail on {time.strftime('%Y-%m-%d')}: {key}"))
        except OSError as error:
            print(f"startrail: cannot cache the measured cluster: {error}", file=sys.stderr)
    return cluster, "measured now"


def _read_cached(path: Path) -> str:
    """Empty if the file cannot be read: raising would leave the other ranks waiting."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# --- one rank


def load_share() -> float:
    """The share of this machine's cores that programs use, measured while this one sleeps."""
    before = _cpu_times()
    time.sleep(LOAD_SECONDS)
    used, total = (after - start for after, start in zip(_cpu_times(), before, strict=True))
    return used / total if total > 0 else 0.0


def _cpu_times() -> tuple[int, int]:
    """Time that all cores have worked, and time in all."""
    try:
        times = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = times[3] + times[4]  # also while waiting for a disk
    return sum(times) - idle, sum(times)


def _best(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The better figure of two measurements: the higher rate, the shorter time.

    >>> _best({"matmul": 5.0, "call": 2.0, "forward": {128: 1.0}}, {"matmul": 4.0, "call": 1.0, "forward": {128: 3.0}})
    {'matmul': 5.0, 'call': 1.0, 'forward': {128: 3.0}}
    """
    best = dict(old)
    for name, value in new.items():
        if name not in old or isinstance(value, str):
            best[name] = value
        elif isinstance(value, dict):
            best[name] = {size: max(speed, old[name][size]) for size, speed in value.items()}
        else:
            best[name] = (min if name == "call" or name.startswith("latency") else max)(value, old[name])
    return best


def _rates(device: torch.device) -> dict[str, Any]:
    """FLOP/s of kernels and matrix products, bytes/s of copies, seconds per call."""
    dtype, probe = torch.bfloat16 if device.type == "cuda" else torch.float32, probe_for(device)
    heads, dim = probe.heads, probe.head_dim
    kernel = kernel_for(device, dtype, dim)
    found: dict[str, Any] = {"dtype": dtype_name(dtype), "forward": {}, "backward": {}}
    for tokens in probe.blocks:
        batch = max(1, probe.tokens // tokens)
        q, k, v, dout = (torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype) for _ in range(4))
        tiles, scale = (Tile(0, tokens, 0, tokens, "full"),), dim**-0.5
        forward = partial(kernel.forward, q, k, v, tiles, scale)
        result = forward()
        backward = partial(kernel.backward, dout, q, k, v, result.out.to(dtype), result.lse.float(), tiles, scale)
        pairs = batch * tokens * tokens * heads * dim
        found["forward"][tokens] = 4 * pairs / _seconds(forward, device)
        found["backward"][tokens] = 10 * pairs / _seconds(backward, device)
    a = torch.randn(probe.product, probe.product, device=device, dtype=dtype)
    found["matmul"] = 2 * probe.product**3 / _seconds(lambda: a @ a, device)
    whole = torch.zeros(probe.copied, dtype=torch.uint8, device=device)
    found["copy"] = 2 * whole.nbytes / _seconds(whole.clone, device)
    tiny = torch.zeros(8, device=device)
    if device.type == "cuda":
        found["call"] = _launch_seconds(lambda: tiny.add_(1), device)
    else:
        found["call"] = 4 * _seconds(lambda: tiny.add_(1), device)
    return found


def _seconds(work: Callable[[], object], device: torch.device, prepare: Callable[[], object] | None = None) -> float:
    """The median of a few repeats, each after ``prepare``; the first one warms up. On a GPU a repeat is a loop between
    two events."""
    times = []
    for _ in range(REPEATS):
        if prepare is not None:
            prepare()
        if device.type == "cuda":
            times.append(_loop_seconds(work, device))
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return max(statistics.median(times[1:]), 1e-9)


def _loop_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds per call on the GPU. While it does the first, the host queues the others."""
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(LOOP):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / LOOP


def _launch_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host per call, which it does not wait for."""
    work()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        work()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return seconds / LAUNCHES


# --- links


def _links(group: dist.ProcessGroup, machine: Machine, device: torch.device) -> dict[str, Any]:
    """Seconds of a small message and bytes/s of large ones: to the next node, alone and with all ranks of the node
    together, and to the next rank of the node. On a GPU also the host's seconds per message, and the bytes/s of lanes
    with few channels."""
    rank, world, inside = dist.get_rank(group), machine.world, machine.ranks_per_node
    node, place = divmod(rank, inside)
    neighbours: dict[int, tuple[int, int]] = {}  # by level: whom it sends to and receives from
    if machine.nodes > 1:
        neighbours[0] = (rank + inside) % world, (rank - inside) % world
    if inside > 1:
        neighbours[1] = node * inside + (place + 1) % inside, node * inside + (place - 1) % inside
    found: dict[str, Any] = {}
    exposed, *hidden = probe_for(device).channels
    with _lane_like_group(group, device, exposed) as lane:
        for level, ends in neighbours.items():
            link = partial(_exchange, lane, *ends, device=device)
            found[f"latency {level}"] = _seconds_of(link(1), group, device)
            if level == 0:
                found["alone 0"] = _bandwidth(link, group, device, takes_part=place == 0)
            found[f"all {level}"] = _bandwidth(link, group, device)
        if device.type == "cuda":
            found["post"] = _launch_seconds(link(1), device) / 2
    for channels in hidden:
        with _lane_like_group(group, device, channels) as lane:
            for level, ends in neighbours.items():
                found[f"few {level}"] = _bandwidth(partial(_exchange, lane, *ends, device=device), group, device)
    return found


_num_measured = itertools.count()


@contextmanager
def _lane_like_group(group: dist.ProcessGroup, device: torch.device, channels: int) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks with the settings of lanes; on CPUs they have none."""
    if device.type != "cuda":
        yield group
        return
    ranks = dist.get_process_group_ranks(group)
    opened = OpenGroups(f"startrail/measure {ranks[0]} {next(_num_measured)}", tuple(ranks), collective=True)
    opened.groups.append(make_group(ranks, opened.name, backend_for(device), default_timeout(group), channels))
    try:
        yield opened.groups[0]
    finally:
        opened.close()


def _exchange(group: dist.ProcessGroup, to: int, source: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """A function that sends and receives ``nbytes``."""
    send, receive = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    ranks = dist.get_process_group_ranks(group)

    def exchange() -> None:
        sending = dist.P2POp(dist.isend, send, ranks[to], group)
        receiving = dist.P2POp(dist.irecv, receive, ranks[source], group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    return exchange


def _seconds_of(work: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of ``work``, which all ranks start together."""
    return _seconds(work, device, prepare=partial(dist.barrier, group=group))


def _bandwidth(
    link: Callable[[int], Callable[[], None]], group: dist.ProcessGroup, device: torch.device, takes_part: bool = True
) -> float:
    """bytes/s of a link: what the last bytes of the larger message take, so that its latency does not count."""
    sizes = probe_for(device).messages
    times = [_seconds_of(link(size) if takes_part else lambda: None, group, device) for size in sizes]
    if len(sizes) == 1 or times[-1] <= times[-2]:
        return sizes[-1] / times[-1]
    return (sizes[-1] - sizes[-2]) / (times[-1] - times[-2])

"""Measures the cluster of this process group: kernels, copies and the links of each level, in a few seconds.

All ranks measure at the same time, so that shared cores and links are as slow as in the job. The result is a
`ClusterSpec`, the same on every rank, and is cached by topology in ``~/.cache/startrail``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from startrail.comm.gather import gather_texts
from startrail.geometry.tiles import Tile
from startrail.kernels import kernel_for
from startrail.planner.cluster import (
    MIN_SHARE,
    ClusterSpec,
    Device,
    LinkLevel,
    Rates,
    SlowMember,
    cluster_text,
    read_cluster,
)
from startrail.planner.kernels import Curve
from startrail.planner.topology import Machine
from startrail.planner.units import parse_text

BLOCKS = (128, 512)  # tokens along one side
HEADS, HEAD_DIM = 4, 64
REPEATS = 5
OUTLIER_SHARE = 0.5  # of the median speed; a slower rank or link is an outlier
MORE_ROUNDS = 2  # of measurements while there are outliers, which may be chance; the best of each rank counts
MAX_LOAD = 0.2  # of a machine's cores that other programs may use; above that, its outliers are not to be trusted
LOAD_SECONDS = 0.3  # over which that is measured
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Measured:
    cluster: ClusterSpec
    outliers: tuple[str, ...]  # in words
    loaded: tuple[str, ...] = ()  # machines that other programs used meanwhile, in words


def own_device() -> torch.device:
    """This rank's GPU if the ranks use NCCL, which emulated nodes never do, or if it runs alone; else the CPU. It reads
    the backend's config because torch calls the default backend 'undefined'."""
    if torch.cuda.is_available() and (not dist.is_initialized() or "cuda:nccl" in dist.get_backend_config()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


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
        if not list(_outliers(everyone)):
            break
    progress("done", 1.0)
    about = device_name(device), memory_of(device, machine.ranks_per_node), "nccl" if device.type == "cuda" else "gloo"
    return describe(machine, everyone, *about)


def cached_or_measured(group: dist.ProcessGroup | None, machine: Machine) -> tuple[ClusterSpec, str]:
    """The cluster from the cache, or measured now, and which of the two."""
    device = own_device()
    backend = dist.get_backend_config(group) if group is not None else "none"
    key = f"{machine} {backend} {device_name(device)} {os.cpu_count()} {torch.__version__} {platform.node()}"
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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = kernel_for(device, dtype, HEAD_DIM)
    found: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "forward": {}, "backward": {}}
    for tokens in BLOCKS if device.type == "cpu" else tuple(4 * tokens for tokens in BLOCKS):
        q, k, v, dout = (torch.randn(1, HEADS, tokens, HEAD_DIM, device=device, dtype=dtype) for _ in range(4))
        tiles, scale = (Tile(0, tokens, 0, tokens, "full"),), HEAD_DIM**-0.5
        forward = partial(kernel.forward, q, k, v, tiles, scale)
        result = forward()
        backward = partial(kernel.backward, dout, q, k, v, result.out.to(dtype), result.lse.float(), tiles, scale)
        pairs = tokens * tokens * HEADS * HEAD_DIM
        found["forward"][tokens] = 4 * pairs / _seconds(forward, device)
        found["backward"][tokens] = 10 * pairs / _seconds(backward, device)
    a = torch.randn(512, 512, device=device, dtype=dtype)
    found["matmul"] = 2 * 512**3 / _seconds(lambda: a @ a, device)
    whole = torch.zeros(2**21, device=device)
    found["copy"] = 2 * whole.nbytes / _seconds(whole.clone, device)
    tiny = torch.zeros(8, device=device)
    found["call"] = 4 * _seconds(lambda: tiny.add_(1), device)
    return found


def _seconds(work: Callable[[], object], device: torch.device, prepare: Callable[[], object] | None = None) -> float:
    """The median of a few repeats, each after ``prepare``; the first one warms up."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times = []
    for _ in range(REPEATS):
        (prepare or synchronize)()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times[1:]), 1e-9)


# --- links


def _links(group: dist.ProcessGroup, machine: Machine, device: torch.device) -> dict[str, Any]:
    """Seconds of a small message and bytes/s of large ones: to the next node, alone and with all ranks of the node
    together, and to the next rank of the node."""
    rank, world, inside = dist.get_rank(group), machine.world, machine.ranks_per_node
    size = 2**18 if device.type == "cpu" else 2**25
    node, place = divmod(rank, inside)
    found: dict[str, Any] = {}
    if machine.nodes > 1:
        to, source = (rank + inside) % world, (rank - inside) % world
        found["latency 0"] = _exchange(group, to, source, 1, device)
        found["alone 0"] = size / _exchange(group, to, source, size, device, takes_part=place == 0)
        found["all 0"] = size / _exchange(group, to, source, size, device)
    if inside > 1:
        to, source = node * inside + (place + 1) % inside, node * inside + (place - 1) % inside
        found["latency 1"] = _exchange(group, to, source, 1, device)
        found["all 1"] = size / _exchange(group, to, source, size, device)
    return found


def _exchange(
    group: dist.ProcessGroup, to: int, source: int, nbytes: int, device: torch.device, takes_part: bool = True
) -> float:
    """Seconds to complete a send and a receive."""
    send, receive = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    ranks = dist.get_process_group_ranks(group)

    def exchange() -> None:
        sending = dist.P2POp(dist.isend, send, ranks[to], group)
        receiving = dist.P2POp(dist.irecv, receive, ranks[source], group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    return _seconds(exchange if takes_part else lambda: None, device, prepare=partial(dist.barrier, group=group))


# --- all ranks


def describe(
    machine: Machine, everyone: Sequence[dict[str, Any]], name: str, memory: float, transport: str
) -> Measured:
    """A cluster from every rank's measurements: the medians, and the outliers."""

    def typical(key: str) -> float:
        return statistics.median(found[key] for found in everyone if key in found)

    levels = []
    if machine.nodes > 1:
        alone = statistics.median(everyone[node * machine.ranks_per_node]["alone 0"] for node in range(machine.nodes))
        together = typical("all 0")
        shared = together * machine.ranks_per_node < 1.5 * alone  # all ranks of a node together get no more than one
        rate = max(alone, together * machine.ranks_per_node) if shared else together
        levels.append(LinkLevel("node", machine.nodes, rate, typical("latency 0"), shared, True))
    if machine.ranks_per_node > 1 or not levels:
        inside = machine.ranks_per_node > 1
        rate, latency = (typical("all 1"), typical("latency 1")) if inside else (1e12, 0.0)
        levels.append(LinkLevel("rank", machine.ranks_per_node, rate, latency, False, True))

    def curve(name: str) -> Curve:
        sizes = everyone[0][name]  # numbers of tokens; JSON turns them into strings
        return Curve(tuple((float(x), statistics.median(found[name][x] for found in everyone)) for x in sizes))

    matmul, call, forward, backward = typical("matmul"), typical("call"), curve("forward"), curve("backward")
    rates = Rates(max(matmul, *(y for _, y in forward.points + backward.points)), matmul, forward, backward)
    times = call, 2 * call, 0.0, 0.0, 20 * call  # call, post, handle, socket, start
    device = Device(name, memory, 0.0, typical("copy"), *times, {everyone[0]["dtype"]: rates})
    outliers = list(_outliers(everyone))
    load = {found["host"]: found["load"] for found in everyone if found["load"] > MAX_LOAD}
    texts = (
        f"rank {rank} (node {machine.node(rank)}, {everyone[rank]['host']}): {what} at {share:.0%} of the others'"
        + (", but other programs ran there: not written down" if everyone[rank]["host"] in load else "")
        for rank, _, what, share in outliers
    )
    slow = _slow_members(machine, len(levels) - 1, [x for x in outliers if everyone[x.rank]["host"] not in load])
    loaded = tuple(f"{host}: other programs use {share:.0%} of the cores" for host, share in load.items())
    return Measured(ClusterSpec("this cluster", tuple(levels), device, transport, slow=slow), tuple(texts), loaded)


class Outlier(NamedTuple):
    """A rank or link that reaches only a ``share`` of the median speed."""

    rank: int
    key: str
    what: str
    share: float


def _outliers(everyone: Sequence[dict[str, Any]]) -> Iterator[Outlier]:
    names = {"matmul": "matrix products", "copy": "memory copies"}
    names |= {"all 0": "its link to the next node", "all 1": "its link to the next rank of its node"}
    for key, what in names.items():
        values = {rank: found[key] for rank, found in enumerate(everyone) if key in found}
        median = statistics.median(values.values() or [0.0])
        for rank, value in values.items():
            if value < OUTLIER_SHARE * median:
                yield Outlier(rank, key, what, value / median)


def _slow_members(machine: Machine, innermost: int, outliers: Iterable[Outlier]) -> tuple[SlowMember, ...]:
    """The outliers for the cluster's description. Slow copies are only reported: they are a small part of the work."""
    found: dict[tuple[int, int], SlowMember] = {}
    for one in outliers:
        if one.key == "copy":
            continue
        at = (0, machine.node(one.rank)) if one.key == "all 0" else (innermost, one.rank)
        share = max(round(one.share, 3), MIN_SHARE)
        before, name = found.get(at, SlowMember(*at)), "compute" if one.key == "matmul" else "bandwidth"
        found[at] = replace(before, **{name: min(getattr(before, name), share)})
    return tuple(found[at] for at in sorted(found))

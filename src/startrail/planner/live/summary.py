"""The description of a cluster from the measurements of all its ranks: the medians, and the outliers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from startrail.planner.cluster import MIN_SHARE, ClusterSpec, Device, LinkLevel, Rates, SlowMember
from startrail.planner.kernels import Curve
from startrail.planner.topology import Machine

OUTLIER_SHARE = 0.5  # of the median speed; a slower rank or link is an outlier
SAME_SHARE = 0.9  # of a link's bandwidth; lanes with few channels that reach it are as fast as others
MAX_LOAD = 0.2  # of a machine's cores that other programs may use; above that, its outliers are not to be trusted


@dataclass(frozen=True)
class Measured:
    cluster: ClusterSpec
    outliers: tuple[str, ...]  # in words
    shares: tuple[float, ...] = ()  # of the tokens, that suit the ranks' speeds
    loaded: tuple[str, ...] = ()  # machines that other programs used meanwhile, in words


def describe(machine: Machine, everyone: Sequence[dict[str, Any]], name: str, memory: float, on_gpu: bool) -> Measured:
    """A cluster from every rank's measurements: the medians, and the outliers."""

    def typical(key: str) -> float:
        return statistics.median(found[key] for found in everyone if key in found)

    def under_compute(level: int, rate: float, sharing: int = 1) -> float:
        """What lanes with few channels reach, or 0 if that is as much as others."""
        few = sharing * typical(f"few {level}") if f"few {level}" in everyone[0] else rate
        return few if few < SAME_SHARE * rate else 0.0

    levels = []
    if machine.nodes > 1:
        alone = statistics.median(everyone[node * machine.ranks_per_node]["alone 0"] for node in range(machine.nodes))
        together = typical("all 0")
        shared = together * machine.ranks_per_node < 1.5 * alone  # all ranks of a node together get no more than one
        rate = max(alone, together * machine.ranks_per_node) if shared else together
        few = under_compute(0, rate, machine.ranks_per_node if shared else 1)
        levels.append(LinkLevel("node", machine.nodes, rate, typical("latency 0"), shared, True, under_compute=few))
    if machine.ranks_per_node > 1 or not levels:
        inside = machine.ranks_per_node > 1
        rate, latency = (typical("all 1"), typical("latency 1")) if inside else (1e12, 0.0)
        few = under_compute(1, rate)
        levels.append(LinkLevel("rank", machine.ranks_per_node, rate, latency, False, True, under_compute=few))

    def curve(name: str) -> Curve:
        sizes = everyone[0][name]  # numbers of tokens; JSON turns them into strings
        return Curve(tuple((float(x), statistics.median(found[name][x] for found in everyone)) for x in sizes))

    matmul, call, forward, backward = typical("matmul"), typical("call"), curve("forward"), curve("backward")
    rates = Rates(max(matmul, *(y for _, y in forward.points + backward.points)), matmul, forward, backward)
    post = typical("post") if on_gpu and len(everyone) > 1 else 2 * call
    times = call, post, 0.0, (6 if on_gpu else 20) * call  # call, post, handle, start
    device = Device(name, memory, 0.0, typical("copy"), *times, {everyone[0]["dtype"]: rates})
    outliers = list(find_outliers(everyone))
    load = {found["host"]: found["load"] for found in everyone if found["load"] > MAX_LOAD}
    texts = (
        f"rank {rank} (node {machine.node(rank)}, {everyone[rank]['host']}): {what} at {share:.0%} of the others'"
        + (", but other programs ran there: ignored" if everyone[rank]["host"] in load else "")
        for rank, _, what, share in outliers
    )
    slow = _slow_members(machine, len(levels) - 1, [x for x in outliers if everyone[x.rank]["host"] not in load])
    loaded = tuple(f"{host}: other programs use {share:.0%} of the cores" for host, share in load.items())
    cluster = ClusterSpec("this cluster", tuple(levels), device, "nccl" if on_gpu else "gloo", slow=slow)
    return Measured(cluster, tuple(texts), shares_of(everyone), loaded)


def shares_of(everyone: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """The tokens that suit each rank's speed, as a share of those of the fastest ranks: what matrix products and both
    passes of attention take, weighted alike. Ranks within ``SAME_SHARE`` of each other count as equally fast.

    >>> shares_of([dict(matmul=x, forward={"512": x}, backward={"512": x}) for x in (4.0, 2.0, 3.8, 2.1)])
    (1.0, 0.53, 1.0, 0.53)
    """
    speeds = [
        (found["matmul"], *([*found[name].values()][-1] for name in ("forward", "backward"))) for found in everyone
    ]
    best = [max(of_all) for of_all in zip(*speeds, strict=True)]
    seconds = [sum(top / own for top, own in zip(best, each, strict=True)) for each in speeds]
    groups: list[list[float]] = []
    for one in sorted(seconds):
        if not groups or groups[-1][0] < SAME_SHARE * one:
            groups.append([])
        groups[-1].append(one)
    typical = {one: statistics.median(group) for group in groups for one in group}
    return tuple(max(round(typical[min(seconds)] / typical[one], 2), MIN_SHARE) for one in seconds)


class Outlier(NamedTuple):
    """A rank or link that reaches only a ``share`` of the median speed."""

    rank: int
    key: str
    what: str
    share: float


def find_outliers(everyone: Sequence[dict[str, Any]]) -> Iterator[Outlier]:
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

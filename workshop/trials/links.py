"""Bytes over the links between nodes: those that a rank's program sends to other nodes. Each node has one link, which
carries all traffic of its ranks with other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from startrail.bench.yardstick import Workload
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import PASSES


class LinkBytes(NamedTuple):
    sent: float
    received: float


def piece_sizes(plan: Plan, machine: Machine, work: Workload) -> dict[str, int]:
    """Bytes of a whole piece by kind. Raises ``ValueError`` if the plan cannot run this work on this machine."""
    return work.sizes(plan, machine.world).by_kind


def interleaved(machine: Machine) -> tuple[int, ...]:
    """Ranks in an order in which neighbours are on different nodes, so that teams span nodes.

    >>> interleaved(Machine(2, 3))
    (0, 3, 1, 4, 2, 5)
    """
    nodes, ranks = machine.nodes, machine.ranks_per_node
    return tuple(node * ranks + local for local in range(ranks) for node in range(nodes))


@lru_cache(maxsize=512)
def link_bytes(plan: Plan, machine: Machine, work: Workload, across: bool = False) -> tuple[LinkBytes, ...]:
    """Bytes that one forward + backward of ``work`` sends and receives over each node's link."""
    order = interleaved(machine) if across else range(machine.world)
    return bytes_between_nodes(plan, machine, piece_sizes(plan, machine, work), order)


def bytes_between_nodes(
    plan: Plan, machine: Machine, sizes: Mapping[str, float], order: Sequence[int]
) -> tuple[LinkBytes, ...]:
    """The bytes of forward and backward on each node's link, for pieces of these ``sizes``, in any unit; ``order`` is
    the rank at each place.

    With sizes in shards, on 4 nodes of 8 ranks, one node's link carries:

    >>> shards = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)
    >>> [bytes_between_nodes(Plan.parse(text), Machine(4, 8), shards, range(32))[0].sent
    ...  for text in ("1x4/u8", "2x2/u8", "u4/1x8")]
    [144.0, 88.0, 48.0]
    """
    sent, received = [0.0] * machine.nodes, [0.0] * machine.nodes
    for place, rank in enumerate(order):
        for pass_ in PASSES:
            for post, size in build_program(plan, machine.world, place, pass_).sends(sizes):
                source, target = machine.node(rank), machine.node(order[post.peer])
                if source != target:
                    sent[source] += size
                    received[target] += size
    return tuple(map(LinkBytes, sent, received))


def ring_bytes(machine: Machine, work: Workload) -> float:
    """Bytes that textbook Ring Attention sends over every node's link, each way, in all layers: one rank of a node
    sends to the next node. Keys and values make P-1 hops forward and again backward, their gradients P hops.

    Link rates follow from this and not from our own ring, so that changes to our ring do not change the conditions.
    """
    sizes = piece_sizes(Plan.parse(f"1x{machine.world}"), machine, work)
    return work.layers * (2 * (machine.world - 1) * sizes["kv"] + machine.world * sizes["dkv"])


def transfer_seconds(links: Sequence[Sequence[float]], rates: Sequence[int | None]) -> float:
    """A lower bound on the time for these bytes (sent, received) per link: the slowest link's busier direction.

    >>> transfer_seconds([LinkBytes(100, 50), LinkBytes(100, 100)], [800, 400])       # bytes, bit/s
    2.0
    """
    return max((8 * max(link) / rate for link, rate in zip(links, rates, strict=True) if rate), default=0.0)


def rate_for(busiest: float, compute: float, pressure: float) -> int:
    """The link rate, in bit/s, at which ``busiest`` bytes take ``pressure`` times the ``compute`` seconds.

    >>> rate_for(busiest=1_000_000, compute=0.5, pressure=8)
    2000000
    """
    if busiest <= 0 or compute <= 0 or pressure <= 0:
        raise ValueError(f"no rate makes {busiest} bytes take {pressure} x {compute} s: all must be positive")
    return round(8 * busiest / (pressure * compute))

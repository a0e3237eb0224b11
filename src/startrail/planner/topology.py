"""Machines as data, and the bytes that a plan sends over the links between their nodes.

A rank's program lists its sends. This module adds the node of each rank (`Machine`) and the size of a whole piece of
each kind (``sizes``, in any unit). Each node has one link, which carries all traffic of its ranks with other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import PASSES

if TYPE_CHECKING:
    from startrail.planner.cluster import ClusterSpec
    from startrail.planner.predict import AttentionShape

    Scaled = tuple[ClusterSpec, Plan, AttentionShape]

MAX_SHARDS = 1024  # longer rings are extrapolated from shorter ones


@dataclass(frozen=True)
class Machine:
    """Nodes of equal size; ranks are numbered node by node, as torchrun does.

    >>> machine = Machine(nodes=4, ranks_per_node=8)
    >>> str(machine), machine.world, machine.node(9)
    ('4x8', 32, 1)
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        check_counts(nodes=self.nodes, ranks_per_node=self.ranks_per_node)

    @classmethod
    def parse(cls, text: str) -> Machine:
        """
        >>> Machine.parse("4x8")
        Machine(nodes=4, ranks_per_node=8)
        """
        nodes, _, ranks = text.partition("x")
        if not (nodes.isdecimal() and ranks.isdecimal() and int(nodes) and int(ranks)):
            raise ValueError(f"shape {text!r} is not NODESxRANKS, such as 4x8")
        return cls(int(nodes), int(ranks))

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], per_node: int) -> Machine:
        """The nodes of these global ranks, with ``per_node`` of all ranks on each. One node if they do not fill several
        evenly and in order, or if ``per_node`` is 0 (unknown).

        >>> [str(Machine.of_ranks(ranks, per_node=4)) for ranks in (range(8), range(6), (0, 1, 4, 5))]
        ['2x4', '1x6', '2x2']
        """
        nodes = [rank // per_node for rank in ranks] if per_node > 0 else [0] * len(ranks)
        counts = {nodes.count(node) for node in set(nodes)}
        if len(counts) > 1 or nodes != sorted(nodes):
            return cls(1, len(ranks))
        return cls(len(set(nodes)), counts.pop())

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def interleaved(self) -> tuple[int, ...]:
        """Ranks in an order in which neighbours are on different nodes, so that teams span nodes.

        >>> Machine(2, 3).interleaved()
        (0, 3, 1, 4, 2, 5)
        """
        return tuple(node * self.ranks_per_node + i for i in range(self.ranks_per_node) for node in range(self.nodes))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number of at least 1")


class LinkBytes(NamedTuple):
    sent: float
    received: float


def link_bytes(
    plan: Plan, machine: Machine, sizes: Mapping[str, float], order: Sequence[int] | None = None
) -> tuple[LinkBytes, ...]:
    """The bytes of forward and backward on each node's link; ``order`` is the rank at each place.

    With sizes in shards, on 4 nodes of 8 ranks, one node's link carries:

    >>> shards = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)
    >>> [link_bytes(Plan.parse(text), Machine(4, 8), shards)[0].sent for text in ("1x4/u8", "2x2/u8", "u4/1x8")]
    [144.0, 88.0, 48.0]
    """
    order = range(machine.world) if order is None else order
    sent, received = [0.0] * machine.nodes, [0.0] * machine.nodes
    for place, rank in enumerate(order):
        for pass_ in PASSES:
            for post, size in build_program(plan, machine.world, place, pass_).sends(sizes):
                source, target = machine.node(rank), machine.node(order[post.peer])
                if source != target:
                    sent[source] += size
                    received[target] += size
    return tuple(map(LinkBytes, sent, received))


def ring_bytes(machine: Machine, sizes: Mapping[str, float]) -> float:
    """The bytes of Ring Attention on each node's link, each way: one rank of a node sends to the next node.

    Keys and values make P-1 hops forward and again backward, their gradients P hops:

    >>> ring_bytes(Machine(4, 8), dict(kv=2, dkv=2))
    188
    """
    return 2 * (machine.world - 1) * sizes["kv"] + machine.world * sizes["dkv"]


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


# --- very long rings


def shorter_rings(
    cluster: ClusterSpec, plan: Plan, call: AttentionShape, aligned: bool
) -> tuple[Scaled, Scaled, int, int] | None:
    """Two shorter rings, and the lengths of the second and of the whole ring as multiples of the first.

    A ring of thousands of hops does the same at each hop, so two shorter rings with pieces of the same size define a
    line to extrapolate. The window stays, so that it reaches as many blocks; one wider than the shorter sequence
    shrinks with it. None if the ring is short enough, or cannot be shortened."""
    shards = cluster.world // plan.heads
    limit = MAX_SHARDS if aligned else MAX_SHARDS // 4  # unaligned lanes need the programs of many ranks
    rings: tuple[Scaled, Scaled, int, int] | None = None
    for factor in divisors(cluster.levels[0].size)[1:] if shards > limit else ():
        for times in (2, 3):
            part = times * factor
            wide = call.window is not None and 2 * call.window > call.length // part
            first, second = (_shorten(cluster, plan, call, n, n if wide else 1) for n in (part, factor))
            if first is not None and second is not None:
                rings = first, second, times, part
                break
        if rings is not None and shards // factor <= limit:
            break
    return rings


def _shorten(cluster: ClusterSpec, plan: Plan, call: AttentionShape, factor: int, narrower: int) -> Scaled | None:
    """Divides the longest ring and the cluster by ``factor`` and the window by ``narrower``. None if not possible."""
    outer, shorter = cluster.levels[0].size, plan.family.shorter(plan, factor)
    if outer % factor or outer // factor < 2 or shorter is None:
        return None
    smaller = cluster.part(cluster.world // factor)
    try:
        shorter.check_world(smaller.world)
    except ValueError:
        return None
    window = None if call.window is None else max(call.window // narrower, 1)
    return smaller, shorter, replace(call, length=call.local(cluster.world) * smaller.world, window=window)

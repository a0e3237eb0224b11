"""Machines as data: nodes and their ranks; and shorter rings that stand for very long ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan

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
        return cls.of_nodes([rank // per_node if per_node > 0 else 0 for rank in ranks])

    @classmethod
    def of_nodes(cls, nodes: Sequence[object]) -> Machine:
        """The machine on which rank r runs on ``nodes[r]``. One node if ranks do not fill several evenly and in order.

        >>> [str(Machine.of_nodes(hosts)) for hosts in ("aabb", "abab", "aab")]
        ['2x2', '1x4', '1x3']
        """
        runs = [len(list(run)) for _, run in groupby(nodes)]
        if len(runs) > len(set(nodes)) or len(set(runs)) > 1:
            return cls(1, len(nodes))
        return cls(len(runs), runs[0])

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number of at least 1")


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

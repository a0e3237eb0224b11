"""Machines as data: nodes and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


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

"""What a plan must send over every node's link, read off its schedule, and the bound that follows from it.

A rank's program says to whom it sends what. Here only two facts are added: which node a rank lives on (`Machine`) and
how large a piece is (`Shapes`). Nothing of the engine's rank arithmetic is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from startrail.bench.cases import Work
from startrail.layout import Layout
from startrail.plan import Plan
from startrail.schedule import build_program
from startrail.wire import KINDS, Shapes

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Machine:
    """Nodes of equal size; ranks are numbered node by node, as torchrun does."""

    nodes: int
    ranks_per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def interleaved(self) -> tuple[int, ...]:
        """Ranks in an order in which neighbours live on different nodes, so that teams of consecutive places span them.

        >>> Machine(2, 3).interleaved()
        (0, 3, 1, 4, 2, 5)
        """
        return tuple(node * self.ranks_per_node + i for i in range(self.ranks_per_node) for node in range(self.nodes))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def shapes_for(plan: Plan, machine: Machine, work: Work) -> Shapes:
    """The sizes of one call; ``ValueError`` says why the plan cannot run this work on this machine."""
    plan.check_world(machine.world)
    layout = Layout("zigzag", machine.world, work.length)
    heads = (work.q_heads, work.kv_heads, work.head_dim)
    return Shapes(plan, layout, work.batch, *heads, torch.float32, torch.float32)


def node_bytes(
    plan: Plan, machine: Machine, sizes: Mapping[str, float], order: Sequence[int] | None = None
) -> list[dict[str, float]]:
    """By node: what forward and backward together send over its link, and receive.

    ``sizes`` are those of a whole piece by kind, such as ``Shapes.nbytes``; ``order`` is the rank at each place.
    With sizes in shards, on 4 nodes of 8 ranks, one node's link carries:

    >>> shards = dict(q=1, kv=2, out=1, do=1, dq=1, dkv=2)
    >>> [node_bytes(Plan.parse(text), Machine(4, 8), shards)[0]["sent"] for text in ("1x4/u8", "2x2/u8", "u32")]
    [144.0, 88.0, 48.0]
    """
    order = range(machine.world) if order is None else order
    totals = [{"sent": 0.0, "received": 0.0} for _ in range(machine.nodes)]
    for place, rank in enumerate(order):
        for direction in DIRECTIONS:
            program = build_program(plan, machine.world, place, direction)
            for post in (post for step in program.steps for post in step.posts if post.send):
                source, target = machine.node(rank), machine.node(order[post.peer])
                if source == target:
                    continue
                size = sizes[post.piece.kind]
                if post.lane == program.place.heads_lane:  # a part of a piece: one head rank's tokens
                    size /= plan.heads
                totals[source]["sent"] += size
                totals[target]["received"] += size
    return totals


@lru_cache(maxsize=512)
def link_bytes(plan: Plan, machine: Machine, work: Work, across: bool = False) -> tuple[tuple[float, float], ...]:
    """Bytes (sent, received) over each node's link by one forward + backward of ``work``."""
    shapes = shapes_for(plan, machine, work)
    sizes = {kind: shapes.nbytes(kind) for kind in KINDS}
    order = machine.interleaved() if across else None
    return tuple((node["sent"], node["received"]) for node in node_bytes(plan, machine, sizes, order))


def ring_bytes(machine: Machine, work: Work) -> float:
    """What textbook Ring Attention moves over every node's link: one rank of a node sends to the next node.

    Keys and values go round forward and again backward, P-1 hops each, and their gradients with them, P hops. The link
    rates are chosen by this and not by a schedule of ours, so that nothing we do to our own ring moves the goal posts.
    """
    shapes = shapes_for(Plan.parse(f"1x{machine.world}"), machine, work)
    return work.layers * (2 * (machine.world - 1) * shapes.nbytes("kv") + machine.world * shapes.nbytes("dkv"))


def transfer_seconds(links: Sequence[tuple[float, float]], rates: Sequence[int | None]) -> float:
    """The least time in which these bytes can cross: the busiest direction of the slowest link decides.

    >>> transfer_seconds([(100.0, 50.0), (100.0, 100.0)], [800, 400])       # bytes, bits a second
    2.0
    """
    return max((8 * max(link) / rate for link, rate in zip(links, rates, strict=True) if rate), default=0.0)


def rate_for(busiest: float, compute: float, pressure: float) -> int:
    """The link rate, in bits a second, at which ``busiest`` bytes take ``pressure`` times the ``compute`` seconds.

    >>> rate_for(busiest=1_000_000, compute=0.5, pressure=8)
    2000000
    """
    if busiest <= 0 or compute <= 0 or pressure <= 0:
        raise ValueError(f"no rate makes {busiest} bytes take {pressure} x {compute} s: all must be more than 0")
    return round(8 * busiest / (pressure * compute))

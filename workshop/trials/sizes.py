"""Bytes that the benchmark's work sends over each node's link: ``planner.topology`` with the sizes of its pieces."""

from __future__ import annotations

from functools import lru_cache

from startrail.bench.workload import Workload
from startrail.planner import topology as cluster
from startrail.planner.topology import LinkBytes, Machine
from startrail.schedule.plan import Plan


def piece_sizes(plan: Plan, machine: Machine, work: Workload) -> dict[str, int]:
    """Bytes of a whole piece by kind. Raises ``ValueError`` if the plan cannot run this work on this machine."""
    return work.sizes(plan, machine.world).by_kind


@lru_cache(maxsize=512)
def link_bytes(plan: Plan, machine: Machine, work: Workload, across: bool = False) -> tuple[LinkBytes, ...]:
    """Bytes that one forward + backward of ``work`` sends and receives over each node's link."""
    order = machine.interleaved() if across else None
    return cluster.link_bytes(plan, machine, piece_sizes(plan, machine, work), order)


def ring_bytes(machine: Machine, work: Workload) -> float:
    """Bytes that textbook Ring Attention sends over every node's link, in all layers.

    Link rates follow from this and not from our own ring, so that changes to our ring do not change the conditions.
    """
    sizes = piece_sizes(Plan.parse(f"1x{machine.world}"), machine, work)
    return work.layers * cluster.ring_bytes(machine, sizes)

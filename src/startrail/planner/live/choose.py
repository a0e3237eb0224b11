"""``auto``: the planner asked by a running job. The group's first rank decides, and all others take its word."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from startrail.comm.gather import gather_texts
from startrail.planner.auto import fitted
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.live.measure import known_or_measured, own_device
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan


def choose(
    group: dist.ProcessGroup | None,
    machine: Machine,
    ask: Callable[[ClusterSpec], tuple[str, str]],
    cluster: str | None = None,
) -> tuple[Plan, str]:
    """The plan for this group, the same on all ranks, and one line that says why: ``ask`` answers for a cluster.

    ``cluster`` is a description (a name or a file), or else STARTRAIL_CLUSTER; without either the cluster is measured,
    once for each topology. All ranks of the group must call this together.
    """
    name = cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    first = group is None or dist.get_rank(group) == 0
    found: ClusterSpec | None = None
    how = f"described by {name}"
    if not name:
        found, how = known_or_measured(group, machine)
    text, why, broken = "", "", None
    if first:
        try:
            text, why = ask(fitted(find_cluster(name) if found is None else found, machine))
            why += f"; cluster {how}"
        except Exception as error:  # whatever it is: the others wait for an answer
            broken = error
            why = f'plan "auto": {error if isinstance(error, ValueError) else repr(error)}'
    text, _, why = gather_texts(f"{text}\n{why}", group, own_device())[0].partition("\n")
    if not text:
        raise ValueError(why) from None if isinstance(broken, ValueError) else broken
    return Plan.parse(text), why

"""``auto`` in a running job: the group's first rank asks the planner, and all ranks use its answer."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from startrail.agreement.gather import gather_texts
from startrail.planner.auto import Choice, fit_cluster
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.live.measure import cached_or_measured
from startrail.planner.live.placement import own_device
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan


def choose(
    group: dist.ProcessGroup | None,
    machine: Machine,
    ask: Callable[[ClusterSpec], Choice],
    cluster: str | ClusterSpec | None = None,
) -> Choice:
    """The plan for this group, the same on all ranks. ``ask`` is the question to the planner.

    ``cluster`` is a description, its name or its file; the default is STARTRAIL_CLUSTER. Without either the cluster is
    measured, once per topology. All ranks of the group must call this together.
    """
    named = cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    source = f"described by {named}"
    if not named:
        named, source = cached_or_measured(group, machine)
    text, reason, raised = "", "", None
    if group is None or dist.get_rank(group) == 0:
        try:
            known = find_cluster(named) if isinstance(named, str) else named
            plan, reason = ask(fit_cluster(known, machine))
            text, reason = str(plan), f"{reason}; cluster {source}"
        except Exception as error:  # of any type: the other ranks wait for an answer
            raised = error
            reason = f'plan "auto": {error if isinstance(error, ValueError) else repr(error)}'
    text, _, reason = gather_texts(f"{text}\n{reason}", group, own_device())[0].partition("\n")
    if not text:
        raise ValueError(reason) from None if isinstance(raised, ValueError) else raised
    return Choice(Plan.parse(text), reason)

"""``auto``: the planner asked by a running job. The group's first rank decides, and all others take its word."""

from __future__ import annotations

import os

import torch.distributed as dist

from startrail.cluster import Machine
from startrail.live import known_or_measured, own_device
from startrail.plan import Plan
from startrail.planning.attention import Call
from startrail.planning.explain import seconds_text
from startrail.planning.hardware import Cluster, find_cluster
from startrail.planning.search import search_attention
from startrail.texts import gather_texts

TOKENS_A_RANK = 4096  # where the length is not known: long enough for links and arithmetic to decide


def choose(
    group: dist.ProcessGroup | None,
    machine: Machine,
    heads: int,
    kv_heads: int,
    head_dim: int | None = None,
    length: int | None = None,
    cluster: str | None = None,
) -> tuple[Plan, str]:
    """The plan for this group, the same on all ranks, and one line that says why.

    ``cluster`` is a description (a name or a file), or else STARTRAIL_CLUSTER; without either the cluster is measured,
    once for each topology. All ranks of the group must call this together.
    """
    name = cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    first = group is None or dist.get_rank(group) == 0
    found: Cluster | None = None
    how = f"described by {name}"
    if not name:
        found, how = known_or_measured(group, machine)
    text, why = "", ""
    if first:
        try:
            described = find_cluster(name) if found is None else found
            text, why = _chosen(fitted(described, machine), how, heads, kv_heads, head_dim or 128, length)
        except ValueError as error:
            why = f'plan "auto": {error}'
    text, _, why = gather_texts(f"{text}\n{why}", group, own_device())[0].partition("\n")
    if not text:
        raise ValueError(why)
    return Plan.parse(text), why


def fitted(cluster: Cluster, machine: Machine) -> Cluster:
    """A description's rates with the sizes of the machine that is there.

    >>> [level.size for level in fitted(find_cluster("a100-4x8"), Machine(2, 8)).levels]
    [2, 8]
    >>> fitted(find_cluster("pcie-8"), Machine(2, 8))
    Traceback (most recent call last):
    ValueError: cluster pcie-8 has the levels gpu x 8, which does not describe 2 nodes of 8 ranks
    """
    if len(cluster.levels) == 2:
        return cluster.resized([machine.nodes, machine.ranks_per_node])
    if len(cluster.levels) == 1 and machine.nodes == 1:
        return cluster.resized([machine.world])
    if cluster.world == machine.world:
        return cluster
    levels = " / ".join(f"{level.name} x {level.size}" for level in cluster.levels)
    raise ValueError(
        f"cluster {cluster} has the levels {levels}, which does not describe {machine.nodes} nodes of "
        f"{machine.ranks_per_node} ranks"
    )


def _chosen(
    cluster: Cluster, how: str, heads: int, kv_heads: int, head_dim: int, length: int | None
) -> tuple[str, str]:
    dtype = "bfloat16" if "bfloat16" in cluster.device.rates else next(iter(cluster.device.rates))
    assumed = length is None
    length = length or TOKENS_A_RANK * cluster.world
    found = search_attention(cluster, Call(length, 1, heads, kv_heads, head_dim, True, dtype))
    best = found.best
    ring = next((row for row in found.rows if row.role == "ring"), None)
    against = f", ring would take {seconds_text(ring.seconds)}" if ring is not None and ring is not best else ""
    return str(best.plan), (
        f"auto chose {best.plan}: {seconds_text(best.seconds)} predicted for forward + backward of {length} tokens"
        f"{' (assumed)' if assumed else ''}, {best.exposed:.0%} exposed{against} "
        f"({heads}:{kv_heads} heads; cluster {how})"
    )

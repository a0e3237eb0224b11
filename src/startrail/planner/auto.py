"""``auto`` as far as it needs no torch: a description fitted to a machine, the plan for it, and one line of why.

A job that knows its model asks what ``startrail plan`` asks (``plan_for_job``). Where no more is known than heads and a
length, plans for one causal sequence are compared that fit the attention of 32 layers into half of the memory, and that
keep nothing for the backward pass, since more layers would have to keep it as well (``plan_for_heads``).
"""

from __future__ import annotations

from dataclasses import replace

from startrail.planner.answer import seconds_text
from startrail.planner.cluster import ClusterSpec
from startrail.planner.predict import AttentionShape
from startrail.planner.search import DoesNotFitError, Found, search, search_attention
from startrail.planner.topology import Machine
from startrail.planner.units import MOST, MOST_COUNTED, read_int
from startrail.planner.workload import Job

TOKENS_A_RANK = 4096  # where the length is not known: long enough for links and arithmetic to decide
HEAD_DIM = 128  # where it is not known
LAYERS, SHARE = 32, 0.5  # that a model is assumed to have, and of the memory, for their attention


def fitted(cluster: ClusterSpec, machine: Machine) -> ClusterSpec:
    """A description's rates with the sizes of the machine that is there.

    >>> from startrail.planner.cluster import find_cluster
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


def plan_for_heads(
    cluster: ClusterSpec, heads: int, kv_heads: int, head_dim: int | None = None, length: int | None = None
) -> tuple[str, str]:
    """The plan's text form, and why.

    >>> from startrail.planner.cluster import find_cluster
    >>> text, why = plan_for_heads(find_cluster("a100-4x8"), 32, 32, 128, 524288)
    >>> "keep" in text, "32 layers assumed, their attention in half the memory, nothing kept" in why
    (False, True)
    """
    for name, value, most in (("head_dim", head_dim, MOST), ("length", length, MOST_COUNTED)):
        if value is not None:
            read_int({name: value}, name, "auto", most=most)
    tokens = length or TOKENS_A_RANK * cluster.world
    call = AttentionShape(tokens, 1, heads, kv_heads, head_dim or HEAD_DIM, True, _dtype(cluster, "bfloat16"))
    what = f"forward + backward of {tokens} tokens{'' if length else ' (assumed)'}"
    room = SHARE * (cluster.device.memory - cluster.device.reserved)
    try:
        found = search_attention(cluster, call, LAYERS, room)
    except DoesNotFitError as error:
        return _least(error, what)
    about = (
        f"{heads}:{kv_heads} heads, one causal sequence; {LAYERS} layers assumed, their attention in half the memory"
    )
    return str(found.best.plan), _line(found, LAYERS, what, f"{about}, nothing kept")


def plan_for_job(cluster: ClusterSpec, job: Job) -> tuple[str, str]:
    """The same, as ``startrail plan`` ranks plans for the whole step, of those that fit the memory.

    >>> from startrail.planner.cluster import find_cluster
    >>> from startrail.planner.workload import Run, find_model
    >>> plan_for_job(find_cluster("a100-4x8"), Job(find_model("gpt-3b"), Run(length=131072)))[1]   # doctest: +ELLIPSIS
    'auto chose ...: ... predicted for a step of gpt-3b with 1 x 131072 tokens, ... of 37.0 GB a device, ...'
    """
    model, run = job.model, replace(job.run, dtype=_dtype(cluster, job.run.dtype))
    about = f"a step of {model.name} with {run.batch} x {run.length} tokens"
    try:
        found = search(cluster, model, run, data_parallel=job.data_parallel)
    except DoesNotFitError as error:
        return _least(error, about)
    memory = found.best.step.memory
    what = f"{about}, {memory.total / 1e9:.1f} of {memory.limit / 1e9:.1f} GB a device"
    return str(found.best.plan), _line(found, 1, what, f"{run.dtype}, {'causal' if model.causal else 'full'} mask")


def _least(error: DoesNotFitError, what: str) -> tuple[str, str]:
    """It is a prediction: let the job try, with as little memory as may be."""
    return str(error.plan), f"auto chose {error.plan}: {what} may not fit, and this needs least ({error.needs})"


def _dtype(cluster: ClusterSpec, wanted: str) -> str:
    """That of which the cluster's description has rates."""
    rates = cluster.device.rates
    return wanted if wanted in rates else "bfloat16" if "bfloat16" in rates else next(iter(rates))


def _line(found: Found, layers: int, what: str, about: str) -> str:
    best = found.best
    ring = next((row for row in found.rows if row.role == "ring"), None)
    against = (
        f", ring would take {seconds_text(ring.seconds / layers)}" if ring is not None and ring is not best else ""
    )
    seconds = f"{seconds_text(best.seconds / layers)} predicted for {what}"
    return f"auto chose {best.plan}: {seconds}, {best.exposed:.0%} exposed{against} ({about})"

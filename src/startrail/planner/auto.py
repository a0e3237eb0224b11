"""The planner behind ``SequenceParallel("auto")``, as far as it needs no torch.

A job that describes its model gets the plan that ``startrail plan`` ranks first (``plan_for_job``). Without a job, only
heads and perhaps a length are known. Then the planner compares plans for one causal sequence and assumes 32 layers
whose attention may use half of the memory. It considers only plans that keep nothing for the backward pass, because a
deeper model would keep it once per layer (``plan_for_heads``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from startrail.compile.attention import Attention
from startrail.planner.candidates import RING
from startrail.planner.cluster import ClusterSpec
from startrail.planner.rows import DoesNotFitError, SearchResult
from startrail.planner.search import search, search_attention
from startrail.planner.topology import Machine
from startrail.planner.units import MAX_COUNT, MAX_SIZE, Fields, bytes_text, seconds_text
from startrail.planner.workload import Job
from startrail.schedule.plan import Plan

ASSUMED_TOKENS_PER_RANK = 4096  # long enough for links and arithmetic to decide
ASSUMED_HEAD_DIM = 128
ASSUMED_LAYERS, MEMORY_SHARE = 32, 0.5  # and the share of the memory that their attention may use


class Choice(NamedTuple):
    plan: Plan
    reason: str  # one line


def fit_cluster(cluster: ClusterSpec, machine: Machine) -> ClusterSpec:
    """``cluster`` with its own rates and the sizes of ``machine``.

    >>> from startrail.planner.cluster import find_cluster
    >>> [level.size for level in fit_cluster(find_cluster("a100-4x8"), Machine(2, 8)).levels]
    [2, 8]
    >>> fit_cluster(find_cluster("pcie-8"), Machine(2, 8))
    Traceback (most recent call last):
    ValueError: cluster pcie-8 has the levels gpu x 8, which do not describe 2 nodes of 8 ranks
    """
    if len(cluster.levels) == 2:
        return cluster.resized([machine.nodes, machine.ranks_per_node])
    if len(cluster.levels) == 1 and machine.nodes == 1:
        return cluster.resized([machine.world])
    if cluster.world == machine.world:
        return cluster
    levels = " / ".join(f"{level.name} x {level.size}" for level in cluster.levels)
    ranks = f"{machine.nodes} nodes of {machine.ranks_per_node} ranks"
    raise ValueError(f"cluster {cluster} has the levels {levels}, which do not describe {ranks}")


def plan_for_heads(
    cluster: ClusterSpec, heads: int, kv_heads: int, head_dim: int | None = None, length: int | None = None
) -> Choice:
    """
    >>> from startrail.planner.cluster import find_cluster
    >>> plan, reason = plan_for_heads(find_cluster("a100-4x8"), 32, 32, 128, 524288)
    >>> plan.keep, "assuming 32 layers whose attention uses at most half of the memory" in reason
    ('none', True)
    """
    for name, value, most in (("head_dim", head_dim, MAX_SIZE), ("length", length, MAX_COUNT)):
        if value is not None:
            Fields({name: value}, "auto").integer(name, most=most)
    tokens = length or ASSUMED_TOKENS_PER_RANK * cluster.world
    dtype = _supported_dtype(cluster, "bfloat16")
    call = Attention.of(tokens, 1, heads, kv_heads, head_dim or ASSUMED_HEAD_DIM, True, dtype)
    what = f"forward + backward of {tokens} tokens"
    limit = MEMORY_SHARE * (cluster.device.memory - cluster.device.reserved)
    try:
        found = search_attention(cluster, call, ASSUMED_LAYERS, limit)
    except DoesNotFitError as error:
        return _smallest(error, what)
    about = f"{heads}:{kv_heads} heads, one causal sequence; assuming {ASSUMED_LAYERS} layers whose attention uses at"
    about = f"{about} most half of the memory and keeps nothing"
    if length is None:  # then a time would be that of another sequence
        return Choice(
            found.best.plan, f"auto chose {found.best.plan} for {tokens} tokens, assumed: pass length= ({about})"
        )
    return _fastest(found, ASSUMED_LAYERS, what, about)


def plan_for_job(cluster: ClusterSpec, job: Job) -> Choice:
    """The plan that ``startrail plan`` ranks first: the fastest whole step that fits the memory.

    >>> from startrail.planner.cluster import find_cluster
    >>> from startrail.planner.workload import Run, find_model
    >>> plan_for_job(find_cluster("a100-4x8"), Job(find_model("gpt-3b"), Run(length=131072))).reason
    ... # doctest: +ELLIPSIS
    'auto chose ...: ... predicted for a step of gpt-3b with 1 x 131072 tokens, ... of 33.3 GB per device, ...'
    """
    model, run = job.model, replace(job.run, dtype=_supported_dtype(cluster, job.run.dtype))
    about = f"a step of {model.name} with {run.batch} x {run.length} tokens"
    try:
        found = search(cluster, model, run, data_parallel=job.data_parallel)
    except DoesNotFitError as error:
        return _smallest(error, about)
    memory = found.best.step.memory
    what = f"{about}, {bytes_text(memory.total)} of {bytes_text(memory.limit)} per device"
    return _fastest(found, 1, what, f"{run.dtype}, {'causal' if model.causal else 'full'} mask")


def _smallest(error: DoesNotFitError, what: str) -> Choice:
    """The plan that needs the least memory: the prediction may be wrong, so let the job try."""
    reason = f"{what} may not fit, and this plan needs the least memory ({error.needs})"
    return Choice(error.plan, f"auto chose {error.plan}: {reason}")


def _supported_dtype(cluster: ClusterSpec, dtype: str) -> str:
    """``dtype`` if the cluster's description has rates for it, else bfloat16 or the first that it has."""
    rates = cluster.device.rates
    return dtype if dtype in rates else "bfloat16" if "bfloat16" in rates else next(iter(rates))


def _fastest(found: SearchResult, layers: int, what: str, about: str) -> Choice:
    best = found.best
    seconds = f"{seconds_text(best.seconds / layers)} predicted for {what}, {best.exposed:.0%} exposed"
    ring = next((row for row in found.rows if row.role == RING), None)
    if ring is not None and ring is not best:
        seconds += f"; ring would take {seconds_text(ring.seconds / layers)}"
    return Choice(best.plan, f"auto chose {best.plan}: {seconds} ({about})")

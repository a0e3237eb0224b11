"""Questions that operators of clusters ask: the longest sequence that fits, the devices that a length needs, the batch
that is worth its memory, and what a million tokens cost.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.planner.workload import find_model
>>> longest = longest_length(find_cluster("a100-4x8"), find_model("gpt-7b"), Run(length=1))
>>> longest % 1024, 2**19 < longest < 2**20
(0, True)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from startrail.planner.candidates import options_of, plans_on
from startrail.planner.cluster import MAX_RANKS, ClusterSpec
from startrail.planner.rows import DoesNotFitError, Row
from startrail.planner.search import limit_memory, search
from startrail.planner.step import Training
from startrail.planner.units import MAX_COUNT, count_text, plural
from startrail.planner.workload import Model, Run
from startrail.schedule.plan import Plan

LENGTH_STEP = 1024
BATCH_GAIN = 0.02  # tokens/s that twice the batch must add
MAX_BATCH = 1024


def _plans(training: Training) -> Iterator[Plan]:
    """Every plan, with every option."""
    for plan in plans_on(training.group, training.heads):
        if isinstance(plan, Plan):
            yield from options_of(plan)


def _plan_fits(training: Training, plan: Plan) -> bool:
    try:
        memory = training.memory(plan)
    except ValueError:  # its groups divide neither heads nor batch
        return False
    return memory.total <= memory.limit


def fits(cluster: ClusterSpec, model: Model, run: Run) -> bool:
    """True if some plan fits the memory, with one group of all ranks."""
    training = Training(cluster, model, run)
    return any(_plan_fits(training, plan) for plan in _plans(training))


def longest_length(cluster: ClusterSpec, model: Model, run: Run, memory: float | None = None) -> int:
    """The most tokens per sequence that fit, in steps of 1024. Raises ``ValueError`` if none do."""
    cluster = limit_memory(cluster, memory)
    least = -(-max(LENGTH_STEP, 2 * cluster.world) // LENGTH_STEP)  # in steps
    longest = least - 1

    def fits_plan(plan: Plan, steps: int) -> bool:
        within = steps * LENGTH_STEP <= MAX_COUNT
        return within and _plan_fits(Training(cluster, model, replace(run, length=steps * LENGTH_STEP)), plan)

    for plan in _plans(Training(cluster, model, run)):
        # What a plan needs grows with the length. Few plans beat all before them, and only these are tried again.
        step = 1
        while fits_plan(plan, longest + step):
            longest, step = longest + step, 2 * step
        while step > 1:
            step //= 2
            longest += step if fits_plan(plan, longest + step) else 0
    if longest < least:
        raise ValueError(f"{model.name} does not fit cluster {cluster} even with {least * LENGTH_STEP} tokens")
    return longest * LENGTH_STEP


def sizes_upwards(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster with 1, 2, 3, 4, 6, 8, 12 ... of its outermost members."""
    inside = [level.size for level in cluster.levels[1:]]
    bare = replace(cluster, slow=())
    for number in sorted({base << power for base in (1, 3) for power in range(17)}):
        if number * cluster.spans[0] <= MAX_RANKS:
            resized = bare.resized([number, *inside])
            yield replace(resized, name=f"{cluster.name.partition('@')[0]}@{'x'.join(map(str, [number, *inside]))}")


def smallest_cluster(cluster: ClusterSpec, model: Model, run: Run, memory: float | None = None) -> ClusterSpec:
    """The fewest members that fit the run. Raises ``ValueError`` if no number does."""
    for sized in sizes_upwards(limit_memory(cluster, memory)):
        if run.length >= 2 * sized.world and fits(sized, model, run):
            return sized
    raise ValueError(f"{model.name} with {run.length} tokens fits no number of {plural(cluster.levels[0].label)}")


def worthwhile_batch(cluster: ClusterSpec, model: Model, run: Run, memory: float | None = None) -> int:
    """The batch after which twice as many sequences no longer add 2 % of tokens/s, or no longer fit."""
    best: Row | None = None
    batch = 1
    while batch <= MAX_BATCH:
        try:
            row = search(cluster, model, replace(run, batch=batch), 1, memory, known=False).best
        except DoesNotFitError:
            if best is None:
                raise
            break
        if best is not None and row.tokens_per_second < (1 + BATCH_GAIN) * best.tokens_per_second:
            break
        best, batch = row, 2 * batch
    assert best is not None
    return best.training.run.batch


def cost_per_million(row: Row, price: float) -> float:
    """Of a million tokens, at ``price`` per device and hour."""
    return price * row.training.cluster.world / 3600 / row.tokens_per_second * 1e6


def complete_question(
    cluster: ClusterSpec, model: Model, run: Run, memory: float | None, length: bool, devices: bool, batch: bool
) -> tuple[ClusterSpec, Run, tuple[str, ...]]:
    """The cluster and the run with the longest length, the fewest devices and the batch that is worth it, where these
    are asked for, and what was found in words."""
    found = []
    if length:
        run = replace(run, length=longest_length(cluster, model, run, memory))
        found.append(f"the longest sequence that fits: {run.length:,} tokens")
    if devices:
        cluster = smallest_cluster(cluster, model, run, memory)
        outer, inner = cluster.levels[0], cluster.levels[-1]
        fewest = f"{count_text(cluster.world, inner.label)} in {count_text(outer.size, outer.label)}"
        found.append(f"the fewest that fit {run.length:,} tokens: {fewest} (tried: 1, 2, 3, 4, 6, 8, 12, ...)")
    if batch:
        run = replace(run, batch=worthwhile_batch(cluster, model, run, memory))
        found.append(
            f"batch {run.batch}: twice as many sequences do not fit, or add less than {BATCH_GAIN:.0%} of speed"
        )
    return cluster, run, tuple(found)

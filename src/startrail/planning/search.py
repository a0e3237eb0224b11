"""The planner: tries every plan that a cluster allows, drops those that do not fit, and ranks the rest by the clock.

Plans follow the cluster's levels: at every level teams and rings, heads, or the paper's schedule, in up to two levels
of the plan; with every backward form, ``keep`` and number of groups; and data parallel groups where the batch allows
several. All are bounded by closed form, and played in the order of their bounds until no other can be among the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

from startrail.plan import Plan, divisors, plans_for, variants_of
from startrail.planning.attention import Call, Prediction, predict
from startrail.planning.bounds import Bound, Bounds
from startrail.planning.hardware import Cluster
from startrail.planning.step import Step, Training
from startrail.planning.workload import Model, Run
from startrail.schedule.family import Heads, Level

LEVELS = 2  # of the plan, at each level of the cluster
GROUPS = (1, 2, 4)
ALIKE = 0.005  # plans that differ by less than this share are alike
PLAYED = 24  # plans at most, beside the well-known ones
LARGE, PLAYED_THERE = 1024, 12  # fewer where there are more ranks, whose programs are long
Played = dict[tuple[Plan, Call, int], Prediction]


@dataclass(frozen=True)
class Row:
    """One plan, played. ``role`` names the well-known ones: ring, star, USP, double ring, Ulysses."""

    plan: Plan
    training: Training
    step: Step
    role: str = ""

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def low(self) -> float:
        return self.seconds * (1 - self.training.cluster.accuracy)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.training.cluster.accuracy)

    @property
    def tokens_per_second(self) -> float:
        return self.training.run.length * self.training.run.batch / self.seconds

    @property
    def exposed(self) -> float:
        """The share of a step in which communication is waited for."""
        return max(0.0, 1 - self.step.compute / self.seconds)

    @property
    def mfu(self) -> float:
        cluster = self.training.cluster
        peak = cluster.device.of(self.training.run.dtype).peak * (cluster.cores or cluster.world)
        return self.step.flops / self.seconds / peak

    @property
    def name(self) -> str:
        groups = self.training.data_parallel
        return str(self.plan) + (f" x {groups} data parallel" if groups > 1 else "")


@dataclass(frozen=True)
class Found:
    """``rows``: the best, fastest first, and the well-known plans that fit. ``dropped``: how many plans did not fit, by
    reason. ``tried``: levels that were bounded, whatever their options; ``played``: plans that were played."""

    cluster: Cluster
    model: Model
    run: Run
    rows: tuple[Row, ...]
    dropped: dict[str, int]
    missing: dict[str, str]  # well-known plans that cannot be used, and why
    tried: int
    played: int
    unsure: float  # by how much of its time the best could be beaten at most by a plan that was not played

    @property
    def best(self) -> Row:
        return self.rows[0]


def search(
    cluster: Cluster, model: Model, run: Run, top: int = 5, memory: float | None = None, one_group: bool = False
) -> Found:
    """The ``top`` best plans, and the well-known ones; ``ValueError`` if nothing fits, with what would. ``one_group``:
    all ranks share every sequence, whatever the batch.

    >>> from startrail.planning.hardware import find_cluster
    >>> from startrail.planning.workload import find_model
    >>> found = search(find_cluster("a100-4x8"), find_model("gpt-3b"), Run(length=131072))
    >>> found.best.plan.heads >= 4, found.best.seconds < found.rows[-1].seconds   # heads over the nodes
    (True, True)
    """
    if memory is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory=memory + cluster.device.reserved))
    if run.length < cluster.world and run.length * run.batch < cluster.world:
        raise ValueError(f"length {run.length} has fewer tokens than cluster {cluster} has ranks, {cluster.world}")
    cluster.device.of(run.dtype)
    finder = _Finder(cluster, model, run, top)
    for training in [Training(cluster, model, run)] if one_group else _trainings(cluster, model, run):
        finder.bound_all(training)
    finder.play_best()
    return finder.found()


def search_attention(cluster: Cluster, call: Call) -> Found:
    """The same for one attention call, forward and backward, with nothing around it.

    >>> from startrail.planning.hardware import find_cluster
    >>> call = Call(length=65536, batch=1, heads=8, kv_heads=8, head_dim=64, causal=True)
    >>> search_attention(find_cluster("pcie-8"), call).best.plan.size
    8
    """
    heads = call.heads, call.kv_heads, call.head_dim
    model = Model("attention", 1, 1, 1, *heads, 1, 0, tied=True, causal=call.causal, windows=(call.window,))
    return search(cluster, model, Run(call.length, call.batch, call.dtype, zero=0), one_group=True)


def _trainings(cluster: Cluster, model: Model, run: Run) -> Iterator[Training]:
    """With every number of data-parallel groups that batch and cluster allow."""
    for groups in divisors(gcd(run.batch, cluster.world)):
        training = Training(cluster, model, run, groups)
        try:
            if run.length >= training.group.world:
                yield training
        except ValueError:
            continue


@lru_cache(maxsize=64)
def levels_for(size: int) -> tuple[tuple[Level, ...], ...]:
    """Every way to use one level of the cluster.

    >>> [str(Plan(levels)) for levels in levels_for(2)]
    ['1x2', '2x1', 'u2']
    """
    return tuple(plan.levels for plan in plans_for(size, LEVELS)) if size > 1 else ((),)


def plans_on(cluster: Cluster, heads: int) -> Iterator[Plan | str]:
    """Every plan whose levels follow the cluster's, with default options; or why levels cannot be used together."""
    for chosen in product(*(levels_for(level.size) for level in cluster.levels)):
        levels = tuple(level for part in chosen for level in part) or (Heads(1),)
        split = prod(level.size for level in levels if isinstance(level, Heads))
        if heads % split:
            yield f"{heads} query heads cannot be split so"
            continue
        if len({type(level) for level in levels if not isinstance(level, Heads)}) > 1:
            continue  # the paper's schedule stands alone
        try:
            yield Plan(levels)
        except ValueError:  # two levels of the paper's
            continue


def least_traffic(plan: Plan) -> list[Plan]:
    """The variants that no other sends less than: all kept, or queries travelling."""
    if not plan.shard_levels:
        return [plan]
    forms = [replace(plan, backward=form) for form in plan.family.backwards if form != "keys"]
    return [replace(plan, keep="all"), *forms]


def options_of(plan: Plan) -> Iterator[Plan]:
    """``plan`` with every option that changes what it does."""
    keeps: set[object] = set()
    for variant in variants_of(plan):
        rings = [(getattr(level, "team", 1), getattr(level, "ring", 2)) for level in plan.shard_levels]
        kept = (
            variant.keep != "none" and any(team > 1 for team, _ in rings),
            variant.keep == "all" and any(ring > 1 for _, ring in rings),
        )
        if (variant.backward, kept) in keeps:
            continue
        keeps.add((variant.backward, kept))
        yield from (replace(variant, groups=groups) for groups in GROUPS)


def well_known(cluster: Cluster, model: Model) -> dict[str, str]:
    """Plans that people ask for, by name."""
    world = cluster.world
    inside = cluster.spans[0]
    outside, heads = world // inside, gcd(inside, model.kv_heads)
    usp = f"1x{outside}/u{heads}" if heads == inside else f"1x{outside}/1x{inside // heads}/u{heads}"
    known = {"ring": f"1x{world}", "Ulysses": f"u{world}"}
    stars = {f"star{team}": f"star{team}" for team in (2, 4, 8) if world % team**2 == 0}
    known |= dict(list(stars.items())[-1:]) if world > LARGE else stars  # in large worlds the best of them
    if outside > 1 and inside > 1:
        known |= {"USP": usp, "double ring": f"1x{outside}/1x{inside}"}
    return known


class _Finder:
    def __init__(self, cluster: Cluster, model: Model, run: Run, top: int) -> None:
        self.cluster, self.model, self.run, self.top = cluster, model, run, top
        # by bound; a plan's options are queued when its levels come up
        self.queue: list[tuple[float, int, Plan, Training, bool]] = []
        self.order, self.unsure = 0, 0.0
        self.bounds: dict[int, dict[Call, Bounds]] = {}
        self.dropped: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        self.tried = 0
        self.least: tuple[float, Plan, Training] | None = None  # of all that do not fit: the one that needs least
        self.rows: list[Row] = []
        self.predictions: Played = {}

    def drop(self, reason: str, number: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + number

    def bound_all(self, training: Training) -> None:
        """Of all levels, whatever the options; these are tried where the levels could be among the best."""
        bounds = self.bounds[training.data_parallel] = {call: Bounds(training.group, call) for call in training.calls}
        for plan in plans_on(training.group, self.model.heads):
            if isinstance(plan, str):
                self.drop(plan)
                continue
            self.tried += 1
            variants = least_traffic(plan)
            both = {call: bound.of_levels(plan, variants, GROUPS[-1]) for call, bound in bounds.items()}
            self.queue.append((_least_step(training, both), len(self.queue), plan, training, False))

    def add_options(self, plan: Plan, training: Training) -> None:
        """Queue a plan with each of its options, where they fit."""
        options = list(options_of(plan))
        for at, variant in enumerate(options):
            try:
                both = {call: bound.of_plan(variant) for call, bound in self.bounds[training.data_parallel].items()}
            except ValueError:
                self.drop("groups divide neither the heads of a rank nor the batch")
                continue
            memory = training.memory(variant)
            if memory.total <= memory.limit:
                heapq.heappush(self.queue, (_least_step(training, both), self.pushed(), variant, training, True))
                continue
            least_of_all = at == 0  # without options nothing is kept
            self.drop(f"more than the {memory.limit / 1e9:.1f} GB of a device", len(options) if least_of_all else 1)
            if self.least is None or memory.total < self.least[0]:
                self.least = memory.total, variant, training
            if least_of_all:
                return

    def pushed(self) -> int:
        self.order += 1
        return self.order

    def play_best(self) -> None:
        """In the order of bounds, until nobody left can be among the best; then the well-known ones."""
        heapq.heapify(self.queue)
        self.order = len(self.queue)
        limit = PLAYED if self.cluster.world <= LARGE else PLAYED_THERE
        worst_kept: list[float] = []  # the best seconds so far, negative, as many as are wanted
        while self.queue:
            bound, _, plan, training, ready = heapq.heappop(self.queue)
            full = len(worst_kept) == self.top
            if full and (bound >= -worst_kept[0] * (1 - ALIKE) or len(self.rows) >= limit):
                self.unsure = max(0.0, 1 - bound / -max(worst_kept))
                break
            if not ready:
                self.add_options(plan, training)
                continue
            row = self.play(plan, training)
            self.rows.append(row)
            heapq.heappush(worst_kept, -row.seconds)
            if len(worst_kept) > self.top:
                heapq.heappop(worst_kept)
        if not self.rows:
            raise ValueError(self.why_nothing_fits())
        training = min(self.rows, key=lambda row: row.seconds).training
        for role, text in well_known(training.group, self.model).items():
            self.add_well_known(role, text, training)

    def add_well_known(self, role: str, text: str, training: Training) -> None:
        plan = Plan.parse(text)
        try:
            plan.check_world(training.group.world)
            memory = training.memory(plan)
        except ValueError as error:
            self.missing[role] = str(error).partition("; ")[0]
            return
        if memory.total > memory.limit:
            self.missing[role] = f"{text} needs {memory.total / 1e9:.1f} GB, a device has {memory.limit / 1e9:.1f} GB"
            return
        same = [row for row in self.rows if row.plan == plan and row.training is training]
        for row in same:
            self.rows.remove(row)
        self.rows.append(replace(same[0] if same else self.play(plan, training), role=role))

    def play(self, plan: Plan, training: Training) -> Row:
        def predicted(call: Call) -> Prediction:
            key = plan, call, training.data_parallel
            if key not in self.predictions:
                self.predictions[key] = predict(training.group, plan, call)
            return self.predictions[key]

        return Row(plan, training, training.step(plan, predicted))

    def found(self) -> Found:
        """Fastest first; of those that are alike, the one that sends least over the outermost links, then inside, and
        then the simplest."""
        fastest = min(row.seconds for row in self.rows)
        alike = [row for row in self.rows if row.seconds <= fastest * (1 + ALIKE)]
        least = [max(min(sent), 1.0) for sent in zip(*(row.step.sent for row in alike), strict=True)]

        def rank(row: Row) -> tuple[object, ...]:
            if row not in alike:
                return 1, row.seconds
            plan = row.plan
            sent = tuple(round(nbytes / fewest, 1) for nbytes, fewest in zip(row.step.sent, least, strict=True))
            simple = len(plan.levels) + (plan.keep != "none") + (plan.groups > 1)
            return 0, sent, simple, row.step.memory.total, row.seconds

        ranked = sorted(self.rows, key=rank)
        best = [row for at, row in enumerate(ranked) if at < self.top or row.role]
        return Found(
            *(self.cluster, self.model, self.run, tuple(best), dict(sorted(self.dropped.items())), self.missing),
            self.tried, len(self.rows), self.unsure,
        )  # fmt: skip

    def why_nothing_fits(self) -> str:
        if self.least is None:
            reasons = "; ".join(f"{count} plans: {reason}" for reason, count in self.dropped.items())
            return f"no plan fits {self.model.name} on cluster {self.cluster}: {reasons or 'none can be made'}"
        needs, plan, training = self.least
        limit = training.memory(plan).limit
        text = (
            f"{self.model.name} with {self.run.length} tokens does not fit cluster {self.cluster}: {plan} needs "
            f"{needs / 1e9:.1f} GB a device, {needs / limit - 1:.0%} more than the {limit / 1e9:.1f} GB that it has"
        )
        return text + "".join(f"; {hint}" for hint in self.what_would_fit(training))

    def what_would_fit(self, training: Training) -> Iterable[str]:
        """Shorter sequences, more devices, or the options that save memory."""
        run, cluster = self.run, self.cluster

        def fits(cluster: Cluster, run: Run) -> bool:
            world = cluster.world // training.data_parallel
            memory = Training(cluster, self.model, run, training.data_parallel).memory(Plan.parse(f"1x{world}"))
            return memory.total <= memory.limit

        for change in (dict(recompute=True), dict(zero=3), dict(recompute=True, zero=3)):
            if replace(run, **change) != run and fits(cluster, replace(run, **change)):
                yield "it would with " + " and ".join(f"{key} = {value}".lower() for key, value in change.items())
                break
        length = run.length // 2
        while length > cluster.world and not fits(cluster, replace(run, length=length)):
            length //= 2
        if length > cluster.world:
            yield f"{length} tokens would"
        sizes = [level.size for level in cluster.levels]
        for factor in (2, 4, 8, 16, 32):
            larger = cluster.resized([sizes[0] * factor, *sizes[1:]])
            if fits(larger, run):
                yield f"{factor} times the {cluster.levels[0].name}s would"
                break


def _least_step(training: Training, both: dict[Call, tuple[Bound, Bound]]) -> float:
    """The bound of a whole step."""
    seconds = training.around + training.first_gather
    for call, layers in training.calls.items():
        for bound, dense, (gathers, _) in zip(both[call], training.dense, training.travels, strict=True):
            links = max(a + b for a, b in zip(bound.busy, gathers, strict=True))
            seconds += layers * max(bound.seconds + dense, links)
    return seconds

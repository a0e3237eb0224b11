"""The planner: tries every plan that a cluster allows, drops those that do not fit, and ranks the rest by the clock.

Plans follow the cluster's levels: at every level teams and rings, heads, both in either order, or the paper's schedule
(`candidates`); with every backward form, ``keep`` and number of groups; and data parallel groups where the batch allows
several. All are bounded by closed form, and played in the order of their bounds until no other can be among the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from startrail.planner.bounds import Bound, Bounds
from startrail.planner.candidates import GROUPS, LARGE, Known, least_traffic, options_of, plans_on, well_known
from startrail.planner.cluster import ClusterSpec
from startrail.planner.predict import AttentionShape, Prediction, predict
from startrail.planner.step import StepEstimate, Training
from startrail.planner.workload import Model, Run
from startrail.schedule.plan import Plan, divisors

ALIKE = 0.03  # plans that differ by less than this share are alike: predictions err by more
PLAYED, PLAYED_IN_LARGE = 96, 12  # plans at most, beside the well-known ones
Played = dict[tuple[Plan, AttentionShape, int], Prediction]


@dataclass(frozen=True)
class Row:
    """One plan, played. ``role`` names the well-known ones: ring, star, USP, double ring, Ulysses."""

    plan: Plan
    training: Training
    step: StepEstimate
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
    """``rows``: the best, fastest first, and the well-known plans; ``missing``: those of them that cannot be used, and
    why. ``dropped``: how many plans did not fit, by reason. ``tried``: levels that were bounded, whatever their
    options; ``played``: plans that were played."""

    cluster: ClusterSpec
    model: Model
    run: Run
    rows: tuple[Row, ...]
    dropped: dict[str, int]
    missing: tuple[Known, ...]
    tried: int
    played: int
    unsure: float  # by how much of its time the best could be beaten at most by a plan that was not played

    @property
    def best(self) -> Row:
        return self.rows[0]


class DoesNotFitError(ValueError):
    """No plan's memory fits a device. ``plan`` is the one that needs least, and ``needs`` says how much too much."""

    def __init__(self, text: str, plan: Plan, needs: str) -> None:
        super().__init__(text)
        self.plan, self.needs = plan, needs


def search(
    cluster: ClusterSpec,
    model: Model,
    run: Run,
    top: int = 5,
    memory: float | None = None,
    *,
    data_parallel: int | None = None,
    keep: bool = True,
    known: bool = True,
) -> Found:
    """The ``top`` best plans, and the well-known ones if they are wanted (``known``); ``DoesNotFitError``, with what
    would fit, if nothing does. ``data_parallel``: the groups that there are (default: as many as are best). ``keep``:
    whether plans may keep what they received for the backward pass.

    >>> from startrail.planner.cluster import find_cluster
    >>> from startrail.planner.workload import find_model
    >>> found = search(find_cluster("a100-4x8"), find_model("gpt-3b"), Run(length=131072))
    >>> found.best.plan.heads >= 4, found.best.seconds < found.rows[-1].seconds   # heads over the nodes
    (True, True)
    """
    if memory is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory=memory + cluster.device.reserved))
    if run.length < cluster.world and run.length * run.batch < cluster.world:
        raise ValueError(f"length {run.length} has fewer tokens than cluster {cluster} has ranks, {cluster.world}")
    cluster.device.of(run.dtype)
    finder = _Finder(cluster, model, run, top, keep)
    for training in _trainings(cluster, model, run, data_parallel):
        finder.bound_all(training)
    finder.play_best(known)
    return finder.found()


def search_attention(
    cluster: ClusterSpec, call: AttentionShape, layers: int = 1, memory: float | None = None, keep: bool = False
) -> Found:
    """The same for attention alone, forward and backward, in so many layers that may have so much ``memory`` together.
    Nothing is kept but what heads need, unless ``keep`` allows it: what the model holds beside attention is not known.

    >>> from startrail.planner.cluster import find_cluster
    >>> call = AttentionShape(length=65536, batch=1, heads=8, kv_heads=8, head_dim=64, causal=True)
    >>> search_attention(find_cluster("pcie-8"), call, layers=32, memory=12e9).best.plan.size
    8
    """
    heads = call.heads, call.kv_heads, call.head_dim
    windows = (call.window,) * layers
    model = Model("attention", 1, 1, layers, *heads, 1, 0, tied=True, causal=call.causal, windows=windows)
    run = Run(call.length, call.batch, call.dtype, zero=0)
    return search(cluster, model, run, memory=memory, data_parallel=1, keep=keep)


def _trainings(cluster: ClusterSpec, model: Model, run: Run, data_parallel: int | None) -> Iterator[Training]:
    """With so many data-parallel groups, or with every number of them that batch and cluster allow."""
    if data_parallel is not None:
        training = Training(cluster, model, run, data_parallel)
        if run.length < training.group.world:
            raise ValueError(f"length {run.length} has fewer tokens than a group has ranks, {training.group.world}")
        yield training
        return
    for groups in divisors(gcd(run.batch, cluster.world)):
        training = Training(cluster, model, run, groups)
        try:
            if run.length >= training.group.world:
                yield training
        except ValueError:
            continue


class _Finder:
    def __init__(self, cluster: ClusterSpec, model: Model, run: Run, top: int, keep: bool) -> None:
        self.cluster, self.model, self.run, self.top, self.keep = cluster, model, run, top, keep
        # by bound; a plan's options are queued when its levels come up
        self.queue: list[tuple[float, int, Plan, Training, bool]] = []
        self.order, self.unsure = 0, 0.0
        self.bounds: dict[int, dict[AttentionShape, Bounds]] = {}
        self.dropped: dict[str, int] = {}
        self.missing: list[Known] = []
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
        options = list(options_of(plan, self.keep))
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

    def play_best(self, known: bool) -> None:
        """In the order of bounds, until nobody left can be among the best; then the well-known ones, if asked for."""
        heapq.heapify(self.queue)
        self.order = len(self.queue)
        kinds = max(len(training.calls) for *_, training, _ in self.queue) if self.queue else 1  # each is played
        limit = PLAYED // kinds if self.cluster.world <= LARGE else PLAYED_IN_LARGE
        worst_kept: list[float] = []  # the best seconds so far, negative, as many as are wanted
        while self.queue:
            bound, _, plan, training, ready = heapq.heappop(self.queue)
            full = len(worst_kept) == self.top
            if full and (bound >= -worst_kept[0] or len(self.rows) >= limit):
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
            raise self.nothing_fits()
        training = min(self.rows, key=lambda row: row.seconds).training
        for one in well_known(training.group, self.model) if known else ():
            self.add_well_known(one, training)

    def add_well_known(self, known: Known, training: Training) -> None:
        why_not, plan = known.why_not, Plan.parse(known.plan)
        if not why_not:
            try:
                plan.check_world(training.group.world)
                memory = training.memory(plan)
                if memory.total > memory.limit:
                    why_not = f"needs {memory.total / 1e9:.1f} GB, a device has {memory.limit / 1e9:.1f} GB"
            except ValueError as error:
                why_not = str(error).partition("; ")[0]
        if why_not:
            self.missing.append(known._replace(why_not=why_not))
            return
        same = [row for row in self.rows if row.plan == plan and row.training is training]
        for row in same:
            self.rows.remove(row)
        self.rows.append(replace(same[0] if same else self.play(plan, training), role=known.role))

    def play(self, plan: Plan, training: Training) -> Row:
        def predicted(call: AttentionShape) -> Prediction:
            key = plan, call, training.data_parallel
            if key not in self.predictions:
                self.predictions[key] = predict(training.group, plan, call)
            return self.predictions[key]

        return Row(plan, training, training.step(plan, predicted))

    def found(self) -> Found:
        """Fastest first; of those that are alike, the one that sends least over the outermost links, then the one with
        the smallest teams, whose blocks wait for each other's transfers, and the fewest groups, since what waiting and
        messages cost is what predictions know least about; then inside, and then the simplest."""
        fastest = min(row.seconds for row in self.rows)
        alike = [row for row in self.rows if row.seconds <= fastest * (1 + ALIKE)]
        least = [max(min(sent), 1.0) for sent in zip(*(row.step.sent for row in alike), strict=True)]

        def rank(row: Row) -> tuple[object, ...]:
            if row not in alike:
                return 1, row.seconds
            plan = row.plan
            sent = tuple(round(nbytes / fewest, 1) for nbytes, fewest in zip(row.step.sent, least, strict=True))
            simple = len(plan.levels) + (plan.keep != "none")
            return 0, sent[0], plan.family.team(plan), plan.groups, sent[1:], simple, row.step.memory.total, row.seconds

        ranked = sorted(self.rows, key=rank)
        best = [row for at, row in enumerate(ranked) if at < self.top or row.role]
        return Found(
            *(self.cluster, self.model, self.run, tuple(best), dict(sorted(self.dropped.items())), tuple(self.missing)),
            self.tried, len(self.rows), self.unsure,
        )  # fmt: skip

    def nothing_fits(self) -> ValueError:
        if self.least is None:
            reasons = "; ".join(f"{count} plans: {reason}" for reason, count in self.dropped.items())
            return ValueError(
                f"no plan fits {self.model.name} on cluster {self.cluster}: {reasons or 'none can be made'}"
            )
        total, plan, training = self.least
        limit = training.memory(plan).limit
        more = f"{total / limit - 1:.0%} more than the {limit / 1e9:.1f} GB that it has"
        needs = f"{plan} needs {total / 1e9:.1f} GB a device, {more}"
        text = f"{self.model.name} with {self.run.length} tokens does not fit cluster {self.cluster}: {needs}"
        return DoesNotFitError(text + "".join(f"; {hint}" for hint in self.what_would_fit(training)), plan, needs)

    def what_would_fit(self, training: Training) -> Iterable[str]:
        """The options that save memory, smaller batches, shorter sequences, or more devices."""
        run, cluster = self.run, self.cluster

        def fits(cluster: ClusterSpec, run: Run) -> bool:
            world = cluster.world // training.data_parallel
            memory = Training(cluster, self.model, run, training.data_parallel).memory(Plan.parse(f"1x{world}"))
            return memory.total <= memory.limit

        for change in (dict(recompute=True), dict(zero=3), dict(recompute=True, zero=3)):
            if replace(run, **change) != run and fits(cluster, replace(run, **change)):
                yield "it would with " + " and ".join(f"{key} = {value}".lower() for key, value in change.items())
                break
        batch = run.batch // 2
        while batch and (batch % training.data_parallel or not fits(cluster, replace(run, batch=batch))):
            batch //= 2
        if batch:
            yield f"a batch of {batch} would"
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


def _least_step(training: Training, both: dict[AttentionShape, tuple[Bound, Bound]]) -> float:
    """The bound of a whole step."""
    seconds = training.outer_seconds + training.exposed_gather_seconds
    for call, layers in training.calls.items():
        for bound, dense, (gathers, _) in zip(both[call], training.dense_seconds, training.fsdp_traffic, strict=True):
            links = max(a + b for a, b in zip(bound.busy, gathers, strict=True))
            seconds += layers * max(bound.seconds + dense, links)
    return seconds

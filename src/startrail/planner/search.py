"""The search tries every plan that a cluster allows, drops those that do not fit and ranks the rest by predicted time.

Plans follow the cluster's levels: at every level teams and rings, heads, both in either order, or the paper's schedule
(`candidates`), with every backward form, ``keep`` and number of groups, and with several data-parallel groups if the
batch allows it. Every plan gets a closed-form lower bound. Plans are simulated in the order of their bounds until no
other can be among the best.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd, inf
from typing import Any

from startrail.compile.attention import Attention
from startrail.planner.bounds import Bound, Bounds
from startrail.planner.candidates import (
    GROUPS,
    LARGE_WORLD,
    RING,
    WellKnown,
    heads_outermost,
    least_traffic,
    options_of,
    plans_on,
    well_known,
    with_more_channels,
)
from startrail.planner.cluster import ClusterSpec
from startrail.planner.peers import RINGS, Implementation
from startrail.planner.predict import Prediction, predict
from startrail.planner.rows import (
    EXPOSED_SHARE,
    TIE_SHARE,
    DoesNotFitError,
    Row,
    SearchResult,
    ranked_rows,
    with_heads_outermost,
    with_other_form,
)
from startrail.planner.step import HEADROOM, Training
from startrail.planner.units import bytes_text, count_text, plural
from startrail.planner.workload import Model, Run
from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan, PlanError

YOURS = "yours"  # the role of plans that the user asks about
MOST_SIMULATED, MOST_SIMULATED_IN_LARGE = 96, 12  # plans, besides the well-known ones
MOST_OTHERS = 4  # plans with heads outermost, or that send the other of keys and latents, if none is among those
_INPUTS = dict(recompute=True, repeat_attention=True, offload=True)
SAVINGS: tuple[dict[str, Any], ...] = (  # settings that save memory, the cheapest first
    *(dict(recompute=True), dict(zero=3), dict(recompute=True, zero=3), dict(recompute=True, offload=True), _INPUTS),
    *(dict(states="bfloat16"), dict(offload_states=True), dict(**_INPUTS, offload_states=True)),
)
Bounded = dict[Attention, tuple[Bound, Bound]]  # forward and backward


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
    compare: Sequence[Plan] = (),
) -> SearchResult:
    """The ``top`` best plans, and with ``known`` the well-known ones. Raises ``DoesNotFitError`` with what would fit if
    no plan does. ``data_parallel`` is the number of groups (default: the best). ``keep`` allows plans that keep
    received pieces for the backward pass. ``compare`` are plans that become rows as well, with the role "yours".

    >>> from startrail.planner.cluster import find_cluster
    >>> from startrail.planner.workload import find_model
    >>> found = search(find_cluster("a100-4x8"), find_model("gpt-3b"), Run(length=131072))
    >>> found.best.plan.heads >= 4, found.best.seconds < found.rows[-1].seconds   # heads over the nodes
    (True, True)
    """
    cluster = limit_memory(cluster, memory)
    if run.length < cluster.world and run.length * run.batch < cluster.world:
        raise ValueError(f"length {run.length} has fewer tokens than cluster {cluster} has ranks, {cluster.world}")
    cluster.device.of(run.dtype)
    state = _Search(cluster, model, run, top, keep)
    for training in _trainings(cluster, model, run, data_parallel):
        state.bound_all(training)
    state.simulate_best(known)
    for plan in compare:
        state.add_well_known(WellKnown(YOURS, str(plan)), state.best_training(plan))
    return state.result()


def limit_memory(cluster: ClusterSpec, memory: float | None) -> ClusterSpec:
    """A copy on whose devices plans may use ``memory`` bytes, all of them; the same without a limit."""
    if memory is None:
        return cluster
    whole = memory / (1 - HEADROOM) + cluster.device.reserved
    return replace(cluster, device=replace(cluster.device, memory=whole))


def search_attention(
    cluster: ClusterSpec, call: Attention, layers: int = 1, memory: float | None = None, keep: bool = False
) -> SearchResult:
    """The search for attention alone, forward and backward, in ``layers`` that share ``memory``. Plans keep only what
    heads need, unless ``keep`` allows more: the memory of the rest of the model is unknown.

    >>> from startrail.planner.cluster import find_cluster
    >>> call = Attention.of(length=65536, batch=1, heads=8, kv_heads=8, head_dim=64, causal=True)
    >>> search_attention(find_cluster("pcie-8"), call, layers=32, memory=12e9).best.plan.size
    8
    """
    sizes = 1, 1, layers, call.heads, call.kv_heads, call.head_dim, 1, 0
    model = Model("attention", *sizes, tied=True, causal=call.mask.causal, windows=(call.mask.window,) * layers)
    run = Run(call.length, call.batch, call.dtype, zero=0)
    return search(cluster, model, run, memory=memory, data_parallel=1, keep=keep)


def _trainings(cluster: ClusterSpec, model: Model, run: Run, data_parallel: int | None) -> Iterator[Training]:
    """With ``data_parallel`` groups, or with every number of groups that batch and cluster allow."""
    forms = (True,) if model.latents is None else (True, False)
    if data_parallel is not None:
        training = Training(cluster, model, run, data_parallel)
        if run.length < training.group.world:
            raise ValueError(f"length {run.length} has fewer tokens than a group has ranks, {training.group.world}")
        yield from (replace(training, latents=latents) for latents in forms)
        return
    found, problem = False, None
    for groups in divisors(gcd(run.batch, cluster.world)):
        try:
            training = Training(cluster, model, run, groups)
            if run.length >= training.group.world:
                found = True
                yield from (replace(training, latents=latents) for latents in forms)
        except ValueError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem


class _Search:
    def __init__(self, cluster: ClusterSpec, model: Model, run: Run, top: int, keep: bool) -> None:
        self.cluster, self.model, self.run, self.top, self.keep = cluster, model, run, top, keep
        # by bound; options of a plan are queued when its levels are popped
        self.queue: list[tuple[float, int, Plan, Training, bool]] = []
        self.queued, self.bounded, self.possible_gain = 0, 0, 0.0
        self.bounds: dict[tuple[int, bool], dict[Attention, Bounds]] = {}
        self.dropped: Counter[str] = Counter()
        self.missing: list[WellKnown] = []
        self.least: tuple[float, Plan, Training] | None = None  # of all that do not fit, the one that needs the least
        self.closest: tuple[float, Plan, float] | None = None  # of those, the fastest by its bound, and its excess
        self.rows: list[Row] = []
        self.peers: list[Row] = []
        self.too_large: list[Row] = []
        self.predictions: dict[tuple[Plan, Attention, int], Prediction] = {}

    def add(self, plan: Plan, training: Training, bound: float, ready: bool) -> None:
        self.queued += 1
        heapq.heappush(self.queue, (bound, self.queued, plan, training, ready))

    def bound_all(self, training: Training) -> None:
        """Bound all combinations of levels. Options are tried only for levels that may be among the best."""
        bounds = {call: Bounds(training.group, call) for call in training.calls}
        self.bounds[training.data_parallel, training.latents] = bounds
        for plan in plans_on(training.group, training.heads):
            if isinstance(plan, str):
                self.dropped[plan] += 1
                continue
            self.bounded += 1
            variants = least_traffic(plan)
            both = {call: bound.of_levels(plan, variants, GROUPS[-1]) for call, bound in bounds.items()}
            self.add(plan, training, _least_step(training, both), ready=False)

    def add_options(self, plan: Plan, training: Training, of_levels: float) -> None:
        """Queue a plan with each of its options, where they fit. ``of_levels`` bounds all of them."""
        options = list(options_of(plan, self.keep))
        for at, variant in enumerate(options):
            try:
                memory = training.memory(variant)
            except ValueError:
                self.dropped["groups divide neither the heads per rank nor the batch"] += 1
                continue
            fits = memory.total <= memory.limit
            if fits or self.closest is None or of_levels < self.closest[0]:
                bounds = self.bounds[training.data_parallel, training.latents]
                bound = _least_step(training, {call: each.of_plan(variant) for call, each in bounds.items()})
                if fits:
                    self.add(variant, training, bound, ready=True)
                elif self.closest is None or bound < self.closest[0]:
                    self.closest = bound, variant, memory.total - memory.limit
            if fits:
                continue
            if self.least is None or memory.total < self.least[0]:
                self.least = memory.total, variant, training
            # what options cannot save: without it the rest would be checked one by one
            hopeless = at == 0 and memory.total - memory.attention - memory.kept > memory.limit
            self.dropped[f"more than {bytes_text(memory.limit)} per device"] += len(options) if hopeless else 1
            if hopeless:
                return

    def simulate_best(self, known: bool) -> None:
        """Simulate in the order of bounds until no other plan can be among the best, then the ``known`` ones."""
        kinds = max((len(training.calls) for *_, training, _ in self.queue), default=1)  # each is simulated
        limit = MOST_SIMULATED // kinds if self.cluster.world <= LARGE_WORLD else MOST_SIMULATED_IN_LARGE
        worst_kept: list[float] = []  # the best seconds so far, negated
        while self.queue:
            bound, _, plan, training, ready = heapq.heappop(self.queue)
            full = len(worst_kept) == self.top
            enough = full and bound >= max(-worst_kept[0], -max(worst_kept) * (1 + TIE_SHARE))  # none can be tied
            if enough or (full and len(self.rows) >= limit):
                self.possible_gain = max(0.0, 1 - bound / -max(worst_kept))
                break
            if not ready:
                self.add_options(plan, training, bound)
                continue
            row = self.simulate(plan, training)
            self.rows.append(row)
            heapq.heappush(worst_kept, -row.seconds)
            if len(worst_kept) > self.top:
                heapq.heappop(worst_kept)
        if not self.rows:
            raise self.nothing_fits()
        self.rows.sort(key=lambda row: row.seconds)
        self.rows[: self.top] = map(self.with_channels, self.rows[: self.top])
        training = min(self.rows, key=lambda row: row.seconds).training
        if self.model.latents is not None:
            other = replace(training, latents=not training.latents)
            self.simulate_some(other, lambda plan: True)
        if known and self.cluster.world <= LARGE_WORLD:  # the answer compares with heads over the nodes of a group
            self.simulate_some(training, lambda plan: heads_outermost(plan, training.group))
        if training.group.world == 1:
            return  # every sequence has a rank of its own: all plans are the same
        for one in well_known(training.group, training.kv_heads) if known else ():
            self.add_well_known(one, training)
        if known and self.cluster.device.of(self.run.dtype).kernel is not None and self.cluster.world <= LARGE_WORLD:
            self.add_peers(training)

    def with_channels(self, row: Row) -> Row:
        """The same plan with more channels, where that is faster although they take multiprocessors from attention."""
        if row.exposed > EXPOSED_SHARE and self.cluster.world <= LARGE_WORLD:
            for plan in with_more_channels(row.plan, row.training.group):
                other = self.simulate(plan, row.training)
                if other.seconds < row.seconds * (1 - EXPOSED_SHARE):
                    row = other
        return row

    def simulate_some(self, training: Training, wanted: Callable[[Plan], bool]) -> None:
        """Simulate the best ``wanted`` plans of a training, unless some were: the answer compares with them."""
        if any(wanted(row.plan) for row in self.rows if row.training == training):
            return
        queue = self.queue
        self.queue = [entry for entry in queue if entry[3] == training and wanted(entry[2])]
        heapq.heapify(self.queue)
        fastest, simulated = inf, 0
        while self.queue and simulated < MOST_OTHERS:
            bound, _, plan, same, ready = heapq.heappop(self.queue)
            if bound >= fastest:
                break
            if not ready:
                self.add_options(plan, same, bound)
                continue
            self.rows.append(self.simulate(plan, same))
            fastest, simulated = min(fastest, self.rows[-1].seconds), simulated + 1
        self.queue = queue

    def add_peers(self, training: Training) -> None:
        """Ring Attention as others run it, if ours fits."""
        for ring in [row for row in self.rows if row.role == RING]:
            for engine in RINGS:

                def predicted(call: Attention, plan: Plan = ring.plan, engine: Implementation = engine) -> Prediction:
                    return predict(training.group, plan, call, engine=engine)

                self.peers.append(Row(ring.plan, training, training.step(ring.plan, predicted), f"by {engine.name}"))

    def best_training(self, plan: Plan) -> Training:
        """That of the best row, or the one whose groups fit ``plan``."""
        fitting = [
            row.training for row in self.rows if not plan.family.open_ended and row.training.group.world == plan.size
        ]
        return fitting[0] if fitting else min(self.rows, key=lambda row: row.seconds).training

    def add_well_known(self, known: WellKnown, training: Training) -> None:
        reason, plan, needed = known.reason, Plan.parse(known.plan), 0.0
        if not reason:
            try:
                plan.check_world(training.group.world)
                memory = training.memory(plan)
                if memory.total > memory.limit:
                    needed = memory.total
                    reason = f"needs {bytes_text(memory.total)}, more than the limit of {bytes_text(memory.limit)}"
                    if plan.family.is_papers:
                        self.too_large.append(replace(self.simulate(plan, training), role=known.role))
            except ValueError as error:
                reason = error.problem.removeprefix(f"plan {plan}: ") if isinstance(error, PlanError) else str(error)
        if reason:
            self.missing.append(known._replace(reason=reason, memory=needed))
            return
        same = [row for row in self.rows if row.plan == plan and row.training is training]
        for row in same:
            self.rows.remove(row)
        found = same[0] if same else self.simulate(plan, training)
        role = f"{found.role}, {YOURS}" if found.role and known.role == YOURS else known.role
        self.rows.append(replace(found, role=role))

    def simulate(self, plan: Plan, training: Training) -> Row:
        def predicted(call: Attention) -> Prediction:
            key = plan, call, training.data_parallel
            if key not in self.predictions:
                self.predictions[key] = predict(training.group, plan, call)
            return self.predictions[key]

        return Row(plan, training, training.step(plan, predicted))

    def result(self) -> SearchResult:
        ranked = with_other_form(with_heads_outermost(ranked_rows(self.rows)))
        best = [row for at, row in enumerate(ranked) if at < self.top or row.role]
        dropped, missing = dict(sorted(self.dropped.items())), tuple(self.missing)
        counts = self.bounded, len(self.rows), self.possible_gain
        closest = self.closest and self.closest[1:]
        return SearchResult(
            self.cluster,
            self.model,
            self.run,
            tuple(best),
            dropped,
            missing,
            *counts,
            closest,
            tuple(self.peers),
            tuple(self.too_large),
        )

    def nothing_fits(self) -> ValueError:
        if self.least is None:
            reasons = "; ".join(f"{count_text(count, 'plan')}: {reason}" for reason, count in self.dropped.items())
            problem = f"no plan fits {self.model.name} on cluster {self.cluster}"
            return ValueError(f"{problem}: {reasons or 'none can be made'}")
        total, plan, training = self.least
        limit = training.memory(plan).limit
        needs = f"{plan} needs {bytes_text(total)} per device, {total / limit:.2f}x the {bytes_text(limit)} available"
        problem = f"{self.model.name} with {self.run.length} tokens does not fit cluster {self.cluster}: {needs}"
        return DoesNotFitError(problem, self.what_would_fit(training), plan, needs)

    def what_would_fit(self, training: Training) -> Iterable[str]:
        """The options that save memory, smaller batches, shorter sequences, or more devices."""
        run, cluster = self.run, self.cluster

        def fits(cluster: ClusterSpec, run: Run) -> bool:
            groups = gcd(run.batch // run.accumulate, training.data_parallel)
            smaller = Training(cluster, self.model, run, groups)
            memory = smaller.memory(Plan.parse(f"1x{smaller.group.world}"))
            return memory.total <= memory.limit

        for change in SAVINGS:
            if replace(run, **change) != run and fits(cluster, replace(run, **change)):
                new = {key: value for key, value in change.items() if getattr(run, key) != value}
                yield "it would fit with " + " and ".join(f"{key} = {value}".lower() for key, value in new.items())
                break
        batch = run.batch // 2
        while batch and (batch % run.accumulate or not fits(cluster, replace(run, batch=batch))):
            batch //= 2
        if batch:
            yield f"a batch of {batch} would fit"
        length = run.length // 2
        while length > cluster.world and not fits(cluster, replace(run, length=length)):
            length //= 2
        if length > cluster.world:
            yield f"{length} tokens would fit"
        sizes = [level.size for level in cluster.levels]
        for factor in (2, 4, 8, 16, 32):
            if fits(cluster.resized([sizes[0] * factor, *sizes[1:]]), run):
                yield f"{factor} times the {plural(cluster.levels[0].label)} would fit"
                break


def _least_step(training: Training, both: Bounded) -> float:
    """A lower bound on the time of a whole step."""
    seconds = training.outer_seconds + training.exposed_gather_seconds
    if training.linear is not None:
        layers = training.run.accumulate * training.linear.layers.layers
        seconds += layers * (sum(training.linear.own_seconds) + sum(training.dense_seconds))
    for call, layers in training.calls.items():
        forward, backward = both[call]
        if training.run.repeat_attention:
            busy = tuple(map(sum, zip(forward.busy, backward.busy, strict=True)))
            backward = Bound(forward.seconds + backward.seconds, busy)
        for bound, dense, (gathers, _) in zip(
            (forward, backward), training.dense_seconds, training.fsdp_traffic, strict=True
        ):
            links = max(a + b for a, b in zip(bound.busy, gathers, strict=True))
            seconds += training.run.accumulate * layers * max(bound.seconds + dense, training.offload_seconds, links)
    return seconds

"""Predicts an attention call over packed documents or under a window: the engine's layout, routes and tiles.

Every rank is simulated, because ranks differ: each has documents of its own.

>>> from startrail.planner.cluster import find_cluster
>>> cluster, plan = find_cluster("a100-4x8@2x2"), Plan.parse("1x2/1x2")
>>> shape = dict(length=8192, batch=1, heads=8, kv_heads=8, head_dim=64, causal=True)
>>> dense, packed = Attention.of(**shape), Attention.of(**shape, documents=tuple(range(0, 8193, 512)))
>>> packed = predict_sparse(cluster, plan, packed)
>>> packed.sent, packed.seconds < predict(cluster, plan, dense).seconds    # every document stays on one rank
((0.0, 0.0), True)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.problem import Rule, Split
from startrail.geometry.layout import Layout
from startrail.planner.cluster import ClusterSpec
from startrail.planner.predict import Prediction, predict, simulate_tasks
from startrail.planner.pricing import (
    ComputeTask,
    Mark,
    Prices,
    ProgramPricing,
    Task,
    lanes_with_few_channels,
    part_prices,
)
from startrail.planner.simulator import OnTask, OnTransfer, SimulatedPass
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES, Pass
from startrail.schedule.walk import Finish, Walker

MAX_RANKS = 256  # all of which are simulated
MESSAGES_PER_PART = 1 << 24


def predict_sparse(cluster: ClusterSpec, plan: Plan, call: Attention) -> Prediction:
    """Predict both passes."""
    sparse = SparseCall(cluster, plan, call)
    return Prediction(*(sparse.simulate(pass_) for pass_ in PASSES))


def predict_call(cluster: ClusterSpec, plan: Plan, call: Attention) -> Prediction:
    """Predict what the engine runs: by zones and directly if there are documents or a window, else the plan. In worlds
    too large to simulate every rank, a window saves no bytes, which is too slow, and documents are a mistake."""
    if cluster.world > 1 and call.is_sparse:
        if cluster.world <= MAX_RANKS:
            return predict_sparse(cluster, plan, call)
        if call.documents:
            raise ValueError(f"documents can be planned for up to {MAX_RANKS} ranks per group, not {cluster.world}")
    return predict(cluster, plan, call)


@dataclass(frozen=True, eq=False)
class SparseCall:
    """One call with its layout and routes. ``rule`` chooses between the plan and ``direct``, by default fewer bytes.
    ``in_rank_order``: tokens are laid out as for models with windows."""

    cluster: ClusterSpec
    plan: Plan
    call: Attention
    rule: bool | Rule = True
    in_rank_order: bool = False

    @cached_property
    def split(self) -> Split:
        return Split(self.plan, self.cluster.world, "zones", self.rule, self.in_rank_order)

    @cached_property
    def layout(self) -> Layout:
        return self.split.layout_of(self.call.boundaries)

    @cached_property
    def zones(self) -> tuple[tuple[AttentionPart, Prices], ...]:
        """What every zone runs, and its prices."""
        parts = [self.call.part(self.split, self.layout, zone) for zone in self.layout.zones]
        return tuple((part, part_prices(self.cluster, part, self.call.dtype)) for part in parts)

    @cached_property
    def routes(self) -> tuple[tuple[tuple[AttentionPart, Prices], ...], ...]:
        """The routes of every rank, with their prices, outermost zones first."""
        found: list[list[tuple[AttentionPart, Prices]]] = [[] for _ in range(self.cluster.world)]
        held = [0] * self.cluster.world
        for route, prices in self.zones:
            for member in range(route.zone.size):
                rank = route.zone.first + member
                found[rank].append((replace(route, start=held[rank], member=member), prices))
                held[rank] += route.zone.counts[member]
        return tuple(map(tuple, found))

    def tasks(self, pass_: Pass, marks: Sequence[list[Mark]] = ()) -> list[list[Task]]:
        """The tasks of every rank in one pass. ``marks``: a list per rank, which gets one entry per event."""
        return [
            self._tasks_of_rank(of_rank, pass_, marks[rank] if marks else None)
            for rank, of_rank in enumerate(self.routes)
        ]

    def simulate(self, pass_: Pass) -> SimulatedPass:
        return self.play(self.tasks(pass_))

    def play(
        self, tasks: list[list[Task]], on_task: OnTask | None = None, on_transfer: OnTransfer | None = None
    ) -> SimulatedPass:
        """Play all ranks. Zones use the lanes of the plan."""
        few = lanes_with_few_channels(self.cluster, self.plan)
        return simulate_tasks(self.cluster, tasks, None, on_task, few, on_transfer)

    def _tasks_of_rank(
        self, routes: Sequence[tuple[AttentionPart, Prices]], pass_: Pass, marks: list[Mark] | None
    ) -> list[Task]:
        half = self.cluster.device.start / 2
        tasks: list[Task] = [ComputeTask(half)] if half else []
        programs = [route.program(pass_) for route, _ in routes]
        pricings, walkers, walks = [], [], []
        for part, ((route, prices), program) in enumerate(zip(routes, programs, strict=True)):
            lane = 0 if self.cluster.in_order else 2 * len(self.plan.levels) * route.zone.level
            pricings.append(ProgramPricing(program, prices, tasks, part * MESSAGES_PER_PART, lane))
            walkers.append(Walker(program))
            walks.append(walkers[-1].steps())
        for part, number in run_order(programs):
            for event in next(walks[part]).events:
                pricings[part].handle(event)
                if marks is not None:
                    marks.append(Mark(number, event, len(tasks), pricings[part].work))
            pricings[part].flush()
        for pricing, walker, walk in zip(pricings, walkers, walks, strict=True):
            assert next(walk, None) is None, "every step has run"
            pricing.finish(walker)
            if marks is not None:
                marks.append(Mark(len(walker.program.steps), Finish(walker.home), len(tasks), 0.0))
        return [*tasks, ComputeTask(half)] if half else tasks

    def describe(self) -> str:
        """What runs, by the share of tokens: '12 % over 16 ranks by 1x2/u8, 80 % over 8 direct, 8 % alone'."""
        shares: Counter[tuple[int, str]] = Counter()
        for route, _ in self.zones:
            how = "alone" if route.zone.size == 1 else f"{'' if route.demand else 'by '}{route.chosen}"
            shares[route.zone.size, how] += sum(route.zone.counts)
        total = sum(shares.values())
        return ", ".join(
            f"{tokens / total:.0%} " + (how if ranks == 1 else f"over {ranks} ranks {how}")
            for (ranks, how), tokens in sorted(shares.items(), reverse=True)
        )

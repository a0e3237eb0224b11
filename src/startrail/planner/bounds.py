"""Lower bounds on a plan's time: its compute, its messages, its bytes over every link, and exchanges nothing hides.

Bounds have a closed form, a hundred times faster than the simulator, and never exceed the simulated time. A plan whose
bound is above the best time so far therefore need not be simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from startrail.compile.attention import Attention
from startrail.planner.cluster import ClusterSpec
from startrail.planner.pricing import Prices, plan_prices
from startrail.schedule.compose import exchange_is_far
from startrail.schedule.places import Place
from startrail.schedule.plan import Plan
from startrail.schedule.program import traffic_at
from startrail.schedule.values import BACKWARD, FORWARD, KINDS, Pass

ONE_EACH = dict.fromkeys(KINDS, 1.0)


class Bound(NamedTuple):
    """For one pass: total seconds, and seconds of the busiest link of each level."""

    seconds: float
    busy: tuple[float, ...]


class Bounds:
    """For plans whose levels match the cluster's, so that each lane uses the links of one level."""

    def __init__(self, cluster: ClusterSpec, call: Attention) -> None:
        self.cluster, self.call, self.world = cluster, call, cluster.world
        self._lanes: dict[int, tuple[float, ...]] = {}
        self._sizes: dict[tuple[int, int, tuple[str, ...]], tuple[dict[str, int], dict[Pass, float]]] = {}
        self.slowness = 1 / min((slow.compute for slow in cluster.slow), default=1.0)
        if cluster.cores:
            self.slowness *= max(1.0, cluster.world / cluster.cores)
        self.rates = tuple(
            (span if level.shared else 1)
            * (1 if level.duplex else 2)
            / (level.ways * level.bandwidth * min((s.bandwidth for s in cluster.slow if s.level == at), default=1.0))
            for at, (level, span) in enumerate(zip(cluster.levels, cluster.spans, strict=True))
        )  # seconds per byte at each level if all ranks send

    def lane(self, stride: int) -> tuple[float, ...]:
        """Seconds per byte by level, for a lane between ranks that are ``stride`` apart."""
        if stride not in self._lanes:
            levels = self.cluster.crossed(0, stride) if stride < self.world else ()
            self._lanes[stride] = tuple(rate if at in levels else 0.0 for at, rate in enumerate(self.rates))
        return self._lanes[stride]

    def sizes(self, plan: Plan) -> tuple[dict[str, int], dict[Pass, float]]:
        """Bytes by kind, and compute seconds of each pass: the same for all plans that split heads alike."""
        key = plan.heads, plan.groups, plan.running_sums
        if key not in self._sizes:
            prices = plan_prices(self.cluster, plan, self.call)
            self._sizes[key] = prices.sizes.by_kind, {pass_: self.work(prices, pass_) for pass_ in (FORWARD, BACKWARD)}
        return self._sizes[key]

    def work(self, prices: Prices, pass_: Pass) -> float:
        """Seconds of a rank's blocks. Under a window, where blocks differ: of the average rank at peak speed."""
        plan = prices.sizes.plan
        shards = self.world // plan.heads
        if self.call.mask.window is None:
            return plan.groups * shards * prices.least_block(pass_, shards) * self.slowness
        return plan.groups * prices.kernel_bound(pass_, self.call.pairs / shards) * self.slowness

    def of_plan(self, plan: Plan) -> tuple[Bound, Bound]:
        """Forward and backward bounds of a plan with its options."""
        return self.of_levels(plan, [plan], plan.groups)

    def of_levels(self, plan: Plan, variants: Iterable[Plan], groups: int) -> tuple[Bound, Bound]:
        """Bounds of a plan's levels that hold for all ``variants`` with at most ``groups`` groups."""
        place = plan.place(self.world, 0)
        sizes, computing = self.sizes(plan)
        forward = traffic_at(plan, place, FORWARD, sizes)
        backwards = [traffic_at(variant, place, BACKWARD, sizes) for variant in variants]
        backward = tuple(map(min, *backwards)) if len(backwards) > 1 else backwards[0]
        pieces = traffic_at(plan, place, FORWARD, ONE_EACH)  # the backward pass never has fewer messages
        messages = sum(n for n, heads in zip(pieces, place.by_heads, strict=True) if not heads)
        messages += 2 * (plan.heads - 1) * plan.groups  # one per peer, into and out of the exchange
        device = self.cluster.device
        work = device.start + 2 * messages * device.post * self.slowness
        far = plan.heads > 1 and exchange_is_far(place)
        return (
            self._bound(place, work + computing[FORWARD], forward, groups if far else 0),
            self._bound(place, work + computing[BACKWARD], backward, groups if far else 0),
        )

    def _bound(self, place: Place, work: float, traffic: Sequence[float], far_groups: int) -> Bound:
        """With ``far_groups``, nothing hides the first group's exchange of inputs and the last one's of results."""
        lanes = [self.lane(prod(place.sizes[at + 1 :])) for at in range(len(place.sizes))]
        levels = range(len(self.rates))
        busy = tuple(sum(n * lane[at] for n, lane in zip(traffic, lanes, strict=True)) for at in levels)
        if far_groups:
            over_heads = [(n, lane) for n, lane, heads in zip(traffic, lanes, place.by_heads, strict=True) if heads]
            work += max(sum(n * lane[at] for n, lane in over_heads) for at in levels) / far_groups
        return Bound(max(work, *busy), busy)

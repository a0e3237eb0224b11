"""Decides whether keys and values travel as latents or expanded, by simulating both on a described cluster.

Latents are many times smaller, but every rank expands what it receives. Where links are fast and heads are few, sending
expanded keys can be faster.

>>> from startrail.planner.cluster import find_cluster
>>> call = Attention.of(16384, 1, 16, 16, 192, causal=True)
>>> call = LatentAttention.from_expanded(replace(call, value_dim=128), rank=512, rope_dim=64)
>>> [Expanding(find_cluster(name)).first(Plan.parse("1x2/1x4"), call) for name in ("boxes-10gbe@2x4", "h100-8x8@2x4")]
[False, True]
"""

from __future__ import annotations

from dataclasses import replace

from startrail.compile.attention import Attention
from startrail.compile.latents import LatentAttention
from startrail.compile.problem import Boundaries
from startrail.geometry.mask import Mask
from startrail.planner.cluster import DTYPES, ClusterSpec
from startrail.planner.predict import predict
from startrail.planner.pricing import plan_prices
from startrail.planner.sparse.rule import MAX_RANKS, MIN_TOKENS
from startrail.schedule.plan import Plan


class Expanding:
    """All ranks get the same answers: they depend on nothing but the cluster's description and the arguments."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._known: dict[tuple[Plan, Attention], bool] = {}

    def first(self, plan: Plan, call: LatentAttention) -> bool:
        """True if keys and values that are expanded first, and travel so, are faster. Never for windows, chunks and
        documents, which send little, nor for few tokens or many ranks. One simulation decides for all lengths up to the
        next power of two."""
        rates, size = self.cluster.device.rates, DTYPES.get(call.dtype)
        dtype = next((name for name in (call.dtype, *rates) if name in rates and DTYPES[name] == size), "")
        local, dense = call.tokens_per_rank(self.cluster.world), call.mask == Mask(call.mask.causal)
        known = dtype and dense and not (call.documents or plan.family.by_demand)
        if not known or local < MIN_TOKENS or self.cluster.world > MAX_RANKS:
            return False
        length = self.cluster.world << (local - 1).bit_length()
        alike = replace(call, boundaries=Boundaries((0, length)), dtype=dtype, wire="")
        if (plan, alike) not in self._known:
            self._known[plan, alike] = self._seconds(plan, alike.expanded, alike) < self._seconds(plan, alike)
        return self._known[plan, alike]

    def _seconds(self, plan: Plan, call: Attention, expanded: LatentAttention | None = None) -> float:
        """Of both passes, with expanding what ``expanded`` says: owners expand their tokens once, for all heads, and
        make the gradients. That is as much as for a piece of one rank's heads."""
        seconds, cluster = predict(self.cluster, plan, call).seconds, self.cluster
        if expanded is None:
            return seconds
        prices, sharing = (
            plan_prices(cluster, plan, expanded),
            max(1.0, cluster.world / (cluster.cores or cluster.world)),
        )
        return seconds + sharing * plan.groups * (prices.expand(0) + prices.contract(prices.sizes.tokens, new=True))

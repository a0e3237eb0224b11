"""Context parallelism that gathers all keys and values first (Llama 3, Megatron's all-gather, torch's default): the
time of one attention call in closed form. It is not one of our plans, but widely used.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.planner.peers import TRANSFORMER_ENGINE_GATHERED
>>> call = Attention.of(length=65536, batch=1, heads=64, kv_heads=8, head_dim=128, causal=True)
>>> predicted = predict_gathered(find_cluster("h100-8x8@1x8"), call, TRANSFORMER_ENGINE_GATHERED)
>>> 10e-3 < predicted.forward.seconds < 20e-3
True
"""

from __future__ import annotations

from startrail.compile.attention import Attention
from startrail.planner.cluster import ClusterSpec
from startrail.planner.peers import Implementation
from startrail.planner.predict import Prediction
from startrail.planner.pricing import Prices, plan_prices
from startrail.planner.simulator import SimulatedPass
from startrail.schedule.plan import Plan
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Pass

CHUNKS = 2  # a zigzag shard has two, and each is one kernel call over the keys that it sees


def predict_gathered(cluster: ClusterSpec, call: Attention, engine: Implementation) -> Prediction:
    world = cluster.world
    prices = plan_prices(cluster, Plan.parse(f"1x{world}"), call, engine)

    def kernels(pass_: Pass) -> float:
        return CHUNKS * prices.kernel(pass_, call.pairs / world / CHUNKS, prices.sizes.tokens / CHUNKS)

    return Prediction(*(gathered_pass(prices, call, pass_, kernels(pass_)) for pass_ in PASSES))


def gathered_pass(prices: Prices, call: Attention, pass_: Pass, kernels: float) -> SimulatedPass:
    """The gather is not overlapped; the backward pass gathers again and scatters the sum of the gradients."""
    cluster, sizes = prices.cluster, prices.sizes
    work = kernels + cluster.device.start
    if pass_ is BACKWARD:
        keys = sum(field.shape[1] * field.shape[3] for field in sizes.fields("kv", 1)) * call.batch * call.length
        work += prices.touch(keys * (prices.engine.add or 0.0))
    moves = sizes.nbytes("kv") * (1 if pass_ is FORWARD else 2)
    busy, sent = collective(cluster, moves * cluster.world)
    return SimulatedPass(work + max(busy), max(busy), sent, busy)


def collective(cluster: ClusterSpec, nbytes: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Gathering ``nbytes`` over all ranks by rings that use every link of a member: seconds that the links of each
    level are busy, and bytes that a rank sends over them."""
    world, busy, sent = cluster.world, [], []
    for level, span in zip(cluster.levels, cluster.spans, strict=True):
        links = (1 if level.shared else span) * level.ways
        slowest = min((s.bandwidth for s in cluster.slow if cluster.levels[s.level] is level), default=1.0)
        moved = nbytes * (world - 1) / world if level.size > 1 else 0.0
        busy.append(moved / (links * level.bandwidth * slowest) + (level.latency * (level.size - 1) if moved else 0.0))
        sent.append(moved / span)
    return tuple(busy), tuple(sent)

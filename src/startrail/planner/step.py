"""The time of a whole training step.

Attention is simulated. Everything else works on a rank's own tokens and is counted: matrix products at the device's
rate, the rest by the bytes that it reads and writes. FSDP's gathers and reductions overlap with the layers and share
links with attention: a layer takes as long as its own work, or as long as the busiest link needs for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log2

from startrail.planner.cluster import DTYPES, ClusterSpec
from startrail.planner.memory import FLOAT_BYTES, Memory, estimate_memory
from startrail.planner.predict import AttentionShape, Prediction
from startrail.planner.workload import Job, Model, Run
from startrail.schedule.plan import Plan

# Numbers per token that the forward pass of a block reads and writes outside its matrix products: norms, rotation and
# residual sums by width, the gate by hidden.
TOUCHED_BY_WIDTH, TOUCHED_BY_HIDDEN = 16, 5
OPTIMIZER_BYTES = 40  # that AdamW and clipping read and write per parameter


@dataclass(frozen=True)
class StepEstimate:
    """``compute`` is the time of a step without communication; ``sent`` the bytes per rank, by level of the cluster."""

    seconds: float
    compute: float
    sent: tuple[float, ...]
    flops: float
    memory: Memory


@dataclass(frozen=True)
class Training:
    """A run of a model on a cluster with ``data_parallel`` groups; ``group`` is one group's part of the cluster."""

    cluster: ClusterSpec
    model: Model
    run: Run
    data_parallel: int = 1

    def __post_init__(self) -> None:
        if self.run.batch % self.data_parallel:
            raise ValueError(f"a batch of {self.run.batch} cannot be split over {self.data_parallel} groups")

    @cached_property
    def group(self) -> ClusterSpec:
        return self.cluster.part(self.cluster.world // self.data_parallel)

    @cached_property
    def batch(self) -> int:
        """Sequences of one group."""
        return self.run.batch // self.data_parallel

    @cached_property
    def local_tokens(self) -> int:
        """Tokens per rank."""
        return self.batch * self.call(None).local(self.cluster.world // self.data_parallel)

    def call(self, window: int | None) -> AttentionShape:
        model, run = self.model, self.run
        window = None if window is None or window >= run.length else window
        heads = model.heads, model.kv_heads, model.head_dim
        return AttentionShape(run.length, self.batch, *heads, model.causal, run.dtype, window)

    @cached_property
    def calls(self) -> dict[AttentionShape, int]:
        """The distinct attention calls of the model, and how many layers make each."""
        return Counter(map(self.call, self.model.windows))

    def step(self, plan: Plan, predicted: Callable[[AttentionShape], Prediction]) -> StepEstimate:
        """One step with attention as ``predicted``."""
        seconds, compute = self.outer_seconds + self.exposed_gather_seconds, self.outer_seconds
        sent = [0.0] * len(self.cluster.levels)
        forward, backward = self.dense_seconds
        for call, layers in self.calls.items():
            attention = predicted(call)
            own = attention.forward.seconds + forward, attention.backward.seconds + backward
            busy = attention.forward.busy, attention.backward.busy
            for part, links, (gathers, _) in zip(own, busy, self.fsdp_traffic, strict=True):
                seconds += layers * max(part, *(a + b for a, b in zip(links, gathers, strict=True)))
            compute += layers * (sum(own) - attention.waiting)
            for level, nbytes in enumerate(attention.sent):
                sent[level] += layers * nbytes
                sent[level] += layers * sum(by_level[level] for _, by_level in self.fsdp_traffic)
        return StepEstimate(seconds, compute, tuple(sent), self.flops, self.memory(plan))

    def memory(self, plan: Plan) -> Memory:
        device, job = self.cluster.device, Job(self.model, self.run, self.data_parallel)
        return estimate_memory(job, plan, self.cluster.world, limit=device.memory - device.reserved)

    @cached_property
    def dense_seconds(self) -> tuple[float, float]:
        """Seconds of one layer without attention, forward and backward."""
        model, run, device = self.model, self.run, self.cluster.device
        products = 2.0 * (model.projections + model.mlp) * self.local_tokens / device.of(run.dtype).matmul
        touched = TOUCHED_BY_WIDTH * model.width + TOUCHED_BY_HIDDEN * model.hidden
        forward = products + touched * run.itemsize * self.local_tokens / device.copy
        return self._on_slowest_rank(forward), self._on_slowest_rank((3 if run.recompute else 2) * forward)

    def _on_slowest_rank(self, seconds: float) -> float:
        """Ranks wait for the slowest of them, and share cores if there are fewer cores than ranks."""
        cluster = self.cluster
        sharing = max(1.0, cluster.world / cluster.cores) if cluster.cores else 1.0
        return seconds * sharing / min((slow.compute for slow in cluster.slow), default=1.0)

    @cached_property
    def outer_seconds(self) -> float:
        """Loss and optimizer."""
        model, run, device = self.model, self.run, self.cluster.device
        vocabulary = 1 if model.modulated else model.vocab
        logits = 6.0 * vocabulary * model.width * self.local_tokens / device.of(run.dtype).matmul
        logits += 6.0 * vocabulary * FLOAT_BYTES * self.local_tokens / device.copy
        optimizer = OPTIMIZER_BYTES * model.parameters / (self.cluster.world if run.zero else 1) / device.copy
        return self._on_slowest_rank(logits + optimizer)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the model on all ranks, without recomputation: 6 per matrix entry and token, and two products
        forward and four backward per visible pair of tokens."""
        model, run = self.model, self.run
        dense = 6.0 * (model.layers * (model.projections + model.mlp) + model.vocab * model.width)
        pairs = sum(layers * call.pairs for call, layers in self.calls.items())
        return run.batch * (dense * run.length + 12.0 * model.heads * model.head_dim * pairs)

    @cached_property
    def fsdp_traffic(self) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
        """For the forward and the backward pass of a layer: the seconds that FSDP keeps the links of each level busy,
        and the bytes that a rank sends over them."""
        block = self.model.per_layer * DTYPES[self.run.gather]
        forward, backward = {0: (0, 0), 2: (1, 0), 3: (1, 1)}[self.run.zero]  # ZeRO-2 gathers parameters once
        reduced = 1 if self.run.zero else 2  # reduce-scatter, or all-reduce
        return self._collective(forward * block), self._collective((backward + reduced) * block)

    def _collective(self, nbytes: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Gathering or reducing ``nbytes`` over all ranks, by rings that cross every link of a member once."""
        cluster, world = self.cluster, self.cluster.world
        if world == 1 or not nbytes:
            return (0.0,) * len(cluster.levels), (0.0,) * len(cluster.levels)
        moved = nbytes * (world - 1) / world
        seconds, sent = [], []
        for level, span in zip(cluster.levels, cluster.spans, strict=True):
            links = (1 if level.shared else span) * level.ways
            slowest = min((s.bandwidth for s in cluster.slow if cluster.levels[s.level] is level), default=1.0)
            hops = level.latency * log2(max(level.size, 2))
            seconds.append((moved / (links * level.bandwidth * slowest) + hops) if level.size > 1 else 0.0)
            sent.append(moved / span if level.size > 1 else 0.0)
        return tuple(seconds), tuple(sent)

    @cached_property
    def exposed_gather_seconds(self) -> float:
        """FSDP's traffic that no layer hides: the first block, and parameters outside of blocks, with gradients."""
        exposed = self.model.per_layer + 2 * self.model.outside if self.run.zero else 0
        return max(self._collective(DTYPES[self.run.gather] * exposed)[0])

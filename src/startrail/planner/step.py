"""A whole training step: what is around attention, by arithmetic and bytes, and the memory that a rank needs.

Attention is simulated. Everything else works on a rank's own tokens and is counted: products of matrices at the
device's rate, the rest by the bytes that it reads and writes. FSDP's gathers and reductions travel while layers
compute, over the same links as attention: a layer takes as long as its own work, or as the busiest link needs for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log2

from startrail.planner.cluster import DTYPES, ClusterSpec
from startrail.planner.predict import AttentionShape, Prediction
from startrail.planner.workload import Model, Run
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import PASSES

FLOAT = 4  # bytes of parameters, gradients, the optimizer's two moments, and of the residual stream
# What a block reads and writes beside its products, forward, in numbers a token: norms, rotation, residual sums
# (by width), the gate (by hidden).
TOUCHED_BY_WIDTH, TOUCHED_BY_HIDDEN = 16, 5
# What a recomputed block holds in its backward pass, in numbers a token: its activations, and gradients on their way;
# those of the MLP are gone when attention's backward pass begins. Fitted to what `make bench-memory` measures.
HELD_BY_WIDTH, HELD_BY_HIDDEN = 10, 5.5
OPTIMIZER_BYTES = 40  # that AdamW and clipping read and write for one parameter
LOGITS = 3  # copies of a chunk's logits


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs at once; ``limit`` is what the device has for them."""

    states: float  # parameters, gradients, optimizer
    gathered: float
    activations: float
    attention: float  # buffers, sums and kept pieces while a pass runs
    kept: float  # from the forward to the backward pass, by ``keep`` and by heads
    limit: float

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.attention + self.kept


@dataclass(frozen=True)
class StepEstimate:
    """``compute``: seconds if nothing had to travel. ``sent``: bytes a rank by level of the cluster."""

    seconds: float
    compute: float
    sent: tuple[float, ...]
    flops: float
    memory: Memory


@dataclass(frozen=True)
class Training:
    """A model's run on a cluster with ``data_parallel`` groups; ``group`` is the part of the cluster that one has."""

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
    def local(self) -> int:
        """Tokens of a rank."""
        world = self.cluster.world // self.data_parallel
        return self.batch * self.call(None).local(world)

    def call(self, window: int | None) -> AttentionShape:
        model, run = self.model, self.run
        window = None if window is None or window >= run.length else window
        return AttentionShape(
            run.length, self.batch, model.heads, model.kv_heads, model.head_dim, model.causal, run.dtype, window
        )  # fmt: skip

    @cached_property
    def calls(self) -> dict[AttentionShape, int]:
        """The calls of the model's layers, and how many layers make each."""
        calls: dict[AttentionShape, int] = {}
        for window, layers in self.model.layer_kinds.items():
            call = self.call(window)
            calls[call] = calls.get(call, 0) + layers
        return calls

    # --- time

    def step(self, plan: Plan, predicted: Callable[[AttentionShape], Prediction]) -> StepEstimate:
        """One step with attention as ``predicted``."""
        seconds = compute = self.around
        seconds += self.first_gather
        sent = [0.0] * len(self.cluster.levels)
        for call, layers in self.calls.items():
            attention = predicted(call)
            forward, backward = self.dense
            own = attention.forward.seconds + forward, attention.backward.seconds + backward
            for part, busy, (gathers, _) in zip(
                own, (attention.forward.busy, attention.backward.busy), self.travels, strict=True
            ):
                seconds += layers * max(part, *(a + b for a, b in zip(busy, gathers, strict=True)))
            waiting = attention.waiting
            compute += layers * (sum(own) - waiting)
            for level, nbytes in enumerate(attention.sent):
                sent[level] += layers * nbytes
                sent[level] += layers * sum(by_level[level] for _, by_level in self.travels)
        return StepEstimate(seconds, compute, tuple(sent), self.flops, self.memory(plan))

    @cached_property
    def dense(self) -> tuple[float, float]:
        """Seconds of a layer beside attention, forward and backward."""
        model, run, device = self.model, self.run, self.cluster.device
        rates = device.of(run.dtype)
        products = 2.0 * (model.projections + model.mlp) * self.local / rates.matmul
        touched = TOUCHED_BY_WIDTH * model.width + TOUCHED_BY_HIDDEN * model.hidden
        forward = products + touched * run.itemsize * self.local / device.copy
        return self._at_the_slowest(forward), self._at_the_slowest((3 if run.recompute else 2) * forward)

    def _at_the_slowest(self, seconds: float) -> float:
        """Ranks wait for each other, and share cores where there are fewer of those."""
        cluster = self.cluster
        sharing = max(1.0, cluster.world / cluster.cores) if cluster.cores else 1.0
        return seconds * sharing / min((slow.compute for slow in cluster.slow), default=1.0)

    @cached_property
    def around(self) -> float:
        """Loss and optimizer."""
        model, run, device = self.model, self.run, self.cluster.device
        vocabulary = 1 if model.modulated else model.vocab
        logits = 6.0 * vocabulary * model.width * self.local / device.of(run.dtype).matmul
        logits += 6.0 * vocabulary * FLOAT * self.local / device.copy
        optimizer = OPTIMIZER_BYTES * model.parameters / (self.cluster.world if run.zero else 1) / device.copy
        return self._at_the_slowest(logits + optimizer)

    @cached_property
    def flops(self) -> float:
        """Of the model, all ranks and nothing computed twice: 6 for each number of a matrix and token, and for each
        pair of tokens that see each other two products forward and four backward."""
        model, run = self.model, self.run
        dense = 6.0 * (model.layers * (model.projections + model.mlp) + model.vocab * model.width)
        pairs = sum(layers * call.pairs for call, layers in self.calls.items())
        return run.batch * (dense * run.length + 12.0 * model.heads * model.head_dim * pairs)

    @cached_property
    def travels(self) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
        """For the forward and the backward pass of a layer: seconds by level that FSDP keeps links busy, and bytes that
        a rank sends over each."""
        itemsize = DTYPES[self.run.gather]
        block = self.model.per_layer
        gathers = {0: (0, 0), 2: (1, 0), 3: (1, 1)}[self.run.zero]  # ZeRO-2 keeps parameters until the backward pass
        reduced = block * itemsize * (2 if not self.run.zero else 1)  # all-reduced, or reduced and scattered
        forward, backward = (number * block * itemsize for number in gathers)
        return tuple(self._collective(nbytes) for nbytes in (forward, backward + reduced))

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
    def first_gather(self) -> float:
        """What no layer hides: parameters of the first block and of those outside, and their gradients."""
        if not self.run.zero:
            return 0.0
        itemsize = DTYPES[self.run.gather]
        gathered, _ = self._collective(itemsize * (self.model.per_layer + 2 * self.model.outside))
        return max(gathered)

    # --- memory

    def sizes(self, plan: Plan) -> Sizes:
        return next(iter(self.calls)).sizes(plan, self.cluster.world // self.data_parallel)

    def memory(self, plan: Plan) -> Memory:
        """The peak of one rank: in the backward pass of a block, recomputed or not."""
        model, run, device = self.model, self.run, self.cluster.device
        world, group = self.cluster.world, self.cluster.world // self.data_parallel
        share = model.parameters / (world if run.zero else 1)
        whole, block, itemsize = model.parameters, model.per_layer, DTYPES[run.gather]
        gathered = {0: 0, 2: whole + 2 * block, 3: whole - (model.layers - 2) * block + 2 * block}[run.zero] * itemsize
        heads_width = model.heads * model.head_dim
        by_layer = FLOAT * model.width + run.itemsize * heads_width + FLOAT * model.heads  # input, out, lse
        by_width, by_hidden = HELD_BY_WIDTH * model.width, HELD_BY_HIDDEN * model.hidden
        held = run.itemsize * (by_width + by_hidden) * self.local
        layers = model.layers * (by_layer * self.local + (0 if run.recompute else held))
        logits = 0 if model.modulated else LOGITS * FLOAT * min(run.loss_chunk, self.local) * model.vocab
        sizes = self.sizes(plan)
        pooled = max(sizes.pooled_bytes(pass_, group) for pass_ in PASSES)
        inside = max(sizes.peak_bytes(pass_, group) - sizes.pooled_bytes(pass_, group) for pass_ in PASSES)
        during = inside + run.itemsize * by_width * self.local  # attention's own backward pass
        peak = max(held, during, logits)
        return Memory(
            states=4.0 * FLOAT * share,
            gathered=gathered,
            activations=layers + peak - (inside if peak == during else 0.0),
            attention=pooled + (inside if peak == during else 0.0),
            kept=model.layers * kept_bytes(sizes, group),
            limit=device.memory - device.reserved,
        )


def kept_bytes(sizes: Sizes, world: int) -> float:
    """What one layer keeps of its attention for the backward pass."""
    plan = sizes.plan
    place = plan.place(world, 0)
    pieces = plan.family.kept(plan, place, 0) if plan.keep != "none" else []
    kinds = [piece.kind for piece in pieces] + (["q", "kv"] if plan.heads > 1 else [])
    return sum(sizes.nbytes(kind) * plan.groups for kind in kinds)

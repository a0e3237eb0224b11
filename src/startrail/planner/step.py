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

from startrail.compile.attention import Attention
from startrail.planner.cluster import DTYPES, ClusterSpec
from startrail.planner.memory import FLOAT_BYTES, Memory, estimate_memory
from startrail.planner.predict import Prediction
from startrail.planner.recurrent import FORWARD_FLOPS as LINEAR_FLOPS
from startrail.planner.recurrent import Layouts, LinearCall, predict_linear
from startrail.planner.units import count_text
from startrail.planner.workload import Job, Model, Run
from startrail.schedule.plan import Plan

# Numbers per token that the forward pass of a block reads and writes outside its matrix products: norms, rotation and
# residual sums by width, the gate by hidden.
TOUCHED_BY_WIDTH, TOUCHED_BY_HIDDEN = 16, 5
OPTIMIZER_BYTES = 40  # that AdamW and clipping read and write per parameter, with float32 states
HEADROOM = 0.1  # the share of a device's memory that a plan must leave free: estimates err by as much


@dataclass(frozen=True)
class StepEstimate:
    """``compute`` is the time of a step without communication; ``sent`` the bytes per rank, by level of the cluster,
    and ``by_attention`` those of attention."""

    seconds: float
    compute: float
    sent: tuple[float, ...]
    by_attention: tuple[float, ...]
    flops: float
    memory: Memory


@dataclass(frozen=True)
class Training:
    """A run of a model on a cluster with ``data_parallel`` groups; ``group`` is one group's part of the cluster. Models
    with latent attention send ``latents``, or expanded keys."""

    cluster: ClusterSpec
    model: Model
    run: Run
    data_parallel: int = 1
    latents: bool = True

    def __post_init__(self) -> None:
        run, model, inner = self.run, self.model, self.cluster.levels[-1].size
        if run.batch % (self.data_parallel * run.accumulate):
            parts = f" in {run.accumulate} parts" if run.accumulate > 1 else ""
            groups = count_text(self.data_parallel, "group")
            raise ValueError(f"a batch of {run.batch} cannot be split over {groups}{parts}")
        if inner % run.tensor or model.heads % run.tensor or model.kv_heads % run.tensor:
            heads = f"{model.heads} query and {model.kv_heads} key/value heads"
            devices = count_text(inner, self.cluster.levels[-1].label)
            raise ValueError(f"tensor = {run.tensor} must divide {heads} and {devices}")
        if run.fp8 and not self.cluster.device.of(run.dtype).fp8:
            raise ValueError(f"fp8 = true: device {self.cluster.device.name} has no fp8 rate")

    @cached_property
    def group(self) -> ClusterSpec:
        """One group's part of the cluster. With tensor parallelism, each rank of it stands for ``tensor`` devices."""
        return self.cluster.part(self.cluster.world // self.data_parallel).joined(self.run.tensor)

    @property
    def heads(self) -> int:
        """Query heads of one tensor-parallel rank: plans split these."""
        return self.model.heads // self.run.tensor

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads // self.run.tensor

    @cached_property
    def batch(self) -> int:
        """Sequences of one group that are computed together."""
        return self.run.batch // self.data_parallel // self.run.accumulate

    @cached_property
    def local_tokens(self) -> int:
        """Tokens per rank of a group."""
        return self.batch * self.call(None).tokens_per_rank(self.group.world)

    def call(self, window: int | None) -> Attention:
        run = self.run
        window = None if window is None or window >= run.length else window
        about = run.dtype, run.tensor, window, run.document_ends, self.latents
        return self.model.attention(run.length, self.batch, *about)

    @property
    def expands(self) -> int:
        """Parameters of one layer that are part of its attention call: they expand latents that others have sent."""
        return self.model.expansion if self.latents else 0

    @cached_property
    def calls(self) -> dict[Attention, int]:
        """The distinct attention calls of the model, and how many layers make each."""
        return Counter(map(self.call, self.model.windows))

    @cached_property
    def linear(self) -> LinearCall | None:
        """What each layer without attention runs."""
        if self.model.linear is None:
            return None
        documents = self.run.document_ends or (0, self.run.length)
        dtypes = self.run.dtype, self.run.itemsize
        return LinearCall(self.group, self.model.linear, self.batch, documents, *dtypes)

    @cached_property
    def _known(self) -> Layouts:
        return {}

    def of_linear(self, plan: Plan) -> Prediction | None:
        """A layer without attention under a plan."""
        return None if self.linear is None else predict_linear(self.linear, plan, self._known)

    def step(self, plan: Plan, predicted: Callable[[Attention], Prediction]) -> StepEstimate:
        """One step with attention as ``predicted``."""
        seconds, compute = self.outer_seconds + self.exposed_gather_seconds, self.outer_seconds
        sent, by_attention = [0.0] * len(self.cluster.levels), [0.0] * len(self.cluster.levels)
        dense, parts = self.dense_seconds, self.run.accumulate
        kinds = [(predicted(call), layers) for call, layers in self.calls.items()]
        if self.model.linear is not None and (linear := self.of_linear(plan)) is not None:
            kinds.append((linear, self.model.linear.layers))
        for of_kind, layers in kinds:
            layers *= parts
            forward, backward = of_kind.forward, of_kind.backward
            repeated = [forward] if self.run.repeat_attention else []
            both = zip(
                ((forward,), (backward, *repeated)), dense, self.tensor_exchanges, self.fsdp_traffic, strict=True
            )
            for passes, own, exchanged, (gathers, _) in both:
                work = sum(each.seconds for each in passes) + own
                links = (sum(busy) for busy in zip(*(each.busy for each in passes), gathers, strict=True))
                seconds += layers * max(work, self.offload_seconds, *links)
                compute += layers * (work - sum(each.waiting for each in passes) - exchanged)
                for each in passes:
                    for level, nbytes in enumerate(each.sent):
                        by_attention[level] += layers * nbytes
            for level in range(len(sent)):
                sent[level] += layers * sum(by_level[level] for _, by_level in self.fsdp_traffic)
        total = tuple(a + b for a, b in zip(sent, by_attention, strict=True))
        return StepEstimate(seconds, compute, total, tuple(by_attention), self.flops, self.memory(plan))

    @cached_property
    def offload_seconds(self) -> float:
        """Seconds per layer and pass that the inputs of a layer take to or from the host."""
        if not self.run.offload:
            return 0.0
        nbytes = DTYPES[self.run.residual] * self.model.width * self.local_tokens / self.run.tensor
        return nbytes / self.cluster.device.host

    @cached_property
    def tensor_exchanges(self) -> tuple[float, float]:
        """Seconds of one layer's forward and backward pass for tensor parallelism: activations are gathered before
        attention and the MLP and scattered after them. Nothing hides them."""
        tensor, link = self.run.tensor, self.cluster.levels[-1]
        if tensor == 1:
            return 0.0, 0.0
        moved = self.run.itemsize * self.model.width * self.local_tokens * (tensor - 1) / tensor
        seconds = 4 * (moved / (link.bandwidth * min(link.ways, tensor - 1)) + link.latency)
        return seconds, (2 if self.run.recompute else 1) * seconds

    def memory(self, plan: Plan) -> Memory:
        device, job = self.cluster.device, Job(self.model, self.run, self.data_parallel)
        limit = (device.memory - device.reserved) * (1 - HEADROOM)
        return estimate_memory(job, plan, self.cluster.world, limit=limit, latents=self.latents)

    @cached_property
    def dense_seconds(self) -> tuple[float, float]:
        """Seconds of one layer without attention, forward and backward, with tensor parallelism's exchanges."""
        model, run, device = self.model, self.run, self.cluster.device
        rates, tokens = device.of(run.dtype), self.local_tokens / run.tensor
        products = (
            2.0 * (model.projections - self.expands + model.mlp) * tokens / (rates.fp8 if run.fp8 else rates.matmul)
        )
        touched = TOUCHED_BY_WIDTH * model.width + TOUCHED_BY_HIDDEN * model.active_hidden
        forward = products + touched * run.itemsize * tokens / device.copy
        backward = (3 if run.recompute else 2) * forward
        one, other = self.tensor_exchanges
        return self._on_slowest_rank(forward) + one, self._on_slowest_rank(backward) + other

    def _on_slowest_rank(self, seconds: float) -> float:
        """Ranks wait for the slowest of them, and share cores if there are fewer cores than ranks."""
        cluster = self.cluster
        sharing = max(1.0, cluster.world / cluster.cores) if cluster.cores else 1.0
        return seconds * sharing / min((slow.compute for slow in cluster.slow), default=1.0)

    @cached_property
    def outer_seconds(self) -> float:
        """Loss and optimizer."""
        model, run, device = self.model, self.run, self.cluster.device
        vocabulary, tokens = 1 if model.modulated else model.vocab, self.local_tokens / run.tensor
        logits = 6.0 * vocabulary * model.width * tokens / device.of(run.dtype).matmul
        logits += 6.0 * vocabulary * FLOAT_BYTES * tokens / device.copy
        own = model.parameters / (self.cluster.world if run.zero else run.tensor)
        rate = device.host if run.offload_states else device.copy
        optimizer = OPTIMIZER_BYTES * DTYPES[run.states] / FLOAT_BYTES * own / rate
        return self._on_slowest_rank(run.accumulate * logits + optimizer)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the model on all ranks, without recomputation: 6 per matrix entry and token, and two products
        forward and four backward per visible pair of tokens; of recurrences 18 per number of a state and token."""
        model, run = self.model, self.run
        dense = 6.0 * (model.layers * (model.projections + model.mlp) + model.vocab * model.width)
        pairs = sum(layers * call.pairs for call, layers in self.calls.items())
        linear = 0.0 if model.linear is None else 3.0 * LINEAR_FLOPS * model.linear.layers * model.linear.state
        return run.batch * (
            (dense + linear) * run.length + 6.0 * model.heads * (model.head_dim + model.of_values) * pairs
        )

    @cached_property
    def fsdp_traffic(self) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
        """For the forward and the backward pass of a layer: the seconds that FSDP keeps the links of each level busy,
        and the bytes that a rank sends over them."""
        block = self.model.per_layer * DTYPES[self.run.gather] / self.run.tensor
        forward, backward = {0: (0, 0), 2: (1, 0), 3: (1, 1)}[self.run.zero]  # ZeRO-2 gathers parameters once
        reduced = 1 if self.run.zero else 2  # reduce-scatter, or all-reduce
        return self._collective(forward * block), self._collective((backward + reduced) * block)

    def _collective(self, nbytes: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Gathering or reducing ``nbytes`` on every rank, by rings that cross every link of a member once. Of
        ``tensor`` neighbours each gathers its own part."""
        cluster, world = self.cluster, self.cluster.world
        if world == 1 or not nbytes:
            return (0.0,) * len(cluster.levels), (0.0,) * len(cluster.levels)
        tensor = self.run.tensor
        moved = nbytes * (world - tensor) / world
        seconds, sent = [], []
        for level, span in zip(cluster.levels, cluster.spans, strict=True):
            links = (1 if level.shared else span) * level.ways / (min(tensor, span))
            slowest = min((s.bandwidth for s in cluster.slow if cluster.levels[s.level] is level), default=1.0)
            hops = level.latency * log2(max(level.size, 2))
            seconds.append((moved / (links * level.bandwidth * slowest) + hops) if level.size > 1 else 0.0)
            sent.append(moved * min(tensor, span) / span if level.size > 1 else 0.0)
        return tuple(seconds), tuple(sent)

    @cached_property
    def exposed_gather_seconds(self) -> float:
        """FSDP's traffic that no layer hides: the first block, and parameters outside of blocks, with gradients."""
        exposed = self.model.per_layer + 2 * self.model.outside if self.run.zero else 0
        nbytes = DTYPES[self.run.gather] * exposed / self.run.tensor
        return self.run.accumulate * max(self._collective(nbytes)[0])

"""The memory that one rank needs in a training step, by closed form.

`make bench-memory` compares it with measurements. The planner drops plans that do not fit, and a trainer prints it
before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from startrail.planner.cluster import DTYPES
from startrail.planner.workload import Job
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES

FLOAT_BYTES = 4  # per number of parameters, gradients, the optimizer's two moments, and the residual stream
# Numbers per token that a block holds in its backward pass, by width and by hidden: saved activations, and gradients in
# flight. Those of the MLP are gone when attention's backward pass begins. Fitted to the results of `make bench-memory`.
SAVED_BY_WIDTH, IN_FLIGHT_BY_WIDTH = 5, 5
SAVED_BY_HIDDEN, IN_FLIGHT_BY_HIDDEN = 2, 1.5  # saved: per matrix of the MLP that reads the block's input
RUNS = 2  # of a rank, with zigzag
# Numbers per token that a gated delta net holds, by head and by channel of its convolution: most are products of all
# pairs of tokens in a chunk of 64. In float32; fitted to the live tensors of `DeltaBlock`.
DELTA_BY_HEAD, DELTA_BY_CHANNEL = 5 * 64, 14
LOGITS_COPIES = 3  # of one chunk
OFFLOADED_LAYERS = 2  # whose inputs are on the device at a time, being copied to or from the host
LIBRARY_BYTES = 30 * 2**20  # of a CPU process: libraries, threads and connections once they are used; measured
DELTA_LIBRARY_BYTES = 14 * 2**20  # the same of gated delta nets, which also use LAPACK and convolutions


@dataclass(frozen=True)
class Memory:
    """The peak of one rank in bytes. ``limit`` is what it may use of the device."""

    states: float  # parameters, gradients, optimizer
    gathered: float  # whole parameters and gradients of FSDP
    activations: float
    attention: float  # buffers and partial results of the pass that runs
    kept: float  # from the forward to the backward pass, by ``keep`` and by heads
    libraries: float
    limit: float

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.attention + self.kept + self.libraries

    @property
    def checkpoint(self) -> float:
        """Bytes that this rank writes of a checkpoint: parameters and the optimizer's moments, no gradients."""
        return self.states * 3 / 4

    def __str__(self) -> str:
        parts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "limit"}
        each = ", ".join(f"{name} {nbytes / 2**20:,.1f} MiB" for name, nbytes in parts.items() if nbytes)
        return f"{self.total / 2**20:,.1f} MiB per rank: {each}"


def estimate_memory(
    job: Job, plan: Plan, world: int, *, limit: float = inf, libraries: float = 0.0, gathered: bool = False,
    latents: bool = True,
) -> Memory:  # fmt: skip
    """The peak of a rank of ``world``: in the backward pass of one block, recomputed or not.

    ``gathered``: attention gathers all keys and values instead of following the plan. Of the result, ``gathered`` is
    everything (ZeRO-2) or two blocks (ZeRO-3), and the gradients of one block twice. ``latents``: they are sent, if the
    model has them.
    """
    model, run, group = job.model, job.run, world // job.data_parallel // job.run.tensor
    batch, tensor = run.batch // job.data_parallel // run.accumulate, run.tensor
    shape = model.attention(run.length, batch, run.dtype, tensor, latents=latents)
    # Tensor-parallel neighbours hold a share of a rank's tokens each, and compute all with a share of the heads.
    sizes, tokens = shape.sizes_on(plan, group), batch * shape.tokens_per_rank(group) / tensor

    share = model.parameters / (world if run.zero else tensor)
    block = model.per_layer / tensor
    parameters = model.parameters / tensor
    by_zero = {0: 0, 2: parameters + 2 * block, 3: parameters - (model.layers - 2) * block + 2 * block}

    # Every layer keeps the block's input, attention's out and lse; without recomputation, its saved activations too.
    kept_inputs = min(OFFLOADED_LAYERS, model.layers) if run.offload else model.layers
    inputs = DTYPES[run.residual] * model.width * kept_inputs
    outputs = 0 if run.repeat_attention else run.itemsize * model.heads * model.of_values + FLOAT_BYTES * model.heads
    hidden = 0 if run.tile_mlp else model.active_hidden
    saved_by_hidden = SAVED_BY_HIDDEN * (model.matrices - 1) * hidden
    width = (
        model.width + model.heads * (model.head_dim + model.of_values) / 2
    ) / 2  # of what attention and its projections hold
    saved = run.itemsize * (SAVED_BY_WIDTH * width + saved_by_hidden) * tokens
    linear, attending = model.linear, len(model.windows)
    layers = (inputs + attending * outputs) * tokens + (0 if run.recompute else (model.layers - 1) * saved)
    of_linear = 0.0
    if linear is not None:  # more than attention's; and what runs do to states, and the states before them
        by_token = (DELTA_BY_HEAD * linear.value_heads + DELTA_BY_CHANNEL * linear.channels) / tensor
        of_linear = (FLOAT_BYTES * by_token - run.itemsize * SAVED_BY_WIDTH * width) * tokens
        layers += RUNS * linear.layers * FLOAT_BYTES * batch * (linear.effect + linear.state) / tensor
        layers += 0 if run.recompute else linear.layers * of_linear

    # The peak is the block's own backward pass, attention's within it, or the loss.
    by_width = (SAVED_BY_WIDTH + IN_FLIGHT_BY_WIDTH) * width
    held = run.itemsize * (by_width + saved_by_hidden + IN_FLIGHT_BY_HIDDEN * hidden) * tokens
    held += of_linear if run.recompute else 0
    pools = {pass_: sizes.pooled_bytes(pass_, group) for pass_ in PASSES}
    pooled, inside = max(pools.values()), max(sizes.peak_bytes(pass_, group) - pools[pass_] for pass_ in PASSES)
    if gathered:  # keys and values of all ranks and a copy of them, and their gradients in float32 and a copy of those
        pooled, inside = 0, 2 * group * sizes.nbytes("kv") + 2 * group * sizes.wide_bytes("kv")
    during = inside + run.itemsize * by_width * tokens
    logits = 0 if model.modulated else LOGITS_COPIES * run.itemsize * min(run.loss_chunk, tokens) * model.vocab
    peak = max(held, during, logits)
    in_attention = inside if peak == during else 0.0
    # Attention keeps pieces for the backward pass by ``keep``, and its inputs if heads are sharded.
    kept = 0.0
    if not run.repeat_attention:
        numbers = plan.family.num_kept(plan, plan.place(group, 0)) if plan.keep != "none" else {}
        own = 1 if plan.keeps_exchanged else 0
        of_group = sum((numbers.get(kind, 0) + own) * sizes.nbytes(kind) for kind in ("q", "kv"))
        kept = float(attending * plan.groups * of_group)
    return Memory(
        states=0.0 if run.offload_states else 4.0 * DTYPES[run.states] * share,
        gathered=by_zero[run.zero] * DTYPES[run.gather],
        activations=layers + peak - in_attention,
        attention=pooled + in_attention,
        kept=kept,
        libraries=libraries + (DELTA_LIBRARY_BYTES if libraries and linear else 0),
        limit=limit,
    )

"""``startrail bench memory``: peak memory per rank in training, against the planner's estimate.

First the sequence grows, then the ranks with it; then the limits that long sequences hit, in the order in which they
hit them, before and after their remedies. Attention, activations and optimizer are measured on a GPT; logits and wide
MLPs on a Llama from Hugging Face with a large vocabulary. Each case is one training step on fresh processes.
`--only groups` measures one attention call instead, whose heads are exchanged in ever more groups.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.bench.train import RecordingDisplay
from startrail.bench.yardstick import Json, Workload, random_inputs, record, with_gradients
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.losses import chunked_cross_entropy, sum_gradients
from startrail.parallel import SequenceParallel
from startrail.planner.memory import LIBRARY_BYTES, estimate_memory
from startrail.planner.workload import Job, Model, Run
from startrail.schedule.plan import Plan
from startrail.schedule.values import BACKWARD, FORWARD
from startrail.training import footprint, sharding
from startrail.training.display import Metrics
from startrail.training.loop import Trainer
from startrail.training.recipes import Recipe, find

ALLOWED = 0.10  # difference as a share of the measured peak
ALLOWED_OF_A_CALL = 0.25  # of attention alone, of which few MiB are measured
ALLOWED_ELSEWHERE = 0.20  # where the formula was not fitted: all activations kept, exchange=twice, and ZeRO-2

RANKS = 4
STEP = dict(zero=3, recompute=True, steps=1, evaluate_batches=0, sample=0)
DEEP = find("gpt-tiny").with_(dict(width=128, layers=16, heads=4, kv_heads=4, hidden=384, length=8192, **STEP))
# Many parameters and few tokens. The first step makes the moments of the optimizer, the second one holds them.
WIDE = DEEP.with_(dict(width=512, layers=8, heads=8, kv_heads=8, hidden=2048, length=512, plan="1x4", steps=2))

LLAMA_RANKS, LLAMA_PLAN = 2, "u2"
VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 131_072, 32, 2, 2, 4096
TILE = 1024  # tokens
GROUPED = Workload(8192, 64, 64, 32, causal=True)  # one call; each rank has 8 heads after the exchange
GROUPED_RANKS, GROUPS = 8, (1, 2, 4, 8)
FEWER = 16  # whole logits are measured on so many times fewer tokens


class Peak(NamedTuple):
    """What one training step added to the fullest rank in bytes, CPU seconds of the step on the busiest rank, and bytes
    that attention sent per rank (0 if that was not counted)."""

    nbytes: float
    seconds: float
    sent: float = 0.0


@dataclass(frozen=True)
class MemoryCase:
    """One row. ``estimate``: the planner's, in bytes; None without startrail. ``measure`` is None if this machine
    cannot run it, for ``reason``. ``allowed``: how far off the estimate may be."""

    wall: str
    name: str
    estimate: float | None
    measure: Callable[[], Peak] | None
    reason: str = ""
    allowed: float = ALLOWED


def cases(tokens: int) -> list[MemoryCase]:
    """All rows; those of the Llama have ``tokens`` per rank."""
    return [*_attention(), *_logits(tokens), *_activations(tokens), *_optimizer()]


def _attention() -> list[MemoryCase]:
    alone = DEEP.with_(dict(zero=0, plan="1x1"))
    text = "GPT of {} layers, {:,} tokens, {}".format
    found = []
    for layers, name, attention in ((2, "eager", eager), (2, "SDPA", sdpa), (DEEP.config.layers, "SDPA", sdpa)):
        recipe = alone.with_(dict(layers=layers))
        case = text(layers, DEEP.tokens, f"{name} on one process")
        found.append(MemoryCase("attention", case, None, partial(measure_alone, recipe, attention)))
    for plan in ("1x4", "2x2,keep=all", "2x2", "u4", "u4,exchange=twice"):
        case = text(DEEP.config.layers, DEEP.tokens, f"`{plan}` on {RANKS} ranks")
        found.append(_trained("attention", case, DEEP.with_(dict(plan=plan))))
    found[-1] = replace(found[-1], allowed=ALLOWED_ELSEWHERE)
    return found


def _logits(tokens: int) -> list[MemoryCase]:
    few = tokens // FEWER
    name = "Llama, {}, {:,} tokens per rank".format
    return [
        _llama("logits", name("whole logits", few), few, whole=True),
        replace(
            _llama("logits", name("whole logits", tokens), tokens, whole=True), measure=None, reason="does not fit"
        ),
        _llama("logits", name("logits in chunks", tokens), tokens),
    ]


def _activations(tokens: int) -> list[MemoryCase]:
    recipe = DEEP.with_(dict(plan="1x4"))
    name = f"GPT of {DEEP.config.layers} layers, {DEEP.tokens:,} tokens on {RANKS} ranks, {{}}".format
    offloaded = estimate(recipe.with_(dict(offload=True)), RANKS, "cuda")
    kept = _trained("activations", name("all activations kept"), recipe.with_(dict(recompute=False)))
    return [
        replace(kept, allowed=ALLOWED_ELSEWHERE),
        _trained("activations", name("layers recomputed"), recipe),
        MemoryCase("activations", name("and layer inputs on the host"), offloaded, None, "needs a GPU"),
        _llama("activations", f"Llama, whole MLPs, {tokens:,} tokens per rank", tokens),
        _llama("activations", f"Llama, MLPs in tiles, {tokens:,} tokens per rank", tokens, TILE),
    ]


def _optimizer() -> list[MemoryCase]:
    def case(name: str, zero: int) -> MemoryCase:
        parameters = WIDE.job("float32").model.parameters / 1e6
        return _trained(
            "optimizer", f"GPT of {parameters:.0f}M parameters on {RANKS} ranks, {name}", WIDE.with_(dict(zero=zero))
        )

    return [
        case("replicated", 0),
        replace(case("ZeRO-2", 2), allowed=ALLOWED_ELSEWHERE),
        case("ZeRO-3", 3),
    ]


def grouped() -> list[MemoryCase]:
    """The row of each number of head groups."""
    found = []
    for groups in GROUPS:
        plan = Plan.parse(f"u{GROUPED_RANKS},groups={groups},exchange=twice")
        local, sizes = GROUPED.length // GROUPED_RANKS, GROUPED.call.sizes_on(plan, GROUPED_RANKS)
        results = 4 * local * GROUPED.q_heads * (GROUPED.head_dim + 1)  # out and lse, which the backward pass reads
        backward = sizes.peak_bytes(BACKWARD, GROUPED_RANKS) + results
        expected = max(sizes.peak_bytes(FORWARD, GROUPED_RANKS), backward)
        case = f"attention of {GROUPED.q_heads} heads x {GROUPED.head_dim}, {local:,} tokens per rank, `{plan}`"
        found.append(MemoryCase("groups", case, expected, partial(measure_call, str(plan)), allowed=ALLOWED_OF_A_CALL))
    return found


def measure_call(plan: str) -> Peak:
    """What a forward and a backward pass need besides q, k, v and the gradient of the result."""

    def on_rank(rank: int) -> Peak:
        sp = SequenceParallel(plan)
        few, sequence = sp.sequence(16 * sp.world), sp.sequence(GROUPED.length)
        given = random_inputs(GROUPED, sequence.local)
        with_gradients(partial(few.attention, causal=True), *(x[:, :, :16] for x in given))  # libraries, connections
        footprint.return_large_blocks()
        baseline, started = footprint.resident_bytes(), time.process_time()
        footprint.reset_peak(given[0].device)
        with_gradients(partial(sequence.attention, causal=True), *given)
        sent = sum(lane["bytes"] for lane in sp.traffic().values())
        return Peak(footprint.peak_bytes(given[0].device) - baseline, time.process_time() - started, sent)

    return _fullest(run_local(on_rank, GROUPED_RANKS, deadline=3600))


# --- the GPT


def _trained(wall: str, name: str, recipe: Recipe) -> MemoryCase:
    return MemoryCase(wall, name, estimate(recipe, RANKS), partial(measure, recipe, RANKS))


def estimate(recipe: Recipe, ranks: int, device: str = "cpu") -> float:
    """The planner's, in bytes, as training prints it."""
    return estimate_memory(
        recipe.job("float32", device), Plan.parse(recipe.plan), ranks, libraries=LIBRARY_BYTES
    ).total  # fmt: skip


class _Clocked(RecordingDisplay):
    """Also notes this rank's CPU time after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: list[float] = []

    def step(self, metrics: Metrics) -> None:
        super().step(metrics)
        self.clock.append(time.process_time())


@cache
def measure(recipe: Recipe, ranks: int) -> Peak:
    """The peak of a whole run, and the time of its last step."""

    def on_rank(rank: int) -> Peak:
        display = _Clocked()
        trainer = Trainer(recipe.with_({"out": out}), torch.device("cpu"), display, Stop())
        display.clock.append(time.process_time())
        trainer.run()
        sent = sum(display.metrics[-1]["sent"].values())
        return Peak(display.summary.peak, display.clock[-1] - display.clock[-2], sent)

    with tempfile.TemporaryDirectory() as out:
        return _fullest(run_local(on_rank, ranks, deadline=3600))


def measure_alone(recipe: Recipe, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Peak:
    """The whole sequence on one process. A recomputed layer repeats such attention."""

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model: Any = sharding.build_model(recipe, torch.device("cpu"))
        ids = torch.randint(model.config.vocab, (1, recipe.tokens + 1))

        def backward() -> None:
            hidden = model(ids[:, :-1], torch.arange(recipe.tokens), attention)
            chunked_cross_entropy(hidden, model.output_weight, ids[:, 1:], recipe.loss_chunk)[0].backward()

        return model, backward

    return _fullest(run_local(lambda rank: _step(make), 1, deadline=3600))


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the weights of all pairs of tokens in memory."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


sdpa = partial(F.scaled_dot_product_attention, is_causal=True)


# --- the Llama


def _llama(wall: str, name: str, tokens: int, tile: int | None = None, whole: bool = False) -> MemoryCase:
    from startrail.integrations.without_logits import tokens_per_chunk

    model = Model(
        "walls", VOCABULARY, WIDTH, LAYERS, HEADS, HEADS, WIDTH // HEADS, HIDDEN, matrices=3, tied=False, causal=True,
        windows=(None,) * LAYERS,
    )  # fmt: skip
    chunk = tokens if whole else tokens_per_chunk(VOCABULARY)
    run = Run(tokens * LLAMA_RANKS, dtype="float32", zero=0, loss_chunk=chunk, tile_mlp=tile is not None)
    expected = estimate_memory(Job(model, run), Plan.parse(LLAMA_PLAN), LLAMA_RANKS, libraries=LIBRARY_BYTES).total
    return MemoryCase(wall, name, expected, partial(measure_llama, tokens, tile, whole))


@cache
def measure_llama(tokens: int, tile: int | None, whole: bool) -> Peak:
    make = partial(_make_llama, tokens * LLAMA_RANKS, tile, whole)
    return _fullest(run_local(lambda rank: _step(make), LLAMA_RANKS, deadline=3600))


def _make_llama(length: int, tile: int | None, whole: bool) -> tuple[nn.Module, Callable[[], None]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from startrail.integrations.transformers import attach, shard_batch

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=HIDDEN, max_position_embeddings=length,
    )  # fmt: skip
    sp = SequenceParallel(LLAMA_PLAN)
    model: Any = attach(LlamaForCausalLM(config), sp, check=False, logits=whole, tile_mlp=tile)
    model.gradient_checkpointing_enable()

    def backward() -> None:
        ids = torch.randint(VOCABULARY, (1, length))
        model(**shard_batch(sp, ids, ids)).loss.backward()
        sum_gradients(model.parameters(), sp.group)

    return model, backward


def _step(make: Callable[[], tuple[nn.Module, Callable[[], None]]]) -> Peak:
    """One step of AdamW in this process: of the model and the backward pass that ``make`` returns."""
    footprint.return_large_blocks()
    device, baseline = torch.device("cpu"), footprint.resident_bytes()
    footprint.reset_peak(device)
    model, backward = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # a later step: gradients and moments exist
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    started = time.process_time()
    backward()
    optimizer.step()
    return Peak(footprint.peak_bytes(device) - baseline, time.process_time() - started)


def _fullest(peaks: list[Peak | None]) -> Peak:
    return Peak(*map(max, zip(*(peak for peak in peaks if peak is not None), strict=True)))


# --- the command

PLANS = {1: "1x1", 2: "2x1", 4: "2x2", 8: "2x4", 16: "4x4"}
NARROW = dict(width=32, layers=2, heads=1, kv_heads=1, hidden=256)


def run(options: argparse.Namespace) -> int:
    for ranks in (options.ranks, *options.worlds):
        if ranks not in PLANS:
            raise ValueError(f"{ranks} ranks have no plan here; use {', '.join(map(str, PLANS))}")
    torch.set_num_threads(1)
    print(
        f"one training step, float32; {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n"
        f"narrow GPT: {', '.join(f'{k} {v}' for k, v in NARROW.items())}, ZeRO-3, "
        f"{'nothing' if options.no_recompute else 'all but attention'} recomputed\n"
        f"Llama: a vocabulary of {VOCABULARY:,d}, width {WIDTH}, MLPs of {HIDDEN:,d}, attached to "
        f"{LLAMA_RANKS} ranks ({LLAMA_PLAN}), layers recomputed\n"
    )
    started = time.time()
    if options.only:
        found = [case for case in [*cases(options.wall_tokens), *grouped()] if case.wall == options.only]
        if not found:
            raise ValueError(
                f"--only {options.only}: no row is about that; the limits are attention, logits, "
                "activations, optimizer and groups"
            )
        measured = found
    else:
        measured = _growing(options) + (cases(options.wall_tokens) if options.wall_tokens else [])
    print(f"{'':70s} {'measured':>10s} {'estimate':>10s} {'off':>7s} {'allowed':>7s} {'CPU s':>6s}")
    rows = [_measured(case) for case in measured]
    too_far = [row["case"] for row, case in zip(rows, measured, strict=True) if abs(_off(row) or 0) > case.allowed]
    print(f"\nfurther off than allowed: {'; '.join(too_far) or 'none'}")
    record(options.json, options, started, rows)
    return int(bool(too_far))


def _growing(options: argparse.Namespace) -> list[MemoryCase]:
    """The sequence grows on a fixed number of ranks; then both grow together."""
    shapes = [(length, options.ranks) for length in options.lengths]
    shapes += [(options.local * world, world) for world in options.worlds]
    found = []
    for length, ranks in dict.fromkeys(shapes):
        changes = dict(**STEP, **NARROW, length=length, plan=PLANS[ranks])
        recipe = find(options.recipe).with_({**changes, "recompute": not options.no_recompute})
        name = f"narrow GPT, {length:,} tokens on {ranks} rank{'s' if ranks > 1 else ''} (`{PLANS[ranks]}`)"
        found.append(MemoryCase("", name, estimate(recipe, ranks), partial(measure, recipe, ranks)))
    return found


def _measured(case: MemoryCase) -> Json:
    """A row of the file; also printed."""
    row: Json = {"wall": case.wall, "case": case.name}
    if case.estimate is not None:
        row["estimate"] = case.estimate
    if case.measure is None:
        row["reason"] = case.reason
    else:
        peak = case.measure()
        row.update(measured=peak.nbytes, seconds=peak.seconds, **({"sent": peak.sent} if peak.sent else {}))
    sizes = (f"{row[key] / 2**20:,.0f} MiB" if key in row else "" for key in ("measured", "estimate"))
    off, seconds = _off(row), f"{row['seconds']:.1f}" if "seconds" in row else case.reason
    allowed = f"{case.allowed:.0%}" if off is not None else ""
    cells = "{:>10s} {:>10s} {:>7s} {:>7s} {:>6s}"
    print(
        f"{case.name:70s} {cells.format(*sizes, '' if off is None else f'{off:.1%}', allowed, seconds)}".rstrip(),
        flush=True,
    )
    return row


def _off(row: Json) -> float | None:
    return row["estimate"] / row["measured"] - 1 if "measured" in row and "estimate" in row else None

"""The second part of ``startrail bench memory``: Hugging Face models with a large vocabulary and a wide MLP, whose
logits and intermediate activations are the first to run out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from startrail.launch.local import run_local
from startrail.parallel import SequenceParallel
from startrail.planner.memory import LIBRARY_BYTES, Memory, estimate_memory
from startrail.planner.workload import Job, Model, Run
from startrail.schedule.plan import Plan
from startrail.training import memory

RANKS, PLAN = 2, "u2"
VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 131_072, 32, 2, 2, 4096
TILE = 1024  # tokens


@dataclass(frozen=True)
class Wall:
    """One row of the table: whether logits are whole, tokens of an MLP's tile, and tokens per rank."""

    name: str
    logits: bool
    tile: int | None
    tokens: int
    measured: bool = True  # False if this machine is too small for it


def walls(tokens: int, few: int) -> list[Wall]:
    """Whole logits are measured on ``few`` tokens: those of ``tokens`` would not fit."""
    return [
        Wall("whole logits", True, None, few),
        Wall("whole logits", True, None, tokens, measured=False),
        Wall("logits in chunks", False, None, tokens),
        Wall("and tiled MLPs", False, TILE, tokens),
    ]


def expected(wall: Wall) -> Memory:
    """The planner's estimate."""
    from startrail.integrations.without_logits import tokens_per_chunk

    model = Model(
        "walls", VOCABULARY, WIDTH, LAYERS, HEADS, HEADS, WIDTH // HEADS, HIDDEN, matrices=3, tied=False, causal=True,
        windows=(None,) * LAYERS,
    )  # fmt: skip
    chunk = wall.tokens if wall.logits else tokens_per_chunk(VOCABULARY)
    run = Run(
        wall.tokens * RANKS, dtype="float32", zero=0, loss_chunk=chunk, tile_mlp=wall.tile is not None
    )  # fmt: skip
    return estimate_memory(Job(model, run), Plan.parse(PLAN), RANKS, libraries=LIBRARY_BYTES)


def measure(wall: Wall) -> float:
    """Peak bytes per rank that one training step added to the process."""
    peaks = run_local(lambda rank: _on_rank(wall), RANKS, deadline=3600)
    return max(peak for peak in peaks if peak is not None)


def _on_rank(wall: Wall) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    from startrail.integrations.transformers import attach, shard_batch
    from startrail.losses import sum_gradients

    memory.return_large_blocks()
    device, baseline = torch.device("cpu"), memory.resident_bytes()
    memory.reset_peak(device)
    length = wall.tokens * RANKS
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=HIDDEN, max_position_embeddings=length,
    )  # fmt: skip
    sp = SequenceParallel(PLAN)
    model: Any = attach(LlamaForCausalLM(config), sp, check=False, logits=wall.logits, tile_mlp=wall.tile)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # a later step: gradients and moments exist
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    ids = torch.randint(VOCABULARY, (1, length))
    model(**shard_batch(sp, ids, ids)).loss.backward()
    sum_gradients(model.parameters(), sp.group)
    optimizer.step()
    return memory.peak_bytes(device) - baseline

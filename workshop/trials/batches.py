"""``python -m workshop.trials.batches``: trains a compiled GPT on local ranks on 300 batches that all have other
documents. It measures how much memory grows, how often the model is compiled and how long placing documents takes, and
writes batches.md in this folder.

Placing is timed on its own, once per batch, in CPU time: it may run in a data loader's thread while the step before it
computes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from startrail.geometry.distributions import DISTRIBUTIONS, document_lengths
from startrail.launch.local import run_local
from startrail.losses import chunked_cross_entropy, global_mean, sum_gradients
from startrail.parallel import SequenceParallel
from startrail.training import footprint
from startrail.training.models.configs import GPTConfig
from startrail.training.models.gpt import GPT

CONFIG = GPTConfig(vocab=256, width=256, layers=4, heads=8, kv_heads=8, hidden=768)
SCALE = 32_768  # tokens per rank for which documents are as long as in reality


class Found(NamedTuple):
    """On one rank: ``memory`` in bytes after each tenth of the batches, and seconds of all of them."""

    graphs: int
    packings: int
    memory: list[int]
    placing: float
    steps: float


def batches(number: int, length: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """The documents of each batch, of all distributions in turn."""
    names = list(DISTRIBUTIONS)
    for seed in range(number):
        lengths = document_lengths(names[seed % len(names)], length, seed, scale=length / ranks / SCALE)
        yield (0, *accumulate(lengths))


def train(number: int, length: int, plan: str, rank: int) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sp, model = SequenceParallel(plan), GPT(CONFIG)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory: list[int] = []
    seen, placing, steps = set(), 0.0, 0.0
    for index, documents in enumerate(batches(number, length, sp.world)):
        seen.add(documents)
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        sequence = sp.sequence(length, documents)
        placing += time.process_time() - cpu_start
        ids = torch.randint(CONFIG.vocab, (1, length), generator=torch.Generator().manual_seed(index))
        own, attend = sequence.shard(ids, 1), partial(sequence.attention, causal=True)
        hidden = compiled(own, sequence.positions(), attend)
        loss_sum, count = chunked_cross_entropy(hidden, model.output_weight, sequence.shard_labels(ids), 1024)
        optimizer.zero_grad()
        global_mean(loss_sum, count, sp.group).backward()
        sum_gradients(model.parameters(), sp.group)
        optimizer.step()
        steps += time.perf_counter() - start if index else 0.0  # the first one compiles
        if (index + 1) * 10 // number > len(memory):
            gc.collect()
            footprint.trim_heap()
            memory.append(footprint.resident_bytes())
    return Found(counter.frame_count, len(seen), memory, placing, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--plan", default="1x2/1x2")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    found = run_local(partial(train, options.batches, options.length, options.plan), options.ranks, deadline=1800)
    ranks = [each for each in found if each is not None]
    worst = max(ranks, key=lambda each: each.memory[-1] - each.memory[2])
    lines = [f"# {options.batches} batches with new documents", ""]
    lines += [f"A compiled GPT with {CONFIG.layers} layers of width {CONFIG.width} on {options.ranks} local ranks,"]
    lines += [
        f"plan {options.plan}, {options.length:,} tokens per batch; documents of five distributions, scaled down.",
        "",
    ]
    lines += [f"- Graphs compiled on a rank: {max(each.graphs for each in ranks)}."]
    lines += [f"- Batches with documents of their own: {ranks[0].packings}."]
    grown = [f"{nbytes / 2**20:.0f}" for nbytes in worst.memory]
    lines += [f"- Memory of the rank that grew most, in MiB, after each tenth: {', '.join(grown)}."]
    share = max(each.placing / each.steps for each in ranks)
    per_batch = max(each.placing for each in ranks) / options.batches
    lines += [f"- Placing: {1000 * per_batch:.2f} ms of CPU time per batch, {share:.2%} of a step.", ""]
    text = "\n".join([*lines, time.strftime("%Y-%m-%d")]) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

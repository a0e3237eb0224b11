"""``python -m workshop.trials.trees``: one training step on a prompt with eight answers, as a packed prefix tree and as
rows that repeat the prompt. Writes trees.md beside it.

Each case runs on fresh ranks. Cases take turns, and times are the best of all turns; the peak is what the step adds to
a rank's memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from startrail.geometry.mask import Mask
from startrail.launch.local import run_local
from startrail.losses import chunked_cross_entropy
from startrail.parallel import SequenceParallel
from startrail.training import footprint
from startrail.training.models.configs import GPTConfig
from startrail.training.models.gpt import GPT

CONFIG = GPTConfig(vocab=256, width=128, layers=2, heads=4, kv_heads=4, hidden=384)
PROMPT, ANSWER, LEAVES = 2048, 128, 8
CASES = "a packed tree", "rows, one at a time", "rows, as a batch"
DEVICE = torch.device("cpu")


def step(model: GPT, sp: SequenceParallel, tokens: Tensor, positions: Tensor, labels: Tensor, mask: Mask) -> None:
    """Forward and backward of (batch, tokens)."""
    sequence = sp.sequence(tokens.shape[1])
    own = sequence.shard(tokens, 1), sequence.shard(positions, 0)
    hidden = model(*own, partial(sequence.attention, mask=mask))
    chunked_cross_entropy(hidden, model.output_weight, sequence.shard(labels, 1, pad_value=-100), 1024)[0].backward()


def run_case(case: str, sp: SequenceParallel, model: GPT) -> None:
    """What is learned from differs at the ends of nodes only, which takes the same time."""
    if case == CASES[0]:
        shape = [-1] + [0] * LEAVES, [PROMPT] + [ANSWER] * LEAVES
        batches, positions, mask = [1], torch.tensor(Mask.tree_positions(*shape)), Mask.tree(*shape)
    else:
        batches, positions, mask = [1] * LEAVES, torch.arange(PROMPT + ANSWER), Mask(causal=True)
        batches = [LEAVES] if case == CASES[2] else batches
    for rows in batches:
        tokens = torch.randint(CONFIG.vocab, (rows, len(positions)), generator=torch.Generator().manual_seed(0))
        labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), 1)
        step(model, sp, tokens, positions, labels, mask)


def measure(case: str, plan: str, ranks: int) -> tuple[float, float]:
    """Seconds and bytes of the second step on the slowest and the fullest rank."""

    def on_rank(rank: int) -> tuple[float, float]:
        torch.set_num_threads(1)
        footprint.return_large_blocks()
        sp, model = SequenceParallel(plan), GPT(CONFIG)
        run_case(case, sp, model)  # connects, and makes the gradients
        footprint.trim_heap()
        footprint.reset_peak(DEVICE)
        before, start = footprint.resident_bytes(), time.perf_counter()
        run_case(case, sp, model)
        return time.perf_counter() - start, footprint.peak_bytes(DEVICE) - before

    found = [each for each in run_local(on_rank, ranks) if each is not None]
    return max(seconds for seconds, _ in found), max(nbytes for _, nbytes in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="1x2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    turns = [[measure(case, options.plan, options.ranks) for case in CASES] for _ in range(options.turns)]
    best = [[min(figures) for figures in zip(*of_case, strict=True)] for of_case in zip(*turns, strict=True)]
    tokens = [PROMPT + LEAVES * ANSWER] + [LEAVES * (PROMPT + ANSWER)] * 2
    lines = [f"A prompt of {PROMPT:,} tokens with {LEAVES} answers of {ANSWER}; a GPT with {CONFIG.layers} layers of"]
    lines += [f"width {CONFIG.width} in float32, plan {options.plan} on {options.ranks} ranks, one training step.", ""]
    lines += ["| | tokens | time | peak memory per rank |", "| --- | --- | --- | --- |"]
    for case, many, (seconds, nbytes) in zip(CASES, tokens, best, strict=True):
        factors = f"{seconds / best[0][0]:.1f}x", f"{nbytes / best[0][1]:.1f}x"
        lines.append(f"| {case} | {many:,} | {seconds:.2f} s, {factors[0]} | {nbytes / 2**20:.0f} MiB, {factors[1]} |")
    text = "\n".join(["# Trees", "", *lines, "", time.strftime("%Y-%m-%d")]) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

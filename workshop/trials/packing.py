"""``python -m workshop.trials.packing``: the passes of an optimizer step on two emulated nodes of two ranks, with the
ways to pack a global batch that validation/packing.py simulates. Writes packing.md beside it.

Computing is paced as in trials/shares.py. Lengths are those of a distribution, scaled down. All ways compute the same
documents, so the sum of their losses must be the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from startrail.geometry.distributions import document_lengths
from startrail.geometry.packing import pack
from startrail.losses import chunked_cross_entropy
from startrail.parallel import SequenceParallel
from startrail.training.models.gpt import GPT
from validation.packing import first_fit, rounds
from workshop.lab.cluster import Cluster
from workshop.trials.shares import CONFIG, SPEED, pace

RANKS, PER_NODE, TOKENS = 4, 2, 512  # tokens per rank
EVEN = 1426  # with the model of trials/shares.py
SCALE = 1 / 64
WAYS = "first fit", "Megatron's rule", "ours, a sequence per node", "ours, one sequence"
Members = tuple[int, ...]
Rounds = list[list[tuple[Members, list[list[int]]]]]  # who computes which sequences, one after the other


def ways(lengths: Sequence[int]) -> list[Rounds]:
    """In the order of ``WAYS``."""
    nodes = RANKS // PER_NODE
    fitted = first_fit(lengths, PER_NODE * TOKENS)
    by_rule: Rounds = []
    for groups in rounds(lengths, RANKS, TOKENS):
        groups.sort(reverse=True, key=lambda group: group[0])
        ends = [0, *accumulate(size for size, _ in groups)]
        by_rule.append([
            (tuple(range(first, first + size)), [[length] for length in documents])
            for first, (size, documents) in zip(ends, groups, strict=False)
        ])  # fmt: skip
    return [
        _of_groups((fitted[at : at + nodes] for at in range(0, len(fitted), nodes)), PER_NODE),
        by_rule,
        *(
            _of_groups(
                ([[lengths[number] for number in own] for own in step] for step in pack(
                    lengths, ranks, TOKENS, groups=RANKS // ranks, even=EVEN).steps),
                ranks,
            )
            for ranks in (PER_NODE, RANKS)
        ),
    ]  # fmt: skip


def _of_groups(steps: Iterable[Sequence[list[int]]], ranks: int) -> Rounds:
    return [
        [(tuple(range(g * ranks, (g + 1) * ranks)), [own]) for g, own in enumerate(sequences)] for sequences in steps
    ]


def measure(model: GPT, schedule: Rounds, parallels: dict[Members, SequenceParallel]) -> tuple[float, float]:
    """Seconds of all rounds, and the sum of all losses."""
    total = torch.zeros((), dtype=torch.float64)
    dist.barrier()
    start = time.perf_counter()
    for groups in schedule:
        for members, sequences in groups:
            for own in sequences if dist.get_rank() in members else ():
                ids = torch.cat([torch.arange(length) * (7 + length) % CONFIG.vocab for length in own]).unsqueeze(0)
                sequence = parallels[members].sequence(ids.shape[1], [0, *accumulate(own)])
                attention = partial(sequence.attention, causal=True)
                hidden = model(sequence.shard(ids, 1), sequence.positions(), attention)
                labels = sequence.shard_labels(ids)
                loss, _ = chunked_cross_entropy(hidden, model.output_weight, labels, 1024)
                loss.backward()
                total += loss.detach()
        dist.barrier()
    seconds = time.perf_counter() - start
    dist.all_reduce(total)
    return seconds, total.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", default="agents")
    parser.add_argument("--times", type=int, default=4, help="tokens of a step, as a multiple of what all ranks hold")
    options = parser.parse_args()
    drawn = document_lengths(options.documents, options.times * RANKS * TOKENS, seed=0, scale=SCALE)
    lengths = [min(length, PER_NODE * TOKENS) for length in drawn]
    schedules = ways(lengths)

    def on_rank(rank: int) -> list[tuple[float, float]]:
        torch.set_num_threads(1)
        pace(SPEED)
        torch.manual_seed(0)
        model, parallels = GPT(CONFIG), {}
        for size in (1, 2, 4):
            for first in range(0, RANKS, size):
                members = tuple(range(first, first + size))
                group = dist.new_group(members)
                if rank in members:
                    parallels[members] = SequenceParallel(f"1x{size}", group=group)
                    sequence = parallels[members].sequence(64)  # connect
                    x = sequence.shard(torch.randn(1, 4, 64, 32, generator=torch.Generator().manual_seed(0)), 2)
                    sequence.attention(x.requires_grad_(), x, x, causal=True).sum().backward()
        return [measure(model, schedule, parallels) for schedule in schedules]

    with Cluster(nodes=RANKS // PER_NODE, ranks_per_node=PER_NODE, link="400mbit") as cluster:
        found, *_ = cluster.call(on_rank, deadline=900)
    off = max(abs(loss / found[0][1] - 1) for _, loss in found)
    assert off < 1e-5, f"the ways do not compute the same documents: {found}"
    lines = ["# Packing on two nodes of two ranks", ""]
    lines += [
        f"{len(lengths)} documents drawn from {options.documents}, scaled by {SCALE:g}, {TOKENS} tokens per rank."
    ]
    lines += [f"Losses agree within {off:.0e}.", "", "| way | rounds | time |", "| --- | --- | --- |"]
    for name, schedule, (seconds, _) in zip(WAYS, schedules, found, strict=True):
        lines.append(f"| {name} | {len(schedule)} | {seconds:.2f} s, {found[0][0] / seconds:.2f}x |")
    text = "\n".join([*lines, "", time.strftime("%Y-%m-%d")]) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m validation.packing``: what packing a global batch gains, by simulation, as the table of packing.md.

Ways to give the documents of one optimizer step to 32 ranks on 4 nodes:

- *first fit*: a sequence per node. Documents in their order, each into the first sequence with room.
- *Megatron's rule* (dynamic context parallelism, written from its description and source): a document of n tokens is
  cut over 2^ceil(log2(n / tokens per rank)) ranks. The longest comes first, and goes to free ranks or to the
  lowest-loaded group of that size. A round ends when loads are within 5 % or nothing fits; what made loads unequal goes
  back, and ranks without a document join the smallest groups. A document's load is n² / ranks.
- *ours*: ``startrail.pack`` with a sequence per node, and with one sequence over all ranks. Inside a sequence, ranks
  hold the tokens that the layout gives them.

The work of a document is n + n²/even. A rank has the part of its own tokens. All ranks wait for the busiest one at the
end of every pass or round. Efficiency is the mean rank's work over the sum of what the busiest ones have. Transfers are
not counted, and documents longer than a node's sequence are cut.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil, log2
from pathlib import Path

from startrail.geometry.distributions import DISTRIBUTIONS, document_lengths
from startrail.geometry.layout import Layout, cut_at_documents
from startrail.geometry.packing import EVEN, pack
from startrail.geometry.zones import ZoneLevel, make_layout
from startrail.schedule.plan import Plan

NODES, PER_NODE = 4, 8
RANKS = NODES * PER_NODE
BATCH = 8  # an optimizer step has this many times the tokens that all ranks hold
SEEDS = 3
Groups = list[tuple[int, list[int]]]  # ranks and documents
WAYS = "first fit", "Megatron's rule", "ours, a sequence per node", "ours, one sequence"
SLACK = 0.05  # between loads, in Megatron's rule


def rank_work(layout: Layout, documents: Sequence[int]) -> list[float]:
    """The work of each rank: its tokens, and twice the pairs that they see under a causal mask, over ``EVEN``."""
    work = []
    for rank in range(layout.world):
        runs = cut_at_documents(layout.runs(rank), documents)
        firsts = [documents[bisect_right(documents, start) - 1] for start, _ in runs]
        work.append(sum(n + n * (2 * (at - first) + n) / EVEN for (at, n), first in zip(runs, firsts, strict=True)))
    return work


def time_of(steps: Iterable[Sequence[Sequence[int]]], plan: str, ranks: int) -> float:
    """What the busiest rank of each pass works, summed. ``steps``: the lengths of each group's sequence."""
    levels = [ZoneLevel(*level) for level in Plan.parse(plan).zone_levels(ranks)]
    passes = ([[0, *accumulate(lengths)] for lengths in groups] for groups in steps)
    return sum(max(max(rank_work(make_layout("zones", levels, ends), ends)) for ends in groups) for groups in passes)


def work_of(length: int) -> float:
    return length * (1 + length / EVEN)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    sequences: list[list[int]] = []
    for length in lengths:
        for sequence in sequences:
            if sum(sequence) + length <= capacity:
                sequence.append(length)
                break
        else:
            sequences.append([length])
    return sequences


def megatron(lengths: Sequence[int], ranks: int, tokens_per_rank: int) -> float:
    """What the busiest rank of each round works, summed."""
    found = rounds(lengths, ranks, tokens_per_rank)
    return sum(max(sum(map(work_of, documents)) / size for size, documents in groups) for groups in found)


def rounds(lengths: Sequence[int], ranks: int, tokens_per_rank: int) -> Iterator[Groups]:
    """The groups of ranks in each round, and the documents of each."""
    waiting: dict[int, list[int]] = {}  # by ranks, the longest last
    for length in sorted(lengths):
        waiting.setdefault(max(1, 2 ** ceil(log2(length / tokens_per_rank))), []).append(length)
    while any(waiting.values()):
        yield _joined(_trimmed(_one_round(waiting, ranks), waiting, ranks), ranks)


def _load(group: tuple[int, list[int]]) -> float:
    return sum(length * length for length in group[1]) / group[0]


def _slack(groups: Groups) -> float:
    loads = [_load(group) for group in groups]
    return 1 - min(loads) / max(loads)


def _one_round(waiting: dict[int, list[int]], ranks: int) -> Groups:
    groups: Groups = []
    while True:
        free = ranks - sum(size for size, _ in groups)
        fitting = [size for size in waiting if waiting[size] and (size <= free or any(s == size for s, _ in groups))]
        if not fitting:
            break
        size = max(fitting)
        if free >= size:
            groups.append((size, [waiting[size].pop()]))
        else:
            min((group for group in groups if group[0] == size), key=_load)[1].append(waiting[size].pop())
        if size < groups[0][0] and sum(s for s, _ in groups) == ranks and _slack(groups) <= SLACK:
            break
    return groups


def _trimmed(groups: Groups, waiting: dict[int, list[int]], ranks: int) -> Groups:
    """Without the last documents of the groups with most, if no rank is free."""
    while sum(size for size, _ in groups) == ranks:
        size, documents = max(groups, key=_load)
        if _slack(groups) <= SLACK or len(documents) < 2:
            break
        insort(waiting[size], documents.pop())
    return groups


def _joined(groups: Groups, ranks: int) -> Groups:
    """Ranks without a document join the smallest groups, which double."""
    free = ranks - sum(size for size, _ in groups)
    while free:
        at = min(range(len(groups)), key=lambda i: groups[i][0])
        size, documents = groups[at]
        more = min(size, free)
        groups[at], free = (size + more, documents), free - more
    return groups


def efficiencies(lengths: Sequence[int], tokens: int) -> list[float]:
    """By way, in the order of ``WAYS``. ``tokens``: of a rank."""
    fitted = first_fit(lengths, PER_NODE * tokens)
    rounds = [fitted[at : at + NODES] for at in range(0, len(fitted), NODES)]
    packed = []
    for packing in (pack(lengths, PER_NODE, tokens, groups=NODES), pack(lengths, RANKS, tokens)):
        packed.append([[[lengths[number] for number in documents] for documents in step] for step in packing.steps])
    times = [time_of(rounds, "1x8", PER_NODE), megatron(lengths, RANKS, tokens)]
    times += [time_of(packed[0], "1x8", PER_NODE), time_of(packed[1], "1x4/1x8", RANKS)]
    return [sum(map(work_of, lengths)) / RANKS / seconds for seconds in times]


def main() -> int:
    lines = ["# Packing a global batch", "", *(__doc__ or "").splitlines()[2:], ""]
    lines += [f"Steps of {BATCH} times the tokens that all ranks hold, {SEEDS} draws each: mean efficiency (worst)."]
    lines += ["", f"| documents | tokens per rank | {' | '.join(WAYS)} |", "|" + " --- |" * (2 + len(WAYS))]
    for name in DISTRIBUTIONS:
        for tokens in (8192, 32768):
            draws = [document_lengths(name, BATCH * RANKS * tokens, seed) for seed in range(SEEDS)]
            found = [efficiencies([min(n, PER_NODE * tokens) for n in draw], tokens) for draw in draws]
            cells = (f"{sum(each) / SEEDS:.0%} ({min(each):.0%})" for each in zip(*found, strict=True))
            lines.append(f"| {name} | {tokens:,} | {' | '.join(cells)} |")
    text = "\n".join(lines) + f"\n\n{time.strftime('%Y-%m-%d')}\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

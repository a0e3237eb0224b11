"""Where packed documents go, before and after: ``python -m validation.placement`` writes placement.md.

Five distributions of lengths x 8K and 32K tokens per rank x 1, 4 and 8 nodes of 8 ranks, each the mean over SEEDS
batches. ``placement.json`` has the same figures of the placement by zones that documents had before (November 2026).
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.explain import work_by_rank
from startrail.compile.problem import Links, Split
from startrail.geometry.distributions import document_lengths
from startrail.geometry.layout import Runs, cut_at_documents
from startrail.schedule.plan import Plan

HERE = Path(__file__).parent
BEFORE = HERE / "placement.json"
KINDS = ("pretraining", "agents", "books", "repositories", "chat")
NODES, RANKS, TOKENS, SEEDS = (1, 4, 8), 8, (8192, 32768), 4
HEADS, HEAD_DIM = 32, 128


class Figures(NamedTuple):
    """``outer`` and ``inner``: bytes between nodes and inside them, over those of a ring over all ranks (keys, and keys
    and their gradients in the backward pass, brought into each node or rank once). ``work`` and ``tokens`` of the
    busiest rank over the mean, and the ``shortest`` piece of a document that is cut, as kernels compute it."""

    outer: float
    inner: float
    work: float
    tokens: float
    shortest: float


def batch(kind: str, nodes: int, tokens: int, seed: int) -> tuple[int, ...]:
    """The cu_seqlens of a batch."""
    return (0, *accumulate(document_lengths(kind, nodes * RANKS * tokens, seed)))


def measure(documents: tuple[int, ...], nodes: int, plan: str = "", links: Links = ()) -> Figures:
    world, length = nodes * RANKS, documents[-1]
    split = Split(Plan.parse(plan or (f"u{nodes}/1x{RANKS}" if nodes > 1 else f"1x{RANKS}")), world, links=links)
    problem = Attention.of(length, 1, HEADS, HEADS, HEAD_DIM, causal=True, documents=documents)
    layout = split.layout_of(problem.boundaries)
    parts = [problem.part(split, layout, zone) for zone in layout.zones]
    sent = [0.0, 0.0]
    for part in parts:
        for level, nbytes in enumerate(reversed(_sent(part))):
            sent[level] += nbytes
    ring = 3 * 2 * HEADS * HEAD_DIM * 2 * length  # every token once: keys, keys again and gradients, in bfloat16
    work = work_by_rank(layout, documents)
    return Figures(
        sent[1] / (ring * (nodes - 1)) if nodes > 1 else 0.0, sent[0] / (ring * nodes * (RANKS - 1)),
        max(work) * world / sum(work), layout.largest * world / length,
        shortest_piece((part.runs_of(shard) for part in parts for shard in range(part.place.num_shards)), documents),
    )  # fmt: skip


def _sent(part: AttentionPart) -> tuple[int, ...]:
    sent = part.plan_bytes if part.demand is None else part.demand_bytes
    assert sent is not None
    return sent


def shortest_piece(shards: Iterable[Runs], documents: tuple[int, ...]) -> int:
    """Of documents that are cut; 0 if none is. A shard is what a kernel computes at once: the tokens of a rank, or of
    all ranks that exchange its heads."""
    pieces = []
    for runs in shards:
        for start, count in cut_at_documents(runs, documents):
            number = bisect_right(documents, start)
            if count < documents[number] - documents[number - 1]:
                pieces.append(count)
    return min(pieces, default=0)


def figures(kind: str, nodes: int, tokens: int) -> list[Figures]:
    return [measure(batch(kind, nodes, tokens, seed), nodes) for seed in range(SEEDS)]


def name_of(kind: str, nodes: int, tokens: int) -> str:
    return f"{kind}, {nodes}x{RANKS}, {tokens // 1024}K"


def _row(found: list[Figures]) -> str:
    outer, inner, *_ = (sum(column) / len(found) for column in zip(*found, strict=True))
    work, tokens = max(each.work for each in found), max(each.tokens for each in found)
    shortest = min((each.shortest for each in found if each.shortest), default=0)
    return f"{outer:.1%} | {inner:.1%} | {work:.2f} | {tokens:.3f} | {shortest:,.0f}"


def main() -> int:
    before = json.loads(BEFORE.read_text())
    lines = [
        "# Where packed documents go", "",
        "`python -m validation.placement`: bytes between nodes and inside them as a share of a ring's over all ranks,",
        f"the mean of {SEEDS} batches; work and tokens of the busiest rank over the mean, and the shortest piece of a",
        "cut document that a kernel computes (those of ranks that exchange heads are computed together), the worst of",
        "them. Plans are `uK/1x8`, with as many KV heads as query heads. One document over all ranks sends 33.5 %",
        "between 4 nodes and 16.8 % between 8; with plans `1xK/1x8`, 100 %. Work above 1.08 is that of batches with",
        "fewer than two documents per node: a node may then have up to 10 % more work if fewer bytes cross for that.",
        "",
        "| documents | before: between | inside | work | tokens | piece | now | inside | work | tokens | piece |",
        "| --- |" + " ---: |" * 10,
    ]  # fmt: skip
    for nodes in NODES:
        for kind in KINDS:
            for tokens in TOKENS:
                name = name_of(kind, nodes, tokens)
                old = [Figures(*each) for each in before[name]]
                lines.append(f"| {name} | {_row(old)} | {_row(figures(kind, nodes, tokens))} |")
                print(lines[-1], flush=True)
    (HERE / "placement.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lengths of documents as they occur in training, to test and plan with.

``pretraining``: the distribution that MagiAttention's benchmark publishes (doc_length_distribution.csv). ``agents``:
traces of coding agents (CoderForge, as described in NeMo Automodel). ``books``, ``repositories`` and ``chat`` are made
up: evenly distributed lengths, and a log-normal distribution with median 1,000. Each is a list of (tokens, percentage
of documents with at most that many); lengths in between are equally likely.

>>> sum(document_lengths("pretraining", 100_000, seed=0)), document_lengths("agents", 300_000, seed=0)[:2]
(100000, [59070, 53780])
"""

from __future__ import annotations

import random
from itertools import pairwise

DISTRIBUTIONS: dict[str, list[tuple[int, float]]] = {
    "pretraining": [
        (0, 0), (200, 18.6), (500, 46.8), (1000, 71.4), (2000, 87.0), (4000, 94.4), (8000, 97.4), (16000, 98.7),
        (32000, 99.6), (64000, 99.7), (128_000, 99.9), (192_000, 100),
    ],
    "agents": [(4000, 0), (32000, 30), (38000, 50), (64000, 92.5), (71000, 95), (96000, 99.3), (184_000, 100)],
    "books": [(16000, 0), (64000, 100)],
    "repositories": [(2000, 0), (16000, 100)],
    "chat": [
        (16, 0), (277, 10), (512, 25), (1000, 50), (1948, 75), (3602, 90), (5180, 95), (10240, 99), (22000, 99.9),
        (64000, 100),
    ],
}  # fmt: skip


def document_lengths(name: str, total: int, seed: int = 0, scale: float = 1.0) -> list[int]:
    """Lengths drawn from a distribution, times ``scale``, until they add up to ``total`` tokens; the last is cut."""
    if name not in DISTRIBUTIONS:
        raise ValueError(f"distribution {name!r} is not one of {', '.join(DISTRIBUTIONS)}")
    points, chance, lengths = DISTRIBUTIONS[name], random.Random(seed), []
    while total:
        share = 100 * chance.random()
        (low, before), (high, after) = next(pair for pair in pairwise(points) if share <= pair[1][1])
        length = scale * (low + (high - low) * (share - before) / (after - before))
        lengths.append(min(max(1, int(length)), total))
        total -= lengths[-1]
    return lengths

"""Collectives of the hosts: sums, maxima, texts and errors that all ranks share.

They run over gloo on host tensors, so no GPU has to synchronize.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from startrail.agreement.gather import gather_texts


def sum_over_ranks(numbers: list[float]) -> list[float]:
    """Each of the numbers, summed over all ranks."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(number: float) -> float:
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def broadcast_text(text: str) -> str:
    """Rank 0's text, on all ranks."""
    return gather_texts(text if dist.get_rank() == 0 else "")[0]


def raise_together(problem: str | None, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` on every rank if any rank has a ``problem``, so that no rank is left waiting."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_texts(problem or "")):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        raise error(next(iter(ranks)))
    if ranks:
        raise error("; ".join(f"rank {members[0]}: {text}" for text, members in ranks.items()))


def check_same_data(size: int, digest: int) -> None:
    """Raise ``ValueError`` on all ranks unless they have the same amount of data with the same ``digest``. A node with
    other files would silently train on other samples."""
    by_rank = [tuple(map(int, text.split())) for text in gather_texts(f"{size} {digest}")]
    for rank, (count, _) in enumerate(by_rank):
        if count != by_rank[0][0]:
            raise ValueError(
                f"rank {rank} sees {count:,} tokens or images to train on, rank 0 sees {by_rank[0][0]:,}: every node "
                "needs the same data"
            )
    for rank, data in enumerate(by_rank):
        if data != by_rank[0]:
            raise ValueError(
                f"rank {rank} sees as many tokens or images as rank 0 ({size:,}), but different ones: every node "
                "needs the same data"
            )

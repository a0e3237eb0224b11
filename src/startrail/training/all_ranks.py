"""What all ranks of a run find out together: sums, the largest number, and whether anybody has a problem.

These are the hosts' own messages, by gloo: no GPU is waited for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from startrail.comm.gather import gather_texts


def sum_over_ranks(numbers: list[float]) -> list[float]:
    """Each of the numbers, summed over all ranks."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def largest_over_ranks(number: float) -> float:
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def say_to_all(text: str) -> str:
    """What the first rank says, on all ranks."""
    return gather_texts(text if dist.get_rank() == 0 else "")[0]


def agree(problem: str | None, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` on every rank if any has a ``problem``, so that nobody waits for it in vain."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_texts(problem or "")):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        raise error(next(iter(ranks)))
    if ranks:
        raise error("; ".join(f"rank {members[0]}: {text}" for text, members in ranks.items()))


def check_same_data(size: int, digest: int) -> None:
    """``ValueError`` on all ranks unless they see as much data, and the same in all places that ``digest`` is of: a
    node with other files would train on other texts."""
    found = [tuple(map(int, text.split())) for text in gather_texts(f"{size} {digest}")]
    for rank, (theirs, _) in enumerate(found):
        if theirs != found[0][0]:
            raise ValueError(
                f"rank {rank} sees {theirs:,} tokens or images to train on, rank 0 sees {found[0][0]:,}: every node "
                "needs the same data"
            )
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} sees other tokens or images than rank 0, though as many ({size:,}): every node needs the "
            "same data"
        )

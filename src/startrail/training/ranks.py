"""What the ranks of a run tell each other: sums, maxima, texts and errors.

Over gloo on host tensors, so that no GPU has to synchronize.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from startrail.agreement.gather import gather_texts
from startrail.launch.signals import StoppedError


class TrainingError(RuntimeError):
    """The run cannot continue, although its arguments are right; the text is one line."""


SHARED_ERRORS = (StoppedError, TrainingError, ValueError)  # a stop explains what other ranks raise


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


@contextmanager
def together() -> Iterator[None]:
    """If the block raises one of ``SHARED_ERRORS`` or an ``OSError`` on any rank, raise on every rank, so that none is
    left waiting. The block must not communicate."""
    problem: Exception | None = None
    try:
        yield
    except SHARED_ERRORS as error:
        problem = error
    except OSError as error:
        problem = ValueError(str(error))
    raise_together(problem)


def raise_together(problem: Exception | None) -> None:
    """Raise an error on every rank if any rank has a ``problem``."""
    kind = next((number for number, shared in enumerate(SHARED_ERRORS) if isinstance(problem, shared)), "")
    members: dict[tuple[str, str], list[int]] = {}
    for rank, message in enumerate(gather_texts(f"{kind}:{problem or ''}")):
        number, _, text = message.partition(":")
        if number:
            members.setdefault((number, text), []).append(rank)
    if not members:
        return
    number = min(number for number, _ in members)
    found = {text: ranks[0] for (of_kind, text), ranks in members.items() if of_kind == number}
    one_text = "; ".join(f"rank {rank}: {text}" for text, rank in found.items()) if len(found) > 1 else min(found)
    raise SHARED_ERRORS[int(number)](one_text)


def log(text: str) -> None:
    print(f"startrail train: {text}", file=sys.stderr, flush=True)


def check_same_data(size: int, digest: int) -> None:
    """Raise ``ValueError`` on all ranks unless they have the same amount of data with the same ``digest``. A node with
    other files would silently train on other samples."""
    by_rank = [tuple(map(int, text.split())) for text in gather_texts(f"{size} {digest}")]
    first_size, first_digest = by_rank[0]
    different = [(rank, theirs) for rank, (theirs, _) in enumerate(by_rank) if theirs != first_size]
    if different:
        rank, theirs = different[0]
        found = f"rank {rank} sees {theirs:,} tokens or images to train on, rank 0 sees {first_size:,}"
    elif others := [rank for rank, (_, theirs) in enumerate(by_rank) if theirs != first_digest]:
        found = f"rank {others[0]} sees as many tokens or images as rank 0 ({size:,}), but different ones"
    else:
        return
    raise ValueError(f"{found}: every node needs the same data")

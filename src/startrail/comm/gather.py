"""Texts between ranks. They travel as bytes in tensors: nobody unpickles what a peer sent, and numpy is not needed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.comm.errors import peer_errors


def gather_texts(text: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> list[str]:
    """What every rank of the group says, by rank; ``device`` is one whose tensors the group moves.

    >>> gather_texts("alone")                                 # one process needs no group
    ['alone']
    """
    if group is None and not dist.is_initialized():
        return [text]
    mine = text.encode()
    sizes = _gather(torch.tensor([len(mine)], device=device), group)
    longest = max(1, *(int(size) for size in sizes))  # a tensor cannot share an empty buffer
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
    found = []
    for size, part in zip(sizes, _gather(padded, group), strict=True):
        buffer = bytearray(longest)
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(part)
        found.append(buffer[: int(size)].decode())
    return found


@peer_errors("what the ranks say")
def _gather(mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return everyone

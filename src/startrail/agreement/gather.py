"""Gathers texts from all ranks, as bytes in tensors: nothing from a peer is unpickled, and numpy is not needed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.agreement.errors import peer_errors


def gather_texts(text: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> list[str]:
    """The texts of all ranks of the group, by rank. The group must be able to move tensors on ``device``.

    >>> gather_texts("alone")                                 # one process needs no group
    ['alone']
    """
    if group is None and not dist.is_initialized():
        return [text]
    encoded = text.encode()
    sizes = gather_tensors(torch.tensor([len(encoded)], device=device), group, "gathering texts")
    longest = max(1, *(int(size) for size in sizes))  # a tensor cannot share an empty buffer
    padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8).to(device)
    texts = []
    for size, part in zip(sizes, gather_tensors(padded, group, "gathering texts"), strict=True):
        buffer = bytearray(longest)
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(part)
        texts.append(buffer[: int(size)].decode())
    return texts


def gather_tensors(x: Tensor, group: dist.ProcessGroup | None, operation: str) -> list[Tensor]:
    """The tensors of all ranks, which have one shape. ``operation`` names the purpose in a ``PeerError``."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    with peer_errors(operation, group):
        dist.all_gather(gathered, x, group=group)
    return gathered

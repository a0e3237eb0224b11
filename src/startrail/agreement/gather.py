"""Gathers values from all ranks, as bytes in tensors: nothing from a peer is unpickled, and numpy is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail._compat import dtype_name
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


def gather_values(given: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """What each rank has ``given``, by rank: dictionaries, lists and tuples of tensors, numbers, texts and None. Ranks
    may have tensors of different shapes."""
    tensors: list[Tensor] = []
    texts = gather_texts(json.dumps(_describe(given, tensors)), group, device)
    own = torch.cat([torch.zeros(0, dtype=torch.uint8, device=device), *(_bytes(x, device) for x in tensors)])
    lengths = gather_tensors(torch.tensor([len(own)], device=device), group, "gathering values")
    padded = own.new_zeros(max(1, *(int(length) for length in lengths)))
    padded[: len(own)] = own
    gathered = gather_tensors(padded, group, "gathering values")
    return [_rebuild(json.loads(text), part)[0] for text, part in zip(texts, gathered, strict=True)]


def _bytes(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device).reshape(-1).view(torch.uint8)


def _describe(given: Any, tensors: list[Tensor]) -> Any:
    """``given`` for JSON, as [kind, ...], without the bytes of its ``tensors``, which are collected."""
    if isinstance(given, Tensor):
        tensors.append(given)
        return ["tensor", dtype_name(given.dtype), list(given.shape)]
    if isinstance(given, Mapping):
        return ["dict", *([name, _describe(x, tensors)] for name, x in given.items())]
    if isinstance(given, list | tuple):
        return ["tuple" if isinstance(given, tuple) else "list", *(_describe(x, tensors) for x in given)]
    if isinstance(given, str | bool | int | float | None):
        return ["value", given]
    raise ValueError(f"values of type {type(given).__name__} cannot be sent to the other ranks")


def _rebuild(described: Any, data: Tensor) -> tuple[Any, Tensor]:
    """What was described, and the rest of the ``data`` of its tensors."""
    kind, *parts = described
    if kind == "value":
        return parts[0], data
    if kind == "tensor":
        dtype, shape = getattr(torch, parts[0]), torch.Size(parts[1])
        size = shape.numel() * dtype.itemsize
        return data[:size].clone().view(dtype).view(shape), data[size:]
    values = []
    for part in parts:
        value, data = _rebuild(part[1] if kind == "dict" else part, data)
        values.append(value)
    if kind == "dict":
        return dict(zip((name for name, _ in parts), values, strict=True)), data
    return (tuple(values) if kind == "tuple" else values), data

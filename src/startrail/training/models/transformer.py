"""Shared by both transformers: initial values, the type of attention functions, angles of positions, heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

# (q, k, v) -> out, all (batch, heads, tokens, head dim), k and v possibly with fewer heads. On one process it is
#   partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
# and sequence-parallel, with this rank's tokens,
#   partial(sequence.attention, causal=True)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Transformer(nn.Module, ABC):
    @abstractmethod
    def reset_parameter(self, name: str, parameter: Tensor) -> None:
        """Initialize one parameter, so that a sharded model can be filled one parameter at a time."""

    def reset_parameters(self) -> None:
        """Initialize all parameters, also of a model that was built on the meta device."""
        for name, parameter in self.named_parameters():
            self.reset_parameter(name, parameter)


def angles(positions: Tensor, count: int, base: float) -> Tensor:
    """``count`` angles for every position, from 1 radian per position down to almost 1 / base.

    In float64: at position 1,000,000 a float32 product can be off by 0.06 radians.

    >>> angles(torch.tensor([0, 3]), 2, 100.0).tolist()
    [[0.0, 0.0], [3.0, 0.30000000000000004]]
    """
    exponents = torch.arange(count, dtype=torch.float64, device=positions.device) / count
    return positions.double().unsqueeze(-1) * base**-exponents


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, tokens, width) -> (batch, heads, tokens, head dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, tokens, head dim) -> (batch, tokens, width)."""
    return x.transpose(1, 2).flatten(2)

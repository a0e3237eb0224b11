"""Checks of one tensor, and of a number that goes into it, as every call of a sequence makes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_dense(x: Tensor, name: str = "a tensor") -> None:
    """Sparse and nested tensors can be neither cut into shards nor sent."""
    if x.is_nested or x.layout is not torch.strided:
        raise ValueError(f"{name} must be dense, got {'a nested one' if x.is_nested else x.layout}")


def read_dim(x: object, dim: object) -> int:
    """The dimension of ``x``, counted from the first one.

    >>> read_dim(torch.zeros(2, 3), -1)
    1
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"need a tensor, got {type(x).__name__}")
    check_dense(x)
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim!r} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def check_value(name: str, value: object, dtype: torch.dtype) -> None:
    """Raises ``ValueError`` if a tensor of this dtype cannot hold the value.

    >>> check_value("fill_value", 0.5, torch.int64)
    Traceback (most recent call last):
    ValueError: fill_value=0.5 is not a value of torch.int64
    """
    if isinstance(value, complex):
        fits = dtype.is_complex
    elif not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= 2**63):
        fits = False
    elif dtype.is_floating_point or dtype.is_complex:
        fits = value != value or abs(value) == math.inf or abs(value) <= torch.finfo(dtype).max
    else:
        held = torch.iinfo(torch.int64 if dtype == torch.bool else dtype)  # a bool is true for every number but 0
        low, high = held.min, held.max
        fits = low <= value <= high and value == int(value)
    if not fits:
        raise ValueError(f"{name}={value!r} is not a value of {dtype}")

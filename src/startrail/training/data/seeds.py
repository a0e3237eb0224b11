"""Random numbers that depend on a key, not on the rank or the order of calls."""

from __future__ import annotations

import hashlib

import torch


def generator_of(*key: int | str) -> torch.Generator:
    """A generator seeded by a hash of ``key``, so that neighbouring keys give unrelated numbers. (With ``seed +
    epoch``, the second epoch of seed 0 would repeat the first epoch of seed 1.)"""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

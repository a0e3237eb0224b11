"""Random numbers that belong to what they are for, not to ranks or to the order of calls."""

from __future__ import annotations

import hashlib

import torch


def generator_of(*key: int | str) -> torch.Generator:
    """Random numbers that depend on all of ``key``; neighbouring keys have nothing in common.

    (A seed of ``seed + epoch`` would give seed 0 in its second epoch the numbers of seed 1 in its first.)
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

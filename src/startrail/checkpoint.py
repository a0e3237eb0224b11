"""Activation checkpointing that never repeats distributed attention.

>>> import torch
>>> from torch.utils.checkpoint import checkpoint
>>> x = torch.ones(2, requires_grad=True)
>>> y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=checkpoint_context)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from startrail.engine import op as _op


def checkpoint_context() -> Any:
    """Pass as ``context_fn``: the backward pass recomputes everything except attention, whose results are saved."""
    assert _op.attention is not None  # importing it registers the op
    return create_selective_checkpoint_contexts([torch.ops.startrail.attention.default])

"""Recomputing a block's activations when the backward pass needs them, instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from startrail.checkpoint import checkpoint_context
from startrail.training.models.dit import DiT
from startrail.training.models.gpt import GPT
from startrail.training.offload import saved_in_host_memory


def recompute_blocks(model: GPT | DiT, offload: bool) -> None:
    """Let every block keep only its input and its attention's result, and compute the rest again when it is needed.

    Distributed attention is never repeated (``startrail.checkpoint_context``). With ``offload``, the inputs wait in
    host memory. Call it before the blocks are sharded: parameters are then gathered once for both computations.
    """
    for block in model.blocks:
        block.forward = _recomputed(block.forward, offload)


def _recomputed(forward: Callable[..., Tensor], offload: bool) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        with saved_in_host_memory(offload):
            return checkpoint(
                forward, *arguments, use_reentrant=False, context_fn=checkpoint_context, preserve_rng_state=False
            )

    return run

"""Finds out which keys a transformers layer attends to.

transformers composes masks from a few functions. ``read_layer_kind`` reads the parameters of those it knows from the
composed function, and rejects any other by name.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from startrail.integrations.batch import BatchContext
from startrail.kernels import kernel_for
from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan

# Arguments that models pass to every layer but attention does not use.
UNUSED_ARGUMENTS = {
    "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "shift_labels", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """The keys that one kind of layer sees. ``blocks``: also all keys of the query's block (an image), as far as the
    window reaches."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    blocks: bool = False

    def __str__(self) -> str:
        text = "causal" if self.causal else "full"
        text += "" if self.window is None else f" window {self.window}"
        text += "" if self.chunk is None else f" chunk {self.chunk}"
        return text + (" and blocks" if self.blocks else "")


class MaskUseError(AttributeError, TypeError):
    """A layer did something with its mask other than pass it to attention."""


def _refuse(*_: object, **__: object) -> Any:
    raise MaskUseError("the model computes with its mask")


@dataclass(frozen=True)
class MaskPlaceholder:
    """Returned by the mask function in place of a mask. ``context`` is None while a model is probed.

    >>> torch.zeros(2) + MaskPlaceholder(None, LayerKind())
    Traceback (most recent call last):
    startrail.integrations.layer_masks.MaskUseError: the model computes with its mask
    """

    context: BatchContext | None
    kind: LayerKind

    __getattr__ = __getitem__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __torch_function__ = staticmethod(_refuse)


def read_layer_kind(function: Any) -> LayerKind:
    """The kind of layer that a transformers mask function describes. Raises ``ValueError`` for an unknown function."""
    if function is None or function.__qualname__ == "causal_mask_function":
        return LayerKind()
    name, closure = function.__qualname__, inspect.getclosurevars(function).nonlocals
    # shard_batch has removed padding
    if name == "bidirectional_mask_function" or name.startswith("padding_mask_function"):
        return LayerKind(causal=False)
    if name.startswith("sliding_window_overlay"):
        return LayerKind(causal=False, window=closure["sliding_window"])
    if name.startswith("sliding_window_bidirectional_overlay"):  # on each side
        return LayerKind(causal=False, window=closure["sliding_window"] + 1)
    if name.startswith("blockwise_overlay"):
        return LayerKind(causal=False, blocks=True)
    if name.startswith("chunked_overlay"):
        return LayerKind(causal=False, chunk=closure["chunk_size"])
    if name.startswith("and_masks"):
        parts = [read_layer_kind(part) for part in closure["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        chunks = [part.chunk for part in parts if part.chunk is not None]
        blocks = any(part.blocks for part in parts)
        causal = any(part.causal for part in parts)
        return LayerKind(causal, min(windows, default=None), min(chunks, default=None), blocks)
    if name.startswith("or_masks"):
        first, *rest = closure["mask_functions"]
        if len(rest) == 1 and rest[0].__qualname__.startswith("blockwise_overlay"):
            return replace(read_layer_kind(first), blocks=True)
    raise ValueError(f"unsupported mask function {name}")


def find_blocks(function: Any) -> Tensor:
    """(batch, tokens) True where the mask function of a layer with blocks has one."""
    closure = inspect.getclosurevars(function).nonlocals
    if "block_sequence_ids" in closure:
        inside: Tensor = closure["block_sequence_ids"] >= 0
        return inside
    return next(find_blocks(part) for part in closure["mask_functions"] if read_layer_kind(part).blocks)


def layer_problem(query: Tensor, key: Tensor, mask: object, dropout: float, others: dict[str, Any]) -> str | None:
    """The reason a layer cannot run, or None."""
    if mask is None:
        return (
            "it attends without the mask that startrail made (accelerate's context parallelism removes it: leave "
            "cp_size at 1, startrail shards the sequence)"
        )
    if not isinstance(mask, MaskPlaceholder):
        return f"its mask is a {type(mask).__name__}, not the one that startrail made"
    if key.shape[2] != query.shape[2]:
        return f"{query.shape[2]} queries and {key.shape[2]} keys: it uses a cache, or attends to an unsharded sequence"
    if dropout:
        return f"attention dropout {dropout}: set it to 0 in the model's config"
    implied = {"sliding_window": mask.kind.window, "is_causal": mask.kind.causal}
    for name, given in others.items():
        if name in UNUSED_ARGUMENTS or given is None or given is False:
            continue
        if name in implied and given == implied[name]:
            continue
        if name == "position_bias":
            return "position_bias: no kernel adds a bias to the logits"
        shown = tuple(given.shape) if isinstance(given, Tensor) else given
        return f"unsupported argument to attention: {name}={shown}"
    return None


def heads_problem(module: nn.Module, heads: int, plan: Plan) -> str | None:
    """The reason a plan cannot split the heads that a layer has on this rank, or None. KV heads are replicated where
    there are fewer of them."""
    if heads % plan.heads == 0:
        return None
    total = getattr(getattr(module, "config", None), "num_attention_heads", heads)
    tensor = total // heads
    return (
        f"(heads / TP) % U must be 0: ({total} / {tensor}) % {plan.heads} = {heads % plan.heads}. Plan {plan} splits "
        f"heads over U = {plan.heads} ranks, and tensor parallelism leaves {heads} of {total} query heads: use "
        + " or ".join(f"u{size}" for size in divisors(heads))
    )


def softcap_problem(query: Tensor, softcap: float) -> str | None:
    """The reason no kernel supports this softcap, or None. Always None on the meta device.

    >>> softcap_problem(torch.zeros(1, 2, 4, 8), 50.0) is None
    True
    """
    if query.device.type == "meta":
        return None
    # autocast may still turn float32 into bfloat16; if it does not, the call itself raises
    dtype = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
    try:
        kernel_for(query.device, dtype, query.shape[3], softcap)
    except ValueError as error:
        return str(error)
    return None

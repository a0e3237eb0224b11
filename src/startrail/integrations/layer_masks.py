"""What a layer of transformers asks for. What its mask lets a query see is read from the function that the mask is made
of: transformers puts masks together from few parts, and a part that is not known is refused by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from startrail.integrations.batch import Shared
from startrail.kernels import kernel_for

# What models pass on to every layer although it is not attention's business.
IRRELEVANT = {
    "cache_position",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}


@dataclass(frozen=True)
class LayerKind:
    """What one kind of layer sees."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        text = "causal" if self.causal else "full"
        text += "" if self.window is None else f" window {self.window}"
        return text + ("" if self.chunk is None else f" chunk {self.chunk}")


class MaskUseError(AttributeError, TypeError):
    """A layer used its mask other than by passing it to attention."""


def _refuse(*_: object, **__: object) -> Any:
    raise MaskUseError("the model computes with its mask")


@dataclass(frozen=True)
class MaskPlaceholder:
    """Returned by the mask function in place of a mask. ``shared`` is None while a model is tried.

    >>> torch.zeros(2) + MaskPlaceholder(None, LayerKind())
    Traceback (most recent call last):
    startrail.integrations.layer_masks.MaskUseError: the model computes with its mask
    """

    shared: Shared | None
    kind: LayerKind

    __getattr__ = __getitem__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __torch_function__ = staticmethod(_refuse)


def kind_of(function: Any) -> LayerKind:
    """What a mask function of transformers lets a query see; ``ValueError`` names what is no staircase that we know."""
    if function is None:
        return LayerKind()
    name, inside = function.__qualname__, _closure(function)
    if name == "causal_mask_function":
        return LayerKind()
    if name == "bidirectional_mask_function":
        return LayerKind(causal=False)
    if name.startswith("sliding_window_overlay"):
        return LayerKind(causal=False, window=inside["sliding_window"])
    if name.startswith("sliding_window_bidirectional_overlay"):  # that many on either side
        return LayerKind(causal=False, window=inside["sliding_window"] + 1)
    if name.startswith("chunked_overlay"):
        return LayerKind(causal=False, chunk=inside["chunk_size"])
    if name.startswith("padding_mask_function"):  # shard_batch has cut it away
        return LayerKind(causal=False)
    if name.startswith("and_masks"):
        parts = [kind_of(part) for part in inside["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        chunks = [part.chunk for part in parts if part.chunk is not None]
        return LayerKind(any(part.causal for part in parts), min(windows, default=None), min(chunks, default=None))
    raise ValueError(f"its mask is made by {name}, which startrail does not know")


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def problem_of(query: Tensor, key: Tensor, mask: object, dropout: float, others: dict[str, Any]) -> str | None:
    """Why a layer cannot be run, or None."""
    if mask is None:
        return (
            "it attends without the mask that startrail made (accelerate's context parallelism takes it away: leave "
            "cp_size at 1, startrail splits the sequence)"
        )
    if not isinstance(mask, MaskPlaceholder):
        return f"it attends under {type(mask).__name__} in place of a mask that startrail made"
    if key.shape[2] != query.shape[2]:
        return f"{query.shape[2]} queries and {key.shape[2]} keys: a cache, or attention to something that is not split"
    if dropout:
        return f"attention dropout {dropout}: set it to 0 in the model's config"
    kind = mask.kind
    for name, given in others.items():
        if name in IRRELEVANT or given is None or given is False:
            continue
        if name == "sliding_window" and given == kind.window:
            continue
        if name == "is_causal" and given == kind.causal:
            continue
        if name == "position_bias":
            return "position_bias: no kernel here adds to its logits"
        return f"it passes {name}={given if not isinstance(given, Tensor) else tuple(given.shape)} to attention"
    return None


def softcap_problem(query: Tensor, softcap: float) -> str | None:
    """Why no kernel bends the logits of these queries, or None. On the meta device nobody knows yet.

    >>> softcap_problem(torch.zeros(1, 2, 4, 8), 50.0) is None
    True
    """
    if query.device.type == "meta":
        return None
    # autocast may narrow what is float32 here; a call that stays in float32 is refused itself
    dtype = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
    try:
        kernel_for(query.device, dtype, query.shape[3], softcap)
    except ValueError as error:
        return str(error)
    return None

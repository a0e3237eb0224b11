"""Running a model's calls of ``F.scaled_dot_product_attention`` through another attention, the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SdpaPatch(TorchFunctionMode):
    """A context in which every call goes to ``attention(q, k, v, causal=, scale=)``; what that cannot do is refused
    rather than ignored."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                f"patch_sdpa: attn_mask {tuple(attn_mask.shape)} covers local tokens only, not the whole sequence; "
                "use is_causal, or sp.attention with window= or documents="
            )
        if dropout_p:
            raise ValueError(f"patch_sdpa: dropout_p={dropout_p} is not supported; set it to 0")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"patch_sdpa: {query.shape[1]} query and {key.shape[1]} key/value heads need enable_gqa=True"
            )
        return self.attention(query, key, value, causal=is_causal, scale=scale)

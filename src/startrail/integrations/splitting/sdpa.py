"""Calls of ``F.scaled_dot_product_attention``: their arguments, a mode that answers them, and whose they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from startrail._compat import without_torch_functions

torch_attention = F.scaled_dot_product_attention


class TorchCall(NamedTuple):
    """The arguments of a call of ``F.scaled_dot_product_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> TorchCall:  # fmt: skip
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def run(self) -> Tensor:
        """Torch's own attention, which no mode sees."""
        with without_torch_functions():
            return torch_attention(
                self.q, self.k, self.v, self.mask, self.dropout, self.causal, scale=self.scale, enable_gqa=self.gqa
            )

    def is_key_mask(self) -> bool:
        """True if the mask has one value per key, the same for all queries."""
        return self.mask is not None and self.mask.dim() >= 2 and self.mask.shape[-2] == 1


class AttentionMode(TorchFunctionMode):
    """Inside, ``attend`` is called in place of ``F.scaled_dot_product_attention``."""

    def __init__(self, attend: Callable[[TorchCall], Tensor], without_dropout: bool = False) -> None:
        super().__init__()
        self._attend, self._without_dropout = attend, without_dropout

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is torch_attention:
            return self._attend(TorchCall.of(*args, **options))
        if function is F.multi_head_attention_forward:  # calls attention where modes do not see it
            instead = patch.object(
                F, "scaled_dot_product_attention", lambda *a, **o: self._attend(TorchCall.of(*a, **o))
            )
            if self._without_dropout:
                options = {**options, "training": False}
            with instead, without_torch_functions():
                return function(*args, **options)
        if self._without_dropout and function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout):
            return args[0] if args else options["input"]
        return function(*args, **options)


def calling_module(default: nn.Module) -> nn.Module:
    """The innermost attached module whose method is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and "_startrail_name" in owner.__dict__:
            return owner
        frame = frame.f_back
    return default

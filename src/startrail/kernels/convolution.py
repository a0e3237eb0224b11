"""The causal depthwise convolution of a short window, which hybrid models have before their recurrences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    history: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Each channel of x (batch, channels, tokens) with its own ``weight`` (channels, width), whose last number is for
    the token itself. ``history`` (batch, channels, width - 1) is what comes before x, zeros by default. ``places``: of
    which tokens the result is; what is not finite elsewhere has no influence on gradients.

    >>> causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]]), history=torch.tensor([[[5.0]]]))
    tensor([[[51., 12., 23.]]])
    """
    channels, width = weight.shape
    before = (x.shape[0], channels, width - 1)
    if x.dim() != 3 or x.shape[1] != channels:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not have the same channels")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation!r} is not None, silu or swish")
    if history is None:
        history = x.new_zeros(before)
    elif history.shape != before:
        raise ValueError(f"history has shape {tuple(history.shape)}, expected {before}: width - 1 tokens")
    tokens = torch.cat((history, x), 2).to(weight.dtype)
    tokens = tokens if x.shape[2] else F.pad(tokens, (0, 1))  # conv1d needs a whole window
    out = F.conv1d(tokens, weight.unsqueeze(1), bias, groups=channels)[:, :, : x.shape[2]]
    out = out if places is None else out.index_select(2, places)
    return (out if activation is None else F.silu(out)).to(x.dtype)

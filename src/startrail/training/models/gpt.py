"""A GPT: RMSNorm, rotary positions, SwiGLU, grouped key/value heads. In a hybrid, most layers are gated delta nets.

Tokens interact only through the attention function, their positions, and the convolutions and scans of ``mixing``, all
arguments, so the same model runs on one process and on one rank's part of a sequence.

>>> from functools import partial
>>> from startrail.training.models.configs import GPT_CONFIGS
>>> model = GPT(GPT_CONFIGS["gpt-tiny"])
>>> tokens = torch.zeros(1, 6, dtype=torch.long)
>>> attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
>>> hidden = model(tokens, torch.arange(6), attention)
>>> hidden.shape, model.logits(hidden[:, -1]).shape
(torch.Size([1, 6, 128]), torch.Size([1, 256]))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.recurrences import gated_delta_rule
from startrail.training.models.configs import GPTConfig
from startrail.training.models.transformer import Attention, Transformer, angles, merge_heads, split_heads

NORM_EPS = 1e-5


class Mixing(Protocol):
    """What delta layers need of a sequence: `Sequence` has it, and ``OneProcess``. Tokens are in dimension 1."""

    def conv1d(self, x: Tensor, weight: Tensor, bias: None, activation: str, *, dim: int) -> Tensor: ...

    def scan(self, kernel: Callable[..., Any], *tensors: Tensor, normalize: bool) -> Tensor: ...


class OneProcess:
    """Whole sequences of one document each."""

    def conv1d(self, x: Tensor, weight: Tensor, bias: None, activation: str, *, dim: int) -> Tensor:
        return causal_conv1d(x.mT, weight, bias, activation).mT

    def scan(self, kernel: Callable[..., Any], *tensors: Tensor, normalize: bool) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            out: Tensor = kernel(*tensors, normalize=normalize).run()[0]
            return out


class GPT(Transformer):
    """Maps tokens to hidden states; the loss takes them and ``output_weight``, to avoid holding all logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        kinds = (GPTBlock if config.has_attention(layer) else DeltaBlock for layer in range(config.layers))
        self.blocks = nn.ModuleList(kind(config) for kind in kinds)
        self.norm = RMSNorm(config.width, eps=NORM_EPS)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameter(self, name: str, parameter: Tensor) -> None:
        if name.endswith("log_decay"):  # a state's decay per step, from e^-1 to e^-16, as in Mamba-2
            nn.init.uniform_(parameter, 1, 16).log_()
        elif name.endswith("step_bias"):  # of a softplus: steps from 0.001 to 0.1
            nn.init.uniform_(parameter, math.log(0.001), math.log(0.1)).exp_().expm1_().log_()
        elif name.endswith("window"):
            nn.init.uniform_(parameter, -(parameter.shape[1] ** -0.5), parameter.shape[1] ** -0.5)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            # projections into the residual stream start smaller, so that its variance does not grow with depth
            added = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if added else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, mixing: Mixing | None = None) -> Tensor:
        """(batch, n) tokens -> (batch, n, width) hidden states, normalized for the output. ``mixing``: the sequence,
        for delta layers; by default the tokens are all of one document.

        ``positions``, (n,) or (batch, n), are global: ``sequence.positions()``. With packed documents they may
        also restart in every document: rotary attention depends only on the distance of query and key, and documents do
        not attend to each other, so the result is the same.
        """
        x = self.embedding(tokens)
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # residual stream: at least float32
        turn = angles(positions, self.config.head_dim // 2, self.config.rotary_base)
        if turn.dim() == 3:
            turn = turn.unsqueeze(1)  # the same for all heads
        rotation = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        for layer, block in enumerate(self.blocks):
            attends = self.config.has_attention(layer)
            x = block(x, rotation, attention) if attends else block(x, mixing or OneProcess())
        return self.norm(x)

    @property
    def output_weight(self) -> Tensor:
        """(vocab, width): logits are hidden states times its transpose."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of a few positions, for sampling; training uses ``chunked_cross_entropy``."""
        return F.linear(hidden, self.output_weight)


class RMSNorm(nn.RMSNorm):
    """Converts bfloat16 weights to the dtype of the residual stream: torch's fused kernel needs one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """The second half of each layer, on a normalized copy that is added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.mlp_norm = RMSNorm(config.width, eps=NORM_EPS)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def after(self, x: Tensor) -> Tensor:
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPTBlock(SwiGLU):
    """One layer: attention, then SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.attention_norm = RMSNorm(config.width, eps=NORM_EPS)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (split_heads(project(y), self.head_dim) for project in (self.query, self.key, self.value))
        return self.after(x + self.output(merge_heads(attention(rotate(q, *rotation), rotate(k, *rotation), v))))


class DeltaBlock(SwiGLU):
    """One layer: a gated delta net as in Qwen3-Next, then SwiGLU. Queries, keys and values go through a convolution;
    the gated delta rule remembers values by keys; its outputs are normalized by head and gated."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head_dim, heads, kv_width = config.head_dim, config.heads, config.kv_heads * config.head_dim
        self.widths = kv_width, kv_width, config.width  # of queries, keys and values
        self.delta_norm = RMSNorm(config.width, eps=NORM_EPS)
        self.query_key_value = nn.Linear(config.width, sum(self.widths), bias=False)
        self.window = nn.Parameter(torch.empty(sum(self.widths), config.conv_width))
        self.write = nn.Linear(config.width, heads, bias=False)
        self.step = nn.Linear(config.width, heads, bias=False)
        self.step_bias, self.log_decay = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.head_norm = RMSNorm(config.head_dim, eps=NORM_EPS)
        self.output_gate = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mixing: Mixing) -> Tensor:
        y = self.delta_norm(x)
        together = mixing.conv1d(self.query_key_value(y), self.window, None, "silu", dim=1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in together.split(self.widths, -1))
        decay, bias, step = (part.to(x.dtype) for part in (self.log_decay, self.step_bias, self.step(y)))
        g = -decay.exp() * F.softplus(step + bias)
        out = mixing.scan(gated_delta_rule, q, k, v, g, self.write(y).sigmoid(), normalize=True)
        return self.after(x + self.output(self.head_norm(out).flatten(2) * F.silu(self.output_gate(y))))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (i, i + dim/2) of the last dimension by its angle, in the angles' precision.

    >>> quarter = torch.tensor([torch.pi / 2])
    >>> rotate(torch.tensor([1.0, 0.0]), quarter.cos(), quarter.sin()).round().tolist()
    [-0.0, 1.0]
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

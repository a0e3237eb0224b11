"""A GPT: RMSNorm, rotary positions, SwiGLU, grouped key/value heads.

Tokens interact only through the attention function and their positions, both arguments, so the same model runs on one
process and on one rank's part of a sequence.

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.training.models.configs import GPTConfig
from startrail.training.models.transformer import Attention, Transformer, angles, merge_heads, split_heads

NORM_EPS = 1e-5


class GPT(Transformer):
    """Maps tokens to hidden states; the loss takes them and ``output_weight``, to avoid holding all logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=NORM_EPS)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameter(self, name: str, parameter: Tensor) -> None:
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            # projections into the residual stream start smaller, so that its variance does not grow with depth
            added = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if added else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """(batch, n) tokens -> (batch, n, width) hidden states, normalized for the output.

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
        for block in self.blocks:
            x = block(x, rotation, attention)
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


class GPTBlock(nn.Module):
    """One layer: attention, then SwiGLU, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.attention_norm = RMSNorm(config.width, eps=NORM_EPS)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = RMSNorm(config.width, eps=NORM_EPS)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (split_heads(project(y), self.head_dim) for project in (self.query, self.key, self.value))
        x = x + self.output(merge_heads(attention(rotate(q, *rotation), rotate(k, *rotation), v)))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (i, i + dim/2) of the last dimension by its angle, in the angles' precision.

    >>> quarter = torch.tensor([torch.pi / 2])
    >>> rotate(torch.tensor([1.0, 0.0]), quarter.cos(), quarter.sin()).round().tolist()
    [-0.0, 1.0]
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

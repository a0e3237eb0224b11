"""Plain modules that call ``F.scaled_dot_product_attention``, as people write them, without startrail."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB = 24, 31


class Attention(nn.Module):
    def __init__(self, heads: int = 6, kv_heads: int = 6, causal: bool = False, **options) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, WIDTH // heads
        self.options = dict(options, is_causal=causal, enable_gqa=kv_heads != heads)
        self.inside = nn.Linear(WIDTH, (heads + 2 * kv_heads) * self.dim)
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inside(x).unflatten(2, (-1, self.dim)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return self.outside(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *heads: int, **options) -> None:
        super().__init__()
        self.attention, self.mlp = (
            Attention(*heads, **options),
            nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Grouped heads, learned positions counted inside, a tied head, and the loss as a second result."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        parts = dict(words=nn.Embedding(VOCAB, WIDTH), places=nn.Embedding(64, WIDTH), last=nn.LayerNorm(WIDTH))
        self.inside = nn.ModuleDict(parts)
        self.inside["blocks"] = nn.ModuleList(Block(6, 2, causal=True, scale=0.4) for _ in range(2))
        self.head, self.recompute = nn.Linear(WIDTH, VOCAB, bias=False), recompute
        self.head.weight = self.inside["words"].weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inside["words"](ids) + self.inside["places"](torch.arange(ids.shape[1]))
        for block in self.inside["blocks"]:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.inside["last"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """A class token, a table of positions, blocks in a ``Sequential``, and both kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 26, WIDTH))
        self.blocks = nn.Sequential(*(Block(3, 3) for _ in range(2)), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places)
        return self.head(x[:, 0] + x.mean(1))


class Pyramid(nn.Module):
    """The same blocks on all tokens, on means of two, and on all again. Levels or blocks are recomputed, and a stem."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.levels = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = checkpoint(self.stem, x, use_reentrant=False) if self.recompute else self.stem(x)
        x = self.level(self.levels[0], x)
        pooled = self.level(self.levels[1], x.unflatten(1, (-1, 2)).mean(2))
        return self.level(self.levels[0], x + pooled.repeat_interleave(2, 1))

    def level(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        if self.recompute == "levels":
            return checkpoint(self.run, blocks, x, use_reentrant=False)
        return self.run(blocks, x)

    def run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute == "blocks" else block(x)
        return x


def encoder(batch_first: bool = True) -> nn.Module:
    """torch's own, which calls attention inside ``F.multi_head_attention_forward``."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Stack(nn.Module):
    """Blocks, and what happens between them."""

    def __init__(self, *blocks: nn.Module, between=lambda x: x) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(blocks), between

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if not index else block(self.between(x))
        return x


class Mixed(nn.Module):
    """A block with something next to its attention."""

    def __init__(self, mix, *modules: nn.Module) -> None:
        super().__init__()
        self.attention, self.mix, self.others = Attention(causal=True), mix, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) + self.mix(x, *self.others)

"""The sizes of the models, and the named ones, as data: no torch, so that recipes need none.

>>> GPT_CONFIGS["gpt-tiny"].head_dim
16
>>> from dataclasses import replace
>>> replace(GPT_CONFIGS["gpt-tiny"], heads=6)
Traceback (most recent call last):
ValueError: width 128 is not a multiple of 6 heads
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class GPTConfig:
    """``hidden`` is the inner width of the SwiGLU; ``tied`` shares one matrix between the embedding and the output."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = False
    rotary_base: float = 500_000.0  # slow enough that positions in the hundred thousands stay apart

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_heads(self.width, self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs: head dim {self.width} / {self.heads} = {self.head_dim} is odd"
            )
        if self.rotary_base <= 1:
            raise ValueError(f"rotary_base {self.rotary_base} must be more than 1")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class DiTConfig:
    """Images of ``channels``, cut into ``rows`` x ``columns`` square patches of ``patch`` x ``patch`` pixels."""

    channels: int
    patch: int
    rows: int
    columns: int
    classes: int
    width: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_heads(self.width, self.heads)
        if self.width % 4:
            raise ValueError(f"2D sin-cos positions need a width that is a multiple of 4, got {self.width}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_heads(self) -> int:
        """As many as of queries."""
        return self.heads

    @property
    def patch_dim(self) -> int:
        return self.channels * self.patch**2

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def _check_sizes(config: GPTConfig | DiTConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int" and value < 1:
            raise ValueError(f"{field.name} {value} must be at least 1")


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of {heads} heads")


# 3b and 7b have the widths and depths of GPT-3 2.7B and 6.7B, with a SwiGLU of 8/3 of the width, which keeps their
# size; the vocabulary is GPT-2's 50,257 rounded up to a multiple of 64. tiny reads bytes.
GPT_CONFIGS = {
    "gpt-3b": GPTConfig(vocab=50_304, width=2560, layers=32, heads=32, kv_heads=32, hidden=6912),
    "gpt-7b": GPTConfig(vocab=50_304, width=4096, layers=32, heads=32, kv_heads=32, hidden=11_008),
    "gpt-tiny": GPTConfig(vocab=256, width=128, layers=4, heads=8, kv_heads=4, hidden=512, tied=True),
}

# 1b has SD3's depth, width and heads, on its 16-channel latents of a 1024 x 1024 image. tiny sees 32 x 32 RGB pixels.
DIT_CONFIGS = {
    "dit-1b": DiTConfig(channels=16, patch=2, rows=64, columns=64, classes=1000, width=1536, layers=24, heads=24),
    "dit-tiny": DiTConfig(channels=3, patch=2, rows=16, columns=16, classes=10, width=128, layers=4, heads=8),
}

"""The sizes of the models as data, without torch. The shapes of the named ones are in ``planner/models/*.toml``.

>>> GPT_CONFIGS["gpt-tiny"].head_dim
16
>>> from dataclasses import replace
>>> replace(GPT_CONFIGS["gpt-tiny"], heads=6)
Traceback (most recent call last):
ValueError: width 128 is not a multiple of 6 heads
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from startrail.planner.workload import find_model


@dataclass(frozen=True)
class GPTConfig:
    """``hidden`` is the inner width of the SwiGLU; ``tied`` shares one matrix between the embedding and the output. One
    layer in ``attention_every`` has attention, the others are gated delta nets."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = False
    rotary_base: float = 500_000.0  # slow enough to tell positions in the hundred thousands apart
    attention_every: int = 1
    conv_width: ClassVar[int] = 4  # tokens that the convolution of a delta net sees

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(
                f"rotary positions need pairs: head dim {self.width} / {self.heads} = {self.head_dim} is odd"
            )
        if self.attention_every > self.layers:
            raise ValueError(f"attention_every {self.attention_every} leaves {self.layers} layers without attention")
        if self.rotary_base <= 1:
            raise ValueError(f"rotary_base {self.rotary_base} must be more than 1")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def has_attention(self, layer: int) -> bool:
        """Each period of layers ends with attention, as in Qwen3-Next."""
        return (layer + 1) % self.attention_every == 0

    @property
    def attention_layers(self) -> int:
        return self.layers // self.attention_every


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
        if self.width % 4:
            raise ValueError(f"2D sin-cos positions need a width that is a multiple of 4, got {self.width}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_heads(self) -> int:
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
    if config.width % config.heads:
        raise ValueError(f"width {config.width} is not a multiple of {config.heads} heads")


def _gpt(name: str) -> GPTConfig:
    model = find_model(name)
    return GPTConfig(model.vocab, model.width, model.layers, model.heads, model.kv_heads, model.hidden, model.tied)


def _dit(name: str, **image: int) -> DiTConfig:
    model = find_model(name)
    return DiTConfig(**image, width=model.width, layers=model.layers, heads=model.heads)


GPT_CONFIGS = {name: _gpt(name) for name in ("gpt-3b", "gpt-7b", "gpt-tiny")}
GPT_CONFIGS["gpt-hybrid-tiny"] = replace(GPT_CONFIGS["gpt-tiny"], attention_every=4)

# dit-1b sees the 16-channel latents of a 1024 x 1024 image, dit-tiny 32 x 32 RGB pixels.
DIT_CONFIGS = {
    "dit-1b": _dit("dit-1b", channels=16, patch=2, rows=64, columns=64, classes=1000),
    "dit-tiny": _dit("dit-tiny", channels=3, patch=2, rows=16, columns=16, classes=10),
}

"""Who computes: our engine, and the rings of others, by what they launch after each block.

A block's result is added to what earlier blocks left, in kernels that are limited by memory. Ours are counted from the
code. Those of others are described by the bytes that they read and write per element, found by comparing their
published rings with their published single-GPU kernels (``validation/hardware`` names the rows).
"""

from __future__ import annotations

from dataclasses import dataclass

ZIGZAG, CONTIGUOUS, STRIPED = "zigzag", "contiguous", "striped"


@dataclass(frozen=True)
class Implementation:
    """``merge`` and ``add``: bytes moved per element of the output, and of the gradients, that a block adds to. None
    counts those of our engine: it reads the block's result, and reads and writes the sum in float32; a first result is
    only converted. ``layout``: how the sequence is cut."""

    name: str
    merge: float | None = None
    add: float | None = None
    layout: str = ZIGZAG

    def __str__(self) -> str:
        return self.name


STARTRAIL = Implementation("startrail")
RING_FLASH_ATTENTION = Implementation("ring-flash-attention", 29.0, 24.0)
RING_FLASH_CONTIGUOUS = Implementation("ring-flash-attention, contiguous", 29.0, 24.0, CONTIGUOUS)
RING_FLASH_STRIPED = Implementation("ring-flash-attention, striped", 29.0, 24.0, STRIPED)
TRANSFORMER_ENGINE = Implementation("Transformer Engine", 30.0, 44.0)

"""Engines: ours, and other libraries' rings, described by what they launch after each block.

A block's result is added to what earlier blocks left, in kernels that are limited by memory. Ours are counted from the
code. Those of others are described by the bytes that they read and write per element, found by comparing their
published rings with their published kernels: ``python -m validation.hardware.fit`` finds the numbers stated here.
"""

from __future__ import annotations

from dataclasses import dataclass

ZIGZAG, CONTIGUOUS, STRIPED = "zigzag", "contiguous", "striped"


@dataclass(frozen=True)
class Implementation:
    """``merge`` and ``add``: bytes moved per element of the output, and of the gradients, that each of several blocks
    adds to. None counts those of our engine: it reads the block's result, and reads and writes the sum in float32; a
    first result is only converted. ``layout``: how the sequence is cut. ``overlaps``: transfers run while blocks are
    computed."""

    name: str
    merge: float | None = None
    add: float | None = None
    layout: str = ZIGZAG
    overlaps: bool = True


STARTRAIL = Implementation("startrail")
RING_FLASH_ATTENTION = Implementation("ring-flash-attention", 30.0, 10.0, overlaps=False)
RING_FLASH_CONTIGUOUS = Implementation("ring-flash-attention, contiguous", 30.0, 10.0, CONTIGUOUS, False)
RING_FLASH_STRIPED = Implementation("ring-flash-attention, striped", 30.0, 10.0, STRIPED, False)
TRANSFORMER_ENGINE = Implementation("Transformer Engine", 30.0, 24.0)
TRANSFORMER_ENGINE_GATHERED = Implementation("Transformer Engine, all-gather", 0.0, 40.0)
ENGINES = {
    engine.name: engine
    for engine in (
        *(STARTRAIL, RING_FLASH_ATTENTION, RING_FLASH_CONTIGUOUS, RING_FLASH_STRIPED),
        *(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_GATHERED),
    )
}
RINGS = (RING_FLASH_ATTENTION, TRANSFORMER_ENGINE)  # Ring Attention that people use instead of ours

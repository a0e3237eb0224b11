"""Drawn digits: images that a small model learns to paint within minutes and that are easy to recognise.

A digit is a 5 x 7 glyph, enlarged to a random size, at a random place near the middle, in a random bright colour on a
dark ground. Everything follows from the seed and the number of the sample.

>>> image, label = draw_digit(0, "train", 7, size=32)
>>> image.shape, label, bool(image.min() >= -1), bool(image.max() <= 1)
(torch.Size([3, 32, 32]), 7, True, True)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.training.data.seeds import generator_of

NUM_DIGITS = 10
# One row of a glyph per number; the highest of five bits is the leftmost pixel.
GLYPHS = (
    (14, 17, 17, 17, 17, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (14, 17, 1, 6, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
HEIGHTS = (0.66, 0.84)  # of the image
SHIFT = 0.06  # of the image, each way
GROUND = -0.85


def draw_digit(seed: int, split: str, number: int, size: int) -> tuple[Tensor, int]:
    """Sample ``number`` of a split, (3, size, size) in [-1, 1], and its digit; digits take turns."""
    label = number % NUM_DIGITS
    random = torch.rand(4, generator=generator_of(seed, "digit", split, number))
    scale, x, y, hue = random.tolist()
    height = round(size * (HEIGHTS[0] + scale * (HEIGHTS[1] - HEIGHTS[0])))
    width = max(round(height * 5 / 7), 1)
    rows = torch.tensor([[row >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in GLYPHS[label]], dtype=torch.float32)
    ink = F.interpolate(rows[None, None], (height, width), mode="bilinear")[0, 0]
    ink = ((ink - 0.25) * 2).clamp(0, 1)  # sharper edges
    top, left = ((size - side) / 2 + (2 * at - 1) * SHIFT * size for side, at in ((height, y), (width, x)))
    canvas = torch.zeros(size, size)
    top, left = (min(max(round(at), 0), size - side) for at, side in ((top, height), (left, width)))
    canvas[top : top + height, left : left + width] = ink
    colour = _bright(hue).view(3, 1, 1)
    return GROUND + canvas * (colour - GROUND), label


def _bright(hue: float) -> Tensor:
    """A saturated colour in [-1, 1]."""
    channels = torch.tensor([0.0, 1 / 3, 2 / 3])
    return (1.2 * (2 * torch.pi * (channels - hue)).cos() + 0.4).clamp(-1, 1)

"""A small classifier of drawn digits, which judges what a DiT paints."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.training.data.images import NUM_DIGITS, draw_digit, read_grid
from startrail.training.tasks import GRID_COLUMNS

SIZE = 16
STEPS, BATCH, RATE = 150, 64, 2e-3
NOISE = 0.15  # of its training images, so that it does not depend on single pixels
UNSEEN = 200  # drawings that the classifier is tested with


def recognise(path: Path) -> tuple[float, str]:
    """The share of a grid's images that show the digit of their column, and a text about it."""
    images = read_grid(path, GRID_COLUMNS, SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = train_classifier()
    drawn, digits = _drawings(STEPS * BATCH, UNSEEN)
    with torch.no_grad():
        right = (classifier(drawn).argmax(1) == digits).float().mean().item()
        found = classifier(images).argmax(1)
    asked = torch.arange(len(images)) % GRID_COLUMNS
    share = (found == asked).float().mean().item()
    by_digit = ", ".join(
        f"{digit}: {int((found[asked == digit] == digit).sum())}/{int((asked == digit).sum())}"
        for digit in range(NUM_DIGITS)
    )
    text = (
        f"{path}: {share:.0%} of {len(images)} samples show the requested digit ({by_digit})\n"
        f"the classifier recognises {right:.0%} of {UNSEEN} held-out drawings that it was not trained on"
    )
    return share, text


def train_classifier() -> nn.Module:
    """Trained on held-out drawings, which no DiT is trained on."""
    widths = (3, 16, 32, 64)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Conv2d(*pair, 3, 2, 1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * (SIZE // 8) ** 2, NUM_DIGITS))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for step in range(STEPS):
        images, digits = _drawings(step * BATCH, BATCH)
        loss = F.cross_entropy(model(images + NOISE * torch.randn_like(images)), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _drawings(first: int, count: int) -> tuple[Tensor, Tensor]:
    drawn = [draw_digit(1, "held-out", number, SIZE) for number in range(first, first + count)]
    return torch.stack([image for image, _ in drawn]), torch.tensor([digit for _, digit in drawn])

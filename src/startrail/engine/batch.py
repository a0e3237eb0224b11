"""``Batch``: which rank owns which tokens of a sequence, as tensors of indices, and the calls made on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.compile.problem import Boundaries
from startrail.geometry.layout import Layout

PREPARED_CALLS = 64  # kept per batch


class Batch:
    """What all layers of a batch share: boundaries and layout, where tokens are, and the calls ``prepared`` so far."""

    def __init__(self, rank: int, layout: Layout, boundaries: Boundaries) -> None:
        self.rank, self.layout, self.boundaries = rank, layout, boundaries
        self.prepared: dict[object, Any] = {}

    def remember(self, key: object, prepared: object) -> None:
        if len(self.prepared) >= PREPARED_CALLS:
            self.prepared.clear()
        self.prepared[key] = prepared

    @property
    def local(self) -> int:
        """This rank's tokens, padding included."""
        return self.layout.counts[self.rank]

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens; those of padding are beyond the sequence."""
        return positions_of(self.layout.table[self.rank])

    def token_order(self) -> Tensor:
        """For each token of the sequence, its index among the tokens of all ranks, rank by rank, if each rank's are
        padded to as many as the most that a rank holds."""
        most = self.layout.largest
        held = torch.cat([
            F.pad(positions_of(runs), (0, most - count), value=self.layout.length)
            for runs, count in zip(self.layout.table, self.layout.counts, strict=True)
        ])  # fmt: skip
        return held.argsort(stable=True)[: self.layout.length]

    def roll_sources(self, shift: int) -> tuple[Tensor, Tensor]:
        """Where a token finds the value of the token ``shift`` before it. It is one of this rank's, or it lies near the
        edge of some run: at its beginning if the shift is negative, at its end otherwise. Returns which of its own
        tokens this rank offers, as many as every rank, and for each of its tokens the index of its source among its
        own and then those that all ranks offer."""
        amount, length, table = abs(shift), self.layout.length, self.layout.table
        offers = [
            positions_of([
                (start, min(amount, count)) if shift < 0 else (start + max(count - amount, 0), min(amount, count))
                for start, count in runs
            ])
            for runs in table
        ]  # fmt: skip
        most = max(map(len, offers))
        padded = torch.stack([F.pad(offer, (0, most - len(offer)), value=-1) for offer in offers])
        known = torch.cat((self.positions, padded.flatten()))
        values, order = known.sort(stable=True)
        wanted = (self.positions - shift).clamp(0, length - 1)
        sources = order[torch.searchsorted(values, wanted).clamp(max=len(values) - 1)]
        if not self.local:  # a rank of a small share: all ranks offer equally many
            return torch.zeros(most, dtype=torch.int64, device="cpu"), sources
        own, own_order = self.positions.sort(stable=True)
        offered = own_order[torch.searchsorted(own, padded[self.rank].clamp(min=0)).clamp(max=len(own) - 1)]
        return offered, sources


def positions_of(runs: Sequence[tuple[int, int]]) -> Tensor:
    """All positions of some runs (first position, count).

    >>> positions_of([(3, 2), (7, 1)]).tolist()
    [3, 4, 7]
    """
    total = sum(count for _, count in runs)
    starts, counts = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    before = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - before, counts, output_size=total) + torch.arange(total, device="cpu")

"""Bands: what kernels with windows of their own take in one call.

Such a kernel computes R rows x K keys under a window (left, right): row t sees the keys from t + K-R - left to
t + K-R + right, as far as there are any; -1 stands for no end. It also takes several such rectangles behind one
another, each with rows and keys of its own, in a single call. So a block that falls into hundreds of squares (packed
documents, windows) is a few calls:

>>> first = Segment(0, 4, 0, 0, 1, 1)                      # a document of four tokens, causal
>>> narrow, wide = Segment(4, 6, 4, 0, 5, 1), Segment(6, 9, 5, 1, 7, 1)    # another of five, in a window of 2
>>> for tile in bands_of([first, narrow, wide]): print(tile.form, tile.window, tile.packs)
causal (-1, -1) ()
bands (1, 0) ((5, 5),)
>>> short = Segment(4, 6, 4, 0, 5, 1)                      # two tokens fit into any window of two and more
>>> long = [Segment(0, 3, 0, 0, 1, 1), Segment(3, 4, 1, 1, 4, 1)]
>>> for tile in bands_of([*long, short]): print(tile.window, tile.packs)
(2, 0) ((4, 4), (2, 2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail.mask import Segment, Tile


@dataclass
class _Band:
    """Rows [q0, q1): row q0 + t sees keys from max(k0, t + low) to min(k1, t + high); None: from k0, to k1."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None
    high: int | None
    full: bool  # the upper end has come to k1, and stays there
    segments: list[Segment]

    @classmethod
    def of(cls, s: Segment) -> _Band:
        rows = s.q1 - s.q0
        low, high = (s.low if s.dlow and rows > 1 else None), (s.high if s.dhigh and rows > 1 else None)
        return cls(s.q0, s.q1, s.low, s.high + s.dhigh * (rows - 1), low, high, high is None, [s])

    def takes(self, s: Segment) -> bool:
        """Continue with a segment that follows, if one window still describes both."""
        t, rows = s.q0 - self.q0, s.q1 - s.q0
        if s.q0 != self.q1:
            return False
        low, high, full = self.low, self.high, self.full
        if low is not None:
            if s.low != t + low or (rows > 1 and not s.dlow):
                return False
        elif s.low == self.k0 + 1 or (s.low == self.k0 and s.dlow and rows > 1):
            if rows > 1 and not s.dlow:
                return False
            low = s.low - t
        elif s.low != self.k0:
            return False
        if full:
            if s.high != self.k1 or (rows > 1 and s.dhigh):
                if len(self.segments) > 1 or t > 1 or s.high != self.k1 + 1 or (rows > 1 and not s.dhigh):
                    return False
                high, full = s.high - t, False  # a single row so far takes either slope
        else:
            assert high is not None
            if s.high == t + high and (rows == 1 or s.dhigh):
                pass
            elif s.high in (self.k1, t + high) and (rows == 1 or not s.dhigh):
                full = True
            else:
                return False
        self.low, self.high, self.full = low, high, full
        self.q1, self.k1 = s.q1, max(self.k1, s.high + s.dhigh * (rows - 1))
        self.segments.append(s)
        return True

    @property
    def window(self) -> tuple[int, int]:
        rows, keys = self.q1 - self.q0, self.k1 - self.k0
        left = -1 if self.low is None else keys - rows - (self.low - self.k0)
        right = -1 if self.high is None else self.high - self.k0 - 1 - keys + rows
        return left, right

    def needs(self) -> tuple[int, int]:
        """From which size on an end that has none could also be written as a number."""
        return self.k1 - self.k0 - 1, self.q1 - self.q0 - 1


def bands_of(segments: Sequence[Segment]) -> list[Tile]:
    """Tiles of form ``bands`` that cover exactly what the segments see."""
    bands: list[_Band] = []
    for segment in segments:
        if not (bands and bands[-1].takes(segment)):
            bands.append(_Band.of(segment))
    tiles: list[Tile] = []
    packed: list[_Band] = []
    window = (-1, -1)
    for band in bands:
        joint = _common(packed, window, band) if packed else None
        if joint is None and packed:
            tiles.append(_tile(packed, window))
            packed = []
        window = band.window if joint is None else joint
        packed.append(band)
    return [*tiles, _tile(packed, window)] if packed else tiles


def _common(packed: list[_Band], window: tuple[int, int], band: _Band) -> tuple[int, int] | None:
    """One window for all, if there is one; their rows and keys must lie behind one another."""
    if packed[-1].q1 != band.q0 or packed[-1].k1 != band.k0:
        return None
    joint = []
    for side in range(2):
        ours, theirs = window[side], band.window[side]
        if ours == theirs:
            joint.append(ours)
        elif ours == -1 and all(theirs >= other.needs()[side] for other in packed):
            joint.append(theirs)
        elif theirs == -1 and ours >= band.needs()[side]:
            joint.append(ours)
        else:
            return None
    return joint[0], joint[1]


def _tile(packed: Sequence[_Band], window: tuple[int, int]) -> Tile:
    packs = tuple((band.q1 - band.q0, band.k1 - band.k0) for band in packed)
    if len(packs) == 1 and window in ((-1, -1), (-1, 0)):
        (rows, keys), (band,) = packs[0], packed
        if window == (-1, -1) or rows == keys:
            return Tile(band.q0, band.q1, band.k0, band.k1, "full" if window == (-1, -1) else "causal")
    bounds = tuple(segment for band in packed for segment in band.segments)
    return Tile(packed[0].q0, packed[-1].q1, packed[0].k0, packed[-1].k1, "bands", bounds, window, packs)

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

Where one window would say it but FlashAttention 2 would read another, it is two calls: four rows see all of two keys,
the fifth the last one alone.

>>> for tile in bands_of([Segment(0, 4, 0, 0, 2, 0), Segment(4, 5, 1, 0, 2, 0)]): print(tile[:5])
(0, 4, 0, 2, 'full')
(4, 5, 1, 2, 'full')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail.geometry.mask import Segment
from startrail.geometry.tiles import Tile


@dataclass(frozen=True)
class _Band:
    """Rows [q0, q1): row q0 + t sees keys from max(k0, t + low) to min(k1, t + high); None: from k0, to k1."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None
    high: int | None
    full: bool  # the upper end has come to k1, and stays there
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, s: Segment) -> _Band:
        rows = s.q1 - s.q0
        low, high = (s.low if s.dlow and rows > 1 else None), (s.high if s.dhigh and rows > 1 else None)
        return cls(s.q0, s.q1, s.low, s.high + s.dhigh * (rows - 1), low, high, high is None, (s,))

    def joined(self, s: Segment) -> _Band | None:
        """Continued with a segment that follows, if one window still describes both."""
        t, rows = s.q0 - self.q0, s.q1 - s.q0
        if s.q0 != self.q1:
            return None
        low, high, full = self.low, self.high, self.full
        if low is not None:
            if s.low != t + low or (rows > 1 and not s.dlow):
                return None
        elif s.low == self.k0 + 1 or (s.low == self.k0 and s.dlow and rows > 1):
            if rows > 1 and not s.dlow:
                return None
            low = s.low - t
        elif s.low != self.k0:
            return None
        if full:
            if s.high != self.k1 or (rows > 1 and s.dhigh):
                if len(self.segments) > 1 or t > 1 or s.high != self.k1 + 1 or (rows > 1 and not s.dhigh):
                    return None
                high, full = s.high - t, False  # a single row so far takes either slope
        else:
            assert high is not None
            if s.high == t + high and (rows == 1 or s.dhigh):
                pass
            elif s.high in (self.k1, t + high) and (rows == 1 or not s.dhigh):
                full = True
            else:
                return None
        k1 = max(self.k1, s.high + s.dhigh * (rows - 1))
        band = _Band(self.q0, s.q1, self.k0, k1, low, high, full, (*self.segments, s))
        return band if _taken_at_its_word(band.window, band.rows, band.keys) else None

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.k1 - self.k0

    @property
    def window(self) -> tuple[int, int]:
        left = -1 if self.low is None else self.keys - self.rows - (self.low - self.k0)
        right = -1 if self.high is None else self.high - self.k0 - 1 - self.keys + self.rows
        return left, right


class _KernelCall:
    """Bands behind one another that one call takes, under one window; the most rows and the most keys of any."""

    def __init__(self, band: _Band) -> None:
        self.bands, self.window, self.rows, self.keys = [band], band.window, band.rows, band.keys

    def takes(self, band: _Band) -> bool:
        """Whether there is one window for all; their rows and keys must lie behind one another."""
        last = self.bands[-1]
        if (last.q1, last.k1) != (band.q0, band.k0):
            return False
        # from which size on an end that has none could also be written as a number
        needs = (self.keys - 1, band.keys - 1), (self.rows - 1, band.rows - 1)
        joint = []
        for ours, theirs, (our_need, their_need) in zip(self.window, band.window, needs, strict=True):
            if ours == theirs or (theirs == -1 and ours >= their_need):
                joint.append(ours)
            elif ours == -1 and theirs >= our_need:
                joint.append(theirs)
            else:
                return False
        window, rows, keys = (joint[0], joint[1]), max(self.rows, band.rows), max(self.keys, band.keys)
        if not _taken_at_its_word(window, rows, keys):
            return False
        self.window, self.rows, self.keys = window, rows, keys
        self.bands.append(band)
        return True

    def tile(self) -> Tile:
        first, last = self.bands[0], self.bands[-1]
        if len(self.bands) == 1 and (self.window == (-1, -1) or (self.window == (-1, 0) and first.rows == first.keys)):
            return Tile(first.q0, first.q1, first.k0, first.k1, "full" if self.window == (-1, -1) else "causal")
        packs = tuple((band.rows, band.keys) for band in self.bands)
        bounds = tuple(segment for band in self.bands for segment in band.segments)
        return Tile(first.q0, last.q1, first.k0, last.k1, "bands", bounds, self.window, packs)


def _taken_at_its_word(window: tuple[int, int], rows: int, keys: int) -> bool:
    """Whether FlashAttention 2 sees what a window says, in a call whose longest rectangles have so many rows and keys.

    It takes a right end of ``keys`` or more for none, and none beside a left end for ``keys``. In more than keys + 1
    rows the first ones would then see too little, or too much.
    """
    return window == (-1, -1) or 0 <= window[1] < keys or rows <= keys + 1


def bands_of(segments: Sequence[Segment]) -> list[Tile]:
    """Tiles of form ``bands`` that cover exactly what the segments see."""
    bands: list[_Band] = []
    for segment in segments:
        if bands and (joined := bands[-1].joined(segment)):
            bands[-1] = joined
        else:
            bands.append(_Band.of(segment))
    calls: list[_KernelCall] = []
    for band in bands:
        if not (calls and calls[-1].takes(band)):
            calls.append(_KernelCall(band))
    return [call.tile() for call in calls]

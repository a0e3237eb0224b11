"""Bands: tiles for kernels that support windows and several sequences per call.

Such a kernel computes R rows x K keys under a window (left, right): row t sees the keys from t + K-R - left to
t + K-R + right, clipped to [0, K); -1 means unbounded. One call can also take several such rectangles, one after the
other, each with its own rows and keys. A block of hundreds of squares (packed documents, windows) is then a few calls:

>>> first = Segment(0, 4, 0, 0, 1, 1)                      # a document of four tokens, causal
>>> narrow, wide = Segment(4, 6, 4, 0, 5, 1), Segment(6, 9, 5, 1, 7, 1)    # another of five, in a window of 2
>>> for tile in bands_of([first, narrow, wide]): print(tile.form, tile.window, tile.packs)
causal (-1, -1) ()
bands (1, 0) ((5, 5),)
>>> short = Segment(4, 6, 4, 0, 5, 1)                      # two tokens fit into any window of two or more
>>> long = [Segment(0, 3, 0, 0, 1, 1), Segment(3, 4, 1, 1, 4, 1)]
>>> for tile in bands_of([*long, short]): print(tile.window, tile.packs)
(2, 0) ((4, 4), (2, 2))

Where FlashAttention 2 would misread the single window, there are two calls. Here four rows see both keys, and the
fifth row sees only the last:

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
    """Rows [q0, q1): row q0 + t sees keys [max(k0, t + low), min(k1, t + high)); None: that end is not limited."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None
    high: int | None
    full: bool  # the upper end has reached k1 and stays there
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, s: Segment) -> _Band:
        low, high = (s.low if s.dlow and s.rows > 1 else None), (s.high if s.dhigh and s.rows > 1 else None)
        return cls(s.q0, s.q1, s.low, s.last_high, low, high, high is None, (s,))

    def extended(self, s: Segment) -> _Band | None:
        """This band and the segment after it, or None if one window cannot describe both."""
        t, low, high, full = s.q0 - self.q0, self.low, self.high, self.full
        single = s.rows == 1  # a single row fits either slope
        if low is None and (s.low == self.k0 + 1 or (s.low == self.k0 and s.dlow and not single)):
            low = s.low - t
        if s.q0 != self.q1 or s.low != (self.k0 if low is None else t + low):
            return None
        if low is not None and not (single or s.dlow):
            return None
        if full and t == 1 and s.high == self.k1 + 1 and (single or s.dhigh):
            high, full = s.high - t, False
        rising = None if full or high is None else t + high
        if s.high != rising or not (single or s.dhigh):
            if s.high not in (self.k1, rising) or not (single or not s.dhigh):
                return None
            full = True
        band = _Band(self.q0, s.q1, self.k0, max(self.k1, s.last_high), low, high, full, (*self.segments, s))
        return band if _is_exact_in_fa2(band.window, band.rows, band.keys) else None

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
    """Adjacent bands that one call computes under one window. ``rows`` and ``keys`` are the maxima over the bands."""

    def __init__(self, band: _Band) -> None:
        self.bands, self.window, self.rows, self.keys = [band], band.window, band.rows, band.keys

    def try_add(self, band: _Band) -> bool:
        """Add the band if it directly follows the last one and one window fits all."""
        last, window = self.bands[-1], []
        # an unbounded end equals any bound of at least this size
        needs = (self.keys - 1, band.keys - 1), (self.rows - 1, band.rows - 1)
        for end, band_end, (need, band_need) in zip(self.window, band.window, needs, strict=True):
            if end == band_end or (band_end == -1 and end >= band_need):
                window.append(end)
            elif end == -1 and band_end >= need:
                window.append(band_end)
            else:
                return False
        left, right = window
        rows, keys = max(self.rows, band.rows), max(self.keys, band.keys)
        if (last.q1, last.k1) != (band.q0, band.k0) or not _is_exact_in_fa2((left, right), rows, keys):
            return False
        self.window, self.rows, self.keys = (left, right), rows, keys
        self.bands.append(band)
        return True

    def tile(self) -> Tile:
        first, last = self.bands[0], self.bands[-1]
        if len(self.bands) == 1 and (self.window == (-1, -1) or (self.window == (-1, 0) and first.rows == first.keys)):
            return Tile(first.q0, first.q1, first.k0, first.k1, "full" if self.window == (-1, -1) else "causal")
        packs = tuple((band.rows, band.keys) for band in self.bands)
        bounds = tuple(segment for band in self.bands for segment in band.segments)
        return Tile(first.q0, last.q1, first.k0, last.k1, "bands", bounds, self.window, packs)


def _is_exact_in_fa2(window: tuple[int, int], rows: int, keys: int) -> bool:
    """True if FlashAttention 2 applies the window as defined above; ``rows`` and ``keys`` are the call's maxima.

    It treats a right end of ``keys`` or more as unbounded, and an unbounded right end next to a left end as ``keys``.
    With more than keys + 1 rows, the first rows would then see too few keys, or too many.
    """
    return window == (-1, -1) or 0 <= window[1] < keys or rows <= keys + 1


def bands_of(segments: Sequence[Segment]) -> list[Tile]:
    """Tiles of form ``bands`` that cover exactly the pairs that the segments describe."""
    bands: list[_Band] = []
    for segment in segments:
        if bands and (extended := bands[-1].extended(segment)):
            bands[-1] = extended
        else:
            bands.append(_Band.of(segment))
    calls: list[_KernelCall] = []
    for band in bands:
        if not (calls and calls[-1].try_add(band)):
            calls.append(_KernelCall(band))
    return [call.tile() for call in calls]

"""Attention kernels as data: speeds by chip, head dim, mask and pass, from published tables. ``*.toml`` name the source
of every curve.

>>> fa3 = find_kernel("fa3", "H100")
>>> round(fa3.speed("forward", True, 128, 8192) / 1e12), round(fa3.speed("forward", False, 96, 8192) / 1e12)
(602, 584)
>>> fa3.source(128)
'FlashAttention 3 on H100 (arXiv 2407.08608, Figure 5)'
>>> find_kernel("fa4", "H100")
Traceback (most recent call last):
ValueError: kernel fa4 has no speeds for chip 'H100'; it has B200
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log, log2

from startrail.planner.units import MAX_SIZE, check_keys, find_file, parse_quantity, read_file, short_repr

LATENT_WIDTHS = 192, 128  # of the keys and values that DeepSeek's models expand from latents
MASKS, PASS_NAMES = ("full", "causal"), ("forward", "backward")
# A kernel's programs each take TILE_ROWS rows of one head, and a GPU runs PROCESSORS of them at a time: on average,
# half of the last wave is idle. The published curves have REFERENCE_PROGRAMS programs.
TILE_ROWS, PROCESSORS, REFERENCE_PROGRAMS = 128, 132, 2048


@dataclass(frozen=True)
class Curve:
    """Speed as a function of size: linear in log(size) between the points, constant outside them.

    >>> Curve(((256, 100.0), (1024, 200.0))).at(512), Curve(((256, 100.0),)).at(1)
    (150.0, 100.0)
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if size <= x1:
                return y0 + (log(size) - log(x0)) / (log(x1) - log(x0)) * (y1 - y0)
        return self.points[-1][1]

    @property
    def peak(self) -> float:
        return max(speed for _, speed in self.points)


@dataclass(frozen=True)
class KernelCurves:
    """One kernel on one chip: a curve by pass, mask and head dim. ``key`` is its name in cluster files."""

    key: str
    name: str
    chip: str
    curves: Mapping[tuple[str, str, int], Curve]
    sources: Mapping[int, str]

    def speed(self, pass_name: str, causal: bool, head_dim: int, size: float) -> float:
        """FLOP/s of a block with ``size`` tokens per side. Between head dims linear in their logarithm, outside them
        that of the nearest. A mask without a curve is as much slower than the other as in the forward pass."""
        mask, other = ("causal", "full") if causal else ("full", "causal")
        speed = self._by_dim(pass_name, mask, head_dim, size)
        if speed is None:
            alike, known = (self._by_dim("forward", name, head_dim, size) for name in (mask, other))
            speed = self._by_dim(pass_name, other, head_dim, size)
            assert speed is not None
            speed *= alike / known if alike and known else 1.0
        return speed

    def _by_dim(self, pass_name: str, mask: str, head_dim: int, size: float) -> float | None:
        dims = sorted(dim for of_pass, of_mask, dim in self.curves if (of_pass, of_mask) == (pass_name, mask))
        if not dims:
            return None
        low = max((dim for dim in dims if dim <= head_dim), default=dims[0])
        high = min((dim for dim in dims if dim >= head_dim), default=dims[-1])
        least, most = (self.curves[pass_name, mask, dim].at(size) for dim in (low, high))
        if low == high:
            return least
        return least + (most - least) * log2(head_dim / low) / log2(high / low)

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """How wide it computes keys and values: all but FlashAttention 2 take those of latent attention as they are."""
        widest = max(head_dim, value_dim)
        native = self.key != "fa2" and (head_dim, value_dim) == LATENT_WIDTHS
        return (head_dim, value_dim) if native else (widest, widest)

    def source(self, head_dim: int) -> str:
        nearest = min(self.sources, key=lambda dim: abs(log2(dim / head_dim)))
        return f"{self.name} on {self.chip} ({self.sources[nearest].partition(';')[0]})"


def occupancy(programs: float) -> float:
    """The share of a GPU that ``programs`` programs keep busy, relative to the published curves.

    >>> round(occupancy(2048), 3), round(occupancy(132), 3)
    (1.0, 0.688)
    """
    return (1 + PROCESSORS / (2 * REFERENCE_PROGRAMS)) / (1 + PROCESSORS / (2 * max(programs, 1.0)))


@lru_cache(maxsize=64)
def find_kernel(key: str, chip: str) -> KernelCurves:
    path = find_file(key, "kernels", "kernel")
    where = path.name
    table = read_file(path)
    fields = check_keys(table, ("name", "curves"), ("name", "curves"), where)
    curves: dict[tuple[str, str, int], Curve] = {}
    sources: dict[int, str] = {}
    chips = []
    if not isinstance(table["curves"], list):
        raise ValueError(f"{where}: curves must be a list of tables, [[curves]]")
    for at, item in enumerate(table["curves"]):
        keys = ("chip", "head_dim", "mask", "pass", "source", "speeds")
        each = check_keys(item, keys, keys, f"{where}: curves[{at}]")
        chips.append(each.line("chip"))
        if chips[-1] == chip:
            dim = each.integer("head_dim", most=1024)
            which = each.choice("pass", PASS_NAMES), each.choice("mask", MASKS), dim
            curves[which] = read_curve(item["speeds"], f"{where}: curves[{at}]: speeds")
            if which[0] == "forward":
                sources.setdefault(dim, each.line("source"))
    if not all(any(found[0] == name for found in curves) for name in PASS_NAMES):
        raise ValueError(f"kernel {key} has no speeds for chip {chip!r}; it has {', '.join(dict.fromkeys(chips))}")
    return KernelCurves(key, fields.line("name"), chip, curves, sources)


def read_curve(value: object, where: str) -> Curve:
    """A curve from ``[[tokens, speed], ...]``, or from one speed for all sizes."""
    pairs = [[1, value]] if isinstance(value, str) else value
    if not isinstance(pairs, list) or not pairs or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError(f"{where} = {short_repr(value)} is neither a speed nor a list of [tokens, speed]")
    points: list[tuple[float, float]] = []
    for size, speed in pairs:
        fits = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MAX_SIZE
        if not fits or (points and size <= points[-1][0]):
            raise ValueError(f"{where}: {short_repr(size)} is not a number of tokens larger than the one before")
        try:
            points.append((float(size), parse_quantity(speed, "flop/s")))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return Curve(tuple(points))

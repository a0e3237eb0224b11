"""Plots as SVG, for pages that a command writes: lines with points, and bars. Axes have labels and units, series differ
in dashes and markers as well as in colour, and colours follow the reader's light or dark theme.

>>> text = line_chart([Series("loss", [(0, 3.0), (10, 1.0)])], "step", "loss (nats per token)")
>>> text.startswith("<svg"), "loss (nats per token)" in text
(True, True)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

WIDTH, HEIGHT = 480, 240  # narrow enough to be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 34, 62
ROW, VALUE = 38, 90  # of bars: height with the name above, and width of the value
DASHES = ("", "7 4", "2 3", "10 3 2 3", "14 4", "1 6")  # one per colour
LEGEND_ROW = 18
MOST_POINTS = 600
PAGE_STYLE = """
:root { color-scheme: light dark; --back: #fbfaf7; --text: #1d1d1f; --quiet: #5c5c63; --line: #bdb9af;
  --c0: #1f5fbf; --c1: #c25700; --c2: #2c7a3f; --c3: #6c4ab0; --c4: #a3195b; --c5: #6b6500; --soft: #d8d4ca; }
@media (prefers-color-scheme: dark) { :root { --back: #16171a; --text: #f0eff2; --quiet: #a9aab2; --line: #4c4f57;
  --c0: #6ea8ff; --c1: #ffa04d; --c2: #7ed492; --c3: #b79cff; --c4: #ff8fc0; --c5: #d8cf5a; --soft: #3a3c43; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
  background: var(--back); color: var(--text); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
svg { max-width: 100%; height: auto; } figure { margin: .5rem 0; } img { max-width: 100%; height: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .5rem 1.5rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); } svg .axis { stroke: var(--line); stroke-width: 1; }
svg .quiet, .note, figcaption { fill: var(--quiet); color: var(--quiet); }
figcaption, .note { font-size: .88rem; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; } td.text { white-space: normal; min-width: 12rem; }
td:first-child { white-space: normal; min-width: 10rem; }
pre, code { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


class Series(NamedTuple):
    """``points`` are (x, y). ``dots``: points that are not joined by a line."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


class Bar(NamedTuple):
    """``low`` and ``high`` are the spread, ``limit`` a mark that the bar could reach, ``text`` the value as written."""

    name: str
    value: float
    text: str
    strong: bool = False
    low: float | None = None
    high: float | None = None
    limit: float | None = None


def line_chart(series: Sequence[Series], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """Several series over one x axis. Points that are not finite are left out."""
    kept = [each._replace(points=[point for point in each.points if all(map(isfinite, point))]) for each in series]
    points = [point for each in kept for point in each.points]
    if not points:
        return f'<p class="note">{escape(y_label)}: nothing measured yet.</p>'
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(0.0 if from_zero else min(ys), max(ys))

    def x_at(value: float) -> float:
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" opacity=".5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}</text>')
    for tick in x_ticks:
        x, anchor = x_at(tick), "end" if tick == x_ticks[-1] else "middle"  # the last one would leave the picture
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{number_text(tick)}</text>')
    for at, each in enumerate(kept):
        (colour, dash), places = _look(at), [(x_at(x), y_at(y)) for x, y in thinned(each.points)]
        if not each.dots:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        if each.dots or len(places) == 1:
            for (x, y), (_, value) in zip(places, thinned(each.points), strict=True):
                parts.append(_diamond(x, y, colour, f"{each.name}: {number_text(value)}"))
    legend, height = _legend(kept)
    parts += legend
    parts.append(
        f'<text class="quiet" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 34}" text-anchor="end">{escape(x_label)}</text>'
    )
    parts.append(f'<text class="quiet" x="0" y="14">{escape(y_label)}</text>')
    last = "; ".join(f"{each.name} ends at {number_text(each.points[-1][1])}" for each in kept if each.points)
    return _svg(height, f"{y_label} over {x_label}: {last}", parts)


def _look(at: int) -> tuple[str, str]:
    """The colour and the dashes of a series."""
    dash = DASHES[at % len(DASHES)]
    return f"var(--c{at % len(DASHES)})", f' stroke-dasharray="{dash}"' if dash else ""


def _diamond(x: float, y: float, colour: str, text: str) -> str:
    box = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" transform="rotate(45 {x:.1f} {y:.1f})"'
    return f'<rect {box} fill="{colour}"><title>{escape(text)}</title></rect>'


def _legend(series: Sequence[Series]) -> tuple[list[str], float]:
    """The names of the series, in as many rows as they need, and the height of the whole chart."""
    parts, x, y = [], LEFT, HEIGHT - 12
    for at, each in enumerate(series):
        colour, dash = _look(at)
        width = 48 + 7 * len(each.name)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        if each.dots:
            parts.append(_diamond(x + 12, y - 4, colour, each.name))
        else:
            ends = f'x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}"'
            parts.append(f'<line {ends} stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{escape(each.name)}</text>')
        x += width
    return parts, y + 12


def bar_chart(bars: Sequence[Bar], label: str, limit_name: str = "") -> str:
    """Horizontal bars from 0, each with its value as text."""
    most = max((max(bar.value, bar.high or 0.0, bar.limit or 0.0) for bar in bars), default=0.0) or 1.0
    notes = [label, f"upright mark: {limit_name}"] if limit_name else [label]
    height = ROW * len(bars) + LEGEND_ROW * len(notes) + 8
    scale = (WIDTH - VALUE) / most
    parts = []
    for at, bar in enumerate(bars):
        top = 2 + ROW * at
        y, thick = top + 16, ROW - 22
        fill = "var(--c0)" if bar.strong else "var(--soft)"
        weight = ' font-weight="600"' if bar.strong else ""
        parts.append(f'<text x="0" y="{top + 11}"{weight}>{escape(bar.name)}</text>')
        parts.append(
            f'<rect x="0.5" y="{y}" width="{max(bar.value * scale, 0.5):.1f}" height="{thick}" fill="{fill}" '
            'stroke="var(--quiet)" stroke-width=".6"/>'
        )
        end = max(bar.value, bar.high or 0.0, bar.limit or 0.0)
        middle = y + thick / 2
        if bar.low is not None and bar.high is not None:
            x0, x1 = bar.low * scale, bar.high * scale
            parts.append(f'<line x1="{x0:.1f}" y1="{middle}" x2="{x1:.1f}" y2="{middle}" stroke="var(--text)"/>')
        if bar.limit is not None:
            x = bar.limit * scale
            ends = f'x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + thick + 2}"'
            parts.append(f'<line {ends} stroke="var(--c1)" stroke-width="3"/>')
        parts.append(f'<text x="{end * scale + 8:.1f}" y="{middle + 4}"{weight}>{escape(bar.text)}</text>')
    for at, note in enumerate(notes, start=1):
        parts.append(f'<text class="quiet" x="0" y="{ROW * len(bars) + LEGEND_ROW * at}">{escape(note)}</text>')
    return _svg(height, f"{label}: " + "; ".join(f"{bar.name} {bar.text}" for bar in bars), parts)


def _svg(height: float, description: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(description)}">{"".join(parts)}</svg>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover [low, high].

    >>> ticks(0.3, 4.1)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    unit = 10 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(step * at, 12) for at in range(first, last + 1)]


def number_text(value: float) -> str:
    """
    >>> number_text(1234.0), number_text(0.25), number_text(2e6), number_text(3.14159)
    ('1,234', '0.25', '2M', '3.142')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS`` points, evenly chosen, with the first and the last."""
    if len(points) <= MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(at * last / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]


def page_text(title: str, blocks: Sequence[str]) -> str:
    """A self-contained page."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head><body>"
    )
    return "\n".join([head, *filter(None, blocks), "</body></html>", ""])


def figures(pictures: Sequence[str]) -> str:
    """Pictures side by side where there is room."""
    return f"<div class='figures'>{''.join(pictures)}</div>"


def figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def image(data: bytes, kind: str, description: str) -> str:
    """``kind``: png or svg+xml."""
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(description)}" src="data:image/{kind};base64,{text}">'

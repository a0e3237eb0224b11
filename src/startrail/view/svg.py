"""A plan as a drawing (SVG) for documents and slides: concentric rings, teams, heads and levels.

A level ``CxT`` is drawn as C concentric rings with T positions each. Ranks at the same position of all rings are a
team. A heads level is a circle of members joined by dotted lines. Each position of an outer level holds the whole
drawing of the levels inside it. Links between nodes are dashed and have another colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import asin, cos, hypot, pi, sin
from typing import NamedTuple

from startrail.geometry.mask import Mask
from startrail.planner.topology import Machine
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan
from startrail.view.matrix import is_sparse, owners_of

DOT, GAP, MARGIN = 11.0, 14.0, 26.0
MAX_DRAWN = 1024  # ranks
MAX_MATRIX_SHARDS = 32
MATRIX_SIDE = 300.0
NUMBERED, SWATCH = 14, 30  # cells that are at least this wide have numbers; others have a legend of this pitch
STYLE = """
.back{fill:#fff}.t{font:13px system-ui,sans-serif;fill:#1d1d1f}.h{font-size:17px;font-weight:600}.q{fill:#5c5c63}
.n{font:10px system-ui,sans-serif;fill:#1d1d1f;text-anchor:middle}.near{stroke:#1f5fbf;stroke-width:1.8;fill:none}
.far{stroke:#c25700;stroke-width:2.4;stroke-dasharray:7 4;fill:none}.heads{stroke-dasharray:1.5 4;stroke-linecap:round}
.team{stroke:#6c4ab0;stroke-opacity:.25;stroke-linecap:round}.level{fill:none;stroke:#bdb9af}.rank{stroke:#1d1d1f}
.tip-near{fill:#1f5fbf}.tip-far{fill:#c25700}.edge{fill:none;stroke:#bdb9af}
@media (prefers-color-scheme:dark){.back{fill:#16171a}.t,.n{fill:#f0eff2}.q{fill:#a9aab2}.near{stroke:#6ea8ff}
.far{stroke:#ffa04d}.team{stroke:#b79cff;stroke-opacity:.35}.level,.edge{stroke:#4c4f57}.rank{stroke:#f0eff2}
.tip-near{fill:#6ea8ff}.tip-far{fill:#ffa04d}.rank,.cell,.swatch{filter:brightness(.62)}}
"""


class Point(NamedTuple):
    x: float
    y: float


class Grid(NamedTuple):
    """How the members of one level are arranged: ``rings`` concentric rings of ``places``, in teams of ``team``.
    ``by_heads``: all members talk to each other."""

    rings: int
    places: int
    team: int
    by_heads: bool

    @property
    def size(self) -> int:
        return self.rings * self.places

    def spot(self, digit: int) -> tuple[int, int]:
        """The ring and the place of a member. Members of a team are consecutive."""
        if self.rings == self.team:  # teams x one ring position each
            return digit % self.team, digit // self.team
        # the paper's team groups: each has rings of its own
        team, seat = divmod(digit, self.team)
        group, place = divmod(team, self.places)
        return group * self.team + seat, place


def grids_of(plan: Plan, world: int) -> list[Grid]:
    grids = []
    for level, size in zip(plan.levels, plan.sizes(world), strict=True):
        if isinstance(level, Heads):
            grids.append(Grid(1, size, 1, True))
        else:
            grids.append(Grid(*plan.family.drawing(level, size), False))
    return grids


def svg(plan: Plan, machine: Machine, mask: Mask | None = None, length: int = 0, shares: tuple[int, ...] = ()) -> str:
    """The drawing as text. With a ``mask`` and a ``length``, the attention matrix is drawn next to the rings."""
    world = machine.world
    plan.check_world(world)
    if world > MAX_DRAWN:
        raise ValueError(f"a drawing shows at most {MAX_DRAWN} ranks, not {world}; --html shows large worlds")
    drawing = _Drawing(plan, machine)
    parts = [*drawing.draw()]
    width, height = (2 * (half + MARGIN) for half in drawing.halves)
    if mask is not None and world // plan.heads <= MAX_MATRIX_SHARDS:
        parts += _matrix(plan, world, mask, length, shares, width)
        width, height = width + MATRIX_SIDE + MARGIN, max(height, MATRIX_SIDE + 2 * MARGIN + 80)
    top, legend = 64, _legend(drawing, height + 64, "".join(parts))
    words = ", then ".join(level.describe() for level in plan.levels)
    title = f"{plan} on {world} ranks" + (f" ({machine} nodes x ranks)" if machine.nodes > 1 else "")
    width, total = max(width, 470.0), height + top + 24 * sum(line.startswith("<text") for line in legend) + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {total:.0f}" '
        f'width="{width:.0f}" height="{total:.0f}"><title>{escape(title)}</title><desc>{escape(words)}</desc>'
        f'<style>{STYLE}</style><rect class="back" width="100%" height="100%"/>'
        f'<text class="t h" x="{MARGIN}" y="30">{escape(title)}</text>'
        f'<text class="t q" x="{MARGIN}" y="50">{escape(words)}</text>'
    )
    return "\n".join([head, f'<g transform="translate(0 {top})">', *parts, "</g>", *legend, "</svg>"]) + "\n"


class _Drawing:
    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.machine = machine
        self.grids = grids_of(plan, machine.world)
        self.radii = [DOT]  # of the drawing of each level, the innermost (a rank) last
        for grid in reversed(self.grids):
            self.radii.insert(0, self.tracks(grid, self.radii[0])[-1] + self.radii[0] + (0 if grid.size == 1 else GAP))

    def tracks(self, grid: Grid, child: float) -> list[float]:
        """The radius of each ring of a level whose members have radius ``child``."""
        pitch = 2 * child + GAP
        if grid.size == 1:
            return [0.0]
        if grid.places == 1:  # a team alone: a row, given by its half width
            return [(grid.rings - 1) * pitch / 2]
        first = max(pitch / (2 * sin(pi / grid.places)), pitch / 2)
        return [first + ring * pitch for ring in range(grid.rings)]

    def at(self, level: int, digit: int, centre: Point) -> Point:
        grid, child = self.grids[level], self.radii[level + 1]
        ring, place = grid.spot(digit)
        if grid.places == 1:
            return Point(centre.x + (ring - (grid.rings - 1) / 2) * (2 * child + GAP), centre.y)
        angle = 2 * pi * place / grid.places - pi / 2
        reach = self.tracks(grid, child)[ring]
        return Point(centre.x + reach * cos(angle), centre.y + reach * sin(angle))

    def is_far(self, rank: int, peer: int) -> bool:
        return self.machine.node(rank) != self.machine.node(peer)

    @property
    def halves(self) -> Point:
        """Half of the drawing's width and height. A team alone is a row."""
        whole, inner = self.radii[0], self.radii[1]
        return Point(whole, inner + GAP) if self.grids[0].places == 1 else Point(whole, whole)

    def draw(self) -> Iterator[str]:
        centre = Point(self.halves.x + MARGIN, self.halves.y + MARGIN)
        yield from self.level(0, 0, centre)

    def level(self, at: int, first: int, centre: Point) -> Iterator[str]:
        """The members of one level from rank ``first`` on: links, then what is inside each member."""
        if at == len(self.grids):
            yield self.rank(first, centre)
            return
        grid, child = self.grids[at], self.radii[at + 1]
        span = 1
        for inner in self.grids[at + 1 :]:
            span *= inner.size
        spots = [self.at(at, digit, centre) for digit in range(grid.size)]
        ranks = [first + digit * span for digit in range(grid.size)]
        if at and grid.size > 1:
            yield f'<circle class="level" cx="{centre.x:.1f}" cy="{centre.y:.1f}" r="{self.radii[at]:.1f}"/>'
        for start in range(0, grid.size, grid.team) if grid.team > 1 else ():
            yield self.line(spots[start], spots[start + grid.team - 1], "team", f'stroke-width="{2 * child + 6:.0f}"')
        if grid.by_heads:
            for one in range(grid.size):
                for other in range(one) if grid.size <= 8 or at == 0 else ():
                    way = "far" if self.is_far(ranks[one], ranks[other]) else "near"
                    yield self.exchange(spots[one], spots[other], child, way)
        else:
            by_spot = {grid.spot(digit): digit for digit in range(grid.size)}
            for (ring, place), digit in by_spot.items() if grid.places > 1 else ():
                following = by_spot[ring, (place + 1) % grid.places]
                way = "far" if self.is_far(ranks[digit], ranks[following]) else "near"
                yield self.hop(centre, self.tracks(grid, child)[ring], place, grid.places, child, way)
        for rank, spot in zip(ranks, spots, strict=True):
            yield from self.level(at + 1, rank, spot)

    def line(self, one: Point, other: Point, kind: str, more: str = "") -> str:
        ends = f'x1="{one.x:.1f}" y1="{one.y:.1f}" x2="{other.x:.1f}" y2="{other.y:.1f}"'
        return f'<line class="{kind}" {ends} {more}/>'

    def exchange(self, one: Point, other: Point, child: float, way: str) -> str:
        """A line between the edges of two members, without a head because heads go both ways."""
        length = hypot(other.x - one.x, other.y - one.y)
        dx, dy = (other.x - one.x) / length * child, (other.y - one.y) / length * child
        return self.line(Point(one.x + dx, one.y + dy), Point(other.x - dx, other.y - dy), f"{way} heads")

    def hop(self, centre: Point, reach: float, place: int, places: int, child: float, way: str) -> str:
        """An arc of the ring from one member to the next, with an arrow head."""
        start, end = ((2 * pi * at / places - pi / 2) for at in (place, place + 1))
        trim = min(2 * asin(min((child + 2) / (2 * reach), 1.0)), 0.42 * (end - start))
        tip = 7 / reach  # the angle that the arrow head takes

        def on(angle: float, more: float = 0.0) -> str:
            return f"{centre.x + (reach + more) * cos(angle):.1f},{centre.y + (reach + more) * sin(angle):.1f}"

        start, end = start + trim, end - trim
        points = f"{on(end)} {on(end - tip, 3.5)} {on(end - tip, -3.5)}"
        arc = f'<path class="{way}" d="M{on(start)} A{reach:.1f} {reach:.1f} 0 0 1 {on(end - tip / 2)}"/>'
        return f'{arc}<polygon class="tip-{way}" points="{points}"/>'

    def rank(self, rank: int, centre: Point) -> str:
        node = self.machine.node(rank)
        return (
            f'<g><title>rank {rank}, node {node}</title><circle class="rank" cx="{centre.x:.1f}" cy="{centre.y:.1f}" '
            f'r="{DOT}" fill="{colour(node, self.machine.nodes)}"/>'
            f'<text class="n" x="{centre.x:.1f}" y="{centre.y + 3.5:.1f}">{rank}</text></g>'
        )


def colour(index: int, number: int) -> str:
    return f"hsl({360 * index // max(number, 1)} 65% 78%)"


def _legend(drawing: _Drawing, top: float, drawn: str) -> list[str]:
    """Only what the drawing has."""
    nodes = drawing.machine.nodes
    texts = {
        "near": "keys and values travel, within a node",
        "far": "keys and values travel, between nodes",
        "team": "a team: shares its queries",
        "near heads": "heads are split: all exchange with all, within a node",
        "far heads": "heads are split: all exchange with all, between nodes",
    }
    entries = [(kind, text) for kind, text in texts.items() if f'class="{kind}"' in drawn]
    lines = []
    for at, (kind, text) in enumerate(entries):
        y = top + 24 * at
        width = ' stroke-width="14"' if kind == "team" else ""
        lines.append(f'<line class="{kind}" x1="{MARGIN + 6}" y1="{y}" x2="{MARGIN + 44}" y2="{y}"{width}/>')
        lines.append(f'<text class="t" x="{MARGIN + 60}" y="{y + 4}">{escape(text)}</text>')
    if nodes > 1:
        text = "rank numbers; ranks of one node have one fill colour"
        lines.append(f'<text class="t q" x="{MARGIN}" y="{top + 24 * len(entries) + 4}">{text}</text>')
    return lines


def _matrix(plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...], left: float) -> list[str]:
    """The attention matrix in the order of tokens; cells without visible pairs stay empty."""
    sparse, top = is_sparse(mask), MARGIN
    cells, owners = owners_of(plan, world, mask, length, shares)
    unit = MATRIX_SIDE / cells
    who = "shard" if plan.heads > 1 and not sparse else "rank"
    parts = [
        f'<text class="t q" x="{left}" y="{top - 18}">{escape(str(mask))}, {length:,} tokens</text>',
        f'<text class="t q" x="{left}" y="{top}">the {who} that computes each cell</text>',
        f'<rect class="edge" x="{left}" y="{top + 10}" width="{MATRIX_SIDE}" height="{MATRIX_SIDE}"/>',
    ]
    number = world if sparse else world // plan.heads
    for (q, k), owner in owners.items():
        x, y = left + k * unit, top + 10 + q * unit
        box = f'x="{x:.2f}" y="{y:.2f}" width="{unit:.2f}" height="{unit:.2f}"'
        parts.append(f'<rect class="cell" {box} fill="{colour(owner, number)}"><title>{owner}</title></rect>')
        if unit >= NUMBERED:
            parts.append(f'<text class="n" x="{x + unit / 2:.1f}" y="{y + unit / 2 + 3.5:.1f}">{owner}</text>')
    for at, owner in enumerate(sorted({*owners.values()})) if unit < NUMBERED else ():  # whose colours these are
        x, y = left + SWATCH * (at % 10), top + 20 + MATRIX_SIDE + 18 * (at // 10)
        box = f'x="{x}" y="{y}" width="{SWATCH - 4}" height="15"'
        parts.append(f'<rect class="swatch" {box} fill="{colour(owner, number)}"/>')
        parts.append(f'<text class="n" x="{x + SWATCH / 2 - 2}" y="{y + 11}">{owner}</text>')
    return parts

"""A scan as text or drawing: the chain that states take from run to run of each document, over ranks and nodes.

>>> plan, mask = Plan.parse("1x2/1x2"), Mask(causal=True)
>>> print(chain_text(plan, 4, mask, 16))
scan of 16 tokens on 4 ranks by 1x2/1x2: several ranks hold 1 of 1 document
<BLANKLINE>
tokens 0 to 15: 7 runs, 2 states between nodes
rank 0  1 . . . . . 7
rank 1  . 2 . . . 6 .
------  -------------
rank 2  . . 3 . 5 . .
rank 3  . . . 4 . . .
<BLANKLINE>
The ranks of a node share the heads of states, so that a chain stops once per visit of a node.
>>> drawing = chain_svg(plan, 4, mask, 16)
>>> drawing.count('class="cell"'), drawing.count('class="near"'), drawing.count('class="far"')
(7, 5, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from itertools import pairwise
from math import prod

from startrail.compile.call import compile_call
from startrail.compile.problem import Boundaries, Split
from startrail.compile.scan import RunPlace, Scan, ScanPart
from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask
from startrail.schedule.plan import Plan
from startrail.view.svg import MARGIN, MAX_DRAWN, STYLE, colour

MAX_CHAINS, MAX_RUNS = 4, 48  # shown as text
ROW, WIDTH, LABEL = 18.0, 640.0, 60.0  # of a drawing
SHARED = "The ranks of a node share the heads of states, so that a chain stops once per visit of a node."
WHOLE = "Every hop is one message with a whole state."


class _Chains:
    def __init__(self, plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...]) -> None:
        split, boundaries = Split(plan, world), Boundaries(mask.documents or (0, length), shares=shares)
        (part,) = compile_call(Scan(boundaries, 1), split, 0).parts
        assert isinstance(part, ScanPart)
        sizes = [size for size in part.table.levels if size > 1]
        self.documents, self.of_ranks = boundaries.documents, part.table.of_ranks
        self.chains = [chain for chain in part.table.chains if len(chain) > 1]
        self.node = prod(sizes[1:])  # ranks of one; on one level, a rank is a node
        self.how = SHARED if part.table.inner > 1 else WHOLE
        number, total = len(self.chains), len(self.documents) - 1
        self.title = (
            f"scan of {length:,} tokens on {world} ranks by {plan}: several ranks hold {number} "
            f"of {total} document{'s' if total > 1 else ''}"
        )

    def between(self, one: RunPlace, other: RunPlace) -> bool:
        return one.rank // self.node != other.rank // self.node


def chain_text(plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...] = ()) -> str:
    """The longest chains, with each run at its rank, numbered along the chain. The mask has the documents."""
    all_of = _Chains(plan, world, mask, length, shares)
    lines = [all_of.title, ""]
    for chain in sorted(all_of.chains, key=len, reverse=True)[:MAX_CHAINS]:
        lines += [*_grid(all_of, chain), ""]
    if len(all_of.chains) > MAX_CHAINS:
        lines += [f"... and {len(all_of.chains) - MAX_CHAINS} more documents", ""]
    return "\n".join([*lines, all_of.how])


def _grid(all_of: _Chains, chain: list[RunPlace]) -> Iterator[str]:
    first = chain[0].start
    last = next(end for end in all_of.documents if end > first) - 1
    crossing = sum(all_of.between(*pair) for pair in pairwise(chain))
    yield f"tokens {first} to {last}: {len(chain)} runs, {crossing} states between nodes"
    shown, ranks = chain[:MAX_RUNS], sorted({run.rank for run in chain[:MAX_RUNS]})
    width, label = len(str(len(shown))), len(f"rank {ranks[-1]}")
    more = " ..." if len(chain) > MAX_RUNS else ""
    for at, rank in enumerate(ranks):
        if at and ranks[at - 1] // all_of.node != rank // all_of.node:
            yield "-" * label + "  " + "-" * (len(shown) * (width + 1) - 1)
        cells = ((str(number) if run.rank == rank else ".").rjust(width) for number, run in enumerate(shown, 1))
        yield f"{f'rank {rank}':{label}s}  {' '.join(cells)}{more}"


def chain_svg(plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...] = ()) -> str:
    """Ranks from top to bottom, tokens from left to right, and a line wherever a state goes to another rank."""
    if world > MAX_DRAWN:
        raise ValueError(f"a drawing shows at most {MAX_DRAWN} ranks, not {world}")
    all_of, scale = _Chains(plan, world, mask, length, shares), WIDTH / length
    nodes = world // all_of.node

    def y(rank: int) -> float:
        return 70 + ROW * (rank + 0.6 * (rank // all_of.node))

    def x(token: int) -> float:
        return MARGIN + LABEL + scale * min(token, length)

    parts = []
    for rank, runs in enumerate(all_of.of_ranks):
        parts.append(f'<text class="t q" x="{MARGIN}" y="{y(rank) + 4:.1f}">rank {rank}</text>')
        parts += _boxes(runs, length, x, y(rank), colour(rank // all_of.node, nodes))
    for chain in all_of.chains:
        for one, other in pairwise(chain):
            kind, at = "far" if all_of.between(one, other) else "near", x(other.start)
            ends = f'x1="{at:.1f}" y1="{y(one.rank):.1f}" x2="{at:.1f}" y2="{y(other.rank):.1f}"'
            parts.append(f'<line class="{kind}" {ends}/>')
            parts.append(f'<circle class="tip-{kind}" cx="{at:.1f}" cy="{y(other.rank):.1f}" r="3"/>')
    below = y(world - 1) + 40
    for number, (kind, text) in enumerate((("near", "a state goes on inside a node"), ("far", "to another node"))):
        left = MARGIN + 260 * number
        parts.append(f'<line class="{kind}" x1="{left}" y1="{below}" x2="{left + 40}" y2="{below}"/>')
        parts.append(f'<text class="t" x="{left + 50}" y="{below + 4}">{text}</text>')
    width, height = LABEL + WIDTH + 2 * MARGIN, below + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><title>{escape(all_of.title)}</title><style>{STYLE}</style>'
        f'<rect class="back" width="100%" height="100%"/>'
        f'<text class="t" x="{MARGIN}" y="30">{escape(all_of.title)}</text>'
        f'<text class="t q" x="{MARGIN}" y="50">{escape(all_of.how)}</text>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _boxes(runs: Runs, length: int, x: Callable[[int], float], y: float, fill: str) -> Iterator[str]:
    for start, count in runs:
        if start < length and count:
            size = f'width="{x(start + count) - x(start):.1f}" height="10"'
            yield f'<rect class="cell" x="{x(start):.1f}" y="{y - 5:.1f}" {size} fill="{fill}"/>'

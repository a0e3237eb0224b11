"""A schedule as a text grid with one row per step and one column per rank.

>>> from startrail.schedule.values import FORWARD
>>> print(show(Plan.parse("1x2"), 2, FORWARD, ranks=[0, 1]))
1x2 on 2 ranks, forward
sends per rank (in shards; q, k and v are 1 each): level 0: 2.0
holds at most, besides its own pieces: kv 1, accumulators: out 1
<BLANKLINE>
step  rank 0       rank 1
   0  send kv0>1   send kv1>0
      compute 0x0  compute 1x1
   1  hold kv1     hold kv0
      compute 0x1  compute 1x0
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, lane_names, stated_pieces
from startrail.schedule.values import Pass, Piece

MHA = {"q": 1.0, "kv": 2.0, "do": 1.0, "out": 1.0, "dq": 1.0, "dkv": 2.0}
CELL_WIDTH = 56  # characters per rank; longer lines are wrapped


Seen = Callable[[int, int], bool]  # True if a query of one shard sees a key of another


def _everything(row: int, column: int) -> bool:
    return True


def fitting(plan: Plan, world: int, pass_: Pass, ranks: Sequence[int], columns: int) -> int:
    """The number of ``ranks`` that fit side by side in ``columns`` characters; at least one."""
    return columns_that_fit((build_program(plan, world, rank, pass_) for rank in ranks), ranks, columns)


def columns_that_fit(programs: Iterable[Program], ranks: Sequence[int], columns: int, seen: Seen = _everything) -> int:
    width = 4
    for shown, (program, rank) in enumerate(zip(programs, ranks, strict=True)):
        width += 2 + _width(rank, _cells(program, len(program.steps), seen))
        if width > columns:
            return max(shown, 1)
    return len(ranks)


def _width(rank: int, cells: list[list[str]]) -> int:
    return max(len(f"rank {rank}"), *(len(line) for cell in cells for line in cell))


def show(plan: Plan, world: int, pass_: Pass, ranks: Sequence[int]) -> str:
    """A plan's schedule."""
    programs = [build_program(plan, world, rank, pass_) for rank in ranks]
    return "\n".join([*_summary(programs[0]), "", *grid(programs, ranks)])


def grid(programs: Sequence[Program], ranks: Sequence[int], seen: Seen = _everything) -> list[str]:
    """The lines of a grid. Blocks without visible pairs (``seen``) are left out, since they are not computed."""
    steps = max(len(program.steps) for program in programs)
    columns = [_cells(program, steps, seen) for program in programs]
    widths = [_width(rank, column) for rank, column in zip(ranks, columns, strict=True)]
    header = "step  " + "  ".join(f"rank {rank}".ljust(width) for rank, width in zip(ranks, widths, strict=True))
    lines = [header]
    for index in range(steps):
        cells = [column[index] for column in columns]
        for line in range(max(map(len, cells))):
            texts = [cell[line] if line < len(cell) else "" for cell in cells]
            label = f"{index:4d}  " if line == 0 else " " * 6
            lines.append(label + "  ".join(text.ljust(w) for text, w in zip(texts, widths, strict=True)))
    return [line.rstrip() for line in lines]


def _summary(program: Program) -> list[str]:
    place = program.place
    totals = [0.0] * len(place.sizes)
    for post, size in program.sends(MHA):
        totals[post.lane] += size / program.plan.groups  # each send is 1/groups of a shard
    lanes = [f"{name}: {total:.1f}" for name, total in zip(lane_names(place), totals, strict=True) if total]
    stated = stated_pieces(program.plan, program.pass_)
    held = ", ".join(f"{kind} {stated[kind]}" for kind in program.pass_.inputs if stated[kind])
    sums = ", ".join(f"{kind} {stated[kind]}" for kind in program.pass_.results)
    share = f" (each 1/{program.plan.groups} of a shard)" if program.plan.groups > 1 else ""
    return [
        f"{program.plan} on {place.world} ranks, {program.pass_}",
        f"sends per rank (in shards; q, k and v are 1 each): {', '.join(lanes) or 'nothing'}",
        f"holds at most, besides its own pieces: {held or 'nothing'}, accumulators: {sums}{share}",
    ]


def _cells(program: Program, steps: int, seen: Seen) -> list[list[str]]:
    """Lines of text for every step of one rank."""
    own, cells = program.place.shard, []
    held = [piece for piece in program.given if piece.shard != own]
    in_flight: list[Piece] = []
    for step, done in zip(program.steps, program.last_uses, strict=True):
        needed = {piece for block in step.blocks for piece in program.pass_.needs(block)}
        needed |= {post.piece for post in step.posts if post.send}
        held += [piece for piece in in_flight if piece in needed]
        in_flight = [piece for piece in in_flight if piece not in needed]
        lines = [f"hold {' '.join(map(str, held))}"] if held else []
        if sends := [f"{post.piece}>{post.peer}" for post in step.posts if post.send]:
            lines.append("send " + " ".join(sends))
        if blocks := [str(block) for block in step.blocks if seen(block.row, block.column)]:
            lines.append("compute " + " ".join(blocks))
        if step.merges:
            lines.append("merge " + " ".join(map(str, step.merges)))
        cells.append([part for line in lines or ["receive" if step.posts else "idle"] for part in _wrap(line)])
        in_flight += [
            p.piece for p in step.posts if not p.send and p.piece.kind in program.pass_.inputs and p.piece.shard != own
        ]
        held = [piece for piece in held if piece not in done]
    return cells + [[""]] * (steps - len(cells))


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, CELL_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

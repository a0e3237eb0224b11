"""The schedule as a text grid: a row a step, a column a rank; who holds, sends, computes and merges what.

>>> from startrail.schedule.values import FORWARD
>>> print(show(Plan.parse("1x2"), 2, FORWARD, ranks=[0, 1]))
1x2 on 2 ranks, forward
sends a rank (shards of q; k and v are 1 each): level 0: 2.0
holds beside its own at most: kv 1, sums: out 1
<BLANKLINE>
step  rank 0       rank 1
   0  send kv0>1   send kv1>0
      compute 0x0  compute 1x1
   1  hold kv1     hold kv0
      compute 0x1  compute 1x0
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, lane_names, stated_pieces
from startrail.schedule.values import INPUTS, Pass, Piece

MHA = {"q": 1.0, "kv": 2.0, "do": 1.0, "out": 1.0, "dq": 1.0, "dkv": 2.0}


CELL = 56  # characters of a rank's column; what is longer goes on in the next line


def fitting(plan: Plan, world: int, pass_: Pass, ranks: Sequence[int], columns: int) -> int:
    """How many of the ``ranks`` can be shown side by side in so many columns; at least one."""
    taken = 4
    for shown, rank in enumerate(ranks):
        program = build_program(plan, world, rank, pass_)
        cells = _cells(program, len(program.steps))
        taken += 2 + max(len(f"rank {rank}"), *(len(line) for cell in cells for line in cell))
        if taken > columns:
            return max(shown, 1)
    return len(ranks)


def show(plan: Plan, world: int, pass_: Pass, ranks: Sequence[int]) -> str:
    programs = [build_program(plan, world, rank, pass_) for rank in ranks]
    steps = max(len(program.steps) for program in programs)
    columns = [_cells(program, steps) for program in programs]
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    widths = [max(width, len(f"rank {rank}")) for width, rank in zip(widths, ranks, strict=True)]
    lines = [
        *_summary(programs[0]),
        "",
        "step  " + "  ".join(f"rank {r}".ljust(w) for r, w in zip(ranks, widths, strict=True)),
    ]
    for index in range(steps):
        cells = [column[index] for column in columns]
        for line in range(max(map(len, cells))):
            texts = [cell[line] if line < len(cell) else "" for cell in cells]
            label = f"{index:4d}  " if line == 0 else " " * 6
            lines.append(label + "  ".join(text.ljust(w) for text, w in zip(texts, widths, strict=True)))
    return "\n".join(line.rstrip() for line in lines)


def _summary(program: Program) -> list[str]:
    place = program.place
    totals = [0.0] * len(place.sizes)
    for post, size in program.sends(MHA):
        totals[post.lane] += size / program.plan.groups  # each is a share of a shard
    lanes = [f"{name}: {total:.1f}" for name, total in zip(lane_names(place), totals, strict=True) if total]
    stated = stated_pieces(program.plan, program.pass_)
    held = ", ".join(f"{kind} {stated[kind]}" for kind in program.pass_.inputs if stated[kind])
    sums = ", ".join(f"{kind} {stated[kind]}" for kind in program.pass_.results)
    return [
        f"{program.plan} on {place.world} ranks, {program.pass_}",
        f"sends a rank (shards of q; k and v are 1 each): {', '.join(lanes) or 'nothing'}",
        f"holds beside its own at most: {held or 'nothing'}, sums: {sums}" + _of_groups(program),
    ]


def _of_groups(program: Program) -> str:
    plan = program.plan
    return f" (each 1/{plan.groups} of a shard)" if plan.groups > 1 else ""


def _cells(program: Program, steps: int) -> list[list[str]]:
    """Lines of text for every step of one rank."""
    own, cells = program.place.shard, []
    held = [piece for piece in program.given if piece.shard != own]
    coming: list[Piece] = []
    for step, done in zip(program.steps, program.last_uses, strict=True):
        needed = {piece for block in step.blocks for piece in program.pass_.needs(block)}
        needed |= {post.piece for post in step.posts if post.send}
        held += [piece for piece in coming if piece in needed]
        coming = [piece for piece in coming if piece not in needed]
        lines = [f"hold {' '.join(map(str, held))}"] if held else []
        if sends := [f"{post.piece}>{post.peer}" for post in step.posts if post.send]:
            lines.append("send " + " ".join(sends))
        if step.blocks:
            lines.append("compute " + " ".join(map(str, step.blocks)))
        if step.merges:
            lines.append("merge " + " ".join(map(str, step.merges)))
        cells.append([part for line in lines or ["receive"] for part in _wrapped(line)])
        coming += [p.piece for p in step.posts if not p.send and p.piece.kind in INPUTS and p.piece.shard != own]
        held = [piece for piece in held if piece not in done]
    return cells + [[""]] * (steps - len(cells))


def _wrapped(line: str) -> list[str]:
    """The line, or if it is long, parts of it between words."""
    return textwrap.wrap(line, CELL, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

"""The schedule as a text grid: a row a step, a column a rank; who holds, sends, computes and merges what.

>>> print(show(Plan.parse("1x2"), 2, "forward", ranks=[0, 1]))
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

from collections.abc import Sequence

from startrail.plan import Plan
from startrail.schedule import INPUTS, Piece, Program, build_program, count_sends, lane_names, last_uses
from startrail.schedule.memory import stated_pieces

MHA = {"q": 1.0, "kv": 2.0, "do": 1.0, "out": 1.0, "dq": 1.0, "dkv": 2.0}


def show(plan: Plan, world: int, direction: str, ranks: Sequence[int]) -> str:
    programs = [build_program(plan, world, rank, direction) for rank in ranks]
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
    counts = count_sends(program, MHA)
    lanes = [f"{name}: {c.size:.1f}" for name, c in zip(lane_names(place), counts, strict=True) if c.hops]
    stated = stated_pieces(program.plan, place.world, program.direction)
    held = ", ".join(f"{kind} {stated[kind]}" for kind in INPUTS if stated[kind])
    sums = ", ".join(f"{kind} {stated[kind]}" for kind in program.results)
    return [
        f"{program.plan} on {place.world} ranks, {program.direction}",
        f"sends a rank (shards of q; k and v are 1 each): {', '.join(lanes) or 'nothing'}",
        f"holds beside its own at most: {held or 'nothing'}, sums: {sums}",
    ]


def _cells(program: Program, steps: int) -> list[list[str]]:
    """Lines of text for every step of one rank."""
    own, cells = program.shard, []
    held = [piece for piece in program.given if piece.shard != own]
    coming: list[Piece] = []
    for step, done in zip(program.steps, last_uses(program), strict=True):
        needed = {
            Piece(kind, block.column if kind == "kv" else block.row, block.group)
            for block in step.blocks
            for kind in INPUTS
        }
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
        cells.append(lines or ["receive"])
        coming += [p.piece for p in step.posts if not p.send and p.piece.kind in INPUTS and p.piece.shard != own]
        held = [piece for piece in held if piece not in done]
    return cells + [[""]] * (steps - len(cells))

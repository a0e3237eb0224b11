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

With a window or documents, ``show_batch`` says which programs the zones of a batch run, and prints each as a grid:

>>> print(show_batch(Plan.parse("1x4"), 4, Mask(causal=True, window=3), 32, FORWARD, [0, 1], columns=80))
32 tokens in 1 document on 4 ranks: 8 per rank, 0.0 % padding, busiest rank 1.00 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
8 (100 %)              4      direct   0.147 MB; 1x4 would send 1.573 MB
1x4 or direct: by bytes, outermost level first
<BLANKLINE>
direct forward, the zone of ranks 0 to 3
step  rank 0       rank 1
   0  send kv4>1   send kv5>0 kv6>2
      compute 0x0  compute 1x1
   1  hold kv5     hold kv4 kv7
      compute 0x5  compute 1x4 1x7
kv4: rank 0 to 1, 2 tokens
kv5: rank 1 to 0, 2 tokens
kv6: rank 1 to 2, 2 tokens
kv7: rank 2 to 1, 2 tokens
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.call import compile_call
from startrail.compile.explain import explain
from startrail.compile.problem import Boundaries, Rule, Split
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, lane_names, stated_pieces
from startrail.schedule.values import Pass, Piece

MHA = {"q": 1.0, "kv": 2.0, "do": 1.0, "out": 1.0, "dq": 1.0, "dkv": 2.0}
ASSUMED_HEADS, ASSUMED_HEAD_DIM = 32, 128  # of a batch: MHA in bfloat16
MAX_BUNDLES = 12  # listed
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
    stated = stated_pieces(program.plan, program.pass_, program.place.world)
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


def show_batch(
    plan: Plan, world: int, mask: Mask, length: int, pass_: Pass, ranks: Sequence[int], columns: int,
    sparse: bool | Rule = True,
) -> str:  # fmt: skip
    """What the first of ``ranks`` runs for a batch, and the programs of its zones on those ranks that share them.
    ``sparse`` is the rule that chooses between the plan and ``direct``."""
    problem, split = problem_of(plan, mask, length), Split(plan, world, sparse=sparse)
    call = compile_call(problem, split, ranks[0])
    texts = [explain(call)]
    for number, part in enumerate(call.parts):
        if part.zone.size > 1:
            zone = range(part.zone.first, part.zone.first + part.zone.size)
            inside = [rank for rank in ranks if rank in zone]
            parts = [problem.parts(split, call.layout, rank)[number] for rank in inside]
            texts.append(_zone_text(parts, inside, pass_, columns))
    return "\n\n".join(texts)


def problem_of(plan: Plan, mask: Mask, length: int, shares: tuple[int, ...] = ()) -> Attention:
    """A call under this mask, which includes documents."""
    boundaries, heads = Boundaries(mask.documents or (0, length), mask.blocks, shares=shares), ASSUMED_HEADS
    if heads % (plan.heads * plan.groups):
        heads = plan.heads * plan.groups
    own = replace(mask, documents=None, blocks=())
    return Attention(boundaries, 1, "bfloat16", "", own, heads, heads, ASSUMED_HEAD_DIM)


def _zone_text(parts: list[AttentionPart], ranks: list[int], pass_: Pass, columns: int) -> str:
    zone, seen = parts[0].zone, _seen(parts[0])
    programs = [part.program(pass_) for part in parts]
    shown = columns_that_fit(programs, ranks, columns, seen)
    last = zone.first + zone.size - 1
    lines = [f"{parts[0].chosen} {pass_}, the zone of ranks {zone.first} to {last}"]
    lines += grid(programs[:shown], ranks[:shown], seen)
    if (demand := parts[0].demand) is not None:
        members = {rank - zone.first for rank in ranks[:shown]}
        listed = [
            f"kv{number}: rank {zone.first + edge.sender} to {zone.first + edge.receiver}, "
            f"{sum(count for _, count in runs)} tokens"
            for number, (edge, runs) in enumerate(demand.messages.items(), zone.size)
            if {edge.sender, edge.receiver} & members
        ]
        lines += listed[:MAX_BUNDLES] + [f"... and {len(listed) - MAX_BUNDLES} more"] * (len(listed) > MAX_BUNDLES)
    return "\n".join(lines)


def _seen(part: AttentionPart) -> Seen:
    """Which blocks of a zone have visible pairs. Whatever is fetched on demand is seen."""
    if part.demand is not None:
        return lambda row, column: True
    tiles = part.tiles(Costs())
    return lambda row, column: bool(tiles(row, column))

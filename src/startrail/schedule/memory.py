"""How long a piece is needed, and how many of each kind a rank holds at once."""

from __future__ import annotations

from collections import Counter
from math import prod

from startrail.plan import Plan
from startrail.schedule.nested import nested_flow
from startrail.schedule.places import Place
from startrail.schedule.values import INPUTS, RESULTS, Piece, Program


def last_uses(program: Program) -> tuple[tuple[Piece, ...], ...]:
    """By step: the input pieces that are needed in it for the last time (received ones and own ones alike)."""
    last: dict[Piece, int] = {}
    for index, step in enumerate(program.steps):
        for post in step.posts:
            if post.piece.kind in INPUTS:
                last[post.piece] = index
        for block in step.blocks:
            for kind in INPUTS:
                piece = Piece(kind, block.column if kind == "kv" else block.row, block.group)
                if kind != "do" or program.direction == "backward":
                    last[piece] = index
    done: list[list[Piece]] = [[] for _ in program.steps]
    for piece, index in last.items():
        if piece not in program.kept:
            done[index].append(piece)
    return tuple(map(tuple, done))


def peak_pieces(program: Program) -> dict[str, int]:
    """The most pieces of each kind that a rank holds at once beside its own: received inputs, and for results the
    accumulators (``out``, ``dq``, ``dkv``) and the partial results on their way in (``out<`` and so on)."""
    own, lane_of_heads = program.shard, program.place.heads_lane
    forward = program.direction == "forward"
    live = {piece for piece in program.given if piece.shard != own}
    sums: set[Piece] = set()
    now: Counter[str] = Counter(piece.kind for piece in live)
    peak = dict.fromkeys((*INPUTS, *RESULTS, *(f"{kind}<" for kind in RESULTS)), 0)

    def add(pieces: set[Piece], piece: Piece) -> None:
        if piece not in pieces:
            pieces.add(piece)
            now[piece.kind] += 1

    def drop(pieces: set[Piece], piece: Piece) -> None:
        if piece in pieces:
            pieces.remove(piece)
            now[piece.kind] -= 1

    for step, done in zip(program.steps, last_uses(program), strict=True):
        for post in step.posts:
            if post.lane == lane_of_heads:
                continue
            if post.piece.kind in INPUTS:
                if not post.send and post.piece.shard != own:
                    add(live, post.piece)
            elif post.send:
                drop(sums, post.piece)
            else:
                now[f"{post.piece.kind}<"] += 1
        for row, column, group in step.blocks:
            add(sums, Piece("out" if forward else "dq", row, group))
            if not forward:
                add(sums, Piece("dkv", column, group))
        for merge in step.merges:
            add(sums, merge.piece)
        for kind, number in now.items():
            if number > peak[kind]:
                peak[kind] = number
        for merge in step.merges:
            now[f"{merge.piece.kind}<"] -= 1
        for piece in done:
            drop(live, piece)
    return peak


def stated_pieces(plan: Plan, world: int, direction: str) -> dict[str, int]:
    """The closed form that bounds ``peak_pieces``: the memory that a plan promises to stay within.

    >>> stated_pieces(Plan.parse("2x4"), 8, "forward")["kv"]           # double buffering
    2
    >>> stated_pieces(Plan.parse("2x4,keep=all"), 8, "forward")["kv"]  # all four columns but its own
    3
    """
    place = Place.of(plan, world, 0)
    if plan.star:
        stated = _star_pieces(plan.star, direction, plan.keep)
    else:
        flow = nested_flow(direction, plan.backward, plan.keep)
        teams, rings = [level.team for level in plan.levels], [level.ring for level in plan.levels]
        team, ring = prod(teams), prod(rings)
        team_levels, ring_levels = sum(size > 1 for size in teams), sum(size > 1 for size in rings)
        shared, passed = ("q", "kv") if flow.rows_in_team else ("kv", "q")
        buffers = sum(min(size - 1, 2) for size in rings)  # one in use, one on its way, at every level
        stated = {shared: team - 1, passed: ring - 1 if plan.keep == "all" else buffers}
        if direction == "backward":
            stated["do"] = stated["q"]
        for kinds, number, levels in (
            (flow.team_out, team, team_levels),
            (flow.ring_out, 2 * ring_levels, ring_levels),
        ):
            for kind in kinds:  # sums, and partial results that come in: two a level, three if they let a group pass
                stated[kind] = max(number, 1)
                stated[f"{kind}<"] = (3 if plan.groups > 1 else 2) * levels
    kinds = (*INPUTS, *RESULTS, *(f"{kind}<" for kind in RESULTS))
    return {kind: stated.get(kind, 0) * place.plan.groups for kind in kinds}


def _star_pieces(team: int, direction: str, keep: str) -> dict[str, int]:
    if direction == "forward":  # the gathered team's keys, the placed ones, and the next hop's
        kept = team if keep == "all" else 0
        return {"q": team - 1, "kv": 3 * team - 1 + kept, "out": team, "out<": team - 1}
    columns = team if keep == "all" else 2 * team - 1
    return {
        "q": 2 * team,
        "do": 2 * team,
        "kv": columns,
        "dq": 2 * team,
        "dq<": 2 * team,
        "dkv": team,
        "dkv<": team,
    }

"""A program as the executor walks it: its transfers as messages with tags, what each block needs and makes, and when a
piece is no longer needed. Worked out once for each program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from startrail.comm.lanes import TAGS_PER_PAIR, Message
from startrail.schedule.program import Program
from startrail.schedule.values import Piece, Step


class CompiledBlock(NamedTuple):
    row: int
    column: int
    needs: list[Piece]
    makes: list[Piece]


@dataclass(frozen=True)
class CompiledStep:
    step: Step
    label: str
    messages: tuple[Message, ...]
    exchanged: tuple[Piece, ...]  # over heads
    all_to_all: int | None  # the lane, if they are an exchange between all that are on it
    blocks: tuple[CompiledBlock, ...]
    done: tuple[Piece, ...]  # inputs that are not needed after this step


@lru_cache(maxsize=256)
def compile_program(program: Program) -> tuple[CompiledStep, ...]:
    """Labels, messages and lifetimes, worked out once."""
    counts: dict[tuple[bool, int, int], int] = {}
    compiled = []
    for index, (step, done) in enumerate(zip(program.steps, program.last_uses, strict=True)):
        over_heads = [post for post in step.posts if program.is_part(post)]
        exchanged = tuple(dict.fromkeys(post.piece for post in over_heads))
        whole = [(post, (post.piece,)) for post in step.posts if not program.is_part(post)]
        first = [post for post in over_heads if post.piece == exchanged[0]]  # one message a peer, for all pieces
        messages = []
        for post, pieces in (*((post, exchanged) for post in first), *whole):
            key = (post.send, post.lane, post.peer)
            counts[key] = counts.get(key, 0) + 1
            messages.append(Message(*key, pieces, program.is_part(post), counts[key] % TAGS_PER_PAIR))
        text = str(step)
        label = f"startrail {program.pass_} {index}: {text if len(text) < 160 else text[:157] + '...'}"
        blocks = tuple(
            CompiledBlock(b.row, b.column, program.pass_.needs(b), program.pass_.makes(b)) for b in step.blocks
        )
        at_once = _all_to_all_lane(program, messages[: len(first)])
        compiled.append(CompiledStep(step, label, tuple(messages), exchanged, at_once, blocks, done))
    return tuple(compiled)


def _all_to_all_lane(program: Program, messages: list[Message]) -> int | None:
    place = program.place
    lanes = {message.lane for message in messages}
    if len(lanes) != 1 or len(messages) != 2 * (place.num_heads - 1):
        return None
    (lane,) = lanes
    return lane if place.lane_ranks(lane) == place.shard_ranks(place.shard) else None


@lru_cache(maxsize=256)
def heads_of(program: Program) -> dict[int, int]:
    """Which head each rank of our shard computes."""
    return {rank: head for head, rank in enumerate(program.place.shard_ranks(program.place.shard))}

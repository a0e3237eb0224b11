"""A program as a flat list of events, in the order in which its rank handles them.

The engine's runner and the planner's pricing both handle these events, so the planner times exactly what runs: the same
messages, waits and copies at the same points. A walk encodes the rules that both follow: the parts of all pieces that
a step exchanges over heads form one message per peer, a rank's own piece is packed before its first send, and a piece
is awaited and prepared when it is first needed.

>>> from startrail.schedule.plan import Plan
>>> from startrail.schedule.program import build_program
>>> from startrail.schedule.values import FORWARD
>>> for step in walk_of(build_program(Plan.parse("1x2"), 2, 0, FORWARD)).steps:
...     print(step.label)
...     print("   ", ", ".join(type(event).__name__ for event in step.events))
startrail forward 0: post kv1<1@0 kv0>1@0 | 0x0
    Post, Prepare, Prepare, Compute
startrail forward 1: 0x1
    Await, Prepare, Compute
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

from startrail.schedule.program import Program
from startrail.schedule.values import Block, Piece, Transfer

MAX_PARTS = 8  # programs that one pass can consist of
TAGS_PER_PART = 1 << 8
TAGS_PER_PAIR = MAX_PARTS * TAGS_PER_PART
LABEL_LENGTH = 160  # of a step's text, at most


class Message(NamedTuple):
    """One message: a whole piece or, when heads are exchanged, the parts of all pieces that a step exchanges."""

    send: bool
    lane: int
    peer: int
    pieces: tuple[Piece, ...]
    tag: int  # counts the messages to (or from) the peer over the lane
    number: int  # counts the messages of the program
    head: int | None = None  # over heads: index of the share of the heads that the peer computes
    packs: bool = False  # the piece is copied into one buffer first


class Await(NamedTuple):
    """Wait for an input piece that is still in flight."""

    piece: Piece
    messages: list[int]
    in_parts: bool  # it arrives over heads, and its parts must be joined


class Post(NamedTuple):
    """Post these messages; ``exchanged`` are the pieces that go over heads."""

    messages: list[Message]
    exchanged: tuple[Piece, ...]


class Prepare(NamedTuple):
    """Prepare an input piece for the first block that uses it."""

    piece: Piece


class Compute(NamedTuple):
    """Compute one block."""

    block: Block
    needs: list[Piece]


class Combine(NamedTuple):
    """Wait for a partial result and merge it."""

    piece: Piece
    message: int


Event = Await | Post | Prepare | Compute | Combine


class Finish(NamedTuple):
    """After the last step: store the results, and wait for whatever is still in flight. Only traces name it."""

    messages: list[int]  # those that bring the rank's own results over heads


# Called after an event was handled: the program, the step, the event, and the seconds at which it began and ended.
EventHook = Callable[[Program, int, Event | Finish, float, float], None]


class WalkStep(NamedTuple):
    program: Program
    number: int
    events: list[Event]

    @property
    def label(self) -> str:
        """The name of the step in traces and profiles."""
        text = str(self.program.steps[self.number])
        short = text if len(text) < LABEL_LENGTH else text[: LABEL_LENGTH - 3] + "..."
        return f"startrail {self.program.pass_} {self.number}: {short}"


class Walk(NamedTuple):
    """``results`` are the pieces that the caller gets at the end; the messages in ``home`` bring their parts."""

    steps: list[WalkStep]
    results: list[Piece]
    home: list[int]

    def next_results(self, after: int) -> Post | None:
        """The first post after this step that exchanges results over heads."""
        for step in self.steps[after + 1 :]:
            results = step.program.pass_.results
            for event in step.events:
                if isinstance(event, Post) and any(piece.kind in results for piece in event.exchanged):
                    return event
        return None


@lru_cache(maxsize=256)
def walk_of(program: Program) -> Walk:
    """The walk of a program, computed once."""
    walker = Walker(program)
    return Walk(list(walker.steps()), walker.results, walker.home)


class Walker:
    """Goes through a program once. The planner does so for thousands of long programs and keeps none of the events.

    After the last step, ``results`` are the pieces that the caller gets. The messages in ``home`` carry their parts
    over heads, and those in ``sends`` must have completed.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.place = program, program.place
        over_heads = self.place.num_heads > 1
        self.joined = set(program.own_inputs if over_heads else ())
        # pieces held in one buffer: kept ones, and own ones that are joined from parts
        views = set() if over_heads else set(program.own_inputs) - set(program.kept)
        self.packed = set(program.given) - views
        self.counts: dict[tuple[bool, int, int], int] = {}
        self.in_flight: dict[Piece, list[int]] = {}
        self.partials: dict[tuple[Piece, int], deque[int]] = {}
        self.prepared: set[Piece] = set()
        self.number = 0
        self.results: list[Piece] = [] if over_heads else program.own(program.pass_.results)
        self.home: list[int] = []
        self.sends: list[int] = []

    def steps(self) -> Iterator[WalkStep]:
        program, in_flight, joined = self.program, self.in_flight, self.joined
        prepared = self.prepared
        for number, step in enumerate(program.steps):
            events: list[Event] = []
            for piece in (*step.after, *(post.piece for post in step.posts if post.send)):
                if piece in in_flight:
                    events.append(Await(piece, in_flight.pop(piece), piece in joined))
            if step.posts:
                events.append(self.post(step.posts))
            for block in step.blocks:
                needs = program.pass_.needs(block)
                for piece in needs:
                    if piece in in_flight:
                        events.append(Await(piece, in_flight.pop(piece), piece in joined))
                    if piece not in prepared:
                        prepared.add(piece)
                        events.append(Prepare(piece))
                events.append(Compute(block, needs))
            for piece, peer in step.merges:
                events.append(Combine(piece, self.partials[piece, peer].popleft()))
            yield WalkStep(program, number, events)

    def post(self, posts: tuple[Transfer, ...]) -> Post:
        by_heads, results, messages = self.place.by_heads, self.program.pass_.results, []
        parts = [post for post in posts if by_heads[post.lane]]
        exchanged = tuple(dict.fromkeys(post.piece for post in parts))
        self.results += [piece for piece in exchanged if piece.kind in results]
        heads = self.head_of_rank if parts else {}
        for send, lane, piece, peer in parts:
            if piece == exchanged[0]:
                messages.append(self.message(send, lane, peer, exchanged, heads[peer], False))
                for each in () if send else exchanged:
                    numbers = self.home if each.kind in results else self.in_flight.setdefault(each, [])
                    numbers.append(messages[-1].number)
        for send, lane, piece, peer in posts:
            if by_heads[lane]:
                continue
            messages.append(self.message(send, lane, peer, (piece,), None, send and piece not in self.packed))
            if piece.kind not in results:
                self.packed.add(piece)
                if not send:
                    self.in_flight[piece] = [self.number]
                    self.prepared.discard(piece)
            elif not send:
                self.partials.setdefault((piece, peer), deque()).append(self.number)
        return Post(messages, exchanged)

    @cached_property
    def head_of_rank(self) -> dict[int, int]:
        """Index of the share of the heads that each rank of our shard computes."""
        ranks = self.place.shard_ranks(self.place.shard)
        return {self.program.first + rank: head for head, rank in enumerate(ranks)}

    def message(
        self, send: bool, lane: int, peer: int, pieces: tuple[Piece, ...], head: int | None, packs: bool
    ) -> Message:
        key = send, lane, peer
        count = self.counts[key] = self.counts.get(key, 0) + 1
        self.number += 1
        if send:
            self.sends.append(self.number)
        return Message(send, lane, peer, pieces, count % TAGS_PER_PART, self.number, head, packs)

"""The values that schedules are made of: plain tuples, no torch, each with a short text form.

A rank's ``Program`` is a list of ``Step``s. A step posts its transfers (first waiting for whatever it sends), computes
its blocks (waiting for the pieces they need), then merges partial results that have arrived:

>>> step = Step((Transfer(True, 0, Piece("kv", 3, 0), 5),), (Block(1, 3, 0),), (Merge(Piece("out", 1, 0), 2),))
>>> str(step)
'post kv3>5@0 | 1x3 | merge out1<2'

Piece kinds: ``q`` queries, ``kv`` keys and values, ``do`` output gradients with lse and delta are inputs;
``out`` partial outputs with lse, ``dq`` and ``dkv`` gradients are results, which add up on the way to their owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from startrail.plan import Plan
from startrail.schedule.places import Place

INPUTS = ("q", "kv", "do")
RESULTS = ("out", "dq", "dkv")


class Piece(NamedTuple):
    """What is moved: the part of ``shard`` that group ``group`` of the heads (or of the batch) needs."""

    kind: str
    shard: int
    group: int

    def __str__(self) -> str:
        return f"{self.kind}{self.shard}" + (f".{self.group}" if self.group else "")


class Transfer(NamedTuple):
    """``piece`` goes to (or comes from) rank ``peer`` over ``lane``; lane = number of levels is the heads lane.

    On the heads lane a piece travels in parts: to each peer the heads that it computes (inputs) or the tokens that it
    owns (results).
    """

    send: bool
    lane: int
    piece: Piece
    peer: int

    def __str__(self) -> str:
        return f"{self.piece}{'>' if self.send else '<'}{self.peer}@{self.lane}"


class Block(NamedTuple):
    """Attention of query shard ``row`` to key/value shard ``column``."""

    row: int
    column: int
    group: int

    def __str__(self) -> str:
        return f"{self.row}x{self.column}" + (f".{self.group}" if self.group else "")


class Merge(NamedTuple):
    """Add the partial result that ``peer`` sent to our own."""

    piece: Piece
    peer: int

    def __str__(self) -> str:
        return f"{self.piece}<{self.peer}"


class Step(NamedTuple):
    posts: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()
    merges: tuple[Merge, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.posts:
            parts.append("post " + " ".join(map(str, self.posts)))
        if self.blocks:
            parts.append(" ".join(map(str, self.blocks)))
        if self.merges:
            parts.append("merge " + " ".join(map(str, self.merges)))
        return " | ".join(parts)


@dataclass(frozen=True)
class Program:
    """What one rank does in one pass. ``given`` are the input pieces it has at the start (its own ones, and what the
    forward pass kept); ``kept`` those that it must still have at the end; ``results`` the kinds it produces."""

    plan: Plan
    place: Place
    direction: str
    steps: tuple[Step, ...]
    given: tuple[Piece, ...]
    kept: tuple[Piece, ...]
    results: tuple[str, ...]

    @property
    def shard(self) -> int:
        return self.place.shard

    @property
    def groups(self) -> range:
        return range(self.plan.groups)

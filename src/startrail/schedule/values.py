"""The values that schedules are made of: plain tuples, no torch, each with a short text form.

A rank's program is a list of ``Step``s. A step waits for the pieces in ``after``, posts its transfers (waiting for
whatever it sends), computes its blocks (waiting for the pieces they need), then merges partial results that came in:

>>> step = Step((Transfer(True, 0, Piece("kv", 3, 0), 5),), (Block(1, 3, 0),), (Merge(Piece("out", 1, 0), 2),))
>>> str(step)
'post kv3>5@0 | 1x3 | merge out1<2'

Kinds of pieces: ``q`` queries, ``kv`` keys and values, ``do`` output gradients with lse and delta go in; ``out``
partial outputs with lse, ``dq`` and ``dkv`` gradients come out, and add up on the way to their owner. What a ``Pass``
takes in and gives, and what a block needs and makes, is said here and nowhere else:

>>> [str(piece) for piece in BACKWARD.needs(Block(1, 3, 0))], [str(piece) for piece in BACKWARD.makes(Block(1, 3, 0))]
(['q1', 'do1', 'kv3'], ['dq1', 'dkv3'])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

INPUTS = ("q", "do", "kv")
RESULTS = ("out", "dq", "dkv")
KINDS = (*INPUTS, *RESULTS)
BY_COLUMN = ("kv", "dkv")  # belong to a key/value shard; all others to a query shard


class Piece(NamedTuple):
    """The unit of transfer: what group ``group`` of the heads (or of the batch) needs of ``shard``."""

    kind: str
    shard: int
    group: int

    def __str__(self) -> str:
        return f"{self.kind}{self.shard}" + (f".{self.group}" if self.group else "")


class Transfer(NamedTuple):
    """``piece`` goes to (or comes from) rank ``peer`` over ``lane``, the level of the plan whose links it crosses.

    On the lane of a heads level a piece travels in parts: to each peer the heads that it computes (inputs) or the
    tokens that it owns (results).
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
    after: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        named = (("after ", self.after), ("post ", self.posts), ("", self.blocks), ("merge ", self.merges))
        return " | ".join(name + " ".join(map(str, values)) for name, values in named if values)


@dataclass(frozen=True)
class Pass:
    """Forward or backward. ``enters`` are the kinds that a caller's own tokens come in as, ``inputs`` those that a
    block needs, ``results`` those that it makes. Over heads a pass exchanges what enters, and its results."""

    name: str
    enters: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def exchanged(self) -> tuple[str, ...]:
        return self.enters + self.results

    def needs(self, block: Block) -> list[Piece]:
        return _pieces(self.inputs, block)

    def makes(self, block: Block) -> list[Piece]:
        return _pieces(self.results, block)

    def __str__(self) -> str:
        return self.name


FORWARD = Pass("forward", ("q", "kv"), ("q", "kv"), ("out",))
BACKWARD = Pass("backward", ("do",), ("q", "do", "kv"), ("dq", "dkv"))
PASSES = (FORWARD, BACKWARD)


def _pieces(kinds: Iterable[str], block: Block) -> list[Piece]:
    return [Piece(kind, block.column if kind in BY_COLUMN else block.row, block.group) for kind in kinds]

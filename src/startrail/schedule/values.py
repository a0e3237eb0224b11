"""The values that schedules consist of: plain tuples, each with a short text form.

A rank's program is a list of ``Step``s. A step waits for the pieces in ``after``, posts its transfers (after waiting
for the pieces it sends), computes its blocks (after waiting for their inputs), then merges the partial results it
received:

>>> step = Step((Transfer(True, 0, Piece("kv", 3, 0), 5),), (Block(1, 3, 0),), (Merge(Piece("out", 1, 0), 2),))
>>> str(step)
'post kv3>5@0 | 1x3 | merge out1<2'

A ``Pass`` defines the kinds of its inputs and results, and those of a block. Attention reads ``q`` (queries), ``kv``
(keys and values) and ``do`` (output gradients with lse and delta), and adds to ``out`` (partial outputs with lse),
``dq`` and ``dkv`` (gradients). Partial results are summed on the way to their owner:

>>> [str(piece) for piece in BACKWARD.needs(Block(1, 3, 0))], [str(piece) for piece in BACKWARD.makes(Block(1, 3, 0))]
(['q1', 'do1', 'kv3'], ['dq1', 'dkv3'])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """The unit of transfer: the part of ``shard`` that belongs to group ``group`` of the heads (or of the batch)."""

    kind: str
    shard: int
    group: int

    def __str__(self) -> str:
        return f"{self.kind}{self.shard}" + (f".{self.group}" if self.group else "")


class Transfer(NamedTuple):
    """Sends ``piece`` to rank ``peer``, or receives it, over ``lane``: the level of the plan whose links it crosses.

    On the lane of a heads level a piece is sent in parts: each peer gets the heads that it computes (inputs) or the
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
    """Add the partial result that ``peer`` sent to the local one."""

    piece: Piece
    peer: int

    def __str__(self) -> str:
        return f"{self.piece}<{self.peer}"


class Step(NamedTuple):
    posts: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()
    merges: tuple[Merge, ...] = ()
    after: tuple[Piece, ...] = ()

    def shifted(self, first: int) -> Step:
        """The same step with ``first`` added to all ranks."""
        posts = tuple(post._replace(peer=post.peer + first) for post in self.posts)
        merges = tuple(merge._replace(peer=merge.peer + first) for merge in self.merges)
        return self._replace(posts=posts, merges=merges)

    def __str__(self) -> str:
        parts = (("after ", self.after), ("post ", self.posts), ("", self.blocks), ("merge ", self.merges))
        return " | ".join(label + " ".join(map(str, values)) for label, values in parts if values)


class Source(NamedTuple):
    """Where some tokens of a bundle lie at its sender: ``tokens`` tokens of ``shard`` (the rank's own, or a bundle that
    it received) from index ``start`` on."""

    shard: int
    start: int
    tokens: int


class Bundle(NamedTuple):
    """A piece that holds some tokens of a shard, or of several: ``runs`` of positions (first, count), sorted.
    ``sources`` are known to the sender only."""

    runs: tuple[tuple[int, int], ...]
    sources: tuple[Source, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class Pass:
    """One direction of a kind of call. ``enters`` are the kinds made from the caller's own tokens, ``inputs`` those
    that a block reads, ``results`` those that it adds to. A heads level exchanges the entering kinds and the results.
    Pieces of the kinds ``by_column`` are named after the column of a block, all others after its row."""

    name: str
    enters: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    by_column: tuple[str, ...]
    is_forward: bool

    def needs(self, block: Block) -> list[Piece]:
        return self._pieces(self.inputs, block)

    def makes(self, block: Block) -> list[Piece]:
        return self._pieces(self.results, block)

    def _pieces(self, kinds: Iterable[str], block: Block) -> list[Piece]:
        shards = (block.column if kind in self.by_column else block.row for kind in kinds)
        return [Piece(kind, shard, block.group) for kind, shard in zip(kinds, shards, strict=True)]

    def __str__(self) -> str:
        return self.name


FORWARD = Pass("forward", ("q", "kv"), ("q", "kv"), ("out",), ("kv",), True)
BACKWARD = Pass("backward", ("do",), ("q", "do", "kv"), ("dq", "dkv"), ("kv", "dkv"), False)
PASSES = (FORWARD, BACKWARD)
KINDS = (*BACKWARD.inputs, *FORWARD.results, *BACKWARD.results)

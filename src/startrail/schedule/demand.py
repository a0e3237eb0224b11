"""The keys that each rank needs of the others, the messages that bring them, and the steps of these messages.

It follows from two tables of runs (first position, count) per rank: the tokens that it owns, and those of others that
it needs. Tokens that several ranks of a node need cross the link to that node once: one of these ranks gets them first
and passes them on. On two nodes of two ranks, every rank owns four tokens and needs the two before them; rank 2 also
needs two more of rank 0:

>>> owned, needed = [((4 * rank, 4),) for rank in range(4)], [(), ((2, 2),), ((2, 2), (6, 2)), ((10, 2),)]
>>> demand = Demand.of(owned, needed, sizes=(2, 2))
>>> for (depth, sender, receiver), runs in demand.messages.items(): print(depth, f"{sender} to {receiver}", runs)
0 0 to 1 ((2, 2),)
0 0 to 2 ((2, 2),)
0 1 to 2 ((6, 2),)
0 2 to 3 ((10, 2),)
>>> demand.tokens_by_level()                  # four tokens between nodes, four inside them
(4, 4)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from startrail.schedule.places import to_digits
from startrail.schedule.values import Block, Bundle, Merge, Piece, Source, Step, Transfer

Runs = tuple[tuple[int, int], ...]

NARROW = 4  # a demand is narrow if no rank fetches more than this many times its own tokens


class Edge(NamedTuple):
    """A message: what ``sender`` sends to ``receiver`` after ``depth`` earlier messages have brought it there."""

    depth: int
    sender: int
    receiver: int


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, since each is made once
class Demand:
    """All messages that bring each rank the tokens it needs, in the order of their numbers. ``pieces`` splits the
    runs of a message by where its sender has them from: None for its own tokens, else the message that brought them.
    """

    owned: tuple[Runs, ...]
    sizes: tuple[int, ...]
    pieces: dict[Edge, tuple[tuple[int, int, Edge | None], ...]]

    @classmethod
    def of(cls, owned: Sequence[Runs], needed: Sequence[Runs], sizes: Sequence[int]) -> Demand:
        """``needed`` must not contain a rank's own tokens. ``sizes``: ranks at every level, outermost first."""
        tree = lru_cache(maxsize=None)(lambda owner, ranks: tuple(_deliver(owner, ranks, tuple(sizes))))
        pieces: dict[Edge, list[tuple[int, int, Edge | None]]] = {}
        for start, count, owner, ranks in _regions(owned, needed):
            for edge, source in tree(owner, ranks):
                pieces.setdefault(edge, []).append((start, count, source))
        return cls(tuple(owned), tuple(sizes), {edge: tuple(pieces[edge]) for edge in sorted(pieces)})

    @classmethod
    def all_of(cls, ranks: int) -> Demand:
        """Every rank needs all keys: those of a shard stand for one token."""
        owned = [((rank, 1),) for rank in range(ranks)]
        needed = [tuple((other, 1) for other in range(ranks) if other != rank) for rank in range(ranks)]
        return cls.of(owned, needed, (ranks,))

    @cached_property
    def messages(self) -> dict[Edge, Runs]:
        """The runs of every message, sorted by position."""
        return {edge: _merged((start, count) for start, count, _ in of_edge) for edge, of_edge in self.pieces.items()}

    @cached_property
    def depth(self) -> int:
        """How many messages in a row bring a token to the last rank that needs it."""
        return 1 + max((edge.depth for edge in self.pieces), default=-1)

    def level(self, edge: Edge) -> int:
        """The outermost level at which sender and receiver differ."""
        pairs = zip(to_digits(edge.sender, self.sizes), to_digits(edge.receiver, self.sizes), strict=True)
        return next(level for level, (a, b) in enumerate(pairs) if a != b)

    def tokens_by_level(self, sender: int | None = None, receiver: int | None = None) -> tuple[int, ...]:
        """The tokens whose keys are sent over each level's links: all, or those of one sender or receiver."""
        tokens = [0] * len(self.sizes)
        for edge, runs in self.messages.items():
            if sender in (None, edge.sender) and receiver in (None, edge.receiver):
                tokens[self.level(edge)] += sum(count for _, count in runs)
        return tuple(tokens)

    def bundles(self, rank: int) -> dict[Edge, tuple[int, Bundle]]:
        """The bundles that a rank sends or receives, each with its number. Numbers start after those of the ranks."""
        numbers = {edge: number for number, edge in enumerate(self.messages, len(self.owned))}
        made = {}
        for edge, number in numbers.items():
            if rank not in (edge.sender, edge.receiver):
                continue
            sources: tuple[Source, ...] = ()
            if edge.sender == rank:
                sources = tuple(
                    Source(rank if at is None else numbers[at], self._index(rank, at, start), count)
                    for start, count, at in self.pieces[edge]
                )
            made[edge] = number, Bundle(self.messages[edge], sources)
        return made

    def _index(self, rank: int, edge: Edge | None, position: int) -> int:
        """The index of a token among those of a rank, or of a message."""
        starts, indices = self._starts(rank, edge)
        at = bisect_right(starts, position) - 1
        return indices[at] + position - starts[at]

    def _starts(self, rank: int, edge: Edge | None) -> tuple[list[int], list[int]]:
        key = rank if edge is None else edge
        if key not in self._cache:
            runs = self.owned[rank] if edge is None else self.messages[edge]
            indices, total = [], 0
            for _, count in runs:
                indices.append(total)
                total += count
            self._cache[key] = [start for start, _ in runs], indices
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[int | Edge, tuple[list[int], list[int]]]:
        return {}


def fetch_steps(demand: Demand, rank: int, kind: str) -> list[Step]:
    """Messages bring each rank what it needs of others. It computes a block with its own piece, and one with each
    message when it has arrived."""
    bundles = demand.bundles(rank)
    steps: list[Step] = []
    for depth in range(demand.depth + 1):
        arrived = [number for e, (number, _) in bundles.items() if e.receiver == rank and e.depth == depth - 1]
        sources = {s.shard for edge, (_, b) in bundles.items() if edge.depth == depth for s in b.sources}
        after = tuple(Piece(kind, number, 0) for number in sorted(sources - {rank}))
        blocks = tuple(Block(rank, column, 0) for column in (arrived if depth else [rank]))
        steps.append(Step(_posts(demand, bundles, rank, kind, depth), blocks, after=after))
    return [step for step in steps if step != Step()]


def return_steps(demand: Demand, rank: int, kind: str) -> list[Step]:
    """Gradients take the way of what was fetched in reverse: a rank that passed it on adds the gradients that come back
    to its own before it returns them."""
    bundles, steps = demand.bundles(rank), []
    for depth in reversed(range(demand.depth)):
        merges = tuple(
            Merge(Piece(kind, number, 0), edge.receiver)
            for edge, (number, _) in bundles.items()
            if edge.sender == rank and edge.depth == depth
        )
        steps.append(Step(_posts(demand, bundles, rank, kind, depth, back=True), merges=merges))
    return [step for step in steps if step != Step()]


def _posts(
    demand: Demand, bundles: Mapping[Edge, tuple[int, Bundle]], rank: int, kind: str, depth: int, back: bool = False
) -> tuple[Transfer, ...]:
    """The messages of one depth, receives first. ``back``: from their receivers to their senders."""
    lane = len(demand.sizes)
    return tuple(
        Transfer(send, lane + demand.level(edge), Piece(kind, number, 0), edge.sender + edge.receiver - rank)
        for send in (False, True)
        for edge, (number, _) in bundles.items()
        if edge.depth == depth and (rank == (edge.receiver if back else edge.sender)) == send
    )


def _regions(owned: Sequence[Runs], needed: Sequence[Runs]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Runs of tokens with one owner that the same ranks need: first position, count, owner, ranks; by position."""
    edges: list[tuple[int, int, int]] = []  # position, and the rank that begins or ends to need tokens there
    for rank, runs in enumerate(needed):
        for start, count in runs:
            edges += [(start, 1, rank), (start + count, -1, rank)]
    edges.sort()
    owners = sorted((start, start + count, rank) for rank, runs in enumerate(owned) for start, count in runs)
    active: set[int] = set()
    number = 0
    for (position, change, rank), (stop, *_) in pairwise(edges):
        (active.add if change > 0 else active.discard)(rank)
        if not active or stop == position:
            continue
        ranks = tuple(sorted(active))
        while owners[number][1] <= position:
            number += 1
        at, index = position, number
        while at < stop:
            until = min(stop, owners[index][1])
            yield at, until - at, owners[index][2], ranks
            at, index = until, index + 1


def _deliver(owner: int, ranks: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Edge, Edge | None]]:
    """The messages that bring tokens from their owner to ``ranks``, each with the one that brings them to its sender.

    At each level one of the ranks of every other subtree gets them and passes them on inside; which one depends on the
    owner, so that no rank does it for all.
    """
    waiting: list[tuple[int, tuple[int, ...], int, Edge | None]] = [(owner, ranks, 0, None)]
    while waiting:
        holder, others, level, source = waiting.pop()
        if not others or level == len(sizes):
            continue
        size = prod(sizes[level + 1 :])
        groups: dict[int, list[int]] = {}
        for rank in others:
            groups.setdefault(rank // size, []).append(rank)
        for subtree, members in groups.items():
            if subtree == holder // size:
                waiting.append((holder, tuple(members), level + 1, source))
                continue
            relay = min(members, key=lambda rank: (rank - owner) % size)
            edge = Edge(0 if source is None else source.depth + 1, holder, relay)
            yield edge, source
            waiting.append((relay, tuple(rank for rank in members if rank != relay), level + 1, edge))


def _merged(runs: Iterator[tuple[int, int]]) -> Runs:
    """Sorted runs with adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for start, count in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + count
        else:
            merged.append((start, count))
    return tuple(merged)

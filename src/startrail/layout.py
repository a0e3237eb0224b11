"""Layout: which tokens of the sequence a rank owns, and how to get back from shards to the sequence.

The sequence is padded to a whole number of chunks. ``zigzag`` cuts 2P chunks and gives rank i the chunks i and 2P-1-i,
so that under a causal mask every rank has the same work in every block; ``contiguous`` cuts P chunks.

>>> layout = Layout("zigzag", world=2, length=7)
>>> layout.chunk, layout.local
(2, 4)
>>> layout.runs(0)            # rank 0 owns 0, 1 and 6 (7 would be padding); a run is (first position, count)
((0, 2), (6, 1))
>>> layout.runs(1)
((2, 2), (4, 2))
>>> layout.order()            # the positions in the order in which the ranks hold them, padding included
[0, 1, 6, 7, 2, 3, 4, 5]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

LAYOUTS = ("zigzag", "contiguous")
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    kind: str
    world: int
    length: int

    def __post_init__(self) -> None:
        check_layout(self.kind)
        if self.world < 1 or self.length < 1:
            raise ValueError(f"layout needs world >= 1 and length >= 1, got world {self.world}, length {self.length}")

    @cached_property
    def chunks_per_rank(self) -> int:
        return chunks_per_rank(self.kind, self.world)

    @cached_property
    def chunk(self) -> int:
        """Tokens in a chunk, padding included."""
        return -(-self.length // (self.chunks_per_rank * self.world))

    @cached_property
    def local(self) -> int:
        """Tokens that every rank holds, padding included."""
        return self.chunk * self.chunks_per_rank

    def chunks(self, rank: int) -> tuple[int, ...]:
        if self.chunks_per_rank == 1:
            return (rank,)
        return (rank, 2 * self.world - 1 - rank)

    def runs(self, shard: int, ranks: int = 1) -> Runs:
        """Runs of real tokens, in order, that ``ranks`` neighbouring ranks hold: ``shard`` counts such neighbourhoods.

        Sorted by position the tokens of a neighbourhood are one run a chunk of its own coarser layout, and since
        padding has the highest positions, the real tokens come first.
        """
        coarse = Layout(self.kind, self.world // ranks, self.length)
        size = self.local * ranks // self.chunks_per_rank
        if coarse.chunks_per_rank < self.chunks_per_rank:  # all ranks together: the two runs meet in the middle
            size *= 2
        runs = ((index * size, min(size, self.length - index * size)) for index in coarse.chunks(shard))
        return tuple((start, count) for start, count in runs if count > 0)

    def slots(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Where the chunks of each of ``ranks`` neighbours stand among all of theirs, sorted by position.

        >>> Layout("zigzag", world=4, length=8).slots(2)         # ranks 0, 1 hold 0, 7 and 1, 6: sorted 0 1 6 7
        ((0, 3), (1, 2))
        """
        if self.chunks_per_rank == 1:
            return tuple((member,) for member in range(ranks))
        return tuple((member, 2 * ranks - 1 - member) for member in range(ranks))

    def order(self) -> list[int]:
        """Position of every token of the padded sequence, rank after rank."""
        return [
            chunk * self.chunk + i
            for rank in range(self.world)
            for chunk in self.chunks(rank)
            for i in range(self.chunk)
        ]

    def positions(self, rank: int) -> list[int]:
        """Global positions of a rank's tokens; padding repeats the last position, so that a table of ``length``
        entries always suffices."""
        last = self.length - 1
        return [min(chunk * self.chunk + i, last) for chunk in self.chunks(rank) for i in range(self.chunk)]


def check_layout(kind: str) -> None:
    if kind not in LAYOUTS:
        raise ValueError(f"layout {kind!r} is not one of {', '.join(LAYOUTS)}")


def chunks_per_rank(kind: str, world: int) -> int:
    """Zigzag on one rank is the sequence itself: nothing to balance, so nothing to pad."""
    return 2 if kind == "zigzag" and world > 1 else 1


def layout_of_local(kind: str, world: int, local: int, length: int | None) -> Layout:
    """The layout of a call whose ranks hold ``local`` tokens each; ``ValueError`` unless they fit ``length``."""
    if length is None:
        per_rank = chunks_per_rank(kind, world)
        if local < 1 or local % per_rank:
            raise ValueError(
                f"{kind} shards hold {per_rank} equal chunks, but this rank has {local} local tokens; "
                "shard with sp.shard(), which pads, and pass length="
            )
        return Layout(kind, world, local * world)
    layout = Layout(kind, world, length)
    if layout.local != local:
        raise ValueError(
            f"length {length} on {world} ranks gives {layout.local} local tokens a rank ({kind}, "
            f"{layout.chunks_per_rank} x {layout.chunk}), but this rank has {local}"
        )
    return layout

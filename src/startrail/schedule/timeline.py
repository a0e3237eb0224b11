"""Builds a list of steps in order, with results that are posted some steps later."""

from __future__ import annotations

from collections.abc import Iterable

from startrail.schedule.values import Block, Merge, Step, Transfer


class Timeline:
    """Steps in order. ``defer`` posts results at a later step and merges those received after that step or the next, so
    that the transfer overlaps with the blocks of at least one step.

    >>> from startrail.schedule.values import Piece
    >>> line = Timeline()
    >>> line.add(blocks=[Block(1, 0, 0)])
    >>> line.defer(line.next_index, [Transfer(True, 0, Piece("out", 1, 0), 1)], [Merge(Piece("out", 0, 0), 1)])
    >>> line.add(blocks=[Block(0, 0, 0)])
    >>> [str(step) for step in line.finish()]
    ['1x0', 'post out1>1@0 | 0x0', 'merge out0<1']
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._posts: dict[int, list[Transfer]] = {}
        self._merges: dict[int, list[Merge]] = {}
        self._last: list[Merge] = []

    @property
    def next_index(self) -> int:
        return len(self.steps)

    def add(self, posts: Iterable[Transfer] = (), blocks: Iterable[Block] = (), merges: Iterable[Merge] = ()) -> None:
        index = len(self.steps)
        posts = (*self._posts.pop(index, ()), *posts)
        merges = (*merges, *self._merges.pop(index, ()))
        self.steps.append(Step(posts, tuple(blocks), merges))

    def defer(self, due: int, posts: Iterable[Transfer], merges: Iterable[Merge], merge_delay: int = 1) -> None:
        """Post at step ``due`` and merge ``merge_delay`` steps later (0: after the blocks of the same step)."""
        assert due >= self.next_index
        self._posts.setdefault(due, []).extend(posts)
        self._merges.setdefault(due + merge_delay, []).extend(merges)

    def postpone(self, shard: int) -> None:
        """Merge the results of ``shard`` that are on their way after all other steps."""
        for index, merges in self._merges.items():
            self._last += [merge for merge in merges if merge.piece.shard == shard]
            self._merges[index] = [merge for merge in merges if merge.piece.shard != shard]

    def finish(self) -> list[Step]:
        while self._posts or self._merges:
            self.add()
        if self._last:
            self.add(merges=self._last)
        return self.steps  # with empty steps: they keep the ranks in step until groups are composed

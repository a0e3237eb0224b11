"""Building a list of steps in order, with results that leave a little later."""

from __future__ import annotations

from collections.abc import Iterable

from startrail.schedule.values import Block, Merge, Step, Transfer


class Timeline:
    """Steps in order. ``later`` posts results at a coming step and merges what comes in after that step or the next, so
    that a result has at least one step's blocks to travel under.

    >>> from startrail.schedule.values import Piece
    >>> line = Timeline()
    >>> line.emit(blocks=[Block(1, 0, 0)])
    >>> line.later(line.now + 1, [Transfer(True, 0, Piece("out", 1, 0), 1)], [Merge(Piece("out", 0, 0), 1)])
    >>> line.emit(blocks=[Block(0, 0, 0)])
    >>> [str(step) for step in line.finish()]
    ['1x0', 'post out1>1@0 | 0x0', 'merge out0<1']
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._posts: dict[int, list[Transfer]] = {}
        self._merges: dict[int, list[Merge]] = {}

    @property
    def now(self) -> int:
        """Index of the step emitted last."""
        return len(self.steps) - 1

    def emit(self, posts: Iterable[Transfer] = (), blocks: Iterable[Block] = (), merges: Iterable[Merge] = ()) -> None:
        index = len(self.steps)
        posts = (*self._posts.pop(index, ()), *posts)
        merges = (*merges, *self._merges.pop(index, ()))
        self.steps.append(Step(posts, tuple(blocks), merges))

    def later(self, due: int, posts: Iterable[Transfer], merges: Iterable[Merge], rest: int = 1) -> None:
        """Post at step ``due``, and merge ``rest`` steps after it (0: after the blocks of that very step)."""
        assert due > self.now
        self._posts.setdefault(due, []).extend(posts)
        self._merges.setdefault(due + rest, []).extend(merges)

    def finish(self) -> list[Step]:
        while self._posts or self._merges:
            self.emit()
        return self.steps  # empty steps stay for now: they keep the ranks in step when groups are put together

"""Building a list of steps in order, with results that leave a little later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from startrail.schedule.places import Place
from startrail.schedule.values import Block, Merge, Piece, Step, Transfer


class Timeline:
    """Steps in order. ``later`` posts results at a coming step and merges what came in one step after that, so that
    a result has at least one step's blocks to travel under.

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

    def later(self, due: int, posts: Iterable[Transfer], merges: Iterable[Merge]) -> None:
        assert due > self.now
        self._posts.setdefault(due, []).extend(posts)
        self._merges.setdefault(due + 1, []).extend(merges)

    def finish(self) -> list[Step]:
        while self._posts or self._merges:
            self.emit()
        return self.steps  # empty steps stay for now: they keep the ranks in step when groups take turns


def with_heads_and_groups(
    place: Place, groups: Sequence[list[Step]], enters: Sequence[str], leaves: Sequence[str]
) -> tuple[Step, ...]:
    """Run the groups' steps in turn, between the Ulysses exchanges of each.

    What the groups post first is posted at once, so that one group's pieces travel while another computes.
    """
    enter = [post for group in range(len(groups)) for kind in enters for post in heads_exchange(place, kind, group)]
    first = [post for steps in groups for post in steps[0].posts]
    steps: list[Step] = [Step(tuple(enter))] if enter else []
    for turn, in_turn in enumerate(zip_longest(*groups)):
        for group, step in enumerate(in_turn):
            if step is None:
                continue
            if turn == 0:
                step = step._replace(posts=tuple(first) if group == 0 else ())
            steps.append(step)
            if turn == len(groups[group]) - 1:
                leave = [post for kind in leaves for post in heads_exchange(place, kind, group)]
                if leave:
                    steps.append(Step(tuple(leave)))
    return tuple(step for step in steps if step != Step())


def heads_exchange(place: Place, kind: str, group: int) -> list[Transfer]:
    """The Ulysses all-to-all of one piece: a part to and from every rank that shares the shard."""
    piece = Piece(kind, place.shard, group)
    return [
        transfer
        for offset in range(1, place.plan.heads)
        for transfer in (
            Transfer(False, place.heads_lane, piece, place.head_peer(-offset)),
            Transfer(True, place.heads_lane, piece, place.head_peer(offset)),
        )
    ]

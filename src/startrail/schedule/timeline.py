"""Building a list of steps in order, with results that leave a little later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from startrail.schedule.places import Place
from startrail.schedule.values import Block, Merge, Piece, Step, Transfer


class Timeline:
    """Steps in order. ``later`` posts results at a coming step and merges what comes in after that step or the next, so
    that a result has at least one step's blocks to travel under.

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


def with_heads_and_groups(
    place: Place, groups: Sequence[list[Step]], enters: Sequence[str], leaves: Sequence[str]
) -> tuple[Step, ...]:
    """Run the groups' steps one group behind the other, between the Ulysses exchanges of each.

    What the groups post first is posted before anything is computed, so that one group's pieces travel while another
    computes; what needs no exchange goes before what waits for one. A group's results travel while the next group
    computes, and our own are waited for at the very end.
    """
    first = [post for body in groups for post in body[0].posts]
    steps: list[Step] = []
    if enters:
        for group in range(len(groups)):
            posts = [post for post in first if post.piece.group == group]
            steps.append(Step(tuple(post for post in posts if post.piece.kind not in enters)))
            for kind in enters:  # one kind at a time, so that the first is not delayed by the others
                steps.append(Step(tuple(heads_exchange(place, kind, group))))
                steps.append(Step(tuple(post for post in posts if post.piece.kind == kind)))
        first = []
    at_once: list[Step] = []  # what is left of the group before, but for its own results
    at_the_end: list[Step] = []
    for group, body in enumerate(groups):
        body = [body[0]._replace(posts=() if group else tuple(first)), *body[1:]]
        last = max(index for index, step in enumerate(body) if step.blocks)
        for step in (*body[:last], body[last]._replace(merges=())):
            steps += [*at_once[:1], step]
            del at_once[:1]
        steps += at_once
        tail = [Step(merges=body[last].merges), *body[last + 1 :]]
        at_once, waited = _tail(place, tail, leaves, group, behind=group < len(groups) - 1)
        at_the_end += waited
    return tuple(step for step in (*steps, *at_once, *at_the_end) if step != Step())


def _tail(
    place: Place, tail: list[Step], leaves: Sequence[str], group: int, behind: bool
) -> tuple[list[Step], list[Step]]:
    """What follows a group's last block, in two parts: what goes on at once, and what is waited for at the end: own
    results, if a group comes behind this one. Without one, everything stays in its order.

    A result goes through the Ulysses exchange as soon as nothing more is to be merged into it.
    """
    at_once: list[Step] = []
    waited: list[Step] = []
    left = list(leaves)
    for index in range(len(tail) + 1):
        coming = {m.piece.kind for step in tail[index:] for m in step.merges if m.piece.shard == place.shard}
        complete = [kind for kind in left if kind not in coming]
        left = [kind for kind in left if kind in coming]
        exchange = Step(tuple(post for kind in complete for post in heads_exchange(place, kind, group)))
        (waited if index else at_once).append(exchange)
        if index < len(tail):
            own = tuple(m for m in tail[index].merges if behind and m.piece.shard == place.shard)
            others = tuple(m for m in tail[index].merges if m not in own)
            (at_once if behind else waited).append(tail[index]._replace(merges=others))
            waited.append(Step(merges=own))
    return [step for step in at_once if step != Step()], waited


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

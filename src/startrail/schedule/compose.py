"""Composes a whole pass: adds the exchange over heads before and after a family's steps, and runs groups in sequence.

The exchange is *near* if its links are inside the outermost shard level (``2x2/u8``), else *far* (``u4/1x8``, ``u8``).
A near exchange is fast: all groups are exchanged, and their first pieces sent, before the first block. A far exchange
dominates, so a group's exchange is posted when the previous group's has arrived, and overlaps with that group's blocks;
so do the results of the group before it:

>>> from startrail.schedule.plan import Plan
>>> from startrail.schedule.program import build_program
>>> from startrail.schedule.values import FORWARD
>>> for step in build_program(Plan.parse("u2,groups=2"), 2, 0, FORWARD).steps: print(step)
post q0<1@0 q0>1@0 kv0<1@0 kv0>1@0
after q0 kv0 | post q0.1<1@0 q0.1>1@0 kv0.1<1@0 kv0.1>1@0
0x0
after q0.1 kv0.1
post out0<1@0 out0>1@0
0x0.1
post out0.1<1@0 out0.1>1@0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from startrail.schedule.places import Place
from startrail.schedule.values import Merge, Pass, Piece, Step, Transfer


def compose(place: Place, pass_: Pass, groups: Sequence[list[Step]], enters: tuple[str, ...]) -> tuple[Step, ...]:
    """The steps of a whole pass from those of each group. ``enters``: the kinds that are exchanged before blocks."""
    if place.num_heads == 1:
        first = [post for body in groups for post in body[0].posts]
        bodies = [_with_first_posts(body, () if group else first) for group, body in enumerate(groups)]
        steps = _sequence(place, (), bodies)
    elif exchange_is_far(place):
        steps = _far(place, pass_, groups, enters)
    else:
        steps = _near(place, pass_, groups, enters)
    return tuple(step for step in steps if step != Step())


def exchange_is_far(place: Place) -> bool:
    """True if heads are split over links outside those of the shard levels."""
    shards = [lane for lane in place.shard_lanes if place.sizes[lane] > 1]
    heads = [lane for lane in place.head_lanes if place.sizes[lane] > 1]
    return not shards or heads[0] < shards[0]


def _near(place: Place, pass_: Pass, groups: Sequence[list[Step]], enters: tuple[str, ...]) -> list[Step]:
    """Pieces that need no exchange are posted first. One kind is exchanged at a time, so that the others do not delay
    the first. The rank waits for its own results at the very end."""
    steps = []
    for group, body in enumerate(groups):
        posts = body[0].posts
        steps.append(Step(tuple(post for post in posts if post.piece.kind not in enters)))
        for kind in enters:
            steps.append(Step(heads_exchange(place, [Piece(kind, place.shard, group)])))
            steps.append(Step(tuple(post for post in posts if post.piece.kind == kind)))
    return steps + _sequence(place, pass_.results, [_with_first_posts(body, ()) for body in groups])


def _far(place: Place, pass_: Pass, bodies: Sequence[list[Step]], enters: tuple[str, ...]) -> list[Step]:
    """Results are posted after the inputs of the next group, so as not to delay them, and overlap with its blocks. All
    results of a group are one exchange."""

    def own(kinds: Sequence[str], group: int) -> tuple[Piece, ...]:
        return tuple(Piece(kind, place.shard, group) for kind in kinds)

    entering = [own(enters, group) for group in range(len(bodies))]
    steps, results = [Step(heads_exchange(place, entering[0]))], Step()
    for group, body in enumerate(bodies):
        following = entering[group + 1] if group + 1 < len(bodies) else ()
        steps += [Step(heads_exchange(place, following), after=entering[group]), results, *body]
        results = Step(heads_exchange(place, own(pass_.results, group)))
    return [*steps, results]


def _with_first_posts(body: list[Step], posts: Iterable[Transfer]) -> list[Step]:
    """The same steps with other posts in the first one."""
    return [body[0]._replace(posts=tuple(posts)), *body[1:]]


def _sequence(place: Place, exchanged: Sequence[str], bodies: Sequence[list[Step]]) -> list[Step]:
    """Interleave the steps after a group's last block with the next group's blocks; wait for own results at the end."""
    steps: list[Step] = []
    tail: list[Step] = []  # of the previous group
    final: list[Step] = []
    for group, body in enumerate(bodies):
        last = max(index for index, step in enumerate(body) if step.blocks)
        for step in (*body[:last], body[last]._replace(merges=())):
            steps += [*tail[:1], step]
            del tail[:1]
        steps += tail
        tail = _exchange_results(place, [Step(merges=body[last].merges), *body[last + 1 :]], exchanged, group)
        if group < len(bodies) - 1:
            tail, waits = _split_off_waits(place, tail)
            final += waits
    return steps + tail + final


def _exchange_results(place: Place, tail: list[Step], kinds: Sequence[str], group: int) -> list[Step]:
    """The steps after a group's last block, with the exchange of each result over heads after its last merge."""
    steps: list[Step] = []
    for index in range(len(tail) + 1):
        pending = {merge.piece.kind for step in tail[index:] for merge in step.merges if _is_own(place, merge)}
        complete = [Piece(kind, place.shard, group) for kind in kinds if kind not in pending]
        kinds = [kind for kind in kinds if kind in pending]
        steps += [Step(heads_exchange(place, complete)), *tail[index : index + 1]]
    return [step for step in steps if step != Step()]


def _split_off_waits(place: Place, tail: list[Step]) -> tuple[list[Step], list[Step]]:
    """Split off the merges of own results, and the exchanges over heads after them: the rank waits for those last."""
    rest: list[Step] = []
    waits: list[Step] = []
    for step in tail:
        own = tuple(merge for merge in step.merges if _is_own(place, merge))
        if waits and any(place.by_heads[post.lane] for post in step.posts):
            waits.append(step)
        else:
            rest.append(step._replace(merges=tuple(merge for merge in step.merges if merge not in own)))
        if own:
            waits.append(Step(merges=own))
    return [step for step in rest if step != Step()], waits


def _is_own(place: Place, merge: Merge) -> bool:
    return merge.piece.shard == place.shard


def heads_exchange(place: Place, pieces: Iterable[Piece]) -> tuple[Transfer, ...]:
    """Exchange own pieces over heads: one part to and from every rank that shares the shard."""
    size = place.num_heads
    return tuple(
        Transfer(send, place.lane_to(peer), piece, peer)
        for piece in pieces
        for offset in range(1, size)
        for send, peer in (
            (False, place.head_rank((place.head - offset) % size)),
            (True, place.head_rank((place.head + offset) % size)),
        )
    )

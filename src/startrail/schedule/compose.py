"""What goes around a family's steps: the exchange over heads in front and behind, and groups one behind the other.

The exchange is either *near*, over links inside those that the schedule's own pieces cross first (``2x2/u8``), or
*far*, over links outside them (``u4/1x8``, ``u8``). Near, it is soon over: all groups are exchanged, and their first
pieces sent off, before anything is computed. Far, it is what takes the time, so a group's exchange is posted when the
one before has arrived, and travels while that group computes; so do the results of the group before that:

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


def compose(place: Place, pass_: Pass, groups: Sequence[list[Step]]) -> tuple[Step, ...]:
    """The steps of a whole pass, from those of each group."""
    if place.num_heads == 1:
        first = [post for body in groups for post in body[0].posts]
        bodies = [_posting(body, () if group else first) for group, body in enumerate(groups)]
        steps = _one_behind_the_other(place, (), bodies)
    elif exchange_is_far(place):
        steps = _far(place, pass_, groups)
    else:
        steps = _near(place, pass_, groups)
    return tuple(step for step in steps if step != Step())


def exchange_is_far(place: Place) -> bool:
    """Whether heads are split over links outside those of the schedule's own levels."""
    own = [lane for lane in place.shard_lanes if place.sizes[lane] > 1]
    heads = [lane for lane in place.head_lanes if place.sizes[lane] > 1]
    return not own or heads[0] < own[0]


def _near(place: Place, pass_: Pass, groups: Sequence[list[Step]]) -> list[Step]:
    """What needs no exchange is posted before what waits for one, and one kind is exchanged at a time, so that the
    first is not delayed by the others. Own results are waited for at the very end."""
    steps = []
    for group, body in enumerate(groups):
        posts = body[0].posts
        steps.append(Step(tuple(post for post in posts if post.piece.kind not in pass_.enters)))
        for kind in pass_.enters:
            steps.append(Step(heads_exchange(place, [Piece(kind, place.shard, group)])))
            steps.append(Step(tuple(post for post in posts if post.piece.kind == kind)))
    bodies = [_posting(body, ()) for body in groups]
    return steps + _one_behind_the_other(place, pass_.results, bodies)


def _far(place: Place, pass_: Pass, bodies: Sequence[list[Step]]) -> list[Step]:
    """Results wait for what the next group needs, which would be delayed by them; then they have its blocks to travel
    under. All results of a group are one exchange."""

    def own(kinds: Sequence[str], group: int) -> tuple[Piece, ...]:
        return tuple(Piece(kind, place.shard, group) for kind in kinds)

    entering = [own(pass_.enters, group) for group in range(len(bodies))]
    steps, results = [Step(heads_exchange(place, entering[0]))], Step()
    for group, body in enumerate(bodies):
        following = entering[group + 1] if group + 1 < len(bodies) else ()
        steps += [Step(heads_exchange(place, following), after=entering[group]), results, *body]
        results = Step(heads_exchange(place, own(pass_.results, group)))
    return [*steps, results]


def _posting(body: list[Step], posts: Iterable[Transfer]) -> list[Step]:
    """The same steps with other posts in the first."""
    return [body[0]._replace(posts=tuple(posts)), *body[1:]]


def _one_behind_the_other(place: Place, leaves: Sequence[str], bodies: Sequence[list[Step]]) -> list[Step]:
    """A group's results travel while the next group computes, and its own ones are waited for at the very end."""
    steps: list[Step] = []
    left_over: list[Step] = []  # of the group before
    at_the_end: list[Step] = []
    for group, body in enumerate(bodies):
        compute, tail = _split(body)
        for step in compute:
            steps += [*left_over[:1], step]
            del left_over[:1]
        steps += left_over
        left_over = _leaving(place, tail, leaves, group)
        if group < len(bodies) - 1:
            left_over, waited = _own_apart(place, left_over)
            at_the_end += waited
    return steps + left_over + at_the_end


def _split(body: list[Step]) -> tuple[list[Step], list[Step]]:
    """The steps up to the last block, and what follows it."""
    last = max(index for index, step in enumerate(body) if step.blocks)
    return [*body[:last], body[last]._replace(merges=())], [Step(merges=body[last].merges), *body[last + 1 :]]


def _leaving(place: Place, tail: list[Step], leaves: Sequence[str], group: int) -> list[Step]:
    """What follows a group's last block: a result goes through the exchange over heads as soon as nothing more is to
    be merged into it."""
    steps: list[Step] = []
    left = list(leaves)
    for index in range(len(tail) + 1):
        coming = {merge.piece.kind for step in tail[index:] for merge in step.merges if _is_own(place, merge)}
        complete = [kind for kind in left if kind not in coming]
        left = [kind for kind in left if kind in coming]
        leaving = [Piece(kind, place.shard, group) for kind in complete]
        steps += [Step(heads_exchange(place, leaving)), *tail[index : index + 1]]
    return [step for step in steps if step != Step()]


def _own_apart(place: Place, tail: list[Step]) -> tuple[list[Step], list[Step]]:
    """The same in two parts: what goes on at once, and what is waited for at the end, which is merging own results and
    all that comes after it over heads."""
    at_once: list[Step] = []
    waited: list[Step] = []
    for step in tail:
        own = tuple(merge for merge in step.merges if _is_own(place, merge))
        over_heads = any(place.by_heads[post.lane] for post in step.posts)
        if over_heads and waited:
            waited.append(step)
        else:
            at_once.append(step._replace(merges=tuple(merge for merge in step.merges if merge not in own)))
        if own:
            waited.append(Step(merges=own))
    return [step for step in at_once if step != Step()], waited


def _is_own(place: Place, merge: Merge) -> bool:
    return merge.piece.shard == place.shard


def heads_exchange(place: Place, pieces: Iterable[Piece]) -> tuple[Transfer, ...]:
    """The exchange of own pieces over heads: a part to and from every rank that shares the shard."""
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

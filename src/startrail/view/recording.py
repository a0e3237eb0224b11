"""One attention call under one plan, played on a described cluster and written down as plain numbers: a recording.

The page draws recordings and computes nothing of its own, so all that the page needs to know about schedules, routes,
tiles and prices is collected here.

>>> from startrail.planner.cluster import find_cluster
>>> call = Attention.of(length=4096, batch=1, heads=8, kv_heads=8, head_dim=64, causal=True)
>>> found = record(find_cluster("a100-4x8@2x4"), Plan.parse("1x8"), call)
>>> sorted(found)[:6], len(found["forward"]["steps"]), found["forward"]["programs"]     # all ranks run one program
(['alone', 'backward', 'colour', 'colours', 'forward', 'heads'], 8, [(0, 1, 2, 3, 4, 5, 6, 7)])

A recording is a dictionary. ``ranks`` are those that it holds: all of them up to ``MAX_RANKS``. In larger worlds one
rank stands for all (``alone``), and ``ranks`` are those of the nodes around it.

- ``zones``: the ranks that share tokens: ``first`` and ``size``, and for each member its ``own`` shard and the ``head``
  index of its share of the heads. A piece's shard is a number: below ``shards`` a shard, from there on a bundle of
  direct fetches, which comes from the bundles that ``sources`` lists. ``names`` and ``colours`` have both.
- ``matrix``: ``edges`` (tokens) of the cells; for each row of cells, the ``rows`` and ``columns`` of their blocks, as
  shards that are counted through all zones from 1 on (0: nothing is visible); and the number of visible pairs of the
  cells that show only some, as ``partial`` ``[q, k, pairs]``.
- ``forward``, ``backward``: ``steps`` lists distinct steps as ``[part, events]``, ``programs`` distinct lists of them,
  and ``of`` the program of each rank. ``part`` counts the zones of the rank. To make steps alike, ranks and shards are
  numbered from the rank's own: add it, modulo the number of ranks (of shards).
  An event is ``[AWAIT, piece]``, ``[POST, message, ...]``, ``[PREPARE, piece]``, ``[COMPUTE, row, column, group,
  hidden]`` or ``[COMBINE, piece]``; a message is ``[flags, level, peer, piece, ...]``; a piece is
  ``(group * shards + shard) * 6 + kind``.
  ``spans`` has for each event the ticks that the rank waits and then works, and these twice for the end of each part;
  ``arrivals`` has the start and the duration of each message that the rank receives, in the order in which they are
  posted. Both are lists of distinct lists, with the one of each rank in ``spans_of`` (-1: none). A pass has ``TICKS``
  ticks.
  ``bytes``: rows ``[part, level, terms, closed form, counted]`` of what a rank sends, with terms ``[text, times, kinds,
  bytes of these]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from startrail.compile.attention import Attention, AttentionPart
from startrail.planner.cluster import ClusterSpec
from startrail.planner.predict import play_one_rank
from startrail.planner.pricing import ComputeTask, Mark, Task, WaitTask, tasks_of
from startrail.planner.simulator import SimulatedPass
from startrail.planner.sparse.predict import MESSAGES_PER_PART, SparseCall
from startrail.schedule.parts import run_order
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, closed_form
from startrail.schedule.values import FORWARD, KINDS, PASSES, Pass, Piece
from startrail.schedule.walk import Await, Combine, Event, Finish, Post, Prepare, walk_of
from startrail.view.matrix import Sight, cells_of, edges_of

AWAIT, POST, PREPARE, COMPUTE, COMBINE = range(5)
SEND, OVER_HEADS = 1, 2  # flags of a message
MAX_RANKS = 64  # all of which are simulated and recorded
RANKS_OF_LARGE = 8  # recorded around the rank that stands for all
MAX_CELLS = 128  # along one side of the matrix
TICKS = 1_000_000
NOTHING = 1e-12  # seconds: what rounding leaves of a task
Numbers = tuple[int, ...]


def record(cluster: ClusterSpec, plan: Plan, call: Attention) -> dict[str, Any]:
    """The recording of both passes of ``call``."""
    alone = cluster.world > MAX_RANKS
    sparse = not alone and call.is_sparse
    return _Recording(SparseCall(cluster, plan, call if sparse else call.undivided, sparse), sparse, alone).data()


@dataclass
class _Played:
    """One rank's pass: its tasks, the times when they ended, and start and end of the messages that it received."""

    tasks: list[Task]
    marks: list[Mark]
    ends: list[float]
    arrivals: dict[int, tuple[float, float]]


class _Table:
    """Distinct values, in the order in which they were first added."""

    def __init__(self) -> None:
        self.rows: dict[Any, int] = {}

    def add(self, row: Any) -> int:
        return self.rows.setdefault(row, len(self.rows))


class _Recording:
    def __init__(self, played: SparseCall, sparse: bool, alone: bool) -> None:
        self.played, self.sparse, self.alone = played, sparse, alone
        self.cluster, self.plan, self.world = played.cluster, played.plan, played.cluster.world
        self.levels = len(played.plan.levels)
        self.sight = Sight(played.call.visible, played.layout.length)

    def data(self) -> dict[str, Any]:
        plan, layout = self.plan, self.played.layout
        passes = {pass_: self.play(pass_) for pass_ in PASSES}
        self.ranks = self.recorded([rank for _, timed in passes.values() for rank in timed])
        shards = [plan.place(self.world, rank).shard for rank in range(self.world)]
        found = {
            "plan": str(plan),
            "words": ", then ".join(level.describe() for level in plan.levels),
            "world": self.world,
            "levels": [str(level) for level in plan.levels],
            "heads": plan.heads,
            "alone": self.alone,
            "sparse": self.sparse,
            "ranks": self.ranks,
            "colours": self.world if self.sparse else self.world // plan.heads,
            "colour": plan.slots(self.world) if self.sparse else shards,
            "zones": [self.zone(route) for route, _ in self.played.zones],
            "matrix": self.matrix(),
            "local": layout.largest,
            "runs": self.played.describe() if self.sparse else "",
        }
        for pass_, (simulated, timed) in passes.items():
            found[str(pass_)] = self.passed(pass_, simulated, timed)
        return found

    def recorded(self, timed: Sequence[int]) -> list[int]:
        if not self.alone:
            return list(range(self.world))
        per_node = self.cluster.spans[0] if len(self.cluster.levels) > 1 else self.world
        size = min(max(RANKS_OF_LARGE // per_node, 1) * per_node, RANKS_OF_LARGE * 2)
        firsts = {min(rank // size * size, self.world - size) for rank in timed}
        return sorted({rank for first in firsts for rank in range(first, first + size)})

    # --- who owns and computes what

    def zone(self, route: AttentionPart) -> dict[str, Any]:
        zone, direct = route.zone, route.demand is not None
        places = [replace(route, member=member).place for member in range(zone.size)]
        ranks = [zone.first + (shard if direct else places[0].shard_ranks(shard)[0]) for shard in range(_shards(route))]
        sources = []
        if route.demand is not None:
            numbers = {edge: number for number, edge in enumerate(route.demand.messages, zone.size)}
            for edge, pieces in route.demand.pieces.items():
                ranks.append(zone.first + edge.sender)
                sources.append(sorted({numbers[source] for _, _, source in pieces if source is not None}))
        slots = self.plan.slots(self.world)
        return {
            "first": zone.first,
            "size": zone.size,
            "tokens": zone.largest,
            "padding": all(start >= self.played.layout.length for runs in zone.runs for start, _ in runs),
            "runs": str(route.chosen),
            "shards": _shards(route),
            "own": [place.shard for place in places],
            "heads": places[0].num_heads,
            "head": [place.head for place in places],
            "names": ranks if self.sparse else range(len(ranks)),
            "colours": [slots[rank] for rank in ranks] if self.sparse else range(len(ranks)),
            "sources": sources,
            "sizes": {} if direct else route.sizes.by_kind,
            "sent": (route.demand_bytes if direct else route.plan_bytes) or (),
            "plan_sent": route.plan_bytes if direct else None,
        }

    def matrix(self) -> dict[str, Any]:
        layout, mask = self.played.layout, self.played.call.visible
        edges = edges_of(layout, self.plan.heads, mask if self.sparse else replace(mask, window=None), MAX_CELLS)
        cells = cells_of(layout, [route for route, _ in self.played.zones], mask, edges)
        bases, base = [], 1
        for route, _ in self.played.zones:
            bases.append(base)
            base += _shards(route) + (len(route.demand.messages) if route.demand is not None else 0)
        rows, columns = ([[0] * (len(edges) - 1) for _ in edges[1:]] for _ in range(2))
        for (q, k), cell in cells.items():
            rows[q][k], columns[q][k] = bases[cell.zone] + cell.row, bases[cell.zone] + cell.column
        partial = [(q, k, cell.pairs) for (q, k), cell in cells.items() if not cell.whole]
        return {"edges": edges, "rows": rows, "columns": columns, "partial": partial}

    # --- playing

    def play(self, pass_: Pass) -> tuple[SimulatedPass, dict[int, _Played]]:
        """The simulated pass, and those ranks whose times are known."""
        if self.alone:
            one, (route, prices) = _Played([], [], [0.0], {}), self.played.zones[0]
            rank, simulated = play_one_rank(
                self.cluster, prices, pass_,
                lambda _, now: one.ends.append(now), lambda _, number, *times: one.arrivals.update({number: times}),
            )  # fmt: skip
            one.tasks = tasks_of(replace(route, member=rank).program(pass_), prices, one.marks)
            return simulated, {rank: one}
        marks: list[list[Mark]] = [[] for _ in range(self.world)]
        tasks = self.played.tasks(pass_, marks)
        timed = {rank: _Played(tasks[rank], marks[rank], [0.0], {}) for rank in range(self.world)}
        simulated = self.played.play(
            tasks,
            lambda rank, now: timed[rank].ends.append(now),
            lambda rank, number, *times: timed[rank].arrivals.update({number: times}),
        )
        return simulated, timed

    def passed(self, pass_: Pass, simulated: SimulatedPass, timed: dict[int, _Played]) -> dict[str, Any]:
        steps, programs, spans, arrivals, rows = (_Table() for _ in range(5))
        tick = simulated.seconds / TICKS
        of, spans_of, bytes_of = [], [], []
        for rank in self.ranks:
            one = _Rank(self, rank, pass_, timed.get(rank))
            own = [steps.add(step) for step in one.steps()]
            of.append(programs.add(tuple(own)))
            bytes_of.append(rows.add(tuple(one.sent())))
            if one.played is not None:
                spans_of.append((spans.add(one.spans(tick)), arrivals.add(one.arrived(tick))))
            else:
                spans_of.append((-1, -1))
        return {
            "seconds": simulated.seconds,
            "waiting": simulated.waiting,
            "sent": simulated.sent,
            "busy": simulated.busy,
            "steps": list(steps.rows),
            "programs": list(programs.rows),
            "of": of,
            "spans": list(spans.rows),
            "spans_of": [own for own, _ in spans_of],
            "arrivals": list(arrivals.rows),
            "arrivals_of": [own for _, own in spans_of],
            "bytes": list(rows.rows),
            "bytes_of": bytes_of,
        }


class _Rank:
    """What one rank does in one pass."""

    def __init__(self, recording: _Recording, rank: int, pass_: Pass, played: _Played | None) -> None:
        self.recording, self.rank, self.pass_, self.played = recording, rank, pass_, played
        routes = recording.played.routes[rank]
        self.routes, self.prices = [route for route, _ in routes], [prices for _, prices in routes]
        self.programs: list[Program] = [route.program(pass_) for route in self.routes]

    @cached_property
    def events(self) -> list[tuple[int, list[Event]]]:
        """Steps in the order in which they run: the part and its events."""
        walks = [walk_of(program).steps for program in self.programs]
        return [(part, walks[part][number].events) for part, number in run_order(self.programs)]

    @cached_property
    def times(self) -> list[list[float]]:
        """For each event, the seconds that the rank waits, works, and so on in turns."""
        if self.played is None:
            return []
        tasks, ends = self.played.tasks, self.played.ends
        at, now, found = 0, 0.0, []
        for _, _, done, seconds in self.played.marks:
            parts = [0.0]
            while at < done:
                if ends[at + 1] - now > NOTHING:
                    if isinstance(tasks[at], WaitTask) == (len(parts) % 2 == 0):
                        parts.append(0.0)
                    parts[-1] += ends[at + 1] - now
                at, now = at + 1, ends[at + 1]
            if seconds:  # part of a task, which shared cores may have slowed down
                task = tasks[at]
                assert isinstance(task, ComputeTask)
                until = ends[at] + (ends[at + 1] - ends[at]) * seconds / task.seconds
                parts += [0.0] * (len(parts) % 2)
                parts[-1] += until - now
                now = until
            found.append(parts)
        found[-1] += [0.0] * (3 - len(found[-1])) + [ends[-1] - now]  # what ends a pass
        return found

    def spans(self, tick: float) -> Numbers:
        """Ticks of each event. Rounding does not add up."""
        assert self.played is not None
        found, now = [], 0.0
        for (_, event, _, _), parts in zip(self.played.marks, self.times, strict=True):
            wanted = 4 if isinstance(event, Finish) else 2
            assert len(parts) <= wanted, (event, parts)
            for seconds in (*parts, *[0.0] * (wanted - len(parts))):
                found.append(round((now + seconds) / tick) - round(now / tick))
                now += seconds
        return tuple(found)

    def arrived(self, tick: float) -> Numbers:
        assert self.played is not None
        found: list[int] = []
        for part, events in self.events:
            for event in events:
                for message in event.messages if isinstance(event, Post) else ():
                    if not message.send:
                        start, end = self.played.arrivals[part * MESSAGES_PER_PART + message.number]
                        found += [round(start / tick), round(end / tick) - round(start / tick)]
        return tuple(found)

    def steps(self) -> Iterator[tuple[Any, ...]]:
        for part, events in self.events:
            yield part, tuple(self.event(part, event) for event in events)

    def event(self, part: int, event: Event) -> tuple[Any, ...]:
        if isinstance(event, Await):
            return AWAIT, self.piece(part, event.piece)
        if isinstance(event, Post):
            return POST, *(
                (
                    SEND * message.send + OVER_HEADS * (message.head is not None),
                    message.lane % self.recording.levels,
                    (message.peer - self.rank) % self.recording.world,
                    *(self.piece(part, piece) for piece in message.pieces),
                )
                for message in event.messages
            )
        if isinstance(event, Prepare):
            return PREPARE, self.piece(part, event.piece)
        if isinstance(event, Combine):
            return COMBINE, self.piece(part, event.piece)
        row, column, group = event.block
        hidden = self.recording.sparse and not self.recording.sight.sees(self.routes[part], row, column)
        return COMPUTE, self.shard(part, row), self.shard(part, column), group, *((1,) if hidden else ())

    def shard(self, part: int, shard: int) -> int:
        shards = _shards(self.routes[part])
        return (shard - self.programs[part].place.shard) % shards if shard < shards else shard

    def piece(self, part: int, piece: Piece) -> int:
        group = piece.group * _shards(self.routes[part])
        return (group + self.shard(part, piece.shard)) * len(KINDS) + KINDS.index(piece.kind)

    def sent(self) -> Iterator[tuple[Any, ...]]:
        """Rows of what this rank sends over each level: by closed form, and counted in its program."""
        for part, route in enumerate(self.routes):
            counted = super(AttentionPart, route).traffic(self.pass_)
            for level, (closed, terms) in enumerate(zip(route.traffic(self.pass_), self.terms(route), strict=True)):
                if terms or closed or counted[level] or not level:
                    yield part, level, terms, closed, counted[level]

    def terms(self, route: AttentionPart) -> list[tuple[Any, ...]]:
        """For each level, what the closed form adds up."""
        sizes = route.sizes.by_kind
        if route.demand is not None:
            ends = ("sender", "tokens sent", "kv"), ("receiver", "tokens fetched", "dkv")
            tokens = [(text, kind, route.demand.tokens_by_level(**{end: route.member})) for end, text, kind in ends]
            return [
                tuple(
                    (text, count[level], kind, sizes[kind] // route.sizes.tokens)
                    for text, kind, count in tokens[: 1 if self.pass_ is FORWARD else 2]
                    if count[level]
                )
                for level in range(self.recording.levels)
            ]
        if route.sizes.of_shard:
            of_levels = route.traffic(self.pass_)
            return [(("1", 1.0, "pieces of several sizes", sent),) if sent else () for sent in of_levels]
        place = route.chosen, route.zone.size, route.member, self.pass_
        units = [closed_form(*place, {kind: float(kind == unit) for kind in KINDS}) for unit in KINDS]
        found: list[tuple[Any, ...]] = []
        for level in zip(*units, strict=True):
            alike: dict[float, list[str]] = {}
            for kind, pieces in zip(KINDS, level, strict=True):
                if pieces:
                    alike.setdefault(pieces, []).append(kind)
            terms = ((str(Fraction(pieces).limit_denominator()), pieces, kinds) for pieces, kinds in alike.items())
            found.append(tuple((*term, "+".join(kinds), sum(sizes[kind] for kind in kinds)) for *term, kinds in terms))
        return found


def _shards(route: AttentionPart) -> int:
    return route.zone.size if route.demand is not None else route.zone.size // route.chosen.heads

"""The checker: plays the programs of all ranks against each other, without data, and proves what must hold.

It delivers messages as the strictest backend would: per rank and lane, what one step posts is one batch, a batch starts
when the one before it has ended, and a transfer happens when both ends' batches have started. It proves that every send
meets its receive, nothing deadlocks, every (query shard, key shard) pair is computed once, every result reaches its
owner with all its parts and none twice, and what should be kept is still there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from startrail.plan import Plan
from startrail.schedule.build import DIRECTIONS, build_program
from startrail.schedule.memory import peak_pieces, stated_pieces
from startrail.schedule.traffic import closed_form, count_sends
from startrail.schedule.values import RESULTS, Piece, Program, Transfer

UNIT_SIZES = {"q": 3.0, "kv": 5.0, "out": 7.0, "do": 11.0, "dq": 13.0, "dkv": 17.0}  # any distinct sizes will do


class ScheduleError(AssertionError):
    """A schedule breaks one of its promises; the text shows rank, step, what was expected and what was found."""


def check_plan(plan: Plan, world: int, directions: Sequence[str] = DIRECTIONS) -> None:
    """Raise ``ScheduleError`` unless the passes of ``plan`` on ``world`` ranks keep every promise."""
    for direction in directions:
        programs = [build_program.__wrapped__(plan, world, rank, direction) for rank in range(world)]
        check_programs(programs)
        for program in programs:
            _check_traffic(program)
            _check_memory(program)


def check_programs(programs: list[Program]) -> None:
    _Game(programs).play()


def _check_traffic(program: Program) -> None:
    place = program.place
    counted = tuple(count.size for count in count_sends(program, UNIT_SIZES))
    form = closed_form(place.plan, place.world, place.rank, program.direction, UNIT_SIZES)
    if any(abs(a - b) > 1e-6 for a, b in zip(counted, form, strict=True)):
        raise ScheduleError(f"{_name(program)}: sends {counted} by lane, the closed form says {form}")


def _check_memory(program: Program) -> None:
    peak, stated = peak_pieces(program), stated_pieces(program.plan, program.place.world, program.direction)
    for kind, number in peak.items():
        if number > stated[kind]:
            raise ScheduleError(
                f"{_name(program)}: holds {number} {kind} pieces at once, the plan states {stated[kind]}"
            )


def _name(program: Program) -> str:
    return f"{program.plan} {program.direction}, rank {program.place.rank} of {program.place.world}"


@dataclass
class _Message:
    transfer: Transfer
    batch: _Batch
    content: int = 0
    done: bool = False


@dataclass
class _Batch:
    rank: int
    messages: list[_Message]
    open: int = 0


@dataclass
class _Rank:
    program: Program
    index: int = 0  # the step it stands at
    posted: bool = False  # whether that step's transfers are on their lanes
    held: dict[Piece, list[_Message]] = field(default_factory=dict)  # input pieces; messages still needed for each
    results: dict[Piece, int] = field(default_factory=dict)  # bit set of the shards combined into a result
    incoming: dict[tuple[Piece, int], deque[_Message]] = field(default_factory=dict)
    lanes: dict[int, deque[_Batch]] = field(default_factory=dict)


class _Game:
    def __init__(self, programs: list[Program]) -> None:
        self.ranks = [_Rank(program) for program in programs]
        self.heads_lane = programs[0].place.heads_lane
        self.everything = (1 << programs[0].place.num_shards) - 1
        self.waiting: dict[tuple[int, int, int], deque[_Message]] = {}  # (from, to, lane): active sends not yet met
        self.wanted: dict[tuple[int, int, int], deque[_Message]] = {}  # (from, to, lane): active receives not yet met
        for state in self.ranks:
            for piece in state.program.given:
                state.held[piece] = []

    def play(self) -> None:
        todo = deque(range(len(self.ranks)))
        self.dirty: set[int] = set(todo)
        while todo:
            rank = todo.popleft()
            self.dirty.discard(rank)
            while self.advance(rank):
                pass
            for other in sorted(self.dirty - set(todo)):
                todo.append(other)
        stuck = [state for state in self.ranks if state.index < len(state.program.steps)]
        if stuck:
            raise ScheduleError("deadlock\n" + "\n".join(self.picture(state) for state in stuck[:8]))
        for state in self.ranks:
            self.check_end(state)

    def advance(self, rank: int) -> bool:
        """Do what the rank's current step allows; True when it moved on to the next one."""
        state = self.ranks[rank]
        if state.index == len(state.program.steps):
            return False
        step = state.program.steps[state.index]
        if not state.posted:
            for post in step.posts:  # on the heads lane a rank sends its own tokens, which it always has
                waits = post.send and post.lane != self.heads_lane and post.piece.kind not in RESULTS
                if waits and not self.ready(state, post.piece):
                    return False
            self.post(rank, step.posts)
            state.posted = True
        for block in step.blocks:
            kinds = ("q", "kv") if state.program.direction == "forward" else ("q", "do", "kv")
            for kind in kinds:
                shard = block.column if kind == "kv" else block.row
                if not self.ready(state, Piece(kind, shard, block.group)):
                    return False
        for merge in step.merges:
            queue = state.incoming.get((merge.piece, merge.peer), deque())
            if not queue:
                self.fail(state, f"merges {merge}, which no receive was posted for")
            if not queue[0].done:
                return False
        for block in step.blocks:
            if state.program.direction == "forward":
                self.combine(state, Piece("out", block.row, block.group), 1 << block.column)
            else:
                self.combine(state, Piece("dq", block.row, block.group), 1 << block.column)
                self.combine(state, Piece("dkv", block.column, block.group), 1 << block.row)
        for merge in step.merges:
            message = state.incoming[merge.piece, merge.peer].popleft()
            self.combine(state, merge.piece, message.content)
        state.index += 1
        state.posted = False
        return True

    def ready(self, state: _Rank, piece: Piece) -> bool:
        if piece not in state.held:
            self.fail(state, f"needs {piece}, which it does not have and has not asked for")
        return all(message.done for message in state.held[piece])

    def combine(self, state: _Rank, piece: Piece, parts: int) -> None:
        have = state.results.get(piece, 0)
        if have & parts:
            self.fail(state, f"adds parts {_bits(have & parts)} to {piece} a second time")
        state.results[piece] = have | parts

    def post(self, rank: int, posts: tuple[Transfer, ...]) -> None:
        state = self.ranks[rank]
        batches: dict[int, _Batch] = {}
        for transfer in posts:
            batch = batches.setdefault(transfer.lane, _Batch(rank, []))
            message = _Message(transfer, batch)
            batch.messages.append(message)
            batch.open += 1
            piece = transfer.piece
            if transfer.send and piece.kind in RESULTS:
                if piece not in state.results:
                    self.fail(state, f"sends {piece}, of which it has nothing")
                if transfer.lane != self.heads_lane:
                    message.content = state.results.pop(piece)  # it leaves for good
                elif state.results[piece] != self.everything:
                    self.fail(state, f"exchanges {piece} over heads before it is complete")
            elif not transfer.send and piece.kind in RESULTS:
                state.incoming.setdefault((piece, transfer.peer), deque()).append(message)
            elif not transfer.send:
                if transfer.lane == self.heads_lane:
                    state.held.setdefault(piece, []).append(message)
                else:
                    state.held[piece] = [message]
        for lane, batch in batches.items():
            queue = state.lanes.setdefault(lane, deque())
            queue.append(batch)
            if len(queue) == 1:
                self.start(batch)

    def start(self, batch: _Batch) -> None:
        """Both ends' batches must have started for a transfer to happen."""
        for message in batch.messages:
            transfer = message.transfer
            if transfer.send:
                key = (batch.rank, transfer.peer, transfer.lane)
                mine, theirs = self.waiting, self.wanted
            else:
                key = (transfer.peer, batch.rank, transfer.lane)
                mine, theirs = self.wanted, self.waiting
            if theirs.get(key):
                other = theirs[key].popleft()
                send, receive = (message, other) if transfer.send else (other, message)
                self.deliver(send, receive)
            else:
                mine.setdefault(key, deque()).append(message)

    def deliver(self, send: _Message, receive: _Message) -> None:
        if send.transfer.piece != receive.transfer.piece:
            state = self.ranks[receive.batch.rank]
            self.fail(state, f"expects {receive.transfer}, but rank {send.batch.rank} sends {send.transfer}")
        receive.content = send.content
        for message in (send, receive):
            message.done = True
            message.batch.open -= 1
            self.dirty.add(message.batch.rank)
            if message.batch.open == 0:
                queue = self.ranks[message.batch.rank].lanes[message.transfer.lane]
                queue.popleft()
                if queue:
                    self.start(queue[0])

    def check_end(self, state: _Rank) -> None:
        program = state.program
        for lane, queue in state.lanes.items():
            if queue:
                self.fail(
                    state, f"ends with {[str(m.transfer) for m in queue[0].messages if not m.done]} open on {lane}"
                )
        for group in program.groups:
            for kind in program.results:
                piece = Piece(kind, program.shard, group)
                if state.results.get(piece, 0) != self.everything:
                    missing = _bits(self.everything & ~state.results.get(piece, 0))
                    self.fail(state, f"ends with {piece} lacking the parts of shards {missing}")
        if foreign := [piece for piece in state.results if piece.shard != program.shard]:
            self.fail(state, f"ends with results that it does not own: {' '.join(map(str, foreign))}")
        for piece in program.kept:
            if piece not in state.held:
                self.fail(state, f"should keep {piece}, but never had it")

    def fail(self, state: _Rank, what: str) -> None:
        raise ScheduleError(f"{_name(state.program)}, step {state.index}: {what}\n{self.picture(state)}")

    def picture(self, state: _Rank) -> str:
        lines = [f"rank {state.program.place.rank}:"]
        for index, step in enumerate(state.program.steps):
            marker = "-->" if index == state.index else "   "
            lines.append(f"{marker} {index:3d}  {step}")
        return "\n".join(lines)


def _bits(parts: int) -> list[int]:
    return [index for index in range(parts.bit_length()) if parts >> index & 1]

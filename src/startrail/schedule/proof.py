"""The player of programs: it runs those of all ranks against each other, without data, and proves what must hold.

It delivers messages as the strictest backend would: what one step posts on a lane is one batch, a rank's batches of
all lanes stand in one line (those of a step by lane), a batch starts when the one before it has ended, a transfer
happens when both ends' batches have started, and nothing of a batch can be used before all of it has come. Whatever
ends under these rules ends on lanes that are independent too, and with messages that arrive one by one. It proves that
every send meets its receive, nothing deadlocks, every (query shard, key shard) pair is computed once, every result
reaches its owner with all its blocks and none twice, and what should be kept is still there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, closed_form, stated_pieces
from startrail.schedule.values import BY_COLUMN, FORWARD, INPUTS, PASSES, RESULTS, Block, Pass, Piece, Transfer

UNIT_SIZES = {"q": 3.0, "kv": 5.0, "out": 7.0, "do": 11.0, "dq": 13.0, "dkv": 17.0}  # any distinct sizes will do


class ScheduleError(AssertionError):
    """A schedule breaks one of its promises; the text shows rank, step, what was expected and what was found."""


def prove_plan(plan: Plan, world: int, passes: Sequence[Pass] = PASSES) -> None:
    """Raise ``ScheduleError`` unless the passes of ``plan`` on ``world`` ranks keep every promise."""
    for pass_ in passes:
        programs = [build_program.__wrapped__(plan, world, rank, pass_) for rank in range(world)]
        prove_programs(programs)
        for program in programs:
            _check_traffic(program)
            _check_memory(program)


def prove_programs(programs: list[Program]) -> None:
    Player(programs).play()


def _check_traffic(program: Program) -> None:
    place = program.place
    counted = [0.0] * len(place.sizes)
    for post, size in program.sends(UNIT_SIZES):
        counted[post.lane] += size
    form = closed_form(program.plan, place.world, place.rank, program.pass_, UNIT_SIZES)
    if any(abs(a - b) > 1e-6 for a, b in zip(counted, form, strict=True)):
        raise ScheduleError(f"{program}: sends {counted} by level, the closed form says {form}")


def _check_memory(program: Program) -> None:
    stated = stated_pieces(program.plan, program.pass_)
    for kind, number in peak_pieces(program).items():
        if number > stated[kind]:
            raise ScheduleError(f"{program}: holds {number} {kind} pieces at once, the plan states {stated[kind]}")


def peak_pieces(program: Program) -> dict[str, int]:
    """The most pieces of each kind that a rank holds at once beside its own: received inputs, and for results the
    accumulators (``out``, ``dq``, ``dkv``) and the partial results on their way in (``out<`` and so on)."""
    own, pass_ = program.place.shard, program.pass_
    live = {piece for piece in program.given if piece.shard != own}
    sums: set[Piece] = set()
    now: Counter[str] = Counter(piece.kind for piece in live)
    peak = dict.fromkeys((*pass_.inputs, *pass_.results, *(f"{kind}<" for kind in pass_.results)), 0)

    def add(pieces: set[Piece], piece: Piece) -> None:
        if piece not in pieces:
            pieces.add(piece)
            now[piece.kind] += 1

    def drop(pieces: set[Piece], piece: Piece) -> None:
        if piece in pieces:
            pieces.remove(piece)
            now[piece.kind] -= 1

    for step, done in zip(program.steps, program.last_uses, strict=True):
        for post in step.posts:
            if program.is_part(post):
                continue
            if post.piece.kind in INPUTS:
                if not post.send and post.piece.shard != own:
                    add(live, post.piece)
            elif post.send:
                drop(sums, post.piece)
            else:
                now[f"{post.piece.kind}<"] += 1
        for piece in (*(made for block in step.blocks for made in pass_.makes(block)), *(m.piece for m in step.merges)):
            add(sums, piece)
        for kind, number in now.items():
            if number > peak[kind]:
                peak[kind] = number
        for merge in step.merges:
            now[f"{merge.piece.kind}<"] -= 1
        for piece in done:
            drop(live, piece)
    return peak


@dataclass
class _PostedMessage:
    transfer: Transfer
    batch: _PostedBatch
    blocks: int = 0  # what is combined in a partial result: a bit set of shards
    met: bool = False

    @property
    def done(self) -> bool:
        return self.batch.open == 0


@dataclass
class _PostedBatch:
    rank: int
    messages: list[_PostedMessage]
    open: int = 0


@dataclass
class _RankState:
    program: Program
    index: int = 0  # the step it stands at
    posted: bool = False  # whether that step's transfers are on their lanes
    held: dict[Piece, list[_PostedMessage]] = field(
        default_factory=dict
    )  # input pieces; messages still needed for each
    results: dict[Piece, int] = field(default_factory=dict)  # bit set of the shards combined into a result
    incoming: dict[tuple[Piece, int], deque[_PostedMessage]] = field(default_factory=dict)
    line: deque[_PostedBatch] = field(default_factory=deque)


class Player:
    def __init__(self, programs: list[Program]) -> None:
        self.ranks = [_RankState(program) for program in programs]
        self.shards = programs[0].place.num_shards
        self.waiting: dict[
            tuple[int, int, int], deque[_PostedMessage]
        ] = {}  # (from, to, lane): active sends not yet met
        self.wanted: dict[
            tuple[int, int, int], deque[_PostedMessage]
        ] = {}  # (from, to, lane): active receives not yet met
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
        program = state.program
        if state.index == len(program.steps):
            return False
        step = program.steps[state.index]
        if not state.posted:
            sent = [post.piece for post in step.posts if self.waits(state, post)]
            if not all(self.ready(state, piece) for piece in (*step.after, *sent)):
                return False
            self.post(rank, step.posts)
            state.posted = True
        for block in step.blocks:
            if not all(self.ready(state, piece) for piece in program.pass_.needs(block)):
                return False
        for merge in step.merges:
            queue = state.incoming.get((merge.piece, merge.peer), deque())
            if not queue:
                self.fail(state, f"merges {merge}, which no receive was posted for")
            if not queue[0].done:
                return False
        for block in step.blocks:
            for piece in program.pass_.makes(block):
                self.combine(state, piece, 1 << self.other_side(block, piece))
        for merge in step.merges:
            message = state.incoming[merge.piece, merge.peer].popleft()
            self.combine(state, merge.piece, message.blocks)
        state.index += 1
        state.posted = False
        return True

    def waits(self, state: _RankState, post: Transfer) -> bool:
        """Whether a post waits for its piece to arrive; over heads a rank sends its own tokens, which it always has."""
        return post.send and not state.program.is_part(post) and post.piece.kind not in RESULTS

    def ready(self, state: _RankState, piece: Piece) -> bool:
        if piece not in state.held:
            self.fail(state, f"needs {piece}, which it does not have and has not asked for")
        return all(message.done for message in state.held[piece])

    def other_side(self, block: Block, piece: Piece) -> int:
        """Of a block that goes into a result: the number of the shard that the result is not of."""
        return block.row if piece.kind in BY_COLUMN else block.column

    @property
    def everything(self) -> int:
        """All that must go into a result."""
        return (1 << self.shards) - 1

    def combine(self, state: _RankState, piece: Piece, blocks: int) -> None:
        have = state.results.get(piece, 0)
        if have & blocks:
            self.fail(state, f"adds the blocks of shards {_bits(have & blocks)} to {piece} a second time")
        state.results[piece] = have | blocks

    def post(self, rank: int, posts: tuple[Transfer, ...]) -> None:
        state = self.ranks[rank]
        batches: dict[int, _PostedBatch] = {}
        for transfer in posts:
            batch = batches.setdefault(transfer.lane, _PostedBatch(rank, []))
            message = _PostedMessage(transfer, batch)
            batch.messages.append(message)
            batch.open += 1
            piece, is_part = transfer.piece, state.program.is_part(transfer)
            if transfer.send and piece.kind in RESULTS:
                if piece not in state.results:
                    self.fail(state, f"sends {piece}, of which it has nothing")
                if not is_part:
                    message.blocks = state.results.pop(piece)  # it leaves for good
                elif state.results[piece] != self.everything:
                    self.fail(state, f"exchanges {piece} over heads before it is complete")
            elif not transfer.send and piece.kind in RESULTS:
                state.incoming.setdefault((piece, transfer.peer), deque()).append(message)
            elif not transfer.send:
                if is_part:
                    state.held.setdefault(piece, []).append(message)
                else:
                    state.held[piece] = [message]
        for _, batch in sorted(batches.items()):  # lanes in order, the same on every rank
            state.line.append(batch)
            if len(state.line) == 1:
                self.start(batch)

    def start(self, batch: _PostedBatch) -> None:
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

    def deliver(self, send: _PostedMessage, receive: _PostedMessage) -> None:
        if send.transfer.piece != receive.transfer.piece:
            state = self.ranks[receive.batch.rank]
            self.fail(state, f"expects {receive.transfer}, but rank {send.batch.rank} sends {send.transfer}")
        receive.blocks = send.blocks
        for message in (send, receive):
            message.met = True
            message.batch.open -= 1
            self.dirty.add(message.batch.rank)
            if message.batch.open == 0:
                line = self.ranks[message.batch.rank].line
                line.popleft()
                if line:
                    self.start(line[0])

    def check_end(self, state: _RankState) -> None:
        program = state.program
        if state.line:
            self.fail(state, f"ends with {[str(m.transfer) for m in state.line[0].messages if not m.met]} open")
        for piece in program.own(program.pass_.results):
            if missing := _bits(self.everything & ~state.results.get(piece, 0)):
                self.fail(state, f"ends with {piece} lacking the blocks of shards {missing}")
        if foreign := [piece for piece in state.results if piece.shard != program.place.shard]:
            self.fail(state, f"ends with results that it does not own: {' '.join(map(str, foreign))}")
        for piece in program.kept if program.pass_ is FORWARD else ():
            if piece not in state.held:
                self.fail(state, f"should keep {piece}, but never had it")

    def fail(self, state: _RankState, what: str) -> None:
        raise ScheduleError(f"{state.program}, step {state.index}: {what}\n{self.picture(state)}")

    def picture(self, state: _RankState) -> str:
        lines = [f"rank {state.program.place.rank}:"]
        for index, step in enumerate(state.program.steps):
            marker = "-->" if index == state.index else "   "
            lines.append(f"{marker} {index:3d}  {step}")
        return "\n".join(lines)


def _bits(blocks: int) -> list[int]:
    return [index for index in range(blocks.bit_length()) if blocks >> index & 1]

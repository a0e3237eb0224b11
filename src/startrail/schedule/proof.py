"""Runs the programs of all ranks against each other, without data, and proves the properties of a schedule.

Messages are delivered as by the strictest backend. The posts of one step on one lane form a batch. A rank's batches of
all lanes run in one sequence (those of a step by lane): a batch starts when the previous one has ended. A transfer
happens when the batches of both ends have started, and no message of a batch can be used before the whole batch has
ended. A schedule that ends under these rules also ends with independent lanes and with messages that arrive one by one.

The checks: every send matches its receive, nothing deadlocks, every (query shard, key shard) pair is computed once,
every result reaches its owner with each block exactly once, the pieces to be kept were received, and traffic and memory
match their closed forms.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program, stated_pieces, traffic_at
from startrail.schedule.values import BY_COLUMN, FORWARD, INPUTS, PASSES, RESULTS, Pass, Piece, Transfer

UNIT_SIZES = {"q": 3.0, "kv": 5.0, "out": 7.0, "do": 11.0, "dq": 13.0, "dkv": 17.0}  # any distinct sizes will do


class ScheduleError(AssertionError):
    """A schedule is wrong; the message shows the rank, its step, and the expected and actual values."""


def prove_plan(plan: Plan, world: int, passes: Sequence[Pass] = PASSES) -> None:
    """Raise ``ScheduleError`` unless the passes of ``plan`` on ``world`` ranks pass every check."""
    for pass_ in passes:
        programs = [build_program.__wrapped__(plan, world, rank, pass_) for rank in range(world)]
        prove_programs(programs)
        for program in programs:
            _check_traffic(program)
            _check_memory(program)


def prove_programs(programs: list[Program]) -> None:
    _Player(programs).play()


def _check_traffic(program: Program) -> None:
    sent = [0.0] * len(program.place.sizes)
    for post, size in program.sends(UNIT_SIZES):
        sent[post.lane] += size
    expected = traffic_at(program.plan, program.place, program.pass_, UNIT_SIZES)
    if any(abs(a - b) > 1e-6 for a, b in zip(sent, expected, strict=True)):
        raise ScheduleError(f"{program}: sends {sent} by level, but the closed form is {expected}")


def _check_memory(program: Program) -> None:
    stated = stated_pieces(program.plan, program.pass_)
    for kind, number in peak_pieces(program).items():
        if number > stated[kind]:
            raise ScheduleError(f"{program}: holds {number} {kind} pieces at once, but the plan states {stated[kind]}")


def peak_pieces(program: Program) -> dict[str, int]:
    """The most pieces of each kind that a rank holds at the same time besides its own: received inputs, accumulators
    (``out``, ``dq``, ``dkv``) and partial results in flight to it (``out<`` and so on)."""
    own, pass_, by_heads = program.place.shard, program.pass_, program.place.by_heads
    held = {piece for piece in program.given if piece.shard != own}
    count: Counter[str] = Counter(piece.kind for piece in held)
    peak = dict.fromkeys((*pass_.inputs, *pass_.results, *(f"{kind}<" for kind in pass_.results)), 0)

    def add(piece: Piece) -> None:
        if piece not in held:
            held.add(piece)
            count[piece.kind] += 1

    def drop(piece: Piece) -> None:
        if piece in held:
            held.remove(piece)
            count[piece.kind] -= 1

    for step, done in zip(program.steps, program.last_uses, strict=True):
        for send, lane, piece, _ in step.posts:
            if by_heads[lane]:
                continue
            if piece.kind in INPUTS:
                if not send and piece.shard != own:
                    add(piece)
            elif send:
                drop(piece)
            else:
                count[f"{piece.kind}<"] += 1
        for piece in (*(made for block in step.blocks for made in pass_.makes(block)), *(m.piece for m in step.merges)):
            add(piece)
        for kind, number in count.items():
            if number > peak[kind]:
                peak[kind] = number
        for merge in step.merges:
            count[f"{merge.piece.kind}<"] -= 1
        for piece in done:
            drop(piece)
    return peak


@dataclass(slots=True)
class _PostedMessage:
    transfer: Transfer
    batch: _PostedBatch
    blocks: int = 0  # bit set of the shards combined in a partial result
    is_delivered: bool = False


@dataclass(slots=True)
class _PostedBatch:
    rank: int
    messages: list[_PostedMessage] = field(default_factory=list)
    num_open: int = 0


@dataclass(slots=True)
class _RankState:
    program: Program
    index: int = 0  # of the current step
    needs: list[Piece] | None = None  # inputs of the current step's blocks, once its transfers are posted
    held: dict[Piece, list[_PostedMessage]] = field(default_factory=dict)  # input pieces, each with its messages
    results: dict[Piece, int] = field(default_factory=dict)  # bit set of the shards combined into each result
    incoming: dict[tuple[Piece, int], deque[_PostedMessage]] = field(default_factory=dict)
    batches: deque[_PostedBatch] = field(default_factory=deque)  # the first has started


class _Player:
    def __init__(self, programs: list[Program]) -> None:
        self.ranks = [_RankState(program, held={piece: [] for piece in program.given}) for program in programs]
        self.all_shards = (1 << programs[0].place.num_shards) - 1
        # started messages without their counterpart, by whether they are sends, and (sender, receiver, lane)
        self.unmatched: dict[tuple[bool, int, int, int], deque[_PostedMessage]] = {}
        self.runnable = deque(range(len(programs)))

    def play(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            while self.advance(rank):
                pass
        stuck = [state for state in self.ranks if state.index < len(state.program.steps)]
        if stuck:
            raise ScheduleError("deadlock\n" + "\n".join(map(_listing, stuck[:8])))
        for state in self.ranks:
            self.check_end(state)

    def advance(self, rank: int) -> bool:
        """Do as much of the rank's current step as possible; True if the step is complete."""
        state = self.ranks[rank]
        program = state.program
        if state.index == len(program.steps):
            return False
        step = program.steps[state.index]
        if state.needs is None:
            # over heads a rank sends its own tokens, which it always has
            by_heads = program.place.by_heads
            sent = [p.piece for p in step.posts if p.send and not by_heads[p.lane] and p.piece.kind in INPUTS]
            if not _are_ready(state, (*step.after, *sent)):
                return False
            self.post(rank, step.posts)
            state.needs = list(dict.fromkeys(piece for block in step.blocks for piece in program.pass_.needs(block)))
        if not _are_ready(state, state.needs):
            return False
        for merge in step.merges:
            queue = state.incoming.get((merge.piece, merge.peer))
            if not queue:
                _fail(state, f"merges {merge}, but has not posted a receive for it")
            if queue[0].batch.num_open:
                return False
        for block in step.blocks:
            for piece in program.pass_.makes(block):
                _combine(state, piece, 1 << (block.row if piece.kind in BY_COLUMN else block.column))
        for merge in step.merges:
            _combine(state, merge.piece, state.incoming[merge.piece, merge.peer].popleft().blocks)
        state.index += 1
        state.needs = None
        return True

    def post(self, rank: int, posts: tuple[Transfer, ...]) -> None:
        state, batches = self.ranks[rank], dict[int, _PostedBatch]()
        for transfer in posts:
            if (batch := batches.get(transfer.lane)) is None:
                batch = batches[transfer.lane] = _PostedBatch(rank)
            message = _PostedMessage(transfer, batch)
            batch.messages.append(message)
            batch.num_open += 1
            piece, is_part = transfer.piece, state.program.place.by_heads[transfer.lane]
            if transfer.send and piece.kind in RESULTS:
                if piece not in state.results:
                    _fail(state, f"sends {piece}, but has no part of it")
                if not is_part:
                    message.blocks = state.results.pop(piece)
                elif state.results[piece] != self.all_shards:
                    _fail(state, f"exchanges {piece} over heads before it is complete")
            elif not transfer.send and piece.kind in RESULTS:
                state.incoming.setdefault((piece, transfer.peer), deque()).append(message)
            elif not transfer.send:
                state.held[piece] = [*state.held.get(piece, ()), message] if is_part else [message]
        for _, batch in sorted(batches.items()):  # lanes in order, the same on every rank
            state.batches.append(batch)
            if len(state.batches) == 1:
                self.start(batch)

    def start(self, batch: _PostedBatch) -> None:
        """Deliver the messages whose other end has started too."""
        for message in batch.messages:
            send, lane, _, peer = message.transfer
            ends = (batch.rank, peer, lane) if send else (peer, batch.rank, lane)
            if others := self.unmatched.get((not send, *ends)):
                other = others.popleft()
                self.deliver(*((message, other) if send else (other, message)))
            else:
                self.unmatched.setdefault((send, *ends), deque()).append(message)

    def deliver(self, sent: _PostedMessage, received: _PostedMessage) -> None:
        if sent.transfer.piece != received.transfer.piece:
            state = self.ranks[received.batch.rank]
            _fail(state, f"expects {received.transfer}, but rank {sent.batch.rank} sends {sent.transfer}")
        received.blocks = sent.blocks
        for message in (sent, received):
            batch = message.batch
            message.is_delivered = True
            batch.num_open -= 1
            if batch.num_open == 0:
                self.runnable.append(batch.rank)
                batches = self.ranks[batch.rank].batches
                batches.popleft()
                if batches:
                    self.start(batches[0])

    def check_end(self, state: _RankState) -> None:
        program = state.program
        if state.batches:
            pending = [str(message.transfer) for message in state.batches[0].messages if not message.is_delivered]
            _fail(state, f"ends with pending transfers {pending}")
        for piece in program.own(program.pass_.results):
            if missing := _bits(self.all_shards & ~state.results.get(piece, 0)):
                _fail(state, f"ends with {piece} lacking the blocks of shards {missing}")
        if foreign := [piece for piece in state.results if piece.shard != program.place.shard]:
            _fail(state, f"ends with results that it does not own: {' '.join(map(str, foreign))}")
        for piece in program.kept if program.pass_ is FORWARD else ():
            if piece not in state.held:
                _fail(state, f"should keep {piece}, but never had it")


def _are_ready(state: _RankState, pieces: Sequence[Piece]) -> bool:
    for piece in pieces:
        if piece not in state.held:
            _fail(state, f"needs {piece}, but neither has it nor has posted a receive for it")
        for message in state.held[piece]:
            if message.batch.num_open:
                return False
    return True


def _combine(state: _RankState, piece: Piece, blocks: int) -> None:
    before = state.results.get(piece, 0)
    if before & blocks:
        _fail(state, f"adds the blocks of shards {_bits(before & blocks)} to {piece} a second time")
    state.results[piece] = before | blocks


def _fail(state: _RankState, problem: str) -> NoReturn:
    raise ScheduleError(f"{state.program}, step {state.index}: {problem}\n{_listing(state)}")


def _listing(state: _RankState) -> str:
    markers = ["-->" if index == state.index else "   " for index in range(len(state.program.steps))]
    steps = [f"{markers[index]} {index:3d}  {step}" for index, step in enumerate(state.program.steps)]
    return "\n".join([f"rank {state.program.place.rank}:", *steps])


def _bits(blocks: int) -> list[int]:
    return [index for index in range(blocks.bit_length()) if blocks >> index & 1]

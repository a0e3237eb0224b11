"""Runs the programs of all ranks against each other, without data, and proves the properties of a schedule.

Messages are delivered as by the strictest backend. The posts of one step on one lane form a batch. A rank's batches of
all lanes run in one sequence (those of a step by lane): a batch starts when the previous one has ended. A transfer
happens when the batches of both ends have started, and no message of a batch can be used before the whole batch has
ended. A schedule that ends under these rules also ends with independent lanes, with messages that arrive one by one,
and if every post blocks its host until its batch has ended: what a rank does between posts needs earlier batches only.

The checks: every send matches its receive, nothing deadlocks, every (query shard, key shard) pair is computed once,
every result reaches its owner with each block exactly once, the pieces to be kept were received, and traffic and memory
match their closed forms.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from startrail.schedule.parts import run_order
from startrail.schedule.program import Program, stated_pieces
from startrail.schedule.values import Piece, Transfer


class ScheduleError(AssertionError):
    """A schedule is wrong; the message shows the rank, its step, and the expected and actual values."""


def prove_programs(programs: list[Program]) -> None:
    """Raise ``ScheduleError`` unless the programs of all ranks work together."""
    prove_parts([[program] for program in programs])


def prove_parts(programs: Sequence[Sequence[Program]]) -> list[list[dict[Piece, Contents]]]:
    """The same for ranks that run several programs in one pass, from the outermost zone inwards. Returns what each
    result of each program consists of in the end."""
    return _Player(programs).play()


def check_memory(program: Program) -> None:
    """Raise ``ScheduleError`` if a rank holds more pieces at once than its plan states."""
    stated = stated_pieces(program.plan, program.pass_, program.place.world)
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
                if send and piece.kind in pass_.results:
                    drop(piece)
                continue
            if piece.kind not in pass_.results:
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


class Contents(dict[int | None, int]):
    """What a result consists of: a bit set of the shards combined in it. In programs with bundles the tokens of a piece
    are told apart: by index, and None for what holds for all of them."""

    def combine(self, other: Contents) -> int:
        """Add ``other``. Returns the shards that were there before."""
        twice = 0
        for token, shards in other.items():
            before = self.get(token, 0)
            twice |= before & shards
            self[token] = before | shards
        return twice


@dataclass(slots=True)
class _PostedMessage:
    transfer: Transfer
    batch: _PostedBatch
    program: Program
    contents: Contents | None = None  # of a partial result
    is_delivered: bool = False

    @property
    def content_name(self) -> tuple[int, int, Piece]:
        """What sender and receiver must agree on: the ranks of the program, and the piece."""
        return self.program.first, self.program.place.world, self.transfer.piece


@dataclass(slots=True)
class _PostedBatch:
    rank: int
    messages: list[_PostedMessage] = field(default_factory=list)
    num_open: int = 0


@dataclass(slots=True)
class _PartState:
    """One program of a rank."""

    program: Program
    held: dict[Piece, list[_PostedMessage]] = field(default_factory=dict)  # input pieces, each with its messages
    results: dict[Piece, Contents] = field(default_factory=dict)
    incoming: dict[tuple[Piece, int], deque[_PostedMessage]] = field(default_factory=dict)
    step: int = 0  # that runs or ran last

    @property
    def all_shards(self) -> int:
        """What a complete result of one of the program's shards consists of."""
        return (1 << self.program.place.num_shards) - 1


@dataclass(slots=True)
class _RankState:
    parts: list[_PartState]
    order: list[tuple[int, int]]
    index: int = 0  # of the current step in the order
    needs: list[Piece] | None = None  # inputs of the current step's blocks, once its transfers are posted
    batches: deque[_PostedBatch] = field(default_factory=deque)  # the first has started


class _Player:
    def __init__(self, programs: Sequence[Sequence[Program]]) -> None:
        self.ranks = [
            _RankState([_PartState(p, held={piece: [] for piece in p.given}) for p in parts], run_order(parts))
            for parts in programs
        ]
        # started messages without their counterpart, by whether they are sends, and (sender, receiver, lane)
        self.unmatched: dict[tuple[bool, int, int, int], deque[_PostedMessage]] = {}
        self.runnable = deque(range(len(programs)))

    def play(self) -> list[list[dict[Piece, Contents]]]:
        while self.runnable:
            rank = self.runnable.popleft()
            while self.advance(rank):
                pass
        stuck = [part for state in self.ranks if state.index < len(state.order) for part in state.parts]
        if stuck:
            raise ScheduleError("deadlock\n" + "\n".join(map(_listing, stuck[:8])))
        for state in self.ranks:
            if state.batches:
                pending = [str(message.transfer) for message in state.batches[0].messages if not message.is_delivered]
                _fail(state.parts[0], f"ends with pending transfers {pending}")
            for part in state.parts:
                _check_end(part)
        return [[part.results for part in state.parts] for state in self.ranks]

    def advance(self, rank: int) -> bool:
        """Do as much of the rank's current step as possible; True if the step is complete."""
        state = self.ranks[rank]
        if state.index == len(state.order):
            return False
        number, index = state.order[state.index]
        part = state.parts[number]
        program, part.step = part.program, index
        step = program.steps[index]
        if state.needs is None:
            # over heads a rank sends its own tokens, which it always has; a bundle is packed from what it waited for
            by_heads, results, sent = program.place.by_heads, program.pass_.results, []
            for post in step.posts:
                if post.send and not by_heads[post.lane] and post.piece.kind not in results:
                    bundle = program.bundles.get(post.piece.shard)
                    shards = [post.piece.shard] if bundle is None else [source.shard for source in bundle.sources]
                    sent += [post.piece._replace(shard=shard) for shard in shards]
            if not _are_ready(part, (*step.after, *sent)):
                return False
            self.post(rank, part, step.posts)
            state.needs = list(dict.fromkeys(piece for block in step.blocks for piece in program.pass_.needs(block)))
        if not _are_ready(part, state.needs):
            return False
        for merge in step.merges:
            queue = part.incoming.get((merge.piece, merge.peer))
            if not queue:
                _fail(part, f"merges {merge}, but has not posted a receive for it")
            if queue[0].batch.num_open:
                return False
        for block in step.blocks:
            for piece in program.pass_.makes(block):
                other = 1 << (block.row if piece.kind in program.pass_.by_column else block.column)
                bundle = program.bundles.get(piece.shard)
                _combine(part, piece, Contents(dict.fromkeys(range(bundle.tokens) if bundle else [None], other)))
        for merge in step.merges:
            contents = part.incoming[merge.piece, merge.peer].popleft().contents
            assert contents is not None
            for shard, of_shard in _unpacked(program, merge.piece, contents).items():
                _combine(part, merge.piece._replace(shard=shard), of_shard)
        state.index += 1
        state.needs = None
        return True

    def post(self, rank: int, part: _PartState, posts: tuple[Transfer, ...]) -> None:
        state, batches, program = self.ranks[rank], dict[int, _PostedBatch](), part.program
        for transfer in posts:
            if (batch := batches.get(transfer.lane)) is None:
                batch = batches[transfer.lane] = _PostedBatch(rank)
            message = _PostedMessage(transfer, batch, program)
            batch.messages.append(message)
            batch.num_open += 1
            piece, is_part = transfer.piece, program.place.by_heads[transfer.lane]
            if transfer.send and piece.kind in program.pass_.results:
                if piece not in part.results:
                    _fail(part, f"sends {piece}, but has no part of it")
                if not is_part:
                    message.contents = part.results.pop(piece)
                elif part.results[piece] != {None: part.all_shards}:
                    _fail(part, f"exchanges {piece} over heads before it is complete")
            elif not transfer.send and piece.kind in program.pass_.results:
                part.incoming.setdefault((piece, transfer.peer), deque()).append(message)
            elif not transfer.send:
                part.held[piece] = [*part.held.get(piece, ()), message] if is_part else [message]
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
        if sent.content_name != received.content_name:
            state = self.ranks[received.batch.rank]
            part = next(part for part in state.parts if part.program is received.program)
            _fail(part, f"expects {received.transfer}, but rank {sent.batch.rank} sends {sent.transfer}")
        received.contents = sent.contents
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


def _check_end(part: _PartState) -> None:
    program = part.program
    expected = program.expected
    if expected is None:
        expected = dict.fromkeys(program.own(program.pass_.results), part.all_shards)
    for piece, shards in expected.items():
        combined = part.results.get(piece, Contents()).get(None, 0)
        if missing := _bits(shards & ~combined):
            _fail(part, f"ends with {piece} lacking the blocks of shards {missing}")
    if foreign := [piece for piece in part.results if piece.shard != program.place.shard]:
        _fail(part, f"ends with results that it does not own: {' '.join(map(str, foreign))}")
    for piece in program.kept if program.pass_.is_forward else ():
        if piece not in part.held:
            _fail(part, f"should keep {piece}, but never had it")


def _unpacked(program: Program, piece: Piece, contents: Contents) -> dict[int, Contents]:
    """What a message brings for each shard. The tokens of a bundle belong to the pieces that it was packed from."""
    bundle = program.bundles.get(piece.shard)
    if bundle is None:
        return {piece.shard: contents}
    found: dict[int, Contents] = {}
    at = 0
    for shard, start, tokens in bundle.sources:
        of_shard = found.setdefault(shard, Contents())
        of_shard.update({start + i: contents[at + i] for i in range(tokens)})
        at += tokens
    return found


def _are_ready(part: _PartState, pieces: Sequence[Piece]) -> bool:
    for piece in pieces:
        if piece not in part.held:
            _fail(part, f"needs {piece}, but neither has it nor has posted a receive for it")
        for message in part.held[piece]:
            if message.batch.num_open:
                return False
    return True


def _combine(part: _PartState, piece: Piece, contents: Contents) -> None:
    if twice := part.results.setdefault(piece, Contents()).combine(contents):
        _fail(part, f"adds the blocks of shards {_bits(twice)} to {piece} a second time")


def _fail(part: _PartState, problem: str) -> NoReturn:
    raise ScheduleError(f"{part.program}, step {part.step}: {problem}\n{_listing(part)}")


def _listing(part: _PartState) -> str:
    program = part.program
    markers = ["-->" if index == part.step else "   " for index in range(len(program.steps))]
    steps = [f"{markers[index]} {index:3d}  {step}" for index, step in enumerate(program.steps)]
    return "\n".join([f"rank {program.first + program.place.rank}:", *steps])


def _bits(blocks: int) -> list[int]:
    return [index for index in range(blocks.bit_length()) if blocks >> index & 1]

"""A rank's program as the tasks that a clock can play: post these messages, wait for those, work for so long.

The program is the very one that the executor walks; here each of its steps gets a price. What is waited for, packed,
joined and merged, and when, follows the executor line by line.

>>> from startrail.schedule.plan import Plan
>>> from startrail.planner.cluster import find_cluster
>>> prices = Prices(find_cluster("a100-4x8"), Sizes(Plan.parse("1x32"), 128, 1, 16, 16, 64, 2), True, None, "bfloat16")
>>> tasks = tasks_of(build_program(prices.sizes.plan, 32, 0, FORWARD), prices)
>>> [type(task).__name__ for task in tasks[:4]], len(tasks[1].messages)
(['ComputeTask', 'PostTask', 'ComputeTask', 'WaitTask'], 2)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import NamedTuple

from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.planner.cluster import ClusterSpec, Curve
from startrail.schedule.program import Program, build_program
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import FORWARD, INPUTS, RESULTS, Pass, Piece

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # by visible pair of tokens and number of a head: two products, five products
LOOKED_AT = 16  # shards whose work is compared under a window
MERGED = 1.5  # a partial result is read, and the sum read and written


class PricedMessage(NamedTuple):
    """One end of a message, as the rank's own number of it."""

    send: bool
    lane: int
    peer: int
    nbytes: float
    number: int


class PostTask(NamedTuple):
    messages: list[PricedMessage]


class WaitTask(NamedTuple):
    numbers: list[int]


class ComputeTask(NamedTuple):
    seconds: float


Task = PostTask | WaitTask | ComputeTask


@dataclass(frozen=True)
class Prices:
    """What the steps of one attention call cost on a cluster, in seconds."""

    cluster: ClusterSpec
    sizes: Sizes
    causal: bool
    window: int | None
    dtype: str

    @cached_property
    def shares(self) -> tuple[int, int]:
        """Batch and query heads of one group."""
        batch, heads, *_ = self.sizes.fields("q", self.sizes.tokens)[0].shape
        return batch, heads

    @cached_property
    def areas(self) -> dict[tuple[Pass, float], float]:
        """The price of a block of so many visible pairs; few differ, since zigzag halves a causal mask in all."""
        return {}

    @cached_property
    def chunks(self) -> dict[tuple[Pass, int], float]:
        """The price of two chunks that are so many apart."""
        return {}

    def block(self, pass_: Pass, row: int, column: int, shards: int) -> float:
        if self.window is not None:
            return self._tiles(pass_, row, column, shards)
        area = self.sizes.tokens**2 / (2 if self.causal else 1)
        if (pass_, area) not in self.areas:
            self.areas[pass_, area] = self.kernel(pass_, area, 1) if area else 0.0
        return self.areas[pass_, area]

    def kernel(self, pass_: Pass, area: float, calls: int) -> float:
        """Of so many visible pairs of tokens, in so many calls."""
        return (
            area * self.per_pair(pass_) / self.speeds(pass_).at(sqrt(area / calls)) + calls * self.cluster.device.call
        )

    def at_best(self, pass_: Pass, area: float) -> float:
        """What no kernel calls for so many pairs can beat."""
        return area * self.per_pair(pass_) / max(speed for _, speed in self.speeds(pass_).points)

    def per_pair(self, pass_: Pass) -> float:
        batch, heads = self.shares
        return (FORWARD_FLOPS if pass_ is FORWARD else BACKWARD_FLOPS) * self.sizes.head_dim * batch * heads

    def speeds(self, pass_: Pass) -> Curve:
        rates = self.cluster.device.of(self.dtype)
        return rates.forward if pass_ is FORWARD else rates.backward

    def _tiles(self, pass_: Pass, row: int, column: int, shards: int) -> float:
        """Under a window, what two chunks of zigzag's cost follows from how far apart they are."""
        if shards == 1:
            return self._chunk(pass_, 0, self.sizes.tokens)
        last, tokens = 2 * shards - 1, self.sizes.tokens // 2
        reach = ((self.window or 1) - 2) // tokens + 1  # chunks further apart do not see each other
        least = 0 if self.causal else -reach
        # both chunks of the queries with both chunks of the keys
        aparts = row - column, row + column - last, last - row - column, column - row
        return sum(self._chunk(pass_, apart, tokens) for apart in aparts if least <= apart <= reach)

    def _chunk(self, pass_: Pass, apart: int, tokens: int) -> float:
        if (pass_, apart) not in self.chunks:
            start = (abs(apart) + 1) * tokens
            runs = ((start, tokens),), ((start - apart * tokens, tokens),)
            tiles = tiles_of(Mask(self.causal, self.window), *runs)
            self.chunks[pass_, apart] = sum(self.kernel(pass_, tile.area, 1) for tile in tiles)
        return self.chunks[pass_, apart]

    @cached_property
    def busiest(self) -> int:
        """The rank with the most work, for which the others wait. Under a window that is not everybody: how many of its
        blocks are near the diagonal depends on its place. Of very many, some are looked at."""
        plan, world = self.sizes.plan, self.cluster.world
        if self.window is None:
            return 0
        slots, shards = plan.slots(world), world // plan.heads

        def work(shard: int) -> float:
            grid = plan.family.grid(plan, plan.place(world, slots.index(shard * plan.heads)))
            rows, columns = grid or ((), ())
            return sum(self.block(FORWARD, row, column, shards) for row in rows for column in columns)

        return slots.index(max(range(0, shards, -(-shards // LOOKED_AT)), key=work) * plan.heads)

    def copy(self, nbytes: float) -> float:
        return 2 * nbytes / self.cluster.device.copy


def tasks_of(program: Program, prices: Prices) -> list[Task]:
    return _Tasks(program, prices).tasks


class _Tasks:
    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices, self.sizes = program, prices, prices.sizes
        self.nbytes = self.sizes.by_kind
        self.tasks: list[Task] = []
        self.work = prices.cluster.device.start / 2
        self.numbers = 0
        self.sends: list[int] = []
        self.coming: dict[Piece, list[int]] = {}  # inputs on their way
        self.joined: set[Piece] = set()  # inputs that come in parts over heads
        self.partial: dict[tuple[Piece, int], deque[int]] = {}
        self.home: list[int] = []
        # pieces that lie in one buffer already: kept ones, and own ones that come in parts over heads
        self.packed = {p for p in program.given if p not in program.own_inputs or program.place.num_heads > 1}
        self.rows: set[Piece] = set()
        for index, step in enumerate(program.steps):
            for piece in step.after:
                self.need(piece)
            if step.posts:
                self.post(index)
            for block in step.blocks:
                for piece in program.pass_.needs(block):
                    self.need(piece)
                    if piece.kind == "do" and piece not in self.rows:  # the stand-in for the row's output
                        self.rows.add(piece)
                        self.work += prices.cluster.device.call + prices.copy(self.nbytes["do"])
                self.work += prices.block(program.pass_, block.row, block.column, program.place.num_shards)
            for merge in step.merges:
                self.wait([self.partial[merge.piece, merge.peer].popleft()])
                self.work += prices.cluster.device.call + MERGED * prices.copy(self.nbytes[merge.piece.kind])
        self.wait(self.home)
        own = sum(self.nbytes[kind] * program.plan.groups for kind in program.pass_.results)
        self.work += prices.copy(own)
        self.wait(self.sends)
        self.work += prices.cluster.device.start / 2
        self.flush()

    def flush(self) -> None:
        if self.work:
            self.tasks.append(ComputeTask(self.work))
            self.work = 0.0

    def wait(self, numbers: list[int]) -> None:
        if numbers:
            self.flush()
            self.tasks.append(WaitTask(numbers))

    def need(self, piece: Piece) -> None:
        if numbers := self.coming.pop(piece, None):
            self.wait(numbers)
            if piece in self.joined:
                self.work += self.prices.copy(self.nbytes[piece.kind])

    def message(self, send: bool, lane: int, peer: int, nbytes: float) -> PricedMessage:
        self.numbers += 1
        self.work += self.prices.cluster.device.post
        if send:
            self.sends.append(self.numbers)
        return PricedMessage(send, lane, peer, nbytes, self.numbers)

    def post(self, index: int) -> None:
        program, nbytes = self.program, self.nbytes
        posts = program.steps[index].posts
        over_heads = [post for post in posts if program.is_part(post)]
        messages = []
        if over_heads:  # one message a peer, for all pieces
            pieces = list(dict.fromkeys(post.piece for post in over_heads))
            whole = sum(nbytes[piece.kind] for piece in pieces)
            self.work += self.prices.copy(whole)
            for post in over_heads:
                if post.piece == pieces[0]:
                    message = self.message(post.send, post.lane, post.peer, whole / program.place.num_heads)
                    messages.append(message)
                    if not post.send:
                        for piece in pieces:
                            self.arriving(piece, message.number)
        whole_pieces = [post for post in posts if not program.is_part(post)]
        for post in whole_pieces:  # before any receive: it may bring the same piece anew
            if post.send and post.piece.kind in INPUTS:
                self.need(post.piece)
        for post in whole_pieces:
            piece, size = post.piece, nbytes[post.piece.kind]
            if post.send and piece not in self.packed:
                self.work += self.prices.copy(size)
                if piece.kind in INPUTS:
                    self.packed.add(piece)
            message = self.message(post.send, post.lane, post.peer, size)
            messages.append(message)
            if post.send:
                continue
            if piece.kind in RESULTS:
                self.partial.setdefault((piece, post.peer), deque()).append(message.number)
            else:
                self.packed.add(piece)
                self.coming[piece] = [message.number]
        self.flush()
        self.tasks.append(PostTask(messages))

    def arriving(self, piece: Piece, number: int) -> None:
        if piece.kind in INPUTS:
            self.joined.add(piece)
            self.coming.setdefault(piece, []).append(number)
        else:
            self.home.append(number)


def call_tasks(prices: Prices, world: int, rank: int, pass_: Pass) -> list[Task]:
    """What ``rank`` does in one pass of a call. Built anew: nobody plays a program twice with the same prices."""
    return tasks_of(build_program.__wrapped__(prices.sizes.plan, world, rank, pass_), prices)

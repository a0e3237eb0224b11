"""Turns a rank's program into tasks for the simulator: post messages, wait for messages, compute for some seconds.

The executor runs the same program; here each of its steps gets a price. The order of waits, copies and merges follows
the executor line by line.

>>> from startrail.schedule.plan import Plan
>>> from startrail.planner.cluster import find_cluster
>>> prices = Prices(find_cluster("a100-4x8"), Sizes(Plan.parse("1x32"), 128, 1, 16, 16, 64, 2), True, None, "bfloat16")
>>> tasks = tasks_of(build_program(prices.sizes.plan, 32, 0, FORWARD), prices)
>>> [type(task).__name__ for task in tasks[:4]], len(tasks[1].messages)
(['ComputeTask', 'PostTask', 'ComputeTask', 'WaitTask'], 2)
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt
from typing import NamedTuple

from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.planner.cluster import ClusterSpec, Curve
from startrail.schedule.program import Program, build_program
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import FORWARD, Pass
from startrail.schedule.walk import Await, Combine, Compute, Event, Finish, Post, Prepare, Walker, handlers_of

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per visible pair and element of head_dim: two and five products
SAMPLED_SHARDS = 16  # shards whose work is compared under a window
MERGE_COPIES = 1.5  # a merge reads a partial result, and reads and writes the sum


class PricedMessage(NamedTuple):
    """One end of a message. It holds only numbers, so the garbage collector can skip it: there are millions."""

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


class Prices:
    """Seconds that each step of one attention call takes on a cluster."""

    def __init__(self, cluster: ClusterSpec, sizes: Sizes, causal: bool, window: int | None, dtype: str) -> None:
        self.cluster, self.sizes, self.causal, self.window, self.dtype = cluster, sizes, causal, window, dtype
        self._whole: dict[Pass, float] = {}  # seconds of a block without a window: all blocks are equal in zigzag
        self._chunks: dict[tuple[Pass, int], float] = {}  # seconds of two chunks, by their distance

    def block(self, pass_: Pass, row: int, column: int, shards: int) -> float:
        if self.window is not None:
            return self._block_in_window(pass_, row, column, shards)
        if pass_ not in self._whole:
            area = self.sizes.tokens**2 / (2 if self.causal else 1)
            self._whole[pass_] = self.kernel(pass_, area) if area else 0.0
        return self._whole[pass_]

    def kernel(self, pass_: Pass, area: float) -> float:
        """Seconds of one kernel call over ``area`` visible pairs."""
        return area * self.flops_per_pair(pass_) / self.speeds(pass_).at(sqrt(area)) + self.cluster.device.call

    def kernel_bound(self, pass_: Pass, area: float) -> float:
        """A lower bound for ``area`` visible pairs in any number of kernel calls."""
        return area * self.flops_per_pair(pass_) / max(speed for _, speed in self.speeds(pass_).points)

    def flops_per_pair(self, pass_: Pass) -> float:
        batch, heads, *_ = self.sizes.fields("q", self.sizes.tokens)[0].shape  # of one group
        return (FORWARD_FLOPS if pass_ is FORWARD else BACKWARD_FLOPS) * self.sizes.head_dim * batch * heads

    def speeds(self, pass_: Pass) -> Curve:
        rates = self.cluster.device.of(self.dtype)
        return rates.forward if pass_ is FORWARD else rates.backward

    def _block_in_window(self, pass_: Pass, row: int, column: int, shards: int) -> float:
        """Under a window, the price of two zigzag chunks depends only on their distance."""
        if shards == 1:
            return self._chunk(pass_, 0, self.sizes.tokens)
        last, tokens = 2 * shards - 1, self.sizes.tokens // 2
        reach = ((self.window or 1) - 2) // tokens + 1  # chunks further apart do not see each other
        least = 0 if self.causal else -reach
        # both chunks of the queries with both chunks of the keys
        distances = row - column, row + column - last, last - row - column, column - row
        return sum(self._chunk(pass_, distance, tokens) for distance in distances if least <= distance <= reach)

    def _chunk(self, pass_: Pass, distance: int, tokens: int) -> float:
        if (pass_, distance) not in self._chunks:
            start = (abs(distance) + 1) * tokens
            runs = ((start, tokens),), ((start - distance * tokens, tokens),)
            tiles = tiles_of(Mask(self.causal, self.window), *runs)
            self._chunks[pass_, distance] = sum(self.kernel(pass_, tile.area) for tile in tiles)
        return self._chunks[pass_, distance]

    @cached_property
    def busiest(self) -> int:
        """The rank with the most work, which the others wait for. Under a window ranks differ: the number of blocks
        near the diagonal depends on the rank's place. In large worlds only a sample of the shards is compared."""
        plan, world = self.sizes.plan, self.cluster.world
        if self.window is None:
            return 0
        slots, shards = plan.slots(world), world // plan.heads

        def work(shard: int) -> float:
            grid = plan.family.grid(plan, plan.place(world, slots.index(shard * plan.heads)))
            rows, columns = grid or ((), ())
            return sum(self.block(FORWARD, row, column, shards) for row in rows for column in columns)

        return slots.index(max(range(0, shards, -(-shards // SAMPLED_SHARDS)), key=work) * plan.heads)

    def copy(self, nbytes: float) -> float:
        return 2 * nbytes / self.cluster.device.copy


class Mark(NamedTuple):
    """When an event ends: after so many tasks, and so many seconds of the next one."""

    step: int
    event: Event | Finish
    tasks: int
    seconds: float


def tasks_of(program: Program, prices: Prices, marks: list[Mark] | None = None) -> list[Task]:
    """The tasks of a program. ``marks`` gets one entry per event, for traces."""
    pricing = _Pricing(program, prices)
    walker, handlers = Walker(program), handlers_of(pricing)
    for step in walker.steps():
        for event in step.events:
            handlers[type(event)](event)
            if marks is not None:
                marks.append(Mark(step.number, event, len(pricing.tasks), pricing.work))
    pricing.finish(walker)
    if marks is not None:
        marks.append(Mark(len(program.steps), Finish(walker.home), len(pricing.tasks), 0.0))
    return pricing.tasks


class _Pricing:
    """Turns the events of a walk into tasks. Compute time accumulates until the next post or wait."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices, self.device = program, prices, prices.cluster.device
        self.nbytes, self.copy = prices.sizes.by_kind, prices.copy
        self.tasks: list[Task] = []
        self.work = self.device.start / 2

    def flush(self) -> None:
        if self.work:
            self.tasks.append(ComputeTask(self.work))
            self.work = 0.0

    def wait(self, messages: list[int]) -> None:
        if messages:
            self.flush()
            self.tasks.append(WaitTask(messages))

    def arrive(self, event: Await) -> None:
        self.wait(event.messages)
        if event.in_parts:
            self.work += self.copy(self.nbytes[event.piece.kind])

    def post(self, event: Post) -> None:
        exchanged = sum(self.nbytes[piece.kind] for piece in event.exchanged)
        if exchanged:
            self.work += self.copy(exchanged)
        part, priced = exchanged / self.program.place.num_heads, []
        for message in event.messages:
            nbytes = part if message.head is not None else self.nbytes[message.pieces[0].kind]
            if message.packs:
                self.work += self.copy(nbytes)
            self.work += self.device.post
            priced.append(PricedMessage(message.send, message.lane, message.peer, nbytes, message.number))
        self.flush()
        self.tasks.append(PostTask(priced))

    def prepare(self, event: Prepare) -> None:
        if event.piece.kind == "do":  # the stand-in for the row's output
            self.work += self.device.call + self.copy(self.nbytes["do"])

    def compute(self, event: Compute) -> None:
        row, column, _ = event.block
        self.work += self.prices.block(self.program.pass_, row, column, self.program.place.num_shards)

    def combine(self, event: Combine) -> None:
        self.wait([event.message])
        self.work += self.device.call + MERGE_COPIES * self.copy(self.nbytes[event.piece.kind])

    def finish(self, walker: Walker) -> None:
        self.wait(walker.home)
        self.work += self.copy(sum(self.nbytes[kind] * self.program.plan.groups for kind in self.program.pass_.results))
        self.wait(walker.sends)
        self.work += self.device.start / 2
        self.flush()


def call_tasks(prices: Prices, world: int, rank: int, pass_: Pass) -> list[Task]:
    """The tasks of ``rank`` in one pass. Not cached: no program is simulated twice with the same prices."""
    return tasks_of(build_program.__wrapped__(prices.sizes.plan, world, rank, pass_), prices)

"""Turns a rank's program into tasks for the simulator: post messages, wait for messages, compute for some seconds.

The engine's runner runs the same program; here each of its steps gets a price. The order of waits, copies and merges
follows the runner line by line.

>>> from startrail.schedule.plan import Plan
>>> from startrail.planner.cluster import find_cluster
>>> call = Attention.of(length=4096, batch=1, heads=16, kv_heads=16, head_dim=64, causal=True)
>>> prices = plan_prices(find_cluster("a100-4x8"), Plan.parse("1x32"), call)
>>> tasks = tasks_of(build_program(prices.sizes.plan, 32, 0, FORWARD), prices)
>>> [type(task).__name__ for task in tasks[:4]], len(tasks[1].messages)
(['ComputeTask', 'PostTask', 'ComputeTask', 'WaitTask'], 2)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.latents import HELD_EXPANSIONS, LatentSizes, ends_of_columns
from startrail.geometry.tiles import Costs, Tile
from startrail.planner.block_tiles import Tiles, tiles_of_part, tiles_of_plan
from startrail.planner.kernels import PROCESSORS, TILE_ROWS, occupancy
from startrail.planner.peers import STARTRAIL, Implementation
from startrail.schedule.plan import CHANNELS, Plan
from startrail.schedule.program import Program, build_program
from startrail.schedule.sizes import PieceSizes, Sizes
from startrail.schedule.values import FORWARD, KINDS, Block, Pass, Piece
from startrail.schedule.walk import Await, Combine, Compute, Event, Finish, Post, Prepare, Walker

if TYPE_CHECKING:
    from startrail.planner.cluster import ClusterSpec
    from startrail.schedule.sizes import Sizes

# Per visible pair: products of so many elements of keys, and of values (two and five in all).
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = (1, 1), (3, 2)
# How often an element is read or written outside the products, to expand keys and values (join the parts of keys), and
# to make the gradient of a latent of theirs (convert it, and rearrange it for the products); and the calls for both.
EXPANSION_TOUCHES, CONTRACTION_TOUCHES = 3, 4
EXPANSION_CALLS, CONTRACTION_CALLS = 4, 10
SAMPLED_SHARDS = 16  # shards whose work is compared under a window
WIDE = 4  # bytes per element of sums


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


FewChannels = dict[int, dict[int, float]]  # by lane and level


def lanes_with_few_channels(cluster: ClusterSpec, plan: Plan) -> FewChannels:
    """Our lanes whose transfers run under compute, and how many times longer they take on each level's links: their
    bandwidth grows with their channels."""
    limited = {at: one.bandwidth / one.under_compute for at, one in enumerate(cluster.levels) if one.under_compute}
    if not limited:
        return {}
    return {
        lane: {at: max(times * CHANNELS / plan.channels_at(lane), 1.0) for at, times in limited.items()}
        for lane in plan.hidden_levels
    }


def part_prices(cluster: ClusterSpec, part: AttentionPart, dtype: str) -> Prices:
    """The prices of what a zone runs."""
    return Prices(cluster, part.sizes, dtype, tiles_of_part(part, costs_on(cluster, dtype)))


def plan_prices(cluster: ClusterSpec, plan: Plan, call: Attention, engine: Implementation = STARTRAIL) -> Prices:
    """The prices of the plan over all ranks, documents apart."""
    sizes = call.sizes_on(plan, cluster.world)
    tiles = tiles_of_plan(call, sizes, cluster.world, costs_on(cluster, call.dtype), engine.layout)
    return Prices(cluster, sizes, call.dtype, tiles, engine)


def costs_on(cluster: ClusterSpec, dtype: str) -> Costs:
    """How blocks are cut: calls of a known kernel (a GPU's) can have a window and several documents."""
    return Costs(bands=cluster.device.of(dtype).kernel is not None)


class BlockPrices(Protocol):
    """What the tasks of a program cost, for any kind of call. ``wide``: bytes of a whole piece's sums, by kind."""

    cluster: ClusterSpec
    engine: Implementation
    wide: dict[str, int]

    @property
    def sizes(self) -> PieceSizes: ...
    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False, /) -> float: ...
    def touch(self, nbytes: float, /) -> float: ...
    def copy(self, nbytes: float, /) -> float: ...


class Prices:
    """Seconds that each step of one attention call takes on a cluster, as ``engine`` launches it. ``in_step``: one rank
    stands for all. Gradients of keys pass from rank to rank in the backward pass, so at every hop the ranks wait for
    the slowest of them: a zigzag's blocks have equal areas, but add to more rows or to more keys."""

    in_step = False

    def __init__(
        self, cluster: ClusterSpec, sizes: Sizes, dtype: str, tiles: Tiles, engine: Implementation = STARTRAIL
    ) -> None:
        self.cluster, self.sizes, self.tiles, self.engine = cluster, sizes, tiles, engine
        self.rates = cluster.device.of(dtype)
        self.batch, self.heads, _, _ = sizes.shapes("q", sizes.tokens)[0]  # of one group
        kernel, widths = self.rates.kernel, (sizes.head_dim, sizes.out_dim)
        self.widths = kernel.widths(*widths) if kernel is not None else (max(widths),) * 2  # as computed
        self.latent = sizes if isinstance(sizes, LatentSizes) else None
        few = self.lanes_with_few_channels()
        # multiprocessors that transfers take from attention, beyond those that every plan gives them
        taken = sum(max(sizes.plan.channels_at(lane) - CHANNELS, 0) for lane in few)
        self.left = (PROCESSORS - taken) / PROCESSORS
        self.wide = {kind: sizes.wide_bytes(kind) for kind in KINDS}
        self._priced: dict[tuple[object, ...], float] = {}

    def lanes_with_few_channels(self) -> FewChannels:
        return lanes_with_few_channels(self.cluster, self.sizes.plan) if self.engine is STARTRAIL else {}

    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False) -> float:
        """One block: for each of its tiles the kernel, and what adds the result to the row's (and the column's), or
        begins them."""
        seconds = self._seconds(pass_, row, column, new_row, new_key)
        if self.in_step and row != column and pass_ is not FORWARD and self.tiles.mask.window is None:
            return max(seconds, self._seconds(pass_, column, row, new_row, new_key))
        return seconds

    def _seconds(self, pass_: Pass, row: int, column: int, new_row: bool, new_key: bool) -> float:
        tiles, keys = self.tiles(row, column), self.tiles.tokens_of(column)
        key = pass_, tiles, keys, new_row, new_key
        if key not in self._priced:
            seconds = 0.0
            for tile in tiles:
                seconds += self._tile(pass_, tile)
                seconds += self.accumulate(pass_, tile.q1 - tile.q0, tile.k1 - tile.k0, new_row, new_key, keys)
                new_row = new_key = False
            self._priced[key] = seconds
        return self._priced[key]

    def _tile(self, pass_: Pass, tile: Tile) -> float:
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        if tile.form == "masked":  # the kernel computes all of it
            return self.kernel(pass_, rows * keys, rows)
        area = rows * keys / 2 if tile.form == "causal" else tile.area  # speeds are published for half of the square
        seconds = self.kernel(pass_, area, rows, tile.form != "full", max(len(tile.packs), 1))
        if tile.form == "anticausal":  # inputs and results are copied in reverse order
            elements = self.batch * self.heads * self.sizes.head_dim * (rows + keys)
            seconds += self.copy(elements * self.sizes.itemsize * (2 if pass_ is FORWARD else 4))
        return seconds

    def least_block(self, pass_: Pass, shards: int) -> float:
        """No block of a rank takes less, if there is no window."""
        both = range(min(shards, 2))
        return min(
            self._seconds(pass_, row, column, first, first)
            for row in both
            for column in both
            for first in (False, True)
        )

    def kernel(self, pass_: Pass, area: float, rows: float, causal: bool = False, parts: int = 1) -> float:
        """Seconds of one kernel call over ``area`` visible pairs of ``rows`` queries, in ``parts`` of similar size that
        do not see each other."""
        side, share = sqrt(area / parts), 1.0
        if self.rates.kernel is not None:
            side = sqrt(2 * area / parts) if causal else side
            share = occupancy(self.batch * self.heads * rows / TILE_ROWS)
        speed = self.rates.speed(pass_.name, causal, self.sizes.head_dim, side) * share
        return area * self.flops_per_pair(pass_) / (speed * self.left) + self.cluster.device.call

    def accumulate(self, pass_: Pass, rows: float, keys: float, new_row: bool, new_key: bool, all_keys: int) -> float:
        """Seconds to add a tile's results to ``rows`` rows of a shard and, in the backward pass, to ``keys`` keys of a
        shard or bundle of ``all_keys``."""
        sizes = self.sizes
        whole = [sizes.tokens, all_keys, all_keys]
        by_row = self.batch * self.heads * (sizes.out_dim if pass_ is FORWARD else sizes.head_dim)
        parts = [(by_row, rows, new_row)]
        if pass_ is not FORWARD:
            parts += [(numbers * self.batch, keys, new_key) for numbers in self.key_numbers]
        stated = self.engine.merge if pass_ is FORWARD else self.engine.add
        if stated is not None and self.cluster.world == sizes.plan.heads:
            return 0.0  # one block only
        nbytes = 0.0
        for (numbers, tokens, new), every in zip(parts, whole, strict=False):
            if stated is not None:
                nbytes += numbers * tokens * stated
            elif new and tokens == every:  # converted, unless it has the dtype of the sum
                nbytes += numbers * tokens * (0 if sizes.itemsize == WIDE else sizes.itemsize + WIDE)
            else:  # a new sum for all tokens begins with zeros
                nbytes += numbers * (tokens * (sizes.itemsize + 2 * WIDE) + (every * WIDE if new else 0))
        return self.touch(nbytes) + len(parts) * self.cluster.device.call

    @cached_property
    def key_numbers(self) -> list[int]:
        """Of the keys and of the values of a token, as blocks take them."""
        if self.latent is not None:
            return [self.heads * self.sizes.head_dim, self.heads * self.sizes.out_dim]
        return [heads * width for _, heads, _, width in self.sizes.shapes("kv", 1)]

    def expand(self, column: int) -> float:
        """Seconds to expand the keys and values of a column from its latents."""
        return self._project(self.tiles.tokens_of(column), 1, EXPANSION_TOUCHES, EXPANSION_CALLS)

    def contract(self, keys: int, new: bool) -> float:
        """Seconds to make the gradients of ``keys`` latents and of the weights from those of a piece's keys and values,
        and to add them to the sums of a shard."""
        assert self.latent is not None
        added = self.batch * keys * (self.latent.rank + self.latent.rope_dim) * WIDE * (1 if new else 3)
        return self._project(keys, 2, CONTRACTION_TOUCHES, CONTRACTION_CALLS) + self.touch(added)

    def _project(self, keys: int, products: int, touches: int, calls: int) -> float:
        """Seconds of products of the keys and values of this rank's heads with the weights that expand latents."""
        assert self.latent is not None
        tokens, projected = self.batch * keys, sum(self.key_numbers) - self.heads * self.latent.rope_dim
        seconds = 2 * products * tokens * self.latent.rank * projected / self.rates.matmul
        touched = tokens * sum(self.key_numbers) * self.sizes.itemsize * touches
        return seconds + self.touch(touched) + calls * self.cluster.device.call

    def kernel_bound(self, pass_: Pass, area: float) -> float:
        """A lower bound for ``area`` visible pairs in any number of kernel calls."""
        curves = [self.rates.forward if pass_ is FORWARD else self.rates.backward]
        if self.rates.kernel is not None:
            curves = [curve for (name, *_), curve in self.rates.kernel.curves.items() if name == pass_.name]
        return area * self.flops_per_pair(pass_) / (max(curve.peak for curve in curves) * occupancy(1e9))

    def flops_per_pair(self, pass_: Pass) -> float:
        products = FORWARD_PRODUCTS if pass_ is FORWARD else BACKWARD_PRODUCTS
        elements = sum(number * width for number, width in zip(products, self.widths, strict=True))
        return 2 * elements * self.batch * self.heads

    def busiest(self, pass_: Pass) -> int:
        """The rank with the most work, which the others wait for: the blocks of a zigzag have equal areas, but add to
        all of a row or to half of it, and under a window their number depends on the rank's place. Only a sample of
        the shards is compared."""
        plan, world = self.sizes.plan, self.cluster.world
        shards = world // plan.heads
        mask = self.tiles.mask
        if shards == 1 or (mask.window is None and not mask.causal):
            return 0
        slots = plan.slots(world)

        def work(shard: int) -> float:
            grid = plan.family.grid(plan, plan.place(world, slots.index(shard * plan.heads)))
            rows, columns = grid or ((), ())
            if mask.window is not None:
                return sum(self.block(pass_, row, column) for row in rows for column in columns)
            ordered = sorted(columns)
            before = sum(bisect_left(ordered, row) for row in rows)
            after = sum(len(ordered) - bisect_right(ordered, row) for row in rows)
            return before * self.block(pass_, 1, 0) + after * self.block(pass_, 0, 1)

        if mask.window is None:
            sample = dict.fromkeys((0, shards // 2, shards - 1))
        else:
            sample = dict.fromkeys(range(0, shards, -(-shards // SAMPLED_SHARDS)))
        return slots.index(max(sample, key=work) * plan.heads)

    def touch(self, nbytes: float) -> float:
        """Seconds to read and write this many bytes in all."""
        return nbytes / self.cluster.device.copy

    def copy(self, nbytes: float) -> float:
        return self.touch(2 * nbytes)


class Mark(NamedTuple):
    """When an event ends: after so many tasks, and so many seconds of the next one."""

    step: int
    event: Event | Finish
    tasks: int
    seconds: float


def tasks_of(program: Program, prices: BlockPrices, marks: list[Mark] | None = None) -> list[Task]:
    """The tasks of a program. ``marks`` gets one entry per event, for traces."""
    pricing = ProgramPricing(program, prices, [])
    pricing.work = prices.cluster.device.start / 2
    walker = Walker(program)
    for step in walker.steps():
        for event in step.events:
            pricing.handle(event)
            if marks is not None:
                marks.append(Mark(step.number, event, len(pricing.tasks), pricing.work))
    pricing.finish(walker)
    pricing.work += prices.cluster.device.start / 2
    pricing.flush()
    if marks is not None:
        marks.append(Mark(len(program.steps), Finish(walker.home), len(pricing.tasks), 0.0))
    return pricing.tasks


class ProgramPricing:
    """Turns the events of a walk into tasks. Compute time accumulates until the next post or wait. Programs that run
    in turns add to the same ``tasks``: each then adds ``number`` to those of its messages, and ``lane`` to its lanes.
    """

    def __init__(
        self, program: Program, prices: BlockPrices, tasks: list[Task], number: int = 0, lane: int = 0
    ) -> None:
        self.program, self.prices, self.device = program, prices, prices.cluster.device
        self.nbytes, self.copy = prices.sizes.by_kind, prices.copy
        self.tasks, self.number, self.lane = tasks, number, lane
        self.begun: set[tuple[str, int, int]] = set()  # results that blocks or merges have added to
        self.expanded: list[tuple[int, int]] = []  # the latest columns and groups whose latents were expanded
        self.by_key = False  # there are gradients of keys and values that are not the latents' yet
        has_latents = isinstance(prices, Prices) and prices.latent is not None
        self.ends = ends_of_columns(program) if has_latents else frozenset()
        self.work = 0.0

    def handle(self, event: Event) -> None:
        HANDLERS[type(event)](self, event)

    def flush(self) -> None:
        if self.work:
            self.tasks.append(ComputeTask(self.work))
            self.work = 0.0

    def wait(self, messages: list[int]) -> None:
        if messages:
            self.flush()
            self.tasks.append(WaitTask([self.number + message for message in messages]))

    def tokens_of(self, piece: Piece) -> int:
        bundle = self.program.bundles.get(piece.shard)
        return self.prices.sizes.tokens_of(piece.shard) if bundle is None else bundle.tokens

    def share(self, piece: Piece) -> float:
        """The tokens of a piece, as a share of those of the largest shard."""
        return self.tokens_of(piece) / self.prices.sizes.tokens

    def bytes_of(self, piece: Piece) -> int:
        return self.nbytes[piece.kind] // self.prices.sizes.tokens * self.tokens_of(piece)

    def pack(self, piece: Piece) -> float:
        """Copying a piece into a message: inputs as they are, results from their float32 sums."""
        kind, nbytes = piece.kind, self.nbytes[piece.kind]
        from_sums = kind in self.program.pass_.results and self.prices.engine.merge is None
        return self.prices.touch(nbytes + (self.prices.wide[kind] if from_sums else nbytes)) * self.share(piece)

    def arrive(self, event: Await) -> None:
        self.wait(event.messages)
        if event.in_parts:
            self.work += self.copy(self.nbytes[event.piece.kind])

    def post(self, event: Post) -> None:
        exchanged = sum(map(self.bytes_of, event.exchanged))
        self.work += sum(self.pack(piece) for piece in event.exchanged)
        part, priced = exchanged / self.program.place.num_heads, []
        for message in event.messages:
            piece = message.pieces[0]
            nbytes = part if message.head is not None else self.bytes_of(piece)
            if message.packs:
                self.work += self.pack(piece)
                self.begun.discard((piece.kind, piece.shard, piece.group))  # a sent result is no longer ours
            self.work += self.device.post
            number, lane = self.number + message.number, self.lane + message.lane
            priced.append(PricedMessage(message.send, lane, message.peer, nbytes, number))
        self.flush()
        self.tasks.append(PostTask(priced))
        if not self.prices.engine.overlaps:
            self.wait([message.number for message in event.messages])

    def prepare(self, event: Prepare) -> None:
        if event.piece.kind == "do":  # the stand-in for the row's output
            self.work += self.device.call + self.copy(self.nbytes["do"])

    def compute(self, event: Compute) -> None:
        row, column, group = event.block
        if isinstance(self.prices, Prices) and self.prices.latent is not None:
            self.compute_latent(event.block, self.prices)
        elif self.program.pass_ is FORWARD:
            self.work += self.prices.block(FORWARD, row, column, self.begin("out", row, group), False)
        else:
            new_row, new_key = self.begin("dq", row, group), self.begin("dkv", column, group)
            self.work += self.prices.block(self.program.pass_, row, column, new_row, new_key)

    def compute_latent(self, block: Block, prices: Prices) -> None:
        """Expands the column unless it is one of those held. In the backward pass, the gradients of its keys and values
        are sums of their own, until the last block of the column in this step."""
        (row, column, group), pass_ = block, self.program.pass_
        if prices.tiles(row, column):
            if (column, group) not in self.expanded:
                self.expanded = [*self.expanded, (column, group)][-HELD_EXPANSIONS:]
                self.work += prices.expand(column)
            new_row = self.begin("out" if pass_ is FORWARD else "dq", row, group)
            self.work += prices.block(pass_, row, column, new_row, pass_ is not FORWARD and not self.by_key)
            self.by_key = pass_ is not FORWARD
        if self.by_key and block in self.ends:
            self.by_key = False
            keys = prices.tiles.tokens_of(column)
            self.work += prices.contract(keys, self.begin("dkv", column, group))

    def begin(self, kind: str, shard: int, group: int) -> bool:
        """True if no block or merge has added to this result yet."""
        key = kind, shard, group
        if key in self.begun:
            return False
        self.begun.add(key)
        return True

    def combine(self, event: Combine) -> None:
        """Reads the partial result, and reads and writes the sum, which begins with zeros. A bundle is added to the
        sums of all pieces that its tokens came from."""
        self.wait([event.message])
        kind, shard, group = event.piece
        wide, bundle = self.prices.wide[kind], self.program.bundles.get(shard)
        into = [shard] if bundle is None else list(dict.fromkeys(source.shard for source in bundle.sources))
        nbytes = (self.nbytes[kind] + 2 * wide) * self.share(event.piece)
        for each in into:
            if self.begin(kind, each, group):
                nbytes += wide * self.share(event.piece._replace(shard=each))
        launches = len(into) * (2 if kind == "dkv" else 1)  # one per tensor; out and lse are merged at once
        self.work += launches * self.device.call + self.prices.touch(nbytes)

    def finish(self, walker: Walker) -> None:
        self.wait(walker.home)
        over_heads = self.program.place.num_heads > 1  # then the sums were packed, and arrive in the wire's dtype
        for kind in self.program.pass_.results:
            own = Piece(kind, self.program.place.shard, 0)
            self.work += self.program.plan.groups * (self.copy(self.nbytes[kind]) if over_heads else self.pack(own))
        self.wait(walker.sends)
        self.flush()


HANDLERS: dict[type[Event], Callable[[ProgramPricing, Any], None]] = {
    Await: ProgramPricing.arrive,
    Post: ProgramPricing.post,
    Prepare: ProgramPricing.prepare,
    Compute: ProgramPricing.compute,
    Combine: ProgramPricing.combine,
}


def call_tasks(prices: Prices, world: int, rank: int, pass_: Pass) -> list[Task]:
    """The tasks of ``rank`` in one pass. Not cached: no program is simulated twice with the same prices."""
    return tasks_of(build_program.__wrapped__(prices.sizes.plan, world, rank, pass_), prices)

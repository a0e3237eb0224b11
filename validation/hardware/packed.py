"""Packed documents as other libraries run them: each document is cut over all ranks by a zigzag of its own, and every
key is sent to all ranks, whatever the mask.

A kernel computes whole tiles of each document. Its grid has as many programs for every document as for the longest one,
and those without rows or keys end at once, in `EMPTY_PROGRAM` seconds.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.planner.peers import TRANSFORMER_ENGINE
>>> call = Attention.of(65536, 1, 64, 8, 128, causal=True, documents=tuple(range(0, 65537, 1024)))
>>> cluster, plans = find_cluster("h100-8x8@1x8"), map(Plan.parse, ("1x8", "u8"))
>>> ring, heads = (predict_packed(cluster, plan, call, TRANSFORMER_ENGINE) for plan in plans)
>>> ring.seconds > 2 * heads.seconds
True
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, sqrt

from startrail.compile.attention import Attention
from startrail.planner.cluster import ClusterSpec
from startrail.planner.kernels import TILE_ROWS, occupancy
from startrail.planner.peers import Implementation
from startrail.planner.predict import Prediction, simulate_one_rank
from startrail.planner.pricing import Prices, plan_prices
from startrail.schedule.plan import Plan
from startrail.schedule.values import FORWARD, PASSES, Pass
from validation.hardware.gathered import CHUNKS, gathered_pass

# On all processors of an H100 together; `python -m validation.hardware.fit` does not find it: it was chosen by hand, as
# a whole number, on MagiAttention's packed rows (without those for judging).
EMPTY_PROGRAM = 3e-9
LEAST_SIDE = 512  # of a square block, that the published curves begin with
# Grids over tiles of rows and of keys: the backward pass prepares rows, computes by keys, and converts the sums of dq,
# dk and dv.
GRIDS = {"forward": (1, 0), "backward": (2, 3)}
Piece = tuple[int, int, bool]  # rows, keys, causal


def predict_packed(cluster: ClusterSpec, plan: Plan, call: Attention, engine: Implementation) -> Prediction:
    prices = PackedPrices(cluster, plan, call, engine)
    return Prediction(*(simulate_one_rank(cluster, prices, pass_) for pass_ in PASSES))


def predict_packed_gathered(cluster: ClusterSpec, call: Attention, engine: Implementation) -> Prediction:
    """All keys are gathered first; a rank's two chunks of each document see the keys before their end."""
    prices, world = PackedPrices(cluster, Plan.parse(f"1x{cluster.world}"), call, engine), cluster.world
    ends = world // 2 + 1, 2 * world - world // 2  # of the middle rank's chunks

    def kernels(pass_: Pass, end: int) -> float:
        chunks = ((ceil(length / (CHUNKS * world)), number) for length, number in prices.documents.items())
        return prices.kernels(pass_, (((chunk, chunk * end, False), number) for chunk, number in chunks))

    return Prediction(
        *(gathered_pass(prices, call, pass_, sum(kernels(pass_, end) for end in ends)) for pass_ in PASSES)
    )


class PackedPrices(Prices):
    """A block holds a part of every document. ``documents``: how many there are of each length."""

    def __init__(self, cluster: ClusterSpec, plan: Plan, call: Attention, engine: Implementation) -> None:
        whole = plan_prices(cluster, plan, call, engine)
        super().__init__(cluster, whole.sizes, call.dtype, whole.tiles, engine)
        self.documents = Counter(stop - start for start, stop in pairwise(call.boundaries.documents))
        self._prices: dict[tuple[object, ...], float] = {}

    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False) -> float:
        shards = self.cluster.world // self.sizes.plan.heads
        sides = [(row > column) - (row < column)]
        if self.in_step and row != column and pass_ is not FORWARD:  # ranks wait for the slower kind
            sides = [1, -1]
        return max(self._block(pass_, side, shards, new_row, new_key) for side in sides)

    def _block(self, pass_: Pass, side: int, shards: int, new_row: bool, new_key: bool) -> float:
        """``side``: 1 if the keys are earlier than the rows, -1 if later, 0 on the diagonal."""
        key = pass_, side, shards, new_row, new_key
        if key not in self._prices:
            tokens = self.sizes.tokens
            rows, keys = {1: (tokens, tokens // 2), -1: (tokens // 2, tokens), 0: (tokens, tokens)}[side]
            pieces = ((self._piece(length, side, shards), number) for length, number in self.documents.items())
            self._prices[key] = self.kernels(pass_, pieces) + self.accumulate(
                pass_, rows, keys, new_row, new_key, tokens
            )
        return self._prices[key]

    def _piece(self, tokens: int, side: int, shards: int) -> Piece:
        if shards == 1:
            return tokens, tokens, True
        chunk = ceil(tokens / (CHUNKS * shards))
        return {1: (2 * chunk, chunk, False), -1: (chunk, 2 * chunk, False), 0: (2 * chunk, 2 * chunk, True)}[side]

    def kernels(self, pass_: Pass, pieces: Iterable[tuple[Piece, int]]) -> float:
        """One call over pieces of documents, so many of each. A tile takes as long as in a block of the same area that
        the curves have."""
        computed, number = 0.0, 0
        used, most = [0, 0], [0, 0]  # tiles of rows and of keys
        for (rows, keys, causal), each in pieces:
            tiles = ceil(rows / TILE_ROWS), ceil(keys / TILE_ROWS)
            side = max(sqrt(rows * keys), LEAST_SIDE)
            speed = self.rates.speed(pass_.name, causal, self.sizes.head_dim, side) * _computed(side, causal)
            area = tiles[0] * (tiles[0] + 1) / 2 if causal else tiles[0] * tiles[1]
            computed += each * area * TILE_ROWS**2 / speed
            number += each
            for at, count in enumerate(tiles):
                used[at], most[at] = used[at] + each * count, max(most[at], count)
        heads = self.batch * self.heads
        seconds = computed * self.flops_per_pair(pass_) / occupancy(heads * used[0])
        grids = zip(GRIDS[pass_.name], most, used, strict=True)
        empty = sum(times * (number * longest - own) for times, longest, own in grids)
        return seconds + empty * heads * EMPTY_PROGRAM + self.cluster.device.call


def _computed(side: float, causal: bool) -> float:
    """Pairs that a kernel computes per visible pair of a square block."""
    tiles = side / TILE_ROWS
    return (tiles + 1) / tiles if causal else 1.0

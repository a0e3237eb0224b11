"""Predicts layers with a recurrence: their kernel, the convolution's halo, and the scan of states. Halo and scan are
the compiled calls that the engine runs, with every rank simulated.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan
>>> cluster, split = find_cluster("h100-8x8@4x8"), Split(Plan.parse("1x4/1x8"), 32)
>>> state = dict(features=32 * 128 * 128, units=32, effect=2 * 32 * 128 * 128)       # of Qwen3.5-35B: 2 MiB
>>> chain, shared = (predict_rows(cluster, split, Scan(Boundaries((0, 2**18)), 1, **state, inner=n)) for n in (1, 8))
>>> chain.seconds > 2 * shared.seconds, [round(nbytes / 2**16) for nbytes in shared.sent]     # in 32nds of a state
(True, [12, 331])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from startrail.compile.call import Part, compile_call
from startrail.compile.halo import Halo
from startrail.compile.problem import Boundaries, Problem, Split
from startrail.compile.scan import Scan, ScanPart
from startrail.planner.cluster import ClusterSpec
from startrail.planner.kernels import Curve, read_curve
from startrail.planner.peers import STARTRAIL
from startrail.planner.predict import Prediction, simulate_tasks
from startrail.planner.pricing import tasks_of
from startrail.planner.simulator import SimulatedPass
from startrail.planner.sparse.predict import MAX_RANKS
from startrail.planner.units import check_keys, find_file, parse_quantity, read_file
from startrail.planner.workload import LinearLayers
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan
from startrail.schedule.values import Pass

TOUCHED = 4  # times that a message's numbers are read or written: copied, multiplied and added
FORWARD_FLOPS, BACKWARD_FLOPS = 6, 12  # per number of a state and token, as recurrences/*.toml count them
# A rank with shared documents computes M and B first, which is as much as the outputs are for twice as many columns.
CALLS_OF_SPLIT = 3


def predict_rows(cluster: ClusterSpec, split: Split, problem: Problem) -> Prediction:
    """Predict both passes of a halo; or of a scan, from when M and B of the runs are known to when the states before
    them are."""
    (first,) = compile_call(problem, split, 0).parts
    parts = [replace(first, member=rank) for rank in range(cluster.world)]
    passes = []
    for pass_ in problem.passes:
        prices = [
            ScanPrices(cluster, part, pass_) if isinstance(part, ScanPart) else RowPrices(cluster, part)
            for part in parts
        ]
        tasks = [tasks_of(part.program(pass_), own) for part, own in zip(parts, prices, strict=True)]
        passes.append(simulate_tasks(cluster, tasks))
    return Prediction(*passes)


class RowPrices:
    """Seconds of blocks that copy rows to their place."""

    engine = STARTRAIL

    def __init__(self, cluster: ClusterSpec, part: Part) -> None:
        self.cluster, self.sizes = cluster, part.sizes
        self.wide: dict[str, int] = dict.fromkeys(part.sizes.kinds, 0)

    def touch(self, nbytes: float) -> float:
        return nbytes / self.cluster.device.copy

    def copy(self, nbytes: float) -> float:
        return self.touch(2 * nbytes)

    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False) -> float:
        return 0.0 if row == column else self.cluster.device.call

    def expands(self, row: int, column: int) -> bool:
        return False

    def expand(self, column: int) -> float:
        return 0.0


class ScanPrices(RowPrices):
    """Those of a scan. Its products of matrices run at the rate of the device's first dtype, as with TF32."""

    def __init__(self, cluster: ClusterSpec, part: ScanPart, pass_: Pass) -> None:
        super().__init__(cluster, part)
        self.table, self.pass_ = part.table, pass_
        self.row = part.table.row_numbers(part.member)
        self.numbers = {each.number: each for each in part.messages(pass_)}
        self.node = part.table.node_of(part.member)

    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False) -> float:
        """What a rank does with a message, or, once it knows what the runs of its node do to states, with that."""
        if column == row:
            return self._combining
        message = self.numbers[column]
        if message.visit is None:
            return self._launch(message.size, 1)
        return len(message.visit.runs) * self._products(self.row) + self._launch(self.row, 3)

    @cached_property
    def _combining(self) -> float:
        """Of the runs of each visit, one after the other, those of all visits at once."""
        if self.table.inner == 1:
            return 0.0
        runs = [len(v.runs) for visits in self.table.visits(self.pass_) for v in visits if v.runs[0].rank in self.node]
        effect = self.table.states.effect * len(self.table.units_of(self.node[0]))
        return sum(runs) * self._products(effect) + max(runs, default=0) * self._launch(effect, 3)

    def _launch(self, numbers: int, calls: int) -> float:
        return calls * self.cluster.device.call + self.touch(TOUCHED * self.sizes.nbytes_of("state", numbers))

    def _products(self, numbers: int) -> float:
        """Seconds to multiply ``numbers`` of a state by a transition."""
        states = self.table.states
        rows = max(states.effect - states.numbers, 1) ** 0.5
        return 2 * rows * numbers / next(iter(self.cluster.device.rates.values())).matmul


# --- whole layers


class Speeds(NamedTuple):
    """FLOP/s of a kernel by tokens. ``share``: of the rate of matrix products, on other chips; ``source``: whose."""

    forward: Curve
    backward: Curve
    matmul: float
    source: str
    chip: str


@lru_cache(maxsize=1)
def kernel_speeds(key: str = "fla") -> Speeds:
    path = find_file(key, "recurrences", "kernel of recurrences")
    table, keys = read_file(path), ("chip", "matmul", "forward", "backward")
    fields = check_keys(table, ("name", "source", "curves"), ("name", "source", "curves"), path.name)
    (curves,) = table["curves"]
    of_chip = check_keys(curves, keys, keys, path.name)
    forward, backward = (read_curve(curves[each], f"{path.name}: {each}") for each in keys[2:])
    matmul = parse_quantity(curves["matmul"], "flop/s")
    return Speeds(forward, backward, matmul, f"{fields.line('name')} ({fields.line('source')})", of_chip.line("chip"))


@dataclass(frozen=True, eq=False)
class LinearCall:
    """One layer with a gated delta rule, as all ranks of ``cluster`` run it together on ``batch`` sequences."""

    cluster: ClusterSpec
    layers: LinearLayers
    batch: int
    documents: tuple[int, ...]
    dtype: str
    itemsize: int

    @cached_property
    def tokens(self) -> float:
        """Of one rank."""
        return self.batch * self.documents[-1] / self.cluster.world

    @cached_property
    def own_seconds(self) -> tuple[float, float]:
        """Seconds of a rank's own work, forward and backward: the kernel, and the convolution by its bytes."""
        device, world, speeds = self.cluster.device, self.cluster.world, kernel_speeds()
        share = device.of(self.dtype).matmul / speeds.matmul if device.chip != speeds.chip else 1.0
        slowness = max(1.0, world / self.cluster.cores) if self.cluster.cores else 1.0
        slowness /= min((slow.compute for slow in self.cluster.slow), default=1.0)
        work, seconds = self.layers.state * self.tokens, []
        for flops, curve, touched in ((FORWARD_FLOPS, speeds.forward, 2), (BACKWARD_FLOPS, speeds.backward, 4)):
            calls = CALLS_OF_SPLIT if world > 1 else 1
            kernel = calls * (flops * work / (share * curve.at(max(1, self.tokens / self.batch))) + device.call)
            convolved = touched * self.layers.channels * self.itemsize * self.tokens / device.copy
            seconds.append(slowness * (kernel + convolved))
        return seconds[0], seconds[1]

    def problems(self) -> tuple[Halo, Scan]:
        """The calls of the convolution and of the recurrence."""
        layers, boundaries, batch = self.layers, Boundaries(self.documents), self.batch
        sizes = batch * layers.channels, self.itemsize
        halo = Halo(boundaries, batch, self.dtype, "", max(layers.conv - 1, 1), *sizes)
        units = batch * layers.value_heads
        return halo, Scan(boundaries, batch, features=batch * layers.state, units=units, effect=batch * layers.effect)

    def predict(self, plan: Plan) -> Prediction:
        """Under a plan, which says how tokens are laid out and which ranks are a node."""
        world = self.cluster.world
        found: list[Prediction] = []
        if world > 1:
            split, (halo, scan) = Split(plan, world), self.problems()
            ways = [predict_rows(self.cluster, split, replace(scan, inner=inner)) for inner in (1, None)]
            found = [predict_rows(self.cluster, split, halo), min(ways, key=lambda way: way.seconds)]
        passes = []
        for own, each in zip(self.own_seconds, ("forward", "backward"), strict=True):
            calls: list[SimulatedPass] = [getattr(prediction, each) for prediction in found]
            none = (0.0,) * len(self.cluster.levels)
            sent, busy = (
                tuple(map(sum, zip(none, *(getattr(call, name) for call in calls), strict=True)))
                for name in ("sent", "busy")
            )
            seconds, waiting = own + sum(call.seconds for call in calls), sum(call.waiting for call in calls)
            passes.append(SimulatedPass(seconds, waiting, sent, busy))
        return Prediction(*passes)


Layouts = dict[tuple[tuple[int, ...], ...], Prediction]  # by the ranks at each level, and their order


def predict_linear(call: LinearCall, plan: Plan, known: Layouts) -> Prediction:
    """The prediction under a plan, of which only its levels and the order of its ranks matter. ``known``: earlier ones.
    Of more than ``MAX_RANKS`` ranks, the line through two clusters with fewer nodes."""
    cluster, world = call.cluster, call.cluster.world
    sizes = plan.sizes(world)
    if (key := (sizes, plan.slots(world))) not in known:
        if world <= MAX_RANKS or cluster.levels[0].size != sizes[0] or sizes[0] < 8:
            known[key] = call.predict(plan)
        else:
            nodes = max(2, MAX_RANKS * sizes[0] // world // 2)
            one, other = (_with_nodes(call, plan, number) for number in (nodes, 2 * nodes))
            known[key] = _line(one, other, nodes, sizes[0])
    return known[key]


def _with_nodes(call: LinearCall, plan: Plan, nodes: int) -> Prediction:
    """The prediction with fewer nodes and as many tokens per rank."""
    cluster = call.cluster.with_members(nodes)
    outer = f"u{nodes}" if isinstance(plan.levels[0], Heads) else f"1x{nodes}"
    tokens = call.documents[-1] * cluster.world // call.cluster.world
    fewer = Plan.parse("/".join([outer, *map(str, plan.levels[1:])]))
    return replace(call, cluster=cluster, documents=(0, tokens)).predict(fewer)


def _line(one: Prediction, other: Prediction, nodes: int, whole: int) -> Prediction:
    """For ``whole`` nodes, through the predictions for ``nodes`` and twice as many. Bytes of all ranks together lie on
    a line, as seconds do."""

    def beyond(x: float, y: float) -> float:
        return x + (y - x) * (whole / nodes - 1)

    def shares(x: float, y: float) -> float:
        return beyond(nodes * x, 2 * nodes * y) / whole

    passes = []
    for a, b in ((one.forward, other.forward), (one.backward, other.backward)):
        sent, busy = tuple(map(shares, a.sent, b.sent)), tuple(map(beyond, a.busy, b.busy))
        passes.append(SimulatedPass(beyond(a.seconds, b.seconds), beyond(a.waiting, b.waiting), sent, busy))
    return Prediction(*passes)

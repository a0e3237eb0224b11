"""Predicts layers with a recurrence: their kernel at published speeds, the convolution's halo, and the scan of states.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.planner.workload import find_model
>>> one_gpu, layers = find_cluster("h100-8x8@1x1"), find_model("qwen3.5-35b").linear
>>> found = LinearCall(one_gpu, layers, 1, (0, 8192), "bfloat16", 2).predict(Plan.parse("1x1"))
>>> 0.47e-3 < found.forward.seconds < 0.6e-3                  # 0.472 ms, and the convolution
True
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from startrail.compile.halo import Halo
from startrail.compile.problem import Boundaries, Split
from startrail.compile.scan import Scan
from startrail.planner.cluster import ClusterSpec
from startrail.planner.kernels import Curve, read_curve
from startrail.planner.predict import Prediction
from startrail.planner.simulator import SimulatedPass
from startrail.planner.states import predict_rows
from startrail.planner.units import check_keys, find_file, parse_quantity, read_file
from startrail.planner.workload import LinearLayers
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan

MAX_RANKS = 256  # all of which are simulated
FORWARD_FLOPS, BACKWARD_FLOPS = 6, 12  # per number of a state and token, as recurrences/*.toml count them
# A rank with shared documents computes M and B first, which is as much as the outputs are for twice as many columns.
CALLS_OF_SPLIT = 3


class Speeds(NamedTuple):
    """FLOP/s of a kernel by tokens. ``share``: of the rate of matrix products, on other chips; ``source``: whose."""

    forward: Curve
    backward: Curve
    matmul: float
    source: str
    chip: str


@lru_cache(maxsize=1)
def kernel_speeds() -> Speeds:
    path = find_file("fla", "recurrences", "kernel of recurrences")
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

"""Predicts scans: the compiled programs of all ranks, with a price for what each message makes a rank compute.

>>> from startrail.compile.problem import Boundaries
>>> from startrail.planner.cluster import find_cluster
>>> from startrail.schedule.plan import Plan
>>> cluster, split = find_cluster("h100-8x8@4x8"), Split(Plan.parse("1x4/1x8"), 32)
>>> state = dict(features=32 * 128 * 128, units=32, effect=2 * 32 * 128 * 128)       # of Qwen3.5-35B: 2 MiB
>>> chain, shared = (predict_scan(cluster, split, Scan(Boundaries((0, 2**18)), 1, **state, inner=n)) for n in (1, 8))
>>> chain.seconds > 2 * shared.seconds, [round(nbytes / 2**16) for nbytes in shared.sent]     # in 32nds of a state
(True, [12, 672])
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from startrail.compile.call import compile_call
from startrail.compile.problem import Split
from startrail.compile.scan import Scan, ScanPart
from startrail.planner.cluster import ClusterSpec
from startrail.planner.peers import STARTRAIL
from startrail.planner.predict import Prediction, simulate_tasks
from startrail.planner.pricing import tasks_of
from startrail.schedule.values import Pass

TOUCHED = 4  # times that a message's numbers are read or written: copied, multiplied and added


def predict_scan(cluster: ClusterSpec, split: Split, problem: Scan) -> Prediction:
    """Predict both passes of a scan, after M and B of the runs are known and until the states before them are. Every
    rank is simulated."""
    (first,) = compile_call(problem, split, 0).parts
    assert isinstance(first, ScanPart)
    parts = [replace(first, member=rank) for rank in range(cluster.world)]
    passes = []
    for pass_ in problem.passes:
        tasks = [tasks_of(part.program(pass_), ScanPrices(cluster, problem, part, pass_)) for part in parts]
        passes.append(simulate_tasks(cluster, tasks))
    return Prediction(*passes)


class ScanPrices:
    """Seconds of a scan's blocks. States are float32, and products of matrices run at the device's rate for it."""

    engine = STARTRAIL

    def __init__(self, cluster: ClusterSpec, problem: Scan, part: ScanPart, pass_: Pass) -> None:
        self.cluster, self.problem, self.part, self.sizes = cluster, problem, part, part.sizes
        self.wide: dict[str, int] = dict.fromkeys(part.sizes.kinds, 0)
        self.numbers = {each.number: each for each in part.messages(pass_)}
        self.pass_ = pass_

    def touch(self, nbytes: float) -> float:
        return nbytes / self.cluster.device.copy

    def copy(self, nbytes: float) -> float:
        return self.touch(2 * nbytes)

    def block(self, pass_: Pass, row: int, column: int, new_row: bool = False, new_key: bool = False) -> float:
        """What a rank does with a message, or, once it knows what the runs of its node do to states, with that."""
        if column == row:
            return self._combining
        message, row_numbers = self.numbers[column], self.part.table.row_numbers(row)
        if message.visit is None:
            return self._launch(message.size, 1)
        return len(message.visit.runs) * self._products(row_numbers) + self._launch(row_numbers, 3)

    @cached_property
    def _combining(self) -> float:
        """Of the runs of each visit, one after the other, those of all visits at once."""
        table = self.part.table
        if table.inner == 1:
            return 0.0
        node, row = table.node_of(self.part.member), table.row_numbers(self.part.member)
        runs = [len(v.runs) for visits in table.visits(self.pass_) for v in visits if v.runs[0].rank in node]
        steps, effect = max(runs, default=0), table.states.effect * len(table.units_of(self.part.member))
        return sum(runs) * (self._products(row) + self._products(effect - row)) + steps * self._launch(effect, 3)

    def _launch(self, numbers: int, calls: int) -> float:
        device, itemsize = self.cluster.device, self.problem.itemsize
        return calls * device.call + self.touch(TOUCHED * numbers * itemsize)

    def _products(self, numbers: int) -> float:
        """Seconds to multiply ``numbers`` of a state by a transition."""
        states, rates = self.part.table.states, self.cluster.device.rates
        rows = 1.0 if states.effect <= states.numbers + 1 else (states.effect - states.numbers) ** 0.5
        return 2 * rows * numbers / rates["float32" if "float32" in rates else next(iter(rates))].matmul

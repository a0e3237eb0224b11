"""Predicts scans and halos: the compiled programs of all ranks, with a price for what each message makes a rank do.

>>> from startrail.compile.problem import Boundaries
>>> from startrail.compile.scan import Scan
>>> from startrail.planner.cluster import find_cluster
>>> from startrail.schedule.plan import Plan
>>> cluster, split = find_cluster("h100-8x8@4x8"), Split(Plan.parse("1x4/1x8"), 32)
>>> state = dict(features=32 * 128 * 128, units=32, effect=2 * 32 * 128 * 128)       # of Qwen3.5-35B: 2 MiB
>>> chain, shared = (predict_rows(cluster, split, Scan(Boundaries((0, 2**18)), 1, **state, inner=n)) for n in (1, 8))
>>> chain.seconds > 2 * shared.seconds, [round(nbytes / 2**16) for nbytes in shared.sent]     # in 32nds of a state
(True, [12, 331])
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from startrail.compile.call import Part, compile_call
from startrail.compile.problem import Problem, Split
from startrail.compile.scan import ScanPart
from startrail.planner.cluster import ClusterSpec
from startrail.planner.peers import STARTRAIL
from startrail.planner.predict import Prediction, simulate_tasks
from startrail.planner.pricing import tasks_of
from startrail.schedule.values import Pass

TOUCHED = 4  # times that a message's numbers are read or written: copied, multiplied and added


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

"""Published figures of attention alone, and their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.peers import ENGINES, Implementation
from startrail.planner.peers.gathered import predict_gathered
from startrail.planner.predict import AttentionShape, Prediction, predict
from startrail.planner.units import parse_quantity, read_file
from startrail.schedule.plan import Plan

Engines = Mapping[str, Implementation]
_predictions: dict[tuple[object, ...], Prediction] = {}


@dataclass(frozen=True)
class AttentionCase:
    """One published figure: a plan, run by an engine, on one cluster."""

    group: str
    source: str
    cluster: ClusterSpec
    call: AttentionShape
    plan: str
    engine: str
    passes: str  # forward, backward or both
    unit: str
    published: float
    partners: str = ""  # another group on the same hardware, to compare with

    @property
    def name(self) -> str:
        return f"{self.group}: {self.plan}" + (f" ({self.engine})" if self.engine != "startrail" else "")

    @property
    def same(self) -> tuple[object, ...]:
        """Cases that can be compared with each other."""
        return self.partners or self.group, self.cluster.name, self.passes

    @property
    def seconds(self) -> float:
        """As published."""
        return self._convert(self.published)

    def _convert(self, value: float) -> float:
        """Seconds to the unit, or the unit to seconds."""
        if self.unit == "iterations/s":
            return 1 / value
        flops = {"forward": 4, "backward": 10, "both": 14}[self.passes]
        pairs = self.call.length**2 / (2 if self.call.causal else 1)
        return (
            flops * self.call.head_dim * self.call.heads * self.call.batch * pairs / self.cluster.world / value / 1e12
        )

    def predicted(self, engines: Engines = ENGINES) -> float:
        """In the unit of the publication."""
        return self._convert(self.predicted_seconds(engines))

    def predicted_seconds(self, engines: Engines = ENGINES) -> float:
        engine = engines[self.engine]
        key = self.group, self.cluster.name, self.plan, engine
        if key not in _predictions:
            gathered = self.plan == "gather"
            _predictions[key] = (
                predict_gathered(self.cluster, self.call, engine)
                if gathered
                else predict(self.cluster, Plan.parse(self.plan), self.call, engine=engine)
            )
        prediction = _predictions[key]
        parts = {"forward": prediction.forward.seconds, "backward": prediction.backward.seconds}
        return sum(parts.values()) if self.passes == "both" else parts[self.passes]


def read_cases(path: Path) -> Iterator[AttentionCase]:
    for group in read_file(path)["attention"]:
        for at, name in enumerate(group["cluster"]):
            cluster = _cluster(group, name)
            nodes, world = cluster.levels[0].size, cluster.world
            shape: tuple[Any, ...] = group["heads"], group["kv_heads"], group["head_dim"], group.get("causal", True)
            call = AttentionShape(group["tokens_per_rank"] * world, group.get("batch", 1), *shape)
            for row in group["rows"]:
                plan = row["plan"].replace("N", str(world)).replace("K", str(nodes)).removeprefix("1x1/")
                about = group["name"], group["source"], cluster, call, plan, row["engine"], row["pass"], group["unit"]
                yield AttentionCase(*about, float(row["figures"][at]), group.get("with", ""))


def _cluster(group: Mapping[str, Any], name: str) -> ClusterSpec:
    cluster = find_cluster(name).with_kernel(group["kernel"])
    if "bandwidth" in group:
        inner = replace(cluster.levels[-1], bandwidth=parse_quantity(group["bandwidth"], "bytes/s"))
        cluster = replace(cluster, levels=(*cluster.levels[:-1], inner))
    return cluster


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one case is as another on the same hardware."""

    one: AttentionCase
    other: AttentionCase
    published: float
    predicted: float

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1

    @property
    def counts(self) -> bool:
        """The published figures differ by more than 5 %."""
        return max(self.published, 1 / self.published) > 1.05

    @property
    def right_side(self) -> bool:
        return (self.predicted > 1) == (self.published > 1)


def ratios(
    cases: list[AttentionCase], engines: Engines = ENGINES, of: list[AttentionCase] | None = None
) -> list[Ratio]:
    """Of all pairs of cases on the same hardware; with ``of``, only pairs in which one of those takes part."""
    found = []
    for one, other in combinations(cases, 2):
        if one.same == other.same and (of is None or one in of or other in of):
            predicted = other.predicted_seconds(engines) / one.predicted_seconds(engines)
            found.append(Ratio(one, other, other.seconds / one.seconds, predicted))
    return found

"""Published figures of attention alone, and their predictions. Packed documents are drawn anew: which ones the
publication drew is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from startrail.compile.attention import Attention
from startrail.compile.problem import Boundaries
from startrail.geometry.distributions import document_lengths
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.peers import ENGINES, Implementation
from startrail.planner.predict import Prediction, predict
from startrail.planner.units import parse_quantity, read_file
from startrail.schedule.plan import Plan
from validation.hardware.gathered import predict_gathered
from validation.hardware.packed import predict_packed, predict_packed_gathered

Engines = Mapping[str, Implementation]
PACKS = 5
_predictions: dict[tuple[object, ...], Prediction] = {}


@dataclass(frozen=True)
class AttentionCase:
    """One published figure: a plan, run by an engine, on one cluster."""

    group: str
    source: str
    cluster: ClusterSpec
    call: Attention
    plan: str
    engine: str
    passes: str  # forward, backward or both
    unit: str
    published: float
    partners: str = ""  # another group on the same hardware, to compare with
    packs: tuple[tuple[int, ...], ...] = ()  # packed documents: cu_seqlens of several sequences

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
        pairs = self.call.length**2 / (2 if self.call.mask.causal else 1)
        pairs = self.call.pairs if self.packs else pairs
        return (
            flops * self.call.head_dim * self.call.heads * self.call.batch * pairs / self.cluster.world / value / 1e12
        )

    def predicted(self, engines: Engines = ENGINES) -> float:
        """In the unit of the publication."""
        return self._convert(self.predicted_seconds(engines))

    def predicted_seconds(self, engines: Engines = ENGINES) -> float:
        if self.packs:  # the mean of their rates, as published
            cases = [
                replace(self, packs=(), call=replace(self.call, boundaries=Boundaries(pack))) for pack in self.packs
            ]
            pairs = [case.call.pairs / self.call.pairs for case in cases]
            rates = [share / case.predicted_seconds(engines) for case, share in zip(cases, pairs, strict=True)]
            return len(rates) / sum(rates)
        engine = engines[self.engine]
        key = self.cluster.name, self.call, self.plan, engine
        if key not in _predictions:
            _predictions[key] = self._predict(engine)
        prediction = _predictions[key]
        parts = {"forward": prediction.forward.seconds, "backward": prediction.backward.seconds}
        return sum(parts.values()) if self.passes == "both" else parts[self.passes]

    def _predict(self, engine: Implementation) -> Prediction:
        if self.plan == "gather":
            gathered = predict_packed_gathered if self.call.documents else predict_gathered
            return gathered(self.cluster, self.call, engine)
        plan = Plan.parse(self.plan)
        if self.call.documents:
            return predict_packed(self.cluster, plan, self.call, engine)
        return predict(self.cluster, plan, self.call, engine=engine)


def draw_packs(distribution: str, length: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of documents as MagiAttention packs them: those longer than a quarter of a sequence are cut."""
    most, packs = length // 4, []
    for seed in range(PACKS):
        ends = [0]
        for tokens in document_lengths(distribution, length, seed):
            start = ends[-1]
            ends += [*range(start + most, start + tokens, most), start + tokens]
        packs.append(tuple(ends))
    return tuple(packs)


def read_cases(path: Path) -> Iterator[AttentionCase]:
    for group in read_file(path)["attention"]:
        for at, name in enumerate(group["cluster"]):
            cluster = _cluster(group, name)
            nodes, world = cluster.levels[0].size, cluster.world
            shape: tuple[Any, ...] = group["heads"], group["kv_heads"], group["head_dim"], group.get("causal", True)
            call = Attention.of(group["tokens_per_rank"] * world, group.get("batch", 1), *shape)
            packs = draw_packs(group["documents"], call.length) if "documents" in group else ()
            call = replace(call, boundaries=Boundaries(packs[0])) if packs else call
            for row in group["rows"]:
                plan = row["plan"].replace("N", str(world)).replace("K", str(nodes)).removeprefix("1x1/")
                about = group["name"], group["source"], cluster, call, plan, row["engine"], row["pass"], group["unit"]
                yield AttentionCase(*about, float(row["figures"][at]), group.get("with", ""), packs)


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
        """The published figures differ by more than 5 %, and the plans differ, too."""
        return max(self.published, 1 / self.published) > 1.05 and not self.same_plan

    @property
    def same_plan(self) -> bool:
        """Two libraries run what is one plan to the planner, such as USP and LoongTrain."""
        return (self.one.plan, self.one.engine) == (self.other.plan, self.other.engine)

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

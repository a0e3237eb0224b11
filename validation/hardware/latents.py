"""Latents against expanded keys: the ratios that pith-train published, and their predictions.

The source states neither the links between its nodes nor how fast the rest of a layer is. Both follow from its rows
with expanded keys: the rest of a layer from the one inside a node (both have as many tokens per GPU), and the links
from the one across nodes. The rows with latents, and so both ratios, are then predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.predict import predict
from startrail.planner.units import Table, read_file
from startrail.planner.workload import Model, find_model
from startrail.schedule.plan import Plan

STEPS = 40  # of the bisection for the rate of the links


@dataclass(frozen=True)
class LatentRun:
    """One length: tokens/s of all GPUs with latents and with expanded keys. ``rings`` run side by side in each of
    ``stages`` pipeline stages."""

    name: str
    model: Model
    cluster: ClusterSpec  # of one ring
    length: int
    rings: int
    stages: int
    latents: float
    expanded: float

    @property
    def published(self) -> float:
        return self.latents / self.expanded

    def layer_seconds(self, tokens_per_second: float) -> float:
        return self.rings * self.length * self.stages / (self.model.layers * tokens_per_second)

    def attention_seconds(self, latents: bool, bandwidth: float | None = None) -> float:
        """Of one layer, forward and backward, with expanding what the form needs once if keys travel."""
        cluster, plan = self.cluster, Plan.parse(f"1x{self.cluster.world}")
        if bandwidth is not None:
            cluster = replace(cluster, levels=(replace(cluster.levels[0], bandwidth=bandwidth), *cluster.levels[1:]))
        call = self.model.attention(self.length, 1, "bfloat16", latents=latents)
        seconds = predict(cluster, plan, call).seconds
        if not latents:
            rate = cluster.device.of("bfloat16").matmul
            seconds += 6 * self.model.expansion * self.length / cluster.world / rate
        return seconds


@dataclass(frozen=True)
class LatentRatios:
    """``across`` spans nodes, ``inside`` does not."""

    source: str
    across: LatentRun
    inside: LatentRun

    @cached_property
    def rest(self) -> float:
        """Seconds of a layer besides attention."""
        return self.inside.layer_seconds(self.inside.expanded) - self.inside.attention_seconds(False)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s per GPU between nodes at which expanded keys are as fast as published."""
        wanted, low, high = self.across.layer_seconds(self.across.expanded) - self.rest, 1e8, 1e12
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.across.attention_seconds(False, middle) < wanted else (middle, high)
        return (low * high) ** 0.5

    def predicted(self, run: LatentRun) -> float:
        """How many times as fast the whole step is with latents."""
        bandwidth = self.bandwidth if run is self.across else None
        latents, expanded = (self.rest + run.attention_seconds(form, bandwidth) for form in (True, False))
        return expanded / latents

    def lines(self) -> Iterator[str]:
        yield "| step | published: latents, expanded keys (tokens/s) | ratio | predicted | off |"
        yield "|" + " --- |" * 5
        for run in (self.across, self.inside):
            ratio = self.predicted(run)
            figures = f"{run.latents:,.0f}, {run.expanded:,.0f} | {run.published:.2f} | {ratio:.2f}"
            yield f"| {run.name} | {figures} | {ratio / run.published - 1:+.1%} |"

    @property
    def worst(self) -> float:
        return max(abs(self.predicted(run) / run.published - 1) for run in (self.across, self.inside))


def read_latents(path: Path) -> LatentRatios:
    table = read_file(path)
    across, inside = (_read_run(table[name], table) for name in ("across", "inside"))
    return LatentRatios(table["source"], across, inside)


def _read_run(row: Table, table: Table) -> LatentRun:
    model, cluster = find_model(table["model"]), find_cluster(row["cluster"])
    sizes = row["length"], row["rings"], table["stages"]
    return LatentRun(row["name"], model, cluster, *sizes, float(row["latents"]), float(row["expanded"]))

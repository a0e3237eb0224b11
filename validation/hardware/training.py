"""Published training steps, and their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from startrail.compile.attention import Attention
from startrail.planner.cluster import SlowMember, find_cluster
from startrail.planner.memory import estimate_memory
from startrail.planner.peers import ENGINES, TRANSFORMER_ENGINE_GATHERED
from startrail.planner.predict import Prediction, predict
from startrail.planner.step import StepEstimate, Training
from startrail.planner.units import parse_quantity, read_file
from startrail.planner.workload import Job, read_model, read_run
from startrail.schedule.plan import Plan
from validation.hardware.gathered import predict_gathered


@dataclass(frozen=True)
class TrainingCase:
    """One published step: its seconds, and its peak memory if that is known. ``inferred``: what the source does not
    say; ``not_counted``: why the step is only listed."""

    name: str
    source: str
    training: Training
    plan: str
    engine: str
    published: float
    memory: float | None
    inferred: str = ""
    not_counted: str = ""

    @cached_property
    def step(self) -> StepEstimate:
        group = self.training.group
        plan = Plan.parse(f"1x{group.world}" if self.plan == "gather" else self.plan)

        def attention(call: Attention) -> Prediction:
            if self.plan == "gather":
                return predict_gathered(group, call, TRANSFORMER_ENGINE_GATHERED)
            return predict(group, plan, call, engine=ENGINES[self.engine])

        return self.training.step(plan, attention)

    @property
    def off(self) -> float:
        """Of the speed, as for attention."""
        return self.published / self.step.seconds - 1

    @property
    def predicted_memory(self) -> float:
        training = self.training
        plan = Plan.parse(f"1x{training.group.world}" if self.plan == "gather" else self.plan)
        job = Job(training.model, training.run, training.data_parallel)
        return estimate_memory(job, plan, training.cluster.world, gathered=self.plan == "gather").total


def read_training(path: Path) -> Iterator[TrainingCase]:
    for table in read_file(path)["training"]:
        name = table["name"]
        cluster = find_cluster(table["cluster"])
        if "kernel" in table:
            cluster = cluster.with_kernel(table["kernel"])
        if "speed" in table:  # ranks run in step, so one slow device slows all
            cluster = replace(cluster, slow=(SlowMember(len(cluster.levels) - 1, 0, compute=table["speed"]),))
        model = read_model({"kind": "gpt", **table["model"]}, name, name)
        training = Training(cluster, model, read_run(table["run"], name), table.get("data_parallel", 1))
        memory = parse_quantity(table["memory"], "bytes") if "memory" in table else None
        seconds = _seconds(table, training)
        notes = table.get("inferred", ""), table.get("not_counted", "")
        about = table["plan"], table.get("engine", "startrail"), seconds, memory, *notes
        yield TrainingCase(name, table["source"], training, *about)


def _seconds(table: Mapping[str, Any], training: Training) -> float:
    """The published step from what the source states: seconds, tokens/s, or TFLOP/s per GPU."""
    run = training.run
    if "seconds" in table:
        return float(table["seconds"])
    if "tokens_per_second" in table:
        return run.length * run.batch / float(table["tokens_per_second"])
    flops = training.flops
    if table.get("pairs") == "all":
        flops += (
            run.batch * 6.0 * training.model.heads * training.model.head_dim * run.length**2 * training.model.layers
        )
    return flops / training.cluster.world / (float(table["tflops"]) * 1e12)

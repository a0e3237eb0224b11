"""What is known of a run before its first step: plan and data, the memory of a rank, and the bytes that are sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from startrail.parallel import SequenceParallel
from startrail.planner.memory import LIBRARY_BYTES, Memory, estimate_memory
from startrail.planner.workload import Job
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form, lane_names
from startrail.schedule.values import PASSES
from startrail.training.recipes import Recipe
from startrail.training.tasks import Task

Traffic = dict[str, float]  # bytes by level


@dataclass(frozen=True)
class Forecast:
    """``traffic`` is what attention sends per step on the average rank, ``ring`` the same with Ring Attention."""

    plan: Plan
    world: int
    data: str
    memory: Memory
    traffic: Traffic
    ring: Traffic


def make_forecast(recipe: Recipe, job: Job, sp: SequenceParallel, task: Task, data: str, world: int) -> Forecast:
    libraries = LIBRARY_BYTES if task.device.type == "cpu" else 0
    sizes = sp.sizes(*task.queries_and_keys())
    calls = recipe.config.layers * recipe.accumulate

    def traffic(plan: Plan) -> Traffic:
        by_kind = replace(sizes, plan=plan).by_kind
        passes = [closed_form(plan, sp.world, rank, pass_, by_kind) for rank in range(sp.world) for pass_ in PASSES]
        sent = (calls * sum(level) / sp.world for level in zip(*passes, strict=True))
        return dict(zip(lane_names(plan.place(sp.world, 0)), sent, strict=True))

    memory = estimate_memory(job, sp.plan, world, libraries=libraries)
    return Forecast(sp.plan, world, data, memory, traffic(sp.plan), traffic(Plan.parse(f"1x{sp.world}")))

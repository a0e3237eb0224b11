"""What is known of a run before its first step: plan and data, the memory of a rank, and the bytes that are sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from startrail.compile.call import compile_call
from startrail.compile.halo import Halo
from startrail.compile.problem import Boundaries, Split
from startrail.compile.scan import Scan
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
    """``traffic`` is what attention and delta layers send per step on the average rank, ``ring`` the same with Ring
    Attention; for sequences of one document."""

    plan: Plan
    world: int
    data: str
    memory: Memory
    traffic: Traffic
    ring: Traffic


def make_forecast(recipe: Recipe, job: Job, sp: SequenceParallel, task: Task, data: str, world: int) -> Forecast:
    libraries = LIBRARY_BYTES if task.device.type == "cpu" else 0
    sizes = sp.sizes(*task.queries_and_keys())
    calls = recipe.accumulate * len(job.model.windows)

    def traffic(plan: Plan) -> Traffic:
        by_kind = replace(sizes, plan=plan).by_kind
        ranks = range(sp.world)
        passes = [(calls, closed_form(plan, sp.world, rank, pass_, by_kind)) for rank in ranks for pass_ in PASSES]
        for problem in _of_linear_layers(recipe, task) if job.model.linear else ():
            compiled = (compile_call(problem, Split(plan, sp.world, recipe.layout), rank) for rank in ranks)
            times = recipe.accumulate * (job.model.layers - len(job.model.windows))
            passes += [(times, call.traffic(pass_)) for call in compiled for pass_ in problem.passes]
        by_level = zip(*([times * sent for sent in levels] for times, levels in passes), strict=True)
        sent = (sum(level) / sp.world for level in by_level)
        return dict(zip(lane_names(plan.place(sp.world, 0)), sent, strict=True))

    memory = estimate_memory(job, sp.plan, world, libraries=libraries)
    return Forecast(sp.plan, world, data, memory, traffic(sp.plan), traffic(Plan.parse(f"1x{sp.world}")))


def _of_linear_layers(recipe: Recipe, task: Task) -> tuple[Halo, Scan]:
    """What a gated delta net sends: the tokens before each run for its convolution, and states."""
    config: Any = recipe.config
    boundaries = Boundaries((0, recipe.tokens))
    channels = (config.heads + 2 * config.kv_heads) * config.head_dim
    dtype = str(task.dtype).removeprefix("torch.")
    halo = Halo(boundaries, 1, dtype, "", config.conv_width - 1, recipe.batch * channels, task.dtype.itemsize)
    return halo, Scan(boundaries, recipe.batch, "float32", "", recipe.batch * config.heads * config.head_dim**2)

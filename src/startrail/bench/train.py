"""``startrail bench train``: tokens/s and exposed communication of Ring Attention and the default plan in training."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile

import torch
import torch.distributed as dist

from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.planner.cluster import ClusterSpec
from startrail.planner.live.measure import measure as measure_cluster
from startrail.planner.predict import predict
from startrail.planner.step import Training
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.training.display import Display, Metrics, Summary
from startrail.training.loop import Trainer
from startrail.training.recipes import Recipe, find


class RecordingDisplay(Display):
    summary: Summary

    def __init__(self) -> None:
        self.metrics: list[Metrics] = []

    def step(self, metrics: Metrics) -> None:
        self.metrics.append(metrics)

    def finish(self, summary: Summary) -> None:
        self.summary = summary


def measure(name: str, plan: str, options: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Tokens/s and exposed share of every step except the first, and bytes that attention sends per rank and step."""
    with tempfile.TemporaryDirectory() as out:
        fixed = dict(plan=plan, steps=options.steps + 1, evaluate_batches=0, sample=0, save_every=0, out=out)
        recipe = find(name).with_(fixed)

        def on_rank(rank: int) -> tuple[list[float], list[float], float]:
            display = RecordingDisplay()
            Trainer(recipe, torch.device("cpu"), display, Stop()).run()
            steps = display.metrics[1:]  # the first step connects the ranks
            sent = sum(display.summary.forecast.traffic.values())
            return [s["tokens_per_second"] for s in steps], [s["waiting"] for s in steps], sent

        result = run_local(on_rank, recipe.ranks, deadline=1800)[0]
    assert result is not None
    return result


def describe(ranks: int) -> ClusterSpec:
    """This machine, measured by ``ranks`` ranks."""
    found = run_local(lambda _: measure_cluster(dist.group.WORLD, Machine(1, ranks)).cluster, ranks)[0]
    assert found is not None
    return found


def predicted(recipe: Recipe, text: str, cluster: ClusterSpec) -> float | None:
    """Tokens/s that the planner predicts. The speeds of recurrences on a CPU are not known to it."""
    plan, job = Plan.parse(text), recipe.job("float32")
    if job.model.linear:
        return None
    training = Training(cluster, job.model, job.run, job.data_parallel)
    step = training.step(plan, lambda call: predict(training.group, plan, call))
    return recipe.tokens_per_step / recipe.accumulate / step.seconds


def run(options: argparse.Namespace) -> int:
    recipes = {name: find(name) for name in options.recipes.split(",")}
    torch.set_num_threads(1)
    print(f"training, float32, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}\n")
    heads = f"{'tokens/s':>9s} {'spread':>15s} {'predicted':>9s} {'off':>6s} {'exposed':>8s} {'sent/rank/step':>15s}"
    print(f"{'recipe':16s} {'ranks':>5s} {'plan':>7s} {heads}")
    for name, recipe in recipes.items():
        plans = [f"1x{recipe.ranks}", recipe.plan]
        cluster = describe(recipe.ranks)
        speeds: dict[str, list[float]] = {plan: [] for plan in plans}
        shares: dict[str, list[float]] = {plan: [] for plan in plans}
        sent = {}
        for _ in range(options.rounds):
            for plan in plans:
                rates, exposed, sent[plan] = measure(name, plan, options)
                speeds[plan] += rates
                shares[plan] += exposed
        for plan in plans:
            typical, promised = statistics.median(speeds[plan]), predicted(recipe, plan, cluster)
            compared = "" if promised is None else f"{promised:9,.0f} {promised / typical - 1:6.0%}"
            print(
                f"{name:16s} {recipe.ranks:5d} {plan:>7s} {typical:9,.0f} "
                f"{min(speeds[plan]):7,.0f}-{max(speeds[plan]):7,.0f} {compared or 'not known':>16s} "
                f"{statistics.median(shares[plan]):8.1%} {sent[plan] / 2**20:11.2f} MiB",
                flush=True,
            )
    return 0

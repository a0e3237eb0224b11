"""``startrail bench memory``: peak memory per rank in training against the planner's estimate."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time

import torch

from startrail.bench import walls
from startrail.bench.report.findings import Json
from startrail.bench.report.record import record
from startrail.bench.train import RecordingDisplay
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.planner.memory import Memory
from startrail.training.recipes import Recipe, find
from startrail.training.trainer import Trainer

PLANS = {1: "1x1", 2: "2x1", 4: "2x2", 8: "2x4", 16: "4x4"}
FEWER = 16  # whole logits are measured on so many times fewer tokens
ALLOWED = 0.10  # difference as a share of the measured peak
NARROW = dict(width=32, layers=2, heads=1, kv_heads=1, hidden=256)


def measure(recipe: Recipe, ranks: int) -> tuple[float, float, Memory]:
    """Peak bytes that training added, seconds of the step, and the estimate."""

    def on_rank(rank: int) -> tuple[float, float, Memory]:
        display = RecordingDisplay()
        trainer = Trainer(recipe, torch.device("cpu"), display, Stop())
        trainer.run()
        return display.summary.peak, display.summary.seconds, trainer.expected

    result = run_local(on_rank, ranks, deadline=3600)[0]
    assert result is not None
    return result


def run(options: argparse.Namespace) -> int:
    for ranks in (options.ranks, *options.worlds):
        if ranks not in PLANS:
            raise ValueError(f"{ranks} ranks have no plan here; use {', '.join(map(str, PLANS))}")
    torch.set_num_threads(1)
    print(
        f"one training step of a GPT ({', '.join(f'{k} {v}' for k, v in NARROW.items())}), float32, ZeRO-3, "
        f"{'nothing' if options.no_recompute else 'all but attention'} recomputed; {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}\n"
    )
    print(
        f"{'N':>8s} {'P':>3s} {'N/P':>7s} {'plan':>5s} {'measured':>10s} {'estimate':>10s} {'off':>7s} {'seconds':>8s}"
    )
    cases = [(length, options.ranks) for length in options.lengths]
    cases += [(options.local * world, world) for world in options.worlds]
    worst, started = 0.0, time.time()
    seen: dict[tuple[int, int], str] = {}
    rows: list[Json] = []
    for length, ranks in cases:
        if (length, ranks) not in seen:
            with tempfile.TemporaryDirectory() as out:
                fixed = dict(zero=3, recompute=not options.no_recompute, steps=1, evaluate_batches=0, sample=0, out=out)
                recipe = find(options.recipe).with_(dict(**NARROW, length=length, plan=PLANS[ranks], **fixed))
                peak, seconds, expected = measure(recipe, ranks)
            off = expected.total / peak - 1
            worst = max(worst, abs(off))
            case = f"GPT, {length:,} tokens on {ranks} ranks (`{PLANS[ranks]}`)"
            rows.append({"case": case, "measured": peak, "estimate": expected.total})
            seen[length, ranks] = (
                f"{length:8,d} {ranks:3d} {length // ranks:7,d} {PLANS[ranks]:>5s} {peak / 2**20:6.1f} MiB "
                f"{expected.total / 2**20:6.1f} MiB {off:7.1%} {seconds:8.1f}"
            )
        print(seen[length, ranks], flush=True)
    if options.wall_tokens:
        worst = max(worst, _print_walls(walls.walls(options.wall_tokens, options.wall_tokens // FEWER), rows))
    print(f"\nworst difference: {worst:.1%} (allowed: {ALLOWED:.0%})")
    record(options.json, options, started, rows)
    return 0 if worst <= ALLOWED else 1


def _print_walls(cases: list[walls.Wall], rows: list[Json]) -> float:
    """A row each, also added to ``rows``; the largest difference."""
    print(
        f"\none training step of a Llama with a vocabulary of {walls.VOCABULARY:,d}, width {walls.WIDTH} and MLPs of "
        f"{walls.HIDDEN:,d}, attached to {walls.RANKS} ranks ({walls.PLAN}), float32, layers recomputed\n"
    )
    print(f"{'':17s} {'N/P':>7s} {'measured':>12s} {'estimate':>12s} {'off':>7s}")
    worst = 0.0
    for wall in cases:
        estimate = walls.expected(wall).total
        measured, off = "not run", ""
        row: Json = {"case": f"Llama, {wall.name}, {wall.tokens:,} tokens per rank", "estimate": estimate}
        if wall.measured:
            peak = walls.measure(wall)
            measured, off = f"{peak / 2**20:,.0f} MiB", f"{estimate / peak - 1:.1%}"
            worst = max(worst, abs(estimate / peak - 1))
            row["measured"] = peak
        rows.append(row)
        sizes = f"{measured:>12s} {f'{estimate / 2**20:,.0f} MiB':>12s} {off:>7s}"
        print(f"{wall.name:17s} {wall.tokens:7,d} {sizes}", flush=True)
    return worst

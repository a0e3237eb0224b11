"""``startrail bench memory``: peak memory per rank in training against the planner's estimate."""

from __future__ import annotations

import argparse
import os
import platform
import time
from functools import partial

import torch

from startrail.bench.record import Json, record
from startrail.training.recipes import find
from workshop.trials import walls

PLANS = {1: "1x1", 2: "2x1", 4: "2x2", 8: "2x4", 16: "4x4"}
NARROW = dict(width=32, layers=2, heads=1, kv_heads=1, hidden=256)


def run(options: argparse.Namespace) -> int:
    for ranks in (options.ranks, *options.worlds):
        if ranks not in PLANS:
            raise ValueError(f"{ranks} ranks have no plan here; use {', '.join(map(str, PLANS))}")
    torch.set_num_threads(1)
    print(
        f"one training step, float32; {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n"
        f"narrow GPT: {', '.join(f'{k} {v}' for k, v in NARROW.items())}, ZeRO-3, "
        f"{'nothing' if options.no_recompute else 'all but attention'} recomputed\n"
        f"Llama: a vocabulary of {walls.VOCABULARY:,d}, width {walls.WIDTH}, MLPs of {walls.HIDDEN:,d}, attached to "
        f"{walls.LLAMA_RANKS} ranks ({walls.LLAMA_PLAN}), layers recomputed\n"
    )
    started = time.time()
    cases = _growing(options)
    if options.wall_tokens:
        cases += walls.cases(options.wall_tokens)
    print(f"{'':70s} {'measured':>10s} {'estimate':>10s} {'off':>7s} {'allowed':>7s} {'CPU s':>6s}")
    rows = [_measured(case) for case in cases]
    too_far = [row["case"] for row, case in zip(rows, cases, strict=True) if abs(_off(row) or 0) > case.allowed]
    print(f"\nfurther off than allowed: {'; '.join(too_far) or 'none'}")
    record(options.json, options, started, rows)
    return int(bool(too_far))


def _growing(options: argparse.Namespace) -> list[walls.MemoryCase]:
    """The sequence grows on a fixed number of ranks; then both grow together."""
    shapes = [(length, options.ranks) for length in options.lengths]
    shapes += [(options.local * world, world) for world in options.worlds]
    found = []
    for length, ranks in dict.fromkeys(shapes):
        changes = dict(**walls.STEP, **NARROW, length=length, plan=PLANS[ranks])
        recipe = find(options.recipe).with_({**changes, "recompute": not options.no_recompute})
        name = f"narrow GPT, {length:,} tokens on {ranks} rank{'s' if ranks > 1 else ''} (`{PLANS[ranks]}`)"
        found.append(walls.MemoryCase("", name, walls.estimate(recipe, ranks), partial(walls.measure, recipe, ranks)))
    return found


def _measured(case: walls.MemoryCase) -> Json:
    """A row of the file; also printed."""
    row: Json = {"wall": case.wall, "case": case.name}
    if case.estimate is not None:
        row["estimate"] = case.estimate
    if case.measure is None:
        row["reason"] = case.reason
    else:
        peak = case.measure()
        row.update(measured=peak.nbytes, seconds=peak.seconds, **({"sent": peak.sent} if peak.sent else {}))
    sizes = (f"{row[key] / 2**20:,.0f} MiB" if key in row else "" for key in ("measured", "estimate"))
    off, seconds = _off(row), f"{row['seconds']:.1f}" if "seconds" in row else case.reason
    allowed = f"{case.allowed:.0%}" if off is not None else ""
    cells = "{:>10s} {:>10s} {:>7s} {:>7s} {:>6s}"
    print(
        f"{case.name:70s} {cells.format(*sizes, '' if off is None else f'{off:.1%}', allowed, seconds)}".rstrip(),
        flush=True,
    )
    return row


def _off(row: Json) -> float | None:
    return row["estimate"] / row["measured"] - 1 if "measured" in row and "estimate" in row else None

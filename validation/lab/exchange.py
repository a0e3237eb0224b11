"""``python -m validation.lab.exchange``: what heads levels keep for the backward pass, against exchanging it again.

Memory per rank in training steps on local ranks, with the planner's estimate, and seconds of attention on emulated
nodes, with the planner's prediction. Writes exchange.md. About three minutes on two idle cores; ``--memory-only`` needs
no emulated nodes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from workshop.trials.walls import estimate, measure

from startrail.planner.topology import Machine
from startrail.training.recipes import find
from validation.lab.model import cases_of, predicted
from validation.lab.trials import MHA, trial

PLANS = ("u4", "u4,exchange=twice")
SHAPE = dict(width=64, layers=16, heads=4, kv_heads=4, hidden=64, length=16384, zero=3, recompute=True)
NODES, SECONDS = "4x4", 300.0
LAB_PLANS = ("u4/1x4", "u4/1x4,exchange=twice")


def memory_lines() -> list[str]:
    lines = ["| plan | measured peak per rank | estimate | off |", "| --- | --- | --- | --- |"]
    peaks = []
    for plan in PLANS:
        recipe = find("gpt-tiny").with_(dict(**SHAPE, plan=plan, steps=1, evaluate_batches=0, sample=0))
        peak, expected = measure(recipe, 4).nbytes, estimate(recipe, 4)
        peaks.append(peak)
        lines.append(f"| `{plan}` | {peak / 2**20:.1f} MiB | {expected / 2**20:.1f} MiB | {expected / peak - 1:+.1%} |")
    kept = SHAPE["layers"] * 3 * SHAPE["length"] // 4 * SHAPE["width"] * 4
    saved = (peaks[0] - peaks[1]) / 2**20
    lines += ["", f"Saved: {saved:.1f} MiB; q, k and v of all layers are {kept / 2**20:.1f} MiB."]
    return lines


def seconds_lines() -> list[str]:
    from workshop.report.findings import measured_trial
    from workshop.trials.measure import run_on_cluster

    machine = Machine.parse(NODES)
    trials = [trial(MHA, 8.0, " ".join(LAB_PLANS))]
    by_rank = run_on_cluster(machine, trials, lambda number, text: None, True, SECONDS)
    records = [
        measured_trial(machine, each, row) for each, row in zip(trials, zip(*by_rank, strict=True), strict=False)
    ]
    lines = ["| plan | measured | predicted |", "| --- | --- | --- |"]
    cases = list(cases_of(records))
    for case in cases:
        lines.append(f"| `{case.plan}` | {case.seconds:.3f} s ({case.repeats}) | {predicted(case, {}).seconds:.3f} s |")
    once, twice = ([case.seconds, predicted(case, {}).seconds] for case in cases)
    measured, expected = (b / a for a, b in zip(once, twice, strict=True))
    return [*lines, "", f"Exchanging again takes {measured:.2f}x as long; predicted: {expected:.2f}x."]


def main() -> int:
    torch.set_num_threads(1)
    shape = ", ".join(f"{name} {value}" for name, value in SHAPE.items())
    text = ["# Exchanged pieces: kept, or exchanged again", "", f"{time.strftime('%Y-%m-%d')}.", ""]
    text += [f"One training step on 4 local ranks, float32 ({shape}):", "", *memory_lines()]
    if "--memory-only" not in sys.argv:
        text += ["", f"Forward + backward attention on {NODES} emulated nodes, causal, links at which Ring Attention"]
        text += ["communicates 8x as long as it computes:", "", *seconds_lines()]
    (Path(__file__).parent / "exchange.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

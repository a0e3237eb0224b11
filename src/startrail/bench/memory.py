"""Peak memory of a rank in training, measured against the estimate that is printed before the start.

    make bench-memory                         # or: python -m benchmarks.memory --lengths 32768,65536 --ranks 4

First the sequence grows on a fixed number of ranks, then both grow together, N/P fixed: memory must follow N/P. The
model is narrow, because attention costs N², and memory is what this is about. Each run is one step in its own ranks.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile

import torch

from startrail.local import run_local
from startrail.training.display import Display
from startrail.training.loop import Trainer
from startrail.training.memory import Estimate
from startrail.training.recipes import Recipe, find
from startrail.training.stopping import Stop

PLANS = {1: "1x1", 2: "2x1", 4: "2x2", 8: "2x4", 16: "4x4"}
SHAPE = dict(width=32, layers=2, heads=1, kv_heads=1, hidden=256)


class Quiet(Display):
    def finish(self, summary):  # type: ignore[no-untyped-def]
        self.summary = summary


def measure(recipe: Recipe, ranks: int) -> tuple[float, float, Estimate]:
    """Bytes that training added at the peak of the fullest rank, seconds of the step, and the estimate."""

    def on_rank(rank: int) -> tuple[float, float, Estimate]:
        display = Quiet()
        trainer = Trainer(recipe, torch.device("cpu"), display, Stop())
        trainer.run()
        return display.summary.peak, display.summary.seconds, trainer.expected

    return run_local(on_rank, ranks, deadline=3600)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,65536,131072")
    parser.add_argument("--ranks", type=int, default=4, help="for the growing sequence (default %(default)s)")
    parser.add_argument("--local", type=int, default=16_384, help="N/P of the second part (default %(default)s)")
    parser.add_argument("--worlds", default="2,4,8", help="P of the second part (default %(default)s)")
    parser.add_argument("--recipe", default="gpt-tiny")
    parser.add_argument("--keep-all", action="store_true", help="no recomputing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"one training step of a GPT ({', '.join(f'{k} {v}' for k, v in SHAPE.items())}), float32, ZeRO-3, "
        f"{'nothing' if options.keep_all else 'all but attention'} recomputed; {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}\n"
    )
    print(
        f"{'N':>8s} {'P':>3s} {'N/P':>7s} {'plan':>5s} {'measured':>10s} {'estimate':>10s} {'off':>7s} {'seconds':>8s}"
    )
    cases = [(int(length), options.ranks) for length in options.lengths.split(",")]
    cases += [(options.local * int(world), int(world)) for world in options.worlds.split(",")]
    worst = 0.0
    seen: dict[tuple[int, int], str] = {}
    for length, ranks in cases:
        if (length, ranks) not in seen:
            with tempfile.TemporaryDirectory() as out:
                recipe = find(options.recipe).with_(
                    dict(
                        **SHAPE, length=length, plan=PLANS[ranks], zero=3, recompute=not options.keep_all, steps=1,
                        evaluate_batches=0, sample=0, out=out,
                    )
                )  # fmt: skip
                peak, seconds, expected = measure(recipe, ranks)
            off = expected.total / peak - 1
            worst = max(worst, abs(off))
            seen[length, ranks] = (
                f"{length:8,d} {ranks:3d} {length // ranks:7,d} {PLANS[ranks]:>5s} {peak / 2**20:6.1f} MiB "
                f"{expected.total / 2**20:6.1f} MiB {off:7.1%} {seconds:8.1f}"
            )
        print(seen[length, ranks], flush=True)
    print(f"\nworst difference {worst:.1%}")
    return 0 if worst <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())

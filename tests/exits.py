"""Ends many processes the ordinary way, on a loaded machine: ``make exits`` (200 exits), and a few in the tests.

A thread that returns from C++ while Python finalizes aborts its process, after all results are right. Each process here
runs an example, trains or measures, then ends as a script does: exit handlers run, and Python finalizes. Processes are
forked from this one, which has imported everything, so that most of their time is spent on what may go wrong.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from startrail._compat import load_dynamo
from startrail.cli import main as cli
from startrail.training import loop  # noqa: F401, for the ranks
from tests.helpers import ROOT, fork_ranks, write_words

RANKS = 4
EXAMPLES = ("own_loop_fsdp2", "hf_causal_lm", "rl_log_probs")
TRAIN = "--plan u2/1x2 --width 16 --layers 1 --heads 2 --kv_heads 2 --hidden 16 --length 64 --steps 2"
TRAIN += " --save_every 1 --sample 0 --evaluate_batches 0"


def programs(names: tuple[str, ...], folder: str) -> list[tuple[str, Callable[[int], None]]]:
    """What ranks run in turn, with names: examples, training and the benchmark as torchrun's ranks run them."""
    load_dynamo()
    mains = {name: runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"] for name in names}

    def example(name: str) -> Callable[[int], None]:
        def run(launch: int) -> None:
            dist.init_process_group("gloo")
            mains[name]("u2/1x2", length=64)
            dist.destroy_process_group()

        return run

    def train(launch: int) -> None:
        out = os.path.join(folder, f"run-{launch}")
        assert cli(["train", "gpt-tiny", *TRAIN.split(), "--data", os.path.join(folder, "texts"), "--out", out]) == 0

    def bench(launch: int) -> None:
        assert cli(["bench", "--quick", "--minutes", "0.01", "--out", os.path.join(folder, f"report-{launch}")]) == 0

    most = [*((name, example(name)) for name in names), ("train", train)]
    return [*most, *most, ("bench", bench)]  # which takes longest


class Finished(BaseException):
    """Raised in a forked process to leave this module: it then ends like any script."""


def leave(code: int) -> None:
    """End a forked process as a script ends."""
    if code:
        os._exit(code)
    raise Finished


def end_many(exits: int, burners: int, names: tuple[str, ...] = EXAMPLES) -> list[str]:
    """A line for each process that did not end with code 0."""
    owner, folder, bad = os.getpid(), tempfile.mkdtemp(), []
    write_words(Path(folder, "texts"))
    ready = programs(names, folder)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
    start = time.monotonic()
    try:
        for number in range(exits // RANKS):
            (name, run), log = ready[number % len(ready)], Path(folder, f"log-{number}")
            for rank, code in enumerate(fork_ranks(RANKS, partial(run, number), log, leave)):
                if code:
                    reason = signal.Signals(-code).name if code < 0 else f"code {code}"
                    bad.append(f"{name}, launch {number}, rank {rank}: {reason}\n{log.read_text()[-3000:]}")
            if (number + 1) % 10 == 0:
                ended = RANKS * (number + 1)
                print(f"{ended} exits, {time.monotonic() - start:.0f} s, {len(bad)} of them wrong", flush=True)
    finally:
        if os.getpid() == owner:  # not in a rank, which leaves through here too
            for process in busy:
                process.kill()
                process.wait()
            shutil.rmtree(folder, ignore_errors=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exits", type=int, default=200)
    parser.add_argument("--burners", type=int, default=4, help="busy processes next to them")
    parser.add_argument("--examples", nargs="*", default=EXAMPLES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        bad = end_many(options.exits, options.burners, tuple(options.examples))
    except Finished:
        return 0
    print("\n".join(bad) or f"{options.exits} exits, no abort")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

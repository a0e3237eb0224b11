"""``startrail bench engine --against TREE``: this source tree against another one, in one run.

The machine's speed varies from minute to minute, so both trees answer every question one right after the other, and
what is compared is the median of the ratios of such pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import startrail
from startrail.bench.engine import case_name, engine_works, read_plans
from startrail.bench.yardstick import Json, record
from startrail.schedule.plan import Plan

CALLS = 3  # of which the fastest counts
HOST_SHARE, SLOWER = 0.60, 0.01  # targets: host time over the other tree's, and how much slower a plan may be


Pair = tuple[list[float], list[float]]  # the same measurements of both trees


class Tree:
    """A process that measures one source tree."""

    def __init__(self, source: Path) -> None:
        worker = Path(__file__).with_name("one_tree.py")
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(worker)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.source = source
        if (found := Path(self._answer()).parents[1]) != source:
            raise ValueError(f"--against: {found} would be measured instead of {source}")

    def __enter__(self) -> Tree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, *question: object) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return list(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"--against: measuring {self.source} failed: see above")
        return json.loads(line)


def source_of(path: Path) -> Path:
    """The folder that holds the package: ``path``, or ``src`` in it."""
    for folder in (path, path / "src"):
        if (folder / "startrail" / "__init__.py").is_file():
            return folder.resolve()
    raise ValueError(f"--against {path}: neither {path} nor {path / 'src'} has a startrail package")


def run(options: argparse.Namespace) -> int:
    plans, started = read_plans(options.plans), time.time()
    for plan in plans:
        Plan.parse(plan).check_world(options.ranks)
    if options.calls < 1 or options.rounds < 1:
        raise ValueError(f"--calls {options.calls} and --rounds {options.rounds} must be at least 1")
    cases: list[tuple[str, list[object]]] = [
        (f"{case_name(work)}, {plan}", ["attention", asdict(work), plan, options.ranks, CALLS])
        for work in ([] if options.host else engine_works(options))
        for plan in (plans[:1] if work.call.is_sparse else plans)
    ]
    cases += [(f"host, {plan}", ["host", plan, options.ranks, options.heads, options.calls]) for plan in plans]
    sources = source_of(options.against), Path(startrail.__file__).resolve().parents[1]
    found: dict[str, list[Pair]] = {name: [] for name, _ in cases}
    with ExitStack() as stack:
        before, after = (stack.enter_context(Tree(source)) for source in sources)
        for number in range(options.rounds):
            for name, question in cases:
                if number % 2:  # the one that comes second may profit from a warm machine
                    second, first = after.ask(*question), before.ask(*question)
                else:
                    first, second = before.ask(*question), after.ask(*question)
                found[name].append((first, second))
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(f"\n{sources[1]} against {sources[0]}, {options.rounds} rounds\n{table(found)}")
    rows: list[Json] = [{"case": name, "pairs": pairs} for name, pairs in found.items()]
    record(options.json, options, started, rows)
    return 0


def table(found: Mapping[str, Sequence[Pair]]) -> str:
    """Medians of both trees in ms, the median of their ratios with its quartiles, that of CPU times, the verdicts."""
    lines = [f"{'case':26s} {'before':>10s} {'after':>10s} {'ratio':>7s} {'half of the rounds':>19s} {'CPU time':>9s}"]
    ratios = {}
    for name, pairs in found.items():
        seconds, *rest = ([(before[at], after[at]) for before, after in pairs] for at in range(len(pairs[0][0])))
        each = sorted(after / before for before, after in seconds)
        ratios[name] = statistics.median(each)
        medians = "".join(f" {1000 * statistics.median(times):10.3f}" for times in zip(*seconds, strict=True))
        half = f"{each[len(each) // 4]:.3f} to {each[-1 - len(each) // 4]:.3f}"
        cpu = "".join(f"{statistics.median(after / before for before, after in times):10.3f}" for times in rest)
        lines.append(f"{name:26s}{medians} {ratios[name]:7.3f} {half:>19s}{cpu}")
    host = {name: ratio for name, ratio in ratios.items() if name.startswith("host, ")}
    slower = [name for name, ratio in ratios.items() if name not in host and ratio > 1 + SLOWER]
    lines += ["ms per call, forward + backward; host: Python's time, while kernels compute nothing and nothing is sent"]
    if len(host) < len(ratios):
        lines.append(f"slower by more than {SLOWER:.0%}: {'; '.join(slower) or 'none'}")
    lines.append(f"host time at most {max(host.values()):.0%} of before (target: {HOST_SHARE:.0%})")
    return "\n".join(lines)

"""``make validate``: measures trials in the lab, fits on some and predicts the others; a table, a plot and a verdict.

python -m validation.lab                       everything; about 15 minutes on two idle cores
python -m validation.lab --quick               two trials as a smoke test (in report/validate-quick)
python -m validation.lab --machines 4x4,8x4    only these machines (other measurements are kept)
python -m validation.lab --only sparse         only trials with a window or documents (or: --only dense)
python -m validation.lab --again               repeat the predictions for the last measurements
python -m validation.lab --report report/report.json      predict the results of `make bench`
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import startrail
from startrail.planner.topology import Machine
from validation.errors import record
from validation.lab.compare import LEAST, Compared, Verdict, fit, scatter
from validation.lab.model import Case, cases_of, with_choice
from validation.lab.trials import ALONE, CALIBRATION, PREDICTED, QUICK
from workshop.lab.cluster import available
from workshop.report.findings import measured_trial

TIMEOUT_SECONDS = 600.0  # for the trials of one machine


def measure(plan: dict[str, list[Any]], before: dict[str, Any], path: Path) -> dict[str, Any]:
    from workshop.trials.measure import run_on_cluster

    measured = dict(before)
    for at, (shape, trials) in enumerate(plan.items()):
        machine = Machine.parse(shape)
        show(f"{shape} ({at + 1} of {len(plan)}): asking the planner")
        trials = [
            trial if trial.work.call.is_sparse else with_choice(machine, trial, ALONE[trial.work, machine.world])
            for trial in trials
        ]

        def progress(number: int, text: str, shape: str = shape, at: int = at, trials: list[Any] = trials) -> None:
            show(f"{shape} ({at + 1} of {len(plan)}), trial {number + 1} of {len(trials)}: {text}")

        by_rank = run_on_cluster(machine, trials, progress, True, TIMEOUT_SECONDS)
        done = list(zip(*by_rank, strict=True))
        records = [measured_trial(machine, trial, row) for trial, row in zip(trials, done, strict=False)]
        new = {_key(record) for record in records}
        measured[shape] = [record for record in measured.get(shape, []) if _key(record) not in new] + records
        path.write_text(json.dumps(measured, indent=1))
    return measured


def _key(record: dict[str, Any]) -> str:
    """What tells the trials of a machine apart."""
    return json.dumps([record[name] for name in ("work", "pressure", "slow_node")])


def missing(plan: dict[str, list[Any]], cases: list[Case]) -> tuple[str, ...]:
    """Plans to predict that have no measurement, because of a timeout or an error."""
    measured = {(str(case.machine), case.work, case.pressure, case.slow_node, case.plan) for case in cases}
    wanted = [
        (shape, trial.work, trial.pressure, trial.slow_node, contender.plan)
        for shape, trials in plan.items()
        if shape not in CALIBRATION
        for trial in trials
        for contender in trial.contenders
    ]
    return tuple(f"{shape} {work}: {plan}" for shape, work, *_, plan in [w for w in wanted if w not in measured])


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text[:110]:110s}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--machines", default="")
    parser.add_argument("--only", choices=["sparse", "dense"])
    parser.add_argument("--report", type=Path)
    parser.add_argument("--out", type=Path, help="default: next to the committed results")
    options = parser.parse_args()
    options.out = options.out or (Path("report/validate-quick") if options.quick else Path(__file__).parent)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "measured.json"
    plan = QUICK if options.quick else CALIBRATION | PREDICTED
    if options.machines:
        wanted = options.machines.split(",")
        if unknown := [shape for shape in wanted if shape not in plan]:
            parser.error(f"no trials for {', '.join(unknown)}; choose from {', '.join(plan)}")
        plan = {shape: plan[shape] for shape in wanted}
    if options.only:
        kept = {
            s: [t for t in trials if t.work.call.is_sparse == (options.only == "sparse")] for s, trials in plan.items()
        }
        plan = {shape: trials for shape, trials in kept.items() if trials}
    if not (options.again or options.report) and (problem := available()):
        parser.error(f"the lab cannot run here: {problem}")
    partly = options.again or options.machines or options.only
    before = json.loads(path.read_text()) if path.exists() and partly else {}
    if options.report:
        trials = json.loads(options.report.read_text())["trials"]
        calibration, others = [], cases_of(trials)
    else:
        measured = before if options.again else measure(plan, before, path)
        calibration = cases_of([t for shape in CALIBRATION for t in measured.get(shape, [])])
        others = cases_of([t for shape, records in measured.items() if shape not in CALIBRATION for t in records])
    figures = fit(calibration, show) if calibration else {}
    rows = []
    for at, case in enumerate(others):
        show(f"predicting {at + 1} of {len(others)}: {case}")
        rows.append(Compared.of(case, figures))
    if not rows:
        parser.error("no measurements to predict")
    verdict = Verdict(rows, () if options.report else missing(plan, others), least=1 if options.quick else LEAST)
    about = (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, startrail {startrail.__version__}; forward + backward "
        "attention, float32, 16 heads x 32,\nranks of one thread that share two cores; medians, (n) repeats."
    )
    if not options.quick and not options.report:
        record("lab", [row.off for row in rows])
    text = verdict.text(about, figures)
    (options.out / "results.md").write_text(text)
    scatter(rows, options.out / "scatter.png")
    show("")
    print(text, end="")
    return 0 if verdict.met else 1


if __name__ == "__main__":
    sys.exit(main())

"""The paper's byte counts, and the comparison of predictions with the lab."""

import json
import re
from dataclasses import asdict, replace

import pytest

from startrail.bench.yardstick import Workload
from startrail.planner.topology import Machine
from validation.lab.compare import Compared, Verdict
from validation.lab.model import cases_of, cluster_of, with_choice
from validation.lab.trials import ALONE, CALIBRATION, PREDICTED
from validation.paper.traffic import byte_counts


def test_every_byte_count_of_the_paper_is_reproduced():
    counts = byte_counts()
    assert len(counts) == 10
    assert [count for count in counts if not count.equal] == []


# What `make bench` measured on 2026-11-16 on two idle cores: 4 nodes of 8 ranks, forward + backward.
MEASURED = [
    (1152, True, 24.0, 13134915, 1.1327, {"u4/u2/1x4,keep=all,groups=2": 9.337, "1x4/u8": 28.164, "star4": 27.376}),
    (960, False, 24.0, 30974754, 0.550, {"u4/u2/2x2,keep=all,groups=2": 3.529, "1x4/u8": 9.816, "2x2/u8": 6.177}),
    (960, False, 8.0, 92924262, 0.556, {"1x4/u8": 3.552, "star4": 4.252, "2x2/u8,keep=all": 1.769}),
]


def record(length, causal, pressure, rate, compute, plans):
    work = Workload(length, 16, 16, 32, causal, batch=4)
    rows = [dict(role="compute", way="compute", plan="", across=False, seconds=[compute])]
    rows += [dict(role="x", way="plan", plan=plan, across=False, seconds=[x, x, x]) for plan, x in plans.items()]
    sizes = dict(nodes=4, ranks_per_node=8, work=asdict(work), pressure=pressure, rates=[rate] * 4)
    return dict(**sizes, rows=rows, slow_node=False)


def test_predictions_are_close_to_measurements():
    rows = [Compared.of(case, {}) for case in cases_of([record(*measured) for measured in MEASURED])]
    verdict = Verdict(rows)
    assert len(rows) == 9
    assert verdict.median <= 0.10
    assert abs(verdict.worst.off) <= 0.25
    assert verdict.good_choices == 1.0
    text = verdict.text("about", {"post": 1e-5})
    assert "| 4x8 | MHA causal, 4 x 1152 | 13 Mbit/s | `star4` | 27.376 s (3) |" in text


def test_a_verdict_counts_errors_and_choices():
    case, *_ = cases_of([record(*MEASURED[0])])
    cases = [replace(case, plan=plan, seconds=seconds) for plan, seconds in (("1x32", 2.0), ("u4/1x8", 1.0))]
    good = Verdict([Compared(cases[0], 2.2), Compared(cases[1], 1.0)])
    assert (good.median, good.worst.off, good.bias) == pytest.approx((0.05, 0.1, 0.05))
    assert not good.met  # too few
    many = Verdict([Compared(cases[0], 2.2), Compared(cases[1], 1.0)] * 8)
    assert many.met
    assert not replace(many, missing=("4x8: 1x32",)).met
    assert "- not measured: 4x8: 1x32" in replace(many, missing=("4x8: 1x32",)).text("about", {})
    bad = Verdict([Compared(cases[0], 0.9), Compared(cases[1], 1.0)])  # would choose the slower one
    assert bad.choices == [(cases[0], 1.0)]
    assert not replace(bad, rows=bad.rows * 8).met
    own = Verdict([bad.rows[0], Compared(replace(cases[1], chosen=True), 1.0)])  # the planner's actual choice counts
    assert own.choices[0][1] == 0.0


def test_the_planners_choice_is_a_contender():
    (machine, (trial, *_)), *_ = PREDICTED.items()
    chosen = with_choice(Machine.parse(machine), trial, ALONE[trial.work, 16])
    assert [contender.role for contender in chosen.contenders].count("chosen") == 1
    assert len(chosen.contenders) >= len(trial.contenders)


def test_a_slow_node_is_a_slow_member_of_the_cluster():
    slow = record(*MEASURED[0])
    slow["rates"] = [50_000_000, 100_000_000, 100_000_000, 100_000_000]
    cluster = cluster_of(cases_of([slow])[0], {})
    (member,) = cluster.slow
    assert (member.level, member.member, member.bandwidth) == (0, 0, 0.5)
    assert cluster.levels[0].bandwidth == pytest.approx(100e6 / 8 * 0.975)


def test_the_trials_cover_machines_plans_and_workloads():
    trials = [trial for records in PREDICTED.values() for trial in records]
    assert set(PREDICTED) == {"2x8", "4x4", "4x8", "8x4", "16x2"}
    assert not set(PREDICTED) & set(CALIBRATION)
    plans = [contender.plan for trial in trials for contender in trial.contenders]
    assert len(plans) >= 16
    for kind in (r"1x(16|32)", r"star\d", r"1x\d+/u\d", r"2x2/u\d.*", r"u\d+/.*x.*"):  # ring, star, USP, nested, heads
        assert any(re.fullmatch(kind, plan) for plan in plans), kind
    assert len({trial.pressure for trial in trials}) >= 3
    assert {trial.work.causal for trial in trials} == {True, False}
    assert {trial.work.kv_heads for trial in trials} == {2, 16}
    assert any(trial.slow_node for trial in trials)
    worlds = {shape: Machine.parse(shape).world for shape in PREDICTED | CALIBRATION}
    dense = [
        (t.work, worlds[shape])
        for shape in worlds
        for t in (PREDICTED | CALIBRATION)[shape]
        if not t.work.call.is_sparse
    ]
    assert all(each in ALONE for each in dense)  # the planner chooses a plan for these


def test_a_quick_run_judges_what_it_measured():
    rows = [Compared.of(case, {}) for case in cases_of([record(*MEASURED[1])])]
    exact = [replace(row, predicted=row.case.seconds) for row in rows]
    assert Verdict(exact, least=1).met and not Verdict(exact).met


def test_eight_configurations_are_sparse_and_predicted_from_a_record():
    trials = [(shape, trial) for shape, trials in PREDICTED.items() for trial in trials if trial.work.call.is_sparse]
    assert sum(len(trial.contenders) for _, trial in trials) == 8
    assert {bool(trial.work.documents) for _, trial in trials} == {True, False}
    rows = []
    for shape, trial in trials:
        machine = Machine.parse(shape)
        plans = [dict(role="x", way="plan", plan=c.plan, across=False, seconds=[1.0]) for c in trial.contenders]
        sizes = dict(nodes=machine.nodes, ranks_per_node=machine.ranks_per_node, rates=[200_000_000] * machine.nodes)
        work = json.loads(json.dumps(asdict(trial.work)))
        cases = cases_of([dict(**sizes, work=work, pressure=trial.pressure, rows=plans)])
        assert all(case.work == trial.work for case in cases)
        rows += [Compared.of(case, {}) for case in cases]
    assert all(row.predicted < 5 and sum(row.sent) > 0 for row in rows)
    assert all((row.sent[0] > 0) is (row.case.work.window is not None) for row in rows), "documents fit into nodes"
    dense = replace(rows[0].case, work=replace(rows[0].case.work, window=None))
    assert Compared.of(dense, {}).predicted > 2 * rows[0].predicted
    exact = Verdict([replace(row, case=replace(row.case, seconds=row.predicted)) for row in rows] * 2)
    assert exact.met
    wrong = Verdict([replace(row, case=replace(row.case, seconds=1.2 * row.predicted)) for row in rows] * 2)
    assert not wrong.met
    assert "- with a window or documents: 16 configurations, median error 16.7%" in wrong.text("about", {})

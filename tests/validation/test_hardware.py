"""Predictions against published figures: all targets are met, and nothing is fitted to the figures for judging."""

import ast
from dataclasses import replace
from pathlib import Path

from startrail.planner.cluster import find_cluster
from startrail.planner.peers import ENGINES
from startrail.planner.predict import predict
from startrail.planner.rows import expected_error
from startrail.planner.step import Training
from startrail.planner.workload import Run, find_model
from startrail.schedule.plan import Plan
from tests.helpers import ROOT
from validation.hardware import __main__ as hardware
from validation.hardware import fit
from validation.hardware.latents import read_latents

FOLDER = ROOT / "validation" / "hardware"


def test_predictions_meet_every_target():
    cases, judged = fit.fitting_cases(), list(hardware.read_cases(hardware.JUDGING / "attention.toml"))
    steps = list(hardware.read_training(fit.FITTING / "training.toml"))
    verdict = hardware.judge_attention("fitting", cases, hardware.ratios(cases))
    verdict += hardware.judge_attention("judging", judged, hardware.ratios([*cases, *judged], of=judged))
    verdict += hardware.judge_rest(cases, steps)
    assert [line for line, met in verdict if not met] == []
    assert len(verdict) == 9


def test_both_ratios_between_latents_and_expanded_keys_are_predicted():
    """What is inferred follows from the rows with expanded keys alone."""
    found = read_latents(fit.FITTING / "latents.toml")
    assert [met for _, met in hardware.judge_latents(found)] == [True]
    others = replace(found, **{name: replace(getattr(found, name), latents=1.0) for name in ("across", "inside")})
    assert (others.rest, others.bandwidth) == (found.rest, found.bandwidth)
    assert found.predicted(found.across) > 4.5 and 0.9 < found.predicted(found.inside) < 1.2


def test_packed_documents_are_predicted_for_those_who_cut_each_over_all_ranks():
    """On one node, with two sequences: Ulysses, the ring, all-gather and USP, both passes."""
    found = hardware.read_cases(fit.FITTING / "packed.toml")
    cases = [replace(case, packs=case.packs[:2]) for case in found if case.cluster.world == 8]
    assert len(cases) == 8
    sides = [ratio.right_side for ratio in hardware.ratios(cases) if ratio.counts]
    assert sum(sides) >= 0.9 * len(sides)
    assert all(0.6 < case.predicted() / case.published < 1.6 for case in cases)


def test_torchtitans_gpus_are_as_slow_as_its_steps_without_context_parallelism():
    """Half of the matrix products are recomputed: the mean of all and none."""
    cases = list(hardware.read_training(fit.FITTING / "training.toml"))
    case = next(case for case in cases if case.name.startswith("torchtitan"))
    cluster, plan = replace(case.training.cluster, slow=()), Plan.parse("u1")
    shares = []
    for fp8, published in ((False, 6667), (True, 8532)):
        seconds = []
        for recompute in (False, True):
            run = Run(8192, 16, fp8=fp8, recompute=recompute)
            training = Training(cluster, case.training.model, run, data_parallel=8)
            seconds.append(training.step(plan, lambda call, on=training.group: predict(on, plan, call)).seconds)
        shares.append(published * sum(seconds) / 2 / (2 * 8192))
    assert all(abs(share - case.training.cluster.slow[0].compute) < 0.02 for share in shares)


def test_fitting_cannot_read_the_figures_for_judging(monkeypatch):
    """They are in another folder, which neither the code that fits nor the planner names or opens."""
    opened = []

    def guarded(self, *args, before=Path.open, **options):
        opened.append(self)
        assert "judging" not in self.parts, f"{self} was opened"
        return before(self, *args, **options)

    monkeypatch.setattr(Path, "open", guarded)
    fit.fit("Transformer Engine, all-gather")
    assert fit.FITTING / "attention.toml" in opened
    for path in [FOLDER / "fit.py", FOLDER / "attention.py", *(ROOT / "src" / "startrail" / "planner").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not any("judging" in text for text in texts), path


def test_statements_about_gathering_match_the_figures():
    """The other engines take longer to fit: ``python -m validation.hardware.fit``."""
    stated = ENGINES["Transformer Engine, all-gather"]
    assert fit.fit(stated.name) == stated


def test_intervals_come_from_measured_errors():
    model, run = find_model("gpt-3b"), Run(65536)
    error = expected_error(Training(find_cluster("a100-4x8"), model, run))
    assert error.share < 0.2 and "published training steps" in error.reason
    error = expected_error(Training(find_cluster("lab"), model, Run(65536, dtype="float32")))
    assert "measured predictions in the lab" in error.reason
    error = expected_error(Training(find_cluster("mi300x"), model, run))  # no published kernel
    assert error.share == 0.3 and "nothing was compared" in error.reason

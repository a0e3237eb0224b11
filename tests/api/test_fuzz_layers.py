"""A few random recurrences and convolutions; `python -m tests.fuzz_layers` runs hundreds, on up to 16 ranks."""

import itertools

import pytest
import torch

from tests.engine.splits import SplitCase
from tests.fuzz_layers import KINDS, STYLES, WORLDS, LayerCase, product, random_case, run, run_cases
from tests.helpers import FULL


@pytest.fixture(autouse=True)
def no_described_cluster(monkeypatch):
    """Otherwise its prices decide, and states travel one way only."""
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)


def test_a_few_random_cases():
    assert not run(first_seed=30_000, count=300 if FULL else 30)


def test_every_number_of_ranks():
    assert not run_cases(
        [random_case(40_000 + 50 * world + at, world) for world in WORLDS for at in range(3 if FULL else 1)]
    )


def test_float32_over_600_tokens_is_at_most_twice_as_far_off_as_one_process():
    splits = [SplitCase("1x2/1x2", 4, layout, 600, (0, 600)) for layout in ("zigzag", "contiguous") * 3]
    cases = zip(itertools.count(), splits, KINDS, strict=False)
    assert not run_cases([LayerCase(*case, torch.float32, 1, 0.1, "both", "plain", 4) for case in cases])


@pytest.mark.skipif(not FULL, reason="2,000 cases")
def test_every_kind_plan_layout_and_packing():
    assert not run_cases(product())


def test_random_cases_cover_every_feature():
    cases = [random_case(seed) for seed in range(1200)]
    assert {case.split.world for case in cases} == set(WORLDS)
    assert {case.kind for case in cases} == set(KINDS) and {case.style for case in cases} == set(STYLES)
    plans = {case.split.plan for case in cases}
    assert any(plan.count("/") == 2 for plan in plans) and any("star" in plan for plan in plans)
    assert any(plan.startswith("u") and "/" in plan for plan in plans)
    assert {case.states for case in cases} == {"none", "initial", "final", "both"}
    assert sum(case.split.shares is not None for case in cases) > 50
    assert any(case.split.length == 1 for case in cases) and any(len(case.split.documents) > 50 for case in cases)

"""A few random recurrences and convolutions; `python -m tests.fuzz_layers` runs hundreds, on up to 16 ranks."""

import pytest

from tests.fuzz_layers import KINDS, STYLES, WORLDS, product, random_case, run, run_cases
from tests.helpers import FULL


def test_a_few_random_cases():
    assert not run(first_seed=30_000, count=300 if FULL else 30)


@pytest.mark.skipif(not FULL, reason="2,000 cases")
def test_every_kind_plan_layout_and_packing():
    assert not run_cases(product())


def test_random_cases_cover_every_feature():
    cases = [random_case(seed) for seed in range(400)]
    assert {case.split.world for case in cases} == set(WORLDS)
    assert {case.kind for case in cases} == set(KINDS) and {case.style for case in cases} == set(STYLES)
    plans = {case.split.plan for case in cases}
    assert any(plan.count("/") == 2 for plan in plans) and any("star" in plan for plan in plans)
    assert any(plan.startswith("u") and "/" in plan for plan in plans)
    assert {case.states for case in cases} == {"none", "initial", "final", "both"}
    assert sum(case.split.shares is not None for case in cases) > 50
    assert any(case.split.length == 1 for case in cases) and any(len(case.split.documents) > 50 for case in cases)

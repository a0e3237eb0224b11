"""A few random cases of everything that moves tokens; `python -m tests.fuzz_tokens` runs a thousand."""

from tests.fuzz_tokens import DTYPES, GRADIENTS, LAYOUTS, PLANS, random_case, run


def test_a_few_random_cases():
    assert not run(first_seed=20_000, count=40)


def test_random_cases_cover_every_feature():
    cases = [random_case(seed) for seed in range(300)]
    assert {case.plan for case in cases} == {plan for plans in PLANS.values() for plan in plans}
    for name, values in (("layout", LAYOUTS), ("dtype", DTYPES), ("gradients", GRADIENTS), ("world", PLANS)):
        assert {getattr(case, name) for case in cases} == set(values)
    assert sum(case.shares is not None and 0.01 in case.shares for case in cases) > 30
    assert any(case.documents and len(case.documents) > 3 and case.shift > 1 for case in cases)

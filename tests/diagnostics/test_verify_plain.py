"""``startrail verify`` on a plain model: each planted fault is named, and right set-ups are the same."""

import pytest

from startrail.diagnostics.verify import verify
from tests.diagnostics.batched import verdicts_of
from tests.diagnostics.plain_setups import FAULTS, RETRIED, RIGHT


def test_each_fault_has_its_name():
    found = verdicts_of([make for make, _ in FAULTS.values()])
    wrong = {
        name: verdict.text
        for (name, (_, text)), verdict in zip(FAULTS.items(), found, strict=True)
        if verdict.same or text not in verdict.text
    }
    assert wrong == {}
    assert len(FAULTS) >= 25


def test_right_setups_are_the_same():
    found = dict(zip(RIGHT, verdicts_of(list(RIGHT.values())), strict=True))
    assert {name: verdict.text for name, verdict in found.items() if not verdict.same} == {}
    assert "cannot be seen" in found["no reference"].text and "cannot be seen" not in found["plain"].text


@pytest.mark.parametrize("name", RETRIED)
def test_faults_that_show_in_a_second_run_are_named(name):
    make, text = RETRIED[name]
    verdict = verify(make, ranks=2)
    assert not verdict.same and text in verdict.text, verdict.text

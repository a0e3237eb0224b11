"""``startrail verify`` reports "same" for set-ups that are right, and names each fault that is planted."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from startrail.cli import main
from startrail.diagnostics.verify import verify
from startrail.testing import assert_same_as_one_process
from tests.diagnostics import plain_setups, setups
from tests.diagnostics.batched import some_of, verdicts_of
from tests.diagnostics.setups import FAULTS, RIGHT, averaged, right
from tests.helpers import refusal

BY_RETRY = [setups.padding_counted, setups.dropout_differs]


def test_right_setups_are_the_same():
    names = some_of(RIGHT)
    found = dict(zip(names, verdicts_of([RIGHT[name] for name in names]), strict=True))
    assert {name: verdict.text for name, verdict in found.items() if not verdict.same} == {}
    assert len(RIGHT) + len(plain_setups.RIGHT) >= 20


def test_each_fault_has_its_name():
    makes = some_of([make for make in FAULTS if make not in BY_RETRY])
    found = list(zip(makes, verdicts_of(makes), strict=True))
    wrong = {FAULTS[make]: verdict.text for make, verdict in found if verdict.same or FAULTS[make] not in verdict.text}
    assert wrong == {}
    assert len(FAULTS) >= 25


@pytest.mark.parametrize("make", BY_RETRY, ids=lambda make: make.__name__)
def test_faults_that_show_in_a_second_run_are_named(make):
    verdict = verify(make, ranks=4)
    assert not verdict.same and FAULTS[make] in verdict.text, verdict.text


def test_the_command_and_the_assertion(capsys):
    assert main(["verify", "tests.diagnostics.setups:right", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("same: loss ")
    assert main(["verify", "tests/diagnostics/setups.py:never_summed", "--ranks", "2"]) == 1
    assert capsys.readouterr().out.startswith("gradients are not summed over ranks")
    assert main(["verify", "tests.diagnostics.setups:right", "--ranks", "2", "--plan", "auto"]) == 0
    assert_same_as_one_process(right, ranks=2)
    assert_same_as_one_process(plain_setups.RIGHT["plain"], ranks=2)
    with pytest.raises(AssertionError, match="gradients are 1/2 of one process"):
        assert_same_as_one_process(averaged, ranks=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere:make"], "No module named 'nowhere'"),
        (["tests.diagnostics.setups"], "must be MODULE:FUNCTION"),
        (["tests.diagnostics.setups:nothing"], "has no function 'nothing'"),
        (["tests.diagnostics.setups:batch"], "must return (model, batch)"),
        (["tests.diagnostics.setups:right", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (["tests.diagnostics.setups:right", "--plan", "1x3"], "world size 4 is not"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert message in refusal(["verify", *arguments], capsys)

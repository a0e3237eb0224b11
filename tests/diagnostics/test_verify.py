"""``startrail verify`` says "same" of every family's right set-up, and names each fault that is planted."""

import time

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[hf]')")

from startrail.cli import main
from startrail.diagnostics.verify import verify
from startrail.testing import assert_same_as_one_process
from tests.diagnostics.setups import FAULTS, batch, plain, right
from tests.helpers import refusal
from tests.integrations.tiny import families, packed, tiny


@pytest.mark.parametrize("name", sorted(families()))
def test_the_right_set_up_of_every_family_is_the_same(name):
    start = time.monotonic()
    verdict = verify(lambda: (tiny(name), batch(37) if name != "qwen3" else packed(20, 17)), ranks=4, plan="u2/1x2")
    assert verdict.same and verdict.text.startswith("same: loss"), verdict.text
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_each_fault_is_named(make):
    verdict = verify(make, ranks=4)
    assert not verdict.same and FAULTS[make] in verdict.text, verdict.text


def test_the_command_and_the_assertion(capsys):
    assert main(["verify", "tests.diagnostics.setups:right", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("same: loss ")
    assert main(["verify", "tests/diagnostics/setups.py:never_summed", "--ranks", "2"]) == 1
    assert capsys.readouterr().out.startswith("gradients are not summed over ranks")
    assert_same_as_one_process(right, ranks=2)
    assert_same_as_one_process(plain, ranks=2)
    with pytest.raises(AssertionError, match="gradients are 1/2 of one process"):
        assert_same_as_one_process(next(iter(FAULTS)), ranks=2)


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

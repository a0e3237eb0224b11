"""``startrail verify`` reports "same" for set-ups that are right, and names each fault that is planted."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[hf]')")

from startrail.cli import main
from startrail.diagnostics import verify as module
from startrail.diagnostics.verify import Setup, verify
from startrail.launch.local import run_local
from startrail.testing import assert_same_as_one_process
from tests.diagnostics import setups
from tests.diagnostics.setups import FAULTS, averaged, batch, plain, right
from tests.helpers import refusal
from tests.integrations.tiny import packed, tiny

BY_RETRY = [setups.padding_counted, setups.dropout_differs]
CONCLUSIVE = {setups.other_data, setups.other_weights, setups.padding_attended}


@pytest.mark.parametrize("name, data", [("gpt-oss", batch(37)), ("qwen3", packed(20, 17))], ids=["gpt-oss", "qwen3"])
def test_correct_setups_are_the_same(name, data):
    """Two families; tests/integrations/test_families.py has all of them, with stricter limits."""
    verdict = verify(lambda: (tiny(name), data), ranks=4, plan="u2/1x2")
    assert verdict.same and verdict.text.startswith("same: loss"), verdict.text


def test_each_fault_is_named():
    """All on one set of ranks, as ``verify`` runs each."""
    torch.set_num_threads(1)
    makes = [make for make in FAULTS if make not in BY_RETRY]
    references = [module._reference(Setup.of(make)) for make in makes]
    cases = list(zip(makes, references, strict=True))
    verdicts = run_local(lambda rank: [module._on_rank(make, reference, 4, None) for make, reference in cases], 4)[0]
    for make, verdict in zip(makes, verdicts, strict=True):
        assert not verdict.same and FAULTS[make] in verdict.text, f"{make.__name__}: {verdict.text}"
        assert verdict.conclusive == (make in CONCLUSIVE), make.__name__


@pytest.mark.parametrize("make", BY_RETRY, ids=lambda make: make.__name__)
def test_faults_that_show_in_a_second_run_are_named(make):
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

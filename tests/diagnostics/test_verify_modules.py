"""``startrail verify`` understands modules and models of diffusers, and names faults of layers and arguments."""

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'startrail[diffusers]')")

from startrail.diagnostics.compare import Comparison, lost_or_scaled
from startrail.diagnostics.verify import verify
from tests.diagnostics.batched import verdicts_of
from tests.diagnostics.module_setups import FAULTS, RIGHT, noise_differs


def test_modules_are_the_same_and_faults_have_names():
    found = verdicts_of([*RIGHT, *FAULTS.values()])
    assert [verdict.text for verdict in found[: len(RIGHT)] if not verdict.same] == []
    named = dict(zip(FAULTS, found[len(RIGHT) :], strict=True))
    assert {name: verdict.text for name, verdict in named.items() if verdict.same or name not in verdict.text} == {}
    assert [verdict.text for verdict in named.values() if "(and " in verdict.text] == [], "nothing is left to explain"


def test_a_parameter_that_is_no_modules_result_is_named_by_its_factor():
    right = {"table": torch.randn(3), "weight": torch.randn(4)}
    close = Comparison(1.0, ("table",), 1e-6, 1e-3, 1e-6, "")
    text = lost_or_scaled({**right, "table": 4 * right["table"]}, right, close, 4)
    assert text.startswith("gradient of table is 4 times one process's: what every rank has in full, such as text")


def test_noise_that_differs_is_named():
    verdict = verify(noise_differs, ranks=2)
    assert not verdict.same and "hidden_states differs between ranks of a sequence" in verdict.text

"""``startrail verify`` understands modules and models of diffusers, and names faults of layers and arguments."""

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'startrail[diffusers]')")

from startrail.diagnostics.verify import verify
from tests.diagnostics.batched import verdicts_of
from tests.diagnostics.module_setups import FAULTS, RIGHT, noise_differs


def test_modules_are_the_same_and_faults_have_names():
    found = verdicts_of([*RIGHT, *FAULTS.values()])
    assert [verdict.text for verdict in found[: len(RIGHT)] if not verdict.same] == []
    named = dict(zip(FAULTS, found[len(RIGHT) :], strict=True))
    assert {name: verdict.text for name, verdict in named.items() if verdict.same or name not in verdict.text} == {}


def test_noise_that_differs_is_named():
    verdict = verify(noise_differs, ranks=2)
    assert not verdict.same and "hidden_states differs between ranks of a sequence" in verdict.text

"""For tests of your own: is a training set-up the same on many ranks as on one process?

def test_my_model():
    assert_same_as_one_process(make, ranks=4)      # make() returns a model, a batch, and perhaps a step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from startrail.diagnostics.verify import verify


def assert_same_as_one_process(
    make: Callable[[], Any], ranks: int = 4, plan: str | None = None, deadline: float = 300.0
) -> None:
    """``AssertionError`` that names the fault, unless loss and every gradient are those of one process; see
    ``startrail.diagnostics.verify``."""
    verdict = verify(make, ranks, plan, deadline)
    if not verdict.same:
        raise AssertionError(verdict.text)

"""For your own tests: does a training setup give the same results on many ranks as in one process?

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
    """Raises an ``AssertionError`` that names the fault, unless the loss and every gradient match one process; see
    ``startrail.diagnostics.verify``."""
    verdict = verify(make, ranks, plan, deadline)
    if not verdict.same:
        raise AssertionError(verdict.text)

"""``startrail check`` proves what it runs: the compiled call of the engine, for whatever case."""

import pytest

from startrail.diagnostics.exactness import check_on_rank, prove
from startrail.diagnostics.reference import make_data
from startrail.engine import attention
from startrail.launch.local import run_local
from tests.fuzz import random_case
from tests.helpers import FULL


@pytest.mark.parametrize("seed", range(0, 500 if FULL else 60, 5))
def test_what_is_proven_is_what_runs(seed, monkeypatch):
    case, compiled = random_case(seed), attention.compile_call
    if case.world > 6:
        pytest.skip("many ranks are slow to start")
    prove(case)
    data, wanted = make_data(case), (case.problem, str(case.split))  # which says what decides

    def on_rank(rank):
        found = []
        monkeypatch.setattr(attention, "compile_call", lambda *given: found.append(given) or compiled(*given))
        check_on_rank(case, data, case.parallel())
        return bool(found) and all((problem, str(split)) == wanted for problem, split, *_ in found), found[:1]

    assert [found for same, found in run_local(on_rank, case.world) if not same] == []

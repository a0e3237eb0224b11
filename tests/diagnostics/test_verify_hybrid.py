"""``startrail verify`` on a hybrid: faults of states and halos are named, and right set-ups are the same."""

from tests.diagnostics.batched import some_of, verdicts_of
from tests.diagnostics.hybrid_setups import FAULTS, NEIGHBOUR, RIGHT, of


def test_faults_are_named_and_right_setups_are_the_same():
    """One of each kind in ``make test``: restarts, leaks, no halo, the neighbour's state only, no gradient."""
    names = some_of(FAULTS)
    found = verdicts_of([*RIGHT.values(), *(FAULTS[name][0] for name in names)])
    right = dict(zip(RIGHT, found, strict=False))
    assert {name: verdict.text for name, verdict in right.items() if not verdict.same} == {}
    faults = zip(names, found[len(RIGHT) :], strict=True)
    wrong = {name: x.text for name, x in faults if x.same or not all(text in x.text for text in FAULTS[name][1])}
    assert wrong == {}


def test_the_neighbours_state_is_enough_on_two_ranks_and_not_on_three():
    make = of(layout="contiguous", length=24, scans="neighbour")  # without padding on both
    for ranks in (2, 3):
        (found,) = verdicts_of([make], ranks)
        assert found.same if ranks == 2 else NEIGHBOUR in found.text, found.text

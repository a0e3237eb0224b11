"""Many set-ups on one set of ranks."""

import torch

from startrail.diagnostics.verify import Verdict, judge, run_alone, run_rank
from startrail.launch.local import run_local
from tests.helpers import FULL


def some_of(setups):
    """Every third of them; with make test-all, every one."""
    return list(setups)[:: 1 if FULL else 3]


def verdicts_of(makes, ranks=4):
    """What ``verify`` says of each, except that it tries none again without padding or dropout."""
    torch.set_num_threads(1)
    found = run_local(lambda rank: [run_rank(make, f"1x{ranks}") for make in makes], ranks)[0]

    def judged(rank):
        pairs = zip(makes, found, strict=True)
        return [Verdict(False, x, True) if isinstance(x, str) else judge(m, run_alone(m), x) for m, x in pairs]

    return run_local(judged, 1)[0]

"""The table of all plans that tests run, and the choice of shapes for them.

A plan that is exact on gloo must also be exact on the backend that behaves like NCCL (``test_like_nccl.py``). Therefore
``run`` rejects plans that are not in the table.
"""

import itertools
from collections import Counter
from collections.abc import Iterable

from startrail.diagnostics.exactness import Report, check_cases
from startrail.diagnostics.reference import Case
from tests.helpers import FULL

PLANS = {
    1: ["1x1", "u1"],
    2: ["1x2", "2x1", "u2", "auto"],
    3: ["1x3", "3x1", "u3"],
    4: ["1x4", "2x2", "4x1", "star2", "u4", "1x2/u2", "2x1/u2", "1x2/2x1", "2x1/1x2", "u2/1x2", "u2/2x1", "u2/u2"],
    6: ["1x6", "2x3", "3x2", "3x1/u2", "1x2/1x3", "1x3/2x1", "u6"],
    8: [
        "1x8",
        "2x4",
        "4x2",
        "star2",
        "2x2/u2",
        "1x2/2x2",
        "2x1/2x2",
        "u8",
        "u4/1x2",
        "u2/2x2",
        "1x2/u2/2x1",
        "u2/1x2/u2",
        "u2/star2",
    ],
    9: ["1x9", "3x3", "star3", "3x1/1x3", "1x3/u3"],
    12: ["1x12", "3x4", "star2", "2x3/u2", "1x3/2x1/u2", "u3/2x2", "2x1/u3/1x2", "u2/1x3/u2", "u3/star2"],
    16: [
        "1x16",
        "4x4",
        "star4",
        "2x2/2x2",
        "2x2/u4",
        "star2/u4",
        "2x1/1x2/2x2",
        "u4/2x2",
        "u2/2x2/u2",
        "1x2/u2/2x2",
        "u4/star2",
    ],
}
VARIANTS = ["keep=queries", "keep=all", "backward=queries", "groups=2", "keep=all,groups=2", "exchange=twice"]
VARIED = {
    4: ["2x2", "star2", "2x1/u2", "u4", "u2/2x1"],
    8: ["2x4", "2x1/2x2", "star2/u2", "1x4/u2", "u2/2x2", "u2/1x2/u2", "u2/star2"],
}
OPTIONS = ["1x4", "2x2,keep=all", "u2/1x2", "2x1/u2,groups=2", "1x4,backward=queries", "star2"]  # for 4 ranks
OTHERS = {  # for single tests
    2: ["1x2,keep=all"],
    4: ["1x1/u4", "1x2/u2,keep=all", "1x2/u2,groups=2", "u2/1x2,keep=all", "u2/1x2,groups=2,exchange=twice"],
    8: ["1x2/u4", "star2/u2"],
}


def varied(world: int, variant: str) -> list[str]:
    """The plans of ``VARIED`` that support this variant."""
    plans = [plan for plan in VARIED[world] if not ("backward" in variant and ("star" in plan or plan == "u4"))]
    plans = [plan for plan in plans if "exchange" not in variant or "u" in plan]
    return [f"{plan},{variant}" for plan in plans]


def variants(world: int) -> list[str]:
    return [plan for variant in VARIANTS for plan in varied(world, variant)] if world in VARIED else []


def on_nccl_only(plan: str, world: int) -> bool:
    """True for a third of the variants on 8 ranks: in ``make test``, they run on the backend like NCCL, and the others
    on gloo. ``make test-all`` runs all of them on both."""
    return not FULL and world == 8 and variants(8).index(plan) % 3 == 0


def every_plan(world: int) -> list[str]:
    options = OPTIONS if world == 4 else []
    return list(dict.fromkeys([*PLANS[world], *variants(world), *options, *OTHERS.get(world, [])]))


def run(cases: list[Case]) -> list[Report]:
    """Check cases of one world size and return their reports. All must be exact, and all plans in the table."""
    missing = {case.plan for case in cases if case.plan not in every_plan(case.world)}
    assert not missing, f"plans that are not in the table, so they do not run on the backend like NCCL: {missing}"
    reports = check_cases(cases)
    wrong = [f"{case}: {text}" for case, report in zip(cases, reports, strict=True) for text in report.verdict()]
    assert not wrong, "\n".join(wrong)
    return reports


# --- pairwise coverage


def features(plan: str, world: int) -> set[str]:
    """The features of a plan: its world size, the kinds and positions of its levels, and its options.

    >>> sorted(features("u2/1x3/2x2,keep=all", 24))
    ['24 ranks', '3 levels', 'grid innermost', 'heads outermost', 'heads/ring', 'keep=all', 'ring between', 'ring/grid']
    """
    levels, *options = plan.split(",")
    kinds = [_kind(level) for level in levels.split("/")]
    found = {f"{world} ranks", f"{len(kinds)} levels", *options, f"{kinds[0]} outermost", f"{kinds[-1]} innermost"}
    found |= {f"{kind} between" for kind in kinds[1:-1]} | {f"{a}/{b}" for a, b in itertools.pairwise(kinds)}
    return found


def _kind(level: str) -> str:
    if not level[0].isdigit():  # u4, star2, auto
        return {"u": "heads"}.get(level.rstrip("0123456789"), level.rstrip("0123456789"))
    team, ring = level.split("x")
    return "ring" if team == "1" else "team" if ring == "1" else "grid"


def pairwise(plans: Iterable[tuple[str, int]], shapes: int) -> list[tuple[str, int, int]]:
    """(plan, world, index of a shape): a small part of the product of ``plans`` (with their worlds) and ``shapes``.

    Every plan gets three shapes, two on more than 4 ranks and one on more than 9, chosen so that its features meet new
    shapes. The choice is greedy, plans with the most features first, and deterministic.
    """
    chosen: list[tuple[str, int, int]] = []
    met: set[tuple[str, int]] = set()
    uses: Counter[int] = Counter()
    for plan, world in sorted(plans, key=lambda pair: -len(features(*pair))):
        own, left = features(plan, world), set(range(shapes))
        for _ in range(3 if world <= 4 else 2 if world <= 9 else 1):
            shape = min(left, key=lambda shape: (sum((f, shape) in met for f in own), uses[shape], shape))
            left.remove(shape)
            uses[shape] += 1
            met |= {(f, shape) for f in own}
            chosen.append((plan, world, shape))
    return chosen

"""The plans of the distributed tests, in one table: what is exact on gloo is run on a backend that behaves like NCCL as
well (``test_like_nccl.py``), since ``run`` refuses whatever is not in the table."""

from startrail.diagnostics.exactness import Report, check_cases
from startrail.diagnostics.reference import Case

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
VARIANTS = ["keep=queries", "keep=all", "backward=queries", "groups=2", "keep=all,groups=2"]
VARIED = {
    4: ["2x2", "star2", "2x1/u2", "u4", "u2/2x1"],
    8: ["2x4", "2x1/2x2", "star2/u2", "1x4/u2", "u2/2x2", "u2/1x2/u2", "u2/star2"],
}
OPTIONS = ["1x4", "2x2,keep=all", "u2/1x2", "2x1/u2,groups=2", "1x4,backward=queries", "star2"]  # of 4 ranks
# what single tests ask for beside all these
OTHERS = {
    2: ["1x2,keep=all"],
    4: ["1x1/u4", "1x2/u2,keep=all", "1x2/u2,groups=2", "u2/1x2,keep=all"],
    8: ["1x2/u4", "star2/u2"],
}


def varied(world: int, variant: str) -> list[str]:
    """Without those that have no such variant."""
    plans = [plan for plan in VARIED[world] if not ("backward" in variant and ("star" in plan or plan == "u4"))]
    return [f"{plan},{variant}" for plan in plans]


def every_plan(world: int) -> list[str]:
    variants = [plan for variant in VARIANTS for plan in varied(world, variant)] if world in VARIED else []
    options = OPTIONS if world == 4 else []
    return list(dict.fromkeys([*PLANS[world], *variants, *options, *OTHERS.get(world, [])]))


def run(cases: list[Case]) -> list[Report]:
    """Reports of cases that are all exact, and whose plans are all in the table."""
    missing = {case.plan for case in cases if case.plan not in every_plan(case.world)}
    assert not missing, f"plans that do not run on the backend that behaves like NCCL: {missing}"
    reports = check_cases(cases)
    wrong = [f"{case}: {text}" for case, report in zip(cases, reports, strict=True) for text in report.verdict()]
    assert not wrong, "\n".join(wrong)
    return reports

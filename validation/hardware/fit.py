"""``python -m validation.hardware.fit``: finds what `planner/peers.py` says about other people's rings.

It reads ``fitting/`` only. Each engine's bytes per element (and whether its transfers overlap) are those of a coarse
grid with the least mean error of figures and of ratios between plans on the same hardware.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path

from startrail.planner.peers import ENGINES, Implementation
from validation.hardware.attention import AttentionCase, Engines, ratios, read_cases

FITTING = Path(__file__).parent / "fitting"
MERGE, ADD, OVERLAPS = (10.0, 20.0, 25.0, 30.0, 35.0, 40.0), (10.0, 16.0, 20.0, 24.0, 30.0, 40.0), (True, False)
FAMILIES = {  # engines that are fitted together, by the start of their names
    "ring-flash-attention": (MERGE, ADD, OVERLAPS),
    "Transformer Engine": (MERGE, ADD, (True,)),
    "Transformer Engine, all-gather": ((0.0,), (0.0, *ADD, 60.0), (True,)),
}


def fitting_cases() -> list[AttentionCase]:
    return list(read_cases(FITTING / "attention.toml"))


def members(family: str) -> Iterator[Implementation]:
    """The engines of a family; one that is fitted by itself is not a member of another."""
    for name, engine in ENGINES.items():
        if name == family or (name.startswith(family) and name not in FAMILIES):
            yield engine


def error(cases: list[AttentionCase], engines: Engines) -> float:
    figures = [abs(log(case.predicted(engines) / case.published)) for case in cases]
    between = [abs(log(1 + ratio.off)) for ratio in ratios(cases, engines)]
    return statistics.mean(figures) + (statistics.mean(between) if between else 0.0)


def fit(family: str) -> Implementation:
    """The first engine of the family with the best figures."""
    own = {engine.name: engine for engine in members(family)}
    cases = [case for case in fitting_cases() if case.engine in own]

    def changed(choice: tuple[float, float, bool]) -> dict[str, Implementation]:
        merge, add, overlaps = choice
        return {name: replace(each, merge=merge, add=add, overlaps=overlaps) for name, each in own.items()}

    best = min(product(*FAMILIES[family]), key=lambda choice: error(cases, {**ENGINES, **changed(choice)}))
    return next(iter(changed(best).values()))


if __name__ == "__main__":
    for each in FAMILIES:
        print(f"fitted: {fit(each)}\nstated: {next(members(each))}")

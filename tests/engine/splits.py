"""Random ways to split a sequence: plans, layouts, lengths, documents and shares, for kinds of calls other than
attention; and how to run them on local ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import startrail
from startrail.compile.problem import Boundaries, Split
from startrail.compile.scan import Scan
from startrail.geometry.layout import weights_of
from startrail.planner.sparse.rule import described_for, links_of
from startrail.schedule.plan import Plan

PLANS = {
    1: ["1x1"],
    2: ["1x2", "2x1", "u2"],
    3: ["1x3", "u3"],
    4: ["1x4", "2x2", "star2", "u4", "1x2/1x2", "1x2/u2", "u2/1x2", "2x1/1x2"],
    6: ["1x2/1x3", "3x1/u2"],
    8: ["1x8", "u2/2x2", "1x2/1x4", "u4/1x2", "1x2/u2/2x1", "u2/1x2/u2"],
}
LAYOUTS = ("zones", "zigzag", "contiguous")
PACKINGS = 5  # ways to cut a sequence into documents


class SplitCase(NamedTuple):
    plan: str
    world: int
    layout: str
    length: int
    documents: tuple[int, ...]
    shares: tuple[float, ...] | None = None

    @property
    def split(self) -> Split:
        described = described_for(os.environ.get("STARTRAIL_CLUSTER", ""), self.world)
        return Split(Plan.parse(self.plan), self.world, self.layout, links=links_of(described))

    @property
    def boundaries(self) -> Boundaries:
        weights = weights_of(self.shares, self.world)
        return Boundaries(self.documents, shares=weights if len(set(weights)) > 1 else ())

    @property
    def nodes(self) -> int:
        """Ranks of one node: those inside the outermost level."""
        return self.world // Plan.parse(self.plan).sizes(self.world)[0]

    def sequence(self) -> startrail.Sequence:
        sp = startrail.SequenceParallel(self.plan, layout=self.layout, timeout=60)
        return sp.sequence(self.length, self.documents, shares=self.shares)


def random_split(
    chance: random.Random, world: int, longest: int = 90, plan: str | None = None, packing: int | None = None
) -> SplitCase:
    """One document, a giant one among others, many tiny ones, or some with edges where shards have theirs."""
    length = chance.choice([1, 2, 3, world, 2 * world + 1, *[chance.randint(1, longest)] * 4])
    cuts = {
        0: [],
        1: [length // 20, length - length // 20],
        2: chance.choices(range(1, length + 1), k=length // 2),
        3: [length * chance.randrange(2 * world) // (2 * world) for _ in range(3)],
        4: chance.choices(range(1, length + 1), k=3),
    }[chance.randrange(PACKINGS) if packing is None else packing]
    documents = (0, *sorted({cut for cut in cuts if 0 < cut < length}), length)
    shares = tuple(chance.choice((1.0, 0.5, 0.13)) for _ in range(world)) if chance.random() < 0.25 else None
    return SplitCase(plan or chance.choice(PLANS[world]), world, chance.choice(LAYOUTS), length, documents, shares)


def of_each_document(case: SplitCase) -> list[tuple[int, int]]:
    return list(pairwise(case.documents))


def scan_of(boundaries: Boundaries, kind: str, batch: int, shape: Sequence[int], itemsize: int) -> Scan:
    """A scan by the recurrence ``kind``, the state of which is ``shape`` for each sequence of the batch: heads or
    channels first, which do not mix. Of each, M is a matrix for the delta rules, one number for decayed attention, and
    as many numbers as the state else."""
    features, units = batch * prod(shape), batch * shape[0]
    moves = units * shape[1] ** 2 if "delta" in kind else units if kind == "decayed_attention" else features
    return Scan(boundaries, batch, "", "", features, itemsize, units=units, effect=moves + features)

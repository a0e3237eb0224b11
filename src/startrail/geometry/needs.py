"""Which tokens of other ranks a rank needs: keys that its queries see, or those just before its runs.

>>> needed_keys(Mask(causal=True, window=3), ((4, 2), (10, 2)), end=12)     # keys 2 and 3, and 8 and 9
((2, 2), (8, 2))
>>> tokens_before(((4, 2), (10, 2)), documents=(0, 3, 12), before=5)        # 3, and 5 to 9
((3, 1), (5, 5))
>>> divide(((3, 1), (5, 5)), ((4, 2), (10, 2)))                             # of these the rank has 5 itself
(((5, 1),), ((3, 1), (6, 4)))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import segments_of


def needed_keys(mask: Mask, own: Runs, end: int) -> Runs:
    """Runs of keys that some query of the runs ``own`` sees, without those runs. The sequence has ``end`` tokens."""
    if mask.hides_rows:  # so there can be gaps
        seen = [(s.low, s.last_high) for s in segments_of(mask, own, ((0, end),))]
    else:  # every query sees itself, so those of a run see one interval
        seen = [(mask.visible(start, end)[0], mask.visible(start + count - 1, end)[1]) for start, count in own]
    needed: list[tuple[int, int]] = []
    at = 0  # keys before this one are done
    number = 0  # of the first own run that ends after it
    for low, high in sorted(seen):
        at = max(at, low)
        while at < high:
            while number < len(own) and sum(own[number]) <= at:
                number += 1
            start, stop = (own[number][0], sum(own[number])) if number < len(own) else (high, high)
            until = min(start, high)
            if at < until:
                if needed and sum(needed[-1]) == at:
                    needed[-1] = needed[-1][0], until - needed[-1][0]
                else:
                    needed.append((at, until - at))
            at = stop if start < high else high
    return tuple(needed)


def tokens_before(runs: Runs, documents: Sequence[int], before: int) -> Runs:
    """The ``before`` tokens before each run, as far as they belong to the run's document."""
    return union(
        (first, start - first)
        for start, _ in runs
        if (first := max(start - before, documents[bisect_right(documents, start) - 1])) < start
    )


def union(runs: Iterable[tuple[int, int]]) -> Runs:
    """Sorted runs of all tokens of ``runs``, which may overlap."""
    merged: list[tuple[int, int]] = []
    for start, count in sorted(runs):
        if merged and start <= sum(merged[-1]):
            first, stop = merged[-1][0], max(sum(merged[-1]), start + count)
            merged[-1] = first, stop - first
        else:
            merged.append((start, count))
    return tuple(merged)


def divide(runs: Runs, own: Runs) -> tuple[Runs, Runs]:
    """The parts of ``runs`` inside and outside of ``own``. All are sorted, and none overlap."""
    inside: list[tuple[int, int]] = []
    outside: list[tuple[int, int]] = []
    number = 0  # of the first own run that ends after ``at``
    for at, count in runs:
        stop = at + count
        while at < stop:
            while number < len(own) and sum(own[number]) <= at:
                number += 1
            first, end = (own[number][0], sum(own[number])) if number < len(own) else (stop, stop)
            parts, until = (inside, min(end, stop)) if first <= at else (outside, min(first, stop))
            parts.append((at, until - at))
            at = until
    return tuple(inside), tuple(outside)

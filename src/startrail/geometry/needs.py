"""Which keys of other ranks the queries of a rank see.

>>> needed_keys(Mask(causal=True, window=3), ((4, 2), (10, 2)), end=12)     # keys 2 and 3, and 8 and 9
((2, 2), (8, 2))
"""

from __future__ import annotations

from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import segments_of


def needed_keys(mask: Mask, own: Runs, end: int) -> Runs:
    """Runs of keys that some query of the runs ``own`` sees, without those runs. The sequence has ``end`` tokens."""
    if mask.steps:  # some queries may see nothing, so there can be gaps
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

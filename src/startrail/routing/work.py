"""The work of each rank: how many query-key pairs its own queries see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from startrail.geometry.layout import Layout


def work_by_rank(layout: Layout, documents: Sequence[int]) -> list[int]:
    """Visible pairs of each rank's queries under a causal mask within these documents (cu_seqlens).

    >>> from startrail.geometry.layout import contiguous
    >>> work_by_rank(contiguous(range(2), 8), (0, 2, 8))            # documents of 2 and 6 tokens
    [6, 18]
    """
    found = [0] * layout.world
    for rank in range(layout.world):
        for start, count in layout.runs(rank):
            while count:
                document = bisect_right(documents, start) - 1
                tokens = min(count, documents[document + 1] - start)
                found[rank] += tokens * (start - documents[document]) + tokens * (tokens + 1) // 2
                start, count = start + tokens, count - tokens
    return found

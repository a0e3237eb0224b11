"""Says what a call runs on one rank, and why.

>>> from startrail.compile.attention import Attention
>>> from startrail.compile.call import compile_call
>>> from startrail.compile.problem import Split
>>> from startrail.schedule.plan import Plan
>>> documents = (0, 9000, 14000, 15000, 16000)
>>> split = Split(Plan.parse("1x2/1x2"), 4)
>>> print(explain(compile_call(Attention.of(16000, 1, 4, 4, 8, True, "float32", documents=documents), split, 0)))
16,000 tokens in 4 documents on 4 ranks: 4,035 per rank, 0.9 % padding, busiest rank 1.02 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
3,032 (75 %)           4      direct   1.384 MB, 2.535 MB; 1x2/1x2 would send 2.329 MB, 4.657 MB
1,003 (25 %)           1      alone    nothing
documents: 2 on 1 rank, 1 on 2 ranks, 1 on 4 ranks
spread over all ranks: 1.08 x with none of them; next best 1.09 x with 2 of them, predicted time over that of even work
1x2/1x2 or direct: by bytes, outermost level first
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from startrail.compile.attention import AttentionPart
from startrail.compile.call import ByLevel, CompiledCall
from startrail.geometry.layout import Layout, cut_at_documents
from startrail.schedule.plan import on_demand


def explain(call: CompiledCall) -> str:
    """A table of the parts of an attention call on its rank."""
    layout, documents = call.layout, call.problem.boundaries.documents
    work, number, held = work_by_rank(layout, documents), len(documents) - 1, sum(layout.counts)
    lines = [
        f"{layout.length:,} tokens in {number:,} document{'s' if number > 1 else ''} on {layout.world} "
        f"rank{'s' if layout.world > 1 else ''}: {_per_rank(layout)} per rank, "
        f"{100 * (held / layout.length - 1):.1f} % padding, busiest rank "
        f"{max(work) * layout.world / sum(work):.2f} x the mean work if causal",
        f"{f'tokens of rank {call.rank}':22s} ranks  runs     sent per rank by level, forward + backward",
    ]
    rules = set()
    for part in call.parts:
        assert isinstance(part, AttentionPart)
        share = f"{part.tokens:,} ({100 * part.tokens / layout.counts[call.rank]:.0f} %)"
        runs = "alone" if part.zone.size == 1 else str(part.chosen)
        lines.append(f"{share:22s} {part.zone.size:<6d} {runs:8s} {_sent(part)}")
        if part.plan_bytes and part.demand_bytes is not None:  # there were two ways
            rules.add(str(call.split.sparse) if part.by_rule else "by bytes, outermost level first")
    if number > 1 and layout.world > 1:
        lines += [_where(layout, documents), call.split.predicted(call.problem.boundaries)]
    lines += [f"{call.split.plan} or {on_demand()}: {rule}" for rule in sorted(rules)]
    return "\n".join(filter(None, lines))


def _where(layout: Layout, documents: Sequence[int]) -> str:
    """How many documents are on how many ranks."""
    ranks: list[set[int]] = [set() for _ in documents[1:]]
    for rank in range(layout.world):
        for start, _ in cut_at_documents(layout.runs(rank), documents):
            ranks[bisect_right(documents, start) - 1].add(rank)
    found = Counter(map(len, ranks))
    return "documents: " + ", ".join(f"{found[size]:,} on {size} rank{'s' * (size > 1)}" for size in sorted(found))


def _per_rank(layout: Layout) -> str:
    least, most = min(layout.counts), layout.largest
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _sent(part: AttentionPart) -> str:
    if part.zone.size == 1:
        return "nothing"
    ways = [(str(on_demand()), part.demand_bytes), (str(part.plan), part.plan_bytes or None)]
    (_, sent), (other, instead) = ways if part.demand is not None else ways[::-1]
    assert sent is not None
    text = _megabytes(part, sent)
    return text if instead is None else f"{text}; {other} would send {_megabytes(part, instead)}"


def _megabytes(part: AttentionPart, sent: ByLevel) -> str:
    return ", ".join(f"{level / part.zone.size / 1e6:.3f} MB" for level in sent)


def work_by_rank(layout: Layout, documents: Sequence[int]) -> list[int]:
    """Visible pairs of each rank's queries under a causal mask within these documents (cu_seqlens).

    >>> from startrail.geometry.layout import contiguous
    >>> work_by_rank(contiguous(range(2), 8), (0, 2, 8))            # documents of 2 and 6 tokens
    [6, 18]
    """
    work = [0] * layout.world
    for rank in range(layout.world):
        for start, count in layout.runs(rank):
            while count:
                document = bisect_right(documents, start) - 1
                tokens = min(count, documents[document + 1] - start)
                work[rank] += tokens * (start - documents[document]) + tokens * (tokens + 1) // 2
                start, count = start + tokens, count - tokens
    return work

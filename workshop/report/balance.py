"""How evenly packed documents are spread over ranks: zones against a zigzag over the whole sequence. Computed."""

from __future__ import annotations

from collections.abc import Sequence

from startrail.compile.attention import Attention
from startrail.compile.call import compile_call
from startrail.compile.explain import work_by_rank
from startrail.compile.problem import Split
from startrail.geometry.distributions import DISTRIBUTIONS, document_lengths
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES

MACHINES = {8: "1x8", 32: "u4/1x8", 64: "u8/1x8"}  # ranks and plan
TOKENS_PER_RANK = (8192, 32768)


def balance_table(kinds: Sequence[str] = tuple(DISTRIBUTIONS)) -> str:
    """Busiest rank over the mean (work and tokens), padding, and bytes by level per rank, for both layouts."""
    lines = [
        "",
        "balance of packed documents (busiest rank over the mean), and MB sent per rank by level, forward + backward,",
        "bfloat16, 32:8 heads x 128:",
        "documents    ranks  tokens layout    work   held  padding  levels",
    ]
    for kind in kinds:
        for ranks, text in MACHINES.items():
            for per_rank in TOKENS_PER_RANK:
                documents = [0]
                for tokens in document_lengths(kind, ranks * per_rank, seed=1):
                    documents.append(documents[-1] + tokens)
                for layout in ("zigzag", "zones"):
                    lines.append(
                        f"{kind:12s} {ranks:5d} {per_rank:7d} {_line(Plan.parse(text), ranks, documents, layout)}"
                    )
    return "\n".join(lines)


def _line(plan: Plan, ranks: int, documents: list[int], name: str) -> str:
    problem = Attention.of(documents[-1], 1, 32, 8, 128, causal=True, documents=tuple(documents))
    split = Split(plan, ranks, name, sparse=name == "zones")
    layout = split.layout_of(problem.boundaries)
    work, mean = work_by_rank(layout, documents), documents[-1] / ranks
    calls = [compile_call(problem, split, rank, layout) for rank in range(ranks)]
    sent = [[sum(level) for level in zip(*map(call.traffic, PASSES), strict=True)] for call in calls]
    levels = " ".join(f"{sum(level) / ranks / 1e6:.1f}" for level in zip(*sent, strict=True))
    return (
        f"{name:7s} {max(work) * ranks / sum(work):6.2f} {layout.largest / mean:6.3f} "
        f"{layout.largest / mean - 1:8.1%}  {levels}"
    )

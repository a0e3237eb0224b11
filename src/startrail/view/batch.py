"""A batch as text: which programs its zones run, and each of them as a grid.

>>> from startrail.schedule.values import FORWARD
>>> print(show_batch(Plan.parse("1x4"), 4, Mask(causal=True, window=3), 32, FORWARD, [0, 1], columns=80))
32 tokens in 1 document on 4 ranks: 8 per rank, 0.0 % padding, busiest rank 1.00 x the mean work if causal
tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
8 (100 %)              4      direct   0.147 MB; 1x4 would send 1.573 MB
1x4 or direct: by bytes, outermost level first
<BLANKLINE>
direct forward, the zone of ranks 0 to 3
step  rank 0       rank 1
   0  send kv4>1   send kv5>0 kv6>2
      compute 0x0  compute 1x1
   1  hold kv5     hold kv4 kv7
      compute 0x5  compute 1x4 1x7
kv4: rank 0 to 1, 2 tokens
kv5: rank 1 to 0, 2 tokens
kv6: rank 1 to 2, 2 tokens
kv7: rank 2 to 1, 2 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from startrail.compile.attention import Attention, AttentionPart
from startrail.compile.call import compile_call
from startrail.compile.explain import explain
from startrail.compile.problem import Boundaries, Rule, Split
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Costs
from startrail.schedule.plan import Plan
from startrail.schedule.values import Pass
from startrail.view.text import Seen, columns_that_fit, grid

ASSUMED_HEADS, ASSUMED_HEAD_DIM = 32, 128  # MHA in bfloat16, for the bytes
MAX_BUNDLES = 12  # listed


def show_batch(
    plan: Plan, world: int, mask: Mask, length: int, pass_: Pass, ranks: Sequence[int], columns: int,
    sparse: bool | Rule = True,
) -> str:  # fmt: skip
    """What the first of ``ranks`` runs for a batch, and the programs of its zones on those ranks that share them.
    ``sparse`` is the rule that chooses between the plan and ``direct``."""
    problem, split = problem_of(plan, mask, length), Split(plan, world, sparse=sparse)
    call = compile_call(problem, split, ranks[0])
    texts = [explain(call)]
    for number, part in enumerate(call.parts):
        if part.zone.size > 1:
            zone = range(part.zone.first, part.zone.first + part.zone.size)
            inside = [rank for rank in ranks if rank in zone]
            parts = [problem.parts(split, call.layout, rank)[number] for rank in inside]
            texts.append(_zone_text(parts, inside, pass_, columns))
    return "\n\n".join(texts)


def problem_of(plan: Plan, mask: Mask, length: int) -> Attention:
    """A call under this mask, which includes documents."""
    boundaries, heads = Boundaries(mask.documents or (0, length), mask.blocks), ASSUMED_HEADS
    if heads % (plan.heads * plan.groups):
        heads = plan.heads * plan.groups
    own = replace(mask, documents=None, blocks=())
    return Attention(boundaries, 1, "bfloat16", "", own, heads, heads, ASSUMED_HEAD_DIM)


def _zone_text(parts: list[AttentionPart], ranks: list[int], pass_: Pass, columns: int) -> str:
    zone, seen = parts[0].zone, _seen(parts[0])
    programs = [part.program(pass_) for part in parts]
    shown = columns_that_fit(programs, ranks, columns, seen)
    last = zone.first + zone.size - 1
    lines = [f"{parts[0].chosen} {pass_}, the zone of ranks {zone.first} to {last}"]
    lines += grid(programs[:shown], ranks[:shown], seen)
    if (demand := parts[0].demand) is not None:
        members = {rank - zone.first for rank in ranks[:shown]}
        listed = [
            f"kv{number}: rank {zone.first + edge.sender} to {zone.first + edge.receiver}, "
            f"{sum(count for _, count in runs)} tokens"
            for number, (edge, runs) in enumerate(demand.messages.items(), zone.size)
            if {edge.sender, edge.receiver} & members
        ]
        lines += listed[:MAX_BUNDLES] + [f"... and {len(listed) - MAX_BUNDLES} more"] * (len(listed) > MAX_BUNDLES)
    return "\n".join(lines)


def _seen(part: AttentionPart) -> Seen:
    """Which blocks of a zone have visible pairs. Whatever is fetched on demand is seen."""
    if part.demand is not None:
        return lambda row, column: True
    tiles = part.tiles(Costs())
    return lambda row, column: bool(tiles(row, column))

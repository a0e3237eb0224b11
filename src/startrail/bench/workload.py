"""What is measured: attention over one sequence, and our plans for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, isqrt

from startrail.geometry.layout import zigzag
from startrail.schedule.places import divisors
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes


@dataclass(frozen=True)
class Workload:
    """Forward + backward attention over one sequence, float32, with random cotangents; or a whole training step.

    ``model`` is empty for attention alone, or ``gpt`` or ``dit``: then the sizes are those of each of its ``layers``.
    ``window`` and ``documents`` (cu_seqlens) make attention alone sparse.
    """

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    batch: int = 1
    model: str = ""
    layers: int = 1
    window: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", tuple(self.documents))  # a list if it comes from a file

    @property
    def is_sparse(self) -> bool:
        return self.window is not None or bool(self.documents)

    @property
    def mask(self) -> str:
        parts = ["causal" if self.causal else "full"]
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [f"{len(self.documents) - 1} documents"] if self.documents else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """``MHA``, ``GQA 8:1`` (query heads per KV head), or the model's name."""
        if self.model:
            return {"gpt": "GPT step", "dit": "DiT step"}[self.model]
        return "MHA" if self.q_heads == self.kv_heads else f"GQA {self.q_heads // self.kv_heads}:1"

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.model else ""
        heads = f"{self.q_heads}:{self.kv_heads} heads x {self.head_dim}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.name} {self.mask}, {batch}{self.length} tokens, {heads}{layers}"

    def sizes(self, plan: Plan, world: int) -> Sizes:
        """Raises ``ValueError`` if the plan cannot run this work on so many ranks."""
        plan.check_world(world)
        local = zigzag(range(world), self.length).largest
        return Sizes(plan, local, self.batch, self.q_heads, self.kv_heads, self.head_dim)


def balanced_team(nodes: int) -> int:
    """The team size that sends the fewest bytes between nodes for MHA: the divisor nearest to the square root.

    >>> [balanced_team(nodes) for nodes in (2, 4, 8, 16)]
    [1, 2, 2, 4]
    """
    return min(divisors(nodes), key=lambda team: (abs(team - isqrt(nodes)), team))


def heads_first(nodes: int, ranks: int, heads: int) -> str:
    """Heads split over as many nodes as possible, the remaining heads inside the nodes, and teams and rings for the
    rest.

    >>> [heads_first(*machine, heads=16) for machine in ((4, 8), (8, 4), (16, 2), (4, 4), (2, 8), (32, 8))]
    ['u4/u4/1x2', 'u8/u2/1x2', 'u16/1x2', 'u4/u4', 'u2/u8', 'u16/1x2/2x4']
    """
    levels = []
    for size in (nodes, ranks):
        split = gcd(size, heads)
        heads //= split
        team = balanced_team(size // split)
        levels += [f"u{split}"] if split > 1 else []
        levels += [f"{team}x{size // split // team}"] if split < size else []
    return "/".join(levels) or "u1"


def own_plans(nodes: int, ranks: int, work: Workload) -> list[str]:
    """Ring Attention, and one plan of each kind that can do this work on ``nodes`` of ``ranks`` each.

    >>> own_plans(2, 4, Workload(8192, 8, 8, 64, causal=True))
    ['1x8', '1x2/1x4', '1x2/u4', 'u8', 'u2/u4', 'star2']
    >>> own_plans(4, 8, Workload(8192, 8, 8, 64, causal=True))
    ['1x32', '1x4/1x8', '1x4/u8', 'u4/u2/2x2', '2x2/u8', 'star2', 'star4']
    """
    world, team = nodes * ranks, balanced_team(nodes)
    texts = [f"1x{world}", f"1x{nodes}/1x{ranks}", f"1x{nodes}/u{ranks}", f"u{world}"]
    texts += [heads_first(nodes, ranks, work.q_heads), f"{team}x{nodes // team}/u{ranks}", "star2", "star4"]
    return [text for text in dict.fromkeys(texts) if _fits(text, world, work)]


def _fits(text: str, world: int, work: Workload) -> bool:
    try:
        work.sizes(Plan.parse(text), world)
    except ValueError:
        return False
    return True

"""What is measured, as data: work, contenders, and trials that put contenders to the same work at the same link rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from startrail.plan import divisors

# How long the links of a flat ring must be busy, by closed form, in units of what computing takes. None: not limited.
PRESSURES = (8.0, 3.0, 1.0)


@dataclass(frozen=True)
class Work:
    """Forward + backward attention over one sequence, float32, with random cotangents."""

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    batch: int = 1

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def kind(self) -> str:
        """``MHA``, or for grouped queries how many share a key head: ``GQA 8:1``."""
        return "MHA" if self.q_heads == self.kv_heads else f"GQA {self.q_heads // self.kv_heads}:1"

    def __str__(self) -> str:
        heads = f"{self.q_heads}:{self.kv_heads} heads x {self.head_dim}"
        return f"{self.kind} {self.mask}, {self.length} tokens, {heads}"


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work. ``way`` says how it is called: ``plan`` is ours, others are named in `peers`.

    ``across``: the ranks are dealt to places so that neighbours live on different nodes. ``keeps``: it saves what it
    received for the backward pass, which costs memory. ``ours``: nested rings, and not a schedule that others have.
    """

    name: str
    way: str = "plan"
    plan: str = ""
    across: bool = False
    role: str = ""

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Trial:
    """Contenders at the same work and the same link rates, repeats interleaved."""

    work: Work
    contenders: tuple[Contender, ...]
    pressure: float | None
    repeats: int
    slow_node: bool = False  # node 0's link has half the rate


def balanced_team(nodes: int) -> int:
    """The team size that moves least between nodes for MHA: the divisor nearest to the square root, the larger if equal.

    >>> [balanced_team(nodes) for nodes in (2, 4, 8, 16)]
    [1, 2, 2, 4]
    """
    return min(divisors(nodes), key=lambda team: (abs(team - isqrt(nodes)), team))


def plan_contenders(nodes: int, ranks: int) -> list[Contender]:
    """Every plan of ours for ``nodes`` of ``ranks`` each, by the role it plays in the claims."""
    team = balanced_team(nodes)
    nested = f"{team}x{nodes // team}/u{ranks}"
    return [
        Contender("ring", plan=f"1x{nodes * ranks}", role="ring"),
        Contender("double ring", plan=f"1x{nodes}/1x{ranks}", role="double ring"),
        Contender("USP", plan=f"1x{nodes}/u{ranks}", role="usp"),
        Contender("Ulysses", plan=f"u{nodes * ranks}", role="ulysses"),
        Contender("star2", plan="star2", role="star"),
        Contender("star4", plan="star4", role="star"),
        Contender("star2 across nodes", plan="star2", across=True, role="star"),
        Contender("star4 across nodes", plan="star4", across=True, role="star"),
        Contender("nested", plan=nested, role="nested"),
        Contender("nested, groups", plan=f"{nested},groups=2", role="nested"),
        Contender("nested, keep", plan=f"{nested},keep=all", role="nested keep"),
        Contender("nested, keep, groups", plan=f"{nested},keep=all,groups=2", role="nested keep"),
    ]


COMPUTE = Contender("compute alone", way="compute", role="compute")
TORCH_RING = Contender("torch ring (all-to-all)", way="torch ring", role="ring")
TORCH_GATHER = Contender("torch ring (all-gather)", way="torch gather", role="peer")

"""What is measured, as data: work, contenders, and trials that put contenders to the same work on the same links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isqrt

from startrail.plan import divisors

# How long textbook Ring Attention keeps a node's link busy, by closed form, in units of what computing takes.
BOUND_BY_LINKS = 8.0
# The claims' trials go further: there the two cores that emulate all ranks must not be what is measured.
PRESSURES = (24.0, BOUND_BY_LINKS, 3.0, 1.0)


@dataclass(frozen=True)
class Work:
    """Forward + backward attention over one sequence, float32, with random cotangents; or a whole training step.

    ``model`` is empty for attention alone, or ``gpt`` or ``dit``: then the sizes are those of each of its ``layers``.
    """

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    batch: int = 1
    model: str = ""
    layers: int = 1

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """``MHA``; for grouped queries how many share a key head, ``GQA 8:1``; or the model's name."""
        if self.model:
            return {"gpt": "GPT step", "dit": "DiT step"}[self.model]
        return "MHA" if self.q_heads == self.kv_heads else f"GQA {self.q_heads // self.kv_heads}:1"

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.model else ""
        heads = f"{self.q_heads}:{self.kv_heads} heads x {self.head_dim}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.name} {self.mask}, {batch}{self.length} tokens, {heads}{layers}"


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work. ``way`` says how it is called: ``plan`` is our engine, others are named in `peers`.

    ``role`` is the part it plays in the claims. ``across``: ranks are dealt to places so that neighbours live on
    different nodes, and the paper's teams span nodes.
    """

    name: str
    role: str
    way: str = "plan"
    plan: str = ""
    across: bool = False


@dataclass(frozen=True)
class Trial:
    """Contenders at the same work and the same link rates.

    Repeats are interleaved and stop early, but not before ``at_least`` of them, once the trial has taken ``seconds``.
    Contenders that are ``brief`` too take part in the first one only. ``pressure`` None leaves the links as they are;
    ``slow_node`` gives node 0's link half the rate.
    """

    work: Work
    contenders: tuple[Contender, ...]
    pressure: float | None
    repeats: int
    seconds: float
    slow_node: bool = False
    at_least: int = 2
    brief: tuple[Contender, ...] = ()


BRIEF = 1  # repeats of a contender that is in a trial's ``brief``
COMPUTE = Contender("compute alone", role="compute", way="compute")
PEERS = (
    Contender("ring, textbook", role="ring", way="textbook ring"),
    Contender("torch ring, all-to-all", role="peer", way="torch ring"),
    Contender("torch ring, all-gather", role="peer", way="torch gather"),
    Contender("ring-flash-attn", role="peer", way="ring-flash-attn"),
    Contender("yunchang USP", role="peer", way="yunchang"),
    Contender("yunchang USP across", role="peer", way="yunchang across"),
    Contender("DeepSpeed Ulysses", role="ulysses", way="deepspeed"),
)


def balanced_team(nodes: int) -> int:
    """The team size that moves least between nodes for MHA: the divisor nearest to the square root.

    >>> [balanced_team(nodes) for nodes in (2, 4, 8, 16)]
    [1, 2, 2, 4]
    """
    return min(divisors(nodes), key=lambda team: (abs(team - isqrt(nodes)), team))


def plan_contenders(nodes: int, ranks: int) -> tuple[Contender, ...]:
    """Our engine with every plan that a claim needs, on ``nodes`` of ``ranks`` each."""
    team = balanced_team(nodes)
    nested = f"{team}x{nodes // team}/u{ranks}"
    return (
        Contender("ring, ours", "ring", plan=f"1x{nodes * ranks}"),
        Contender("double ring", "double ring", plan=f"1x{nodes}/1x{ranks}"),
        Contender("USP", "usp", plan=f"1x{nodes}/u{ranks}"),
        Contender("Ulysses", "ulysses", plan=f"u{nodes * ranks}"),
        Contender("star2", "star", plan="star2"),
        Contender("star4", "star", plan="star4"),
        Contender("star2 across nodes", "star", plan="star2", across=True),
        Contender("star4 across nodes", "star", plan="star4", across=True),
        Contender("nested", "nested", plan=nested),
        Contender("nested, groups", "nested", plan=f"{nested},groups=2"),
        Contender("nested, keep", "nested keep", plan=f"{nested},keep=all"),
        Contender("nested, keep, groups", "nested keep", plan=f"{nested},keep=all,groups=2"),
    )


def picked(contenders: Iterable[Contender], *names: str) -> tuple[Contender, ...]:
    return tuple(contender for contender in contenders if contender.name in names)


MHA = Work(length=2048, q_heads=16, kv_heads=16, head_dim=32, causal=False)
# Grouped keys are few bytes a token: a batch gives messages of a size at which headers are less than 3 % of them.
GQA = replace(MHA, length=768, kv_heads=2, batch=4)
# For GQA on 4 nodes of 8: heads split as far as there are key heads, which is USP's rule, and what ``auto`` picks.
GROUPED = (
    Contender("USP", "usp", plan="1x4/1x4/u2"),
    Contender("auto", "nested", plan="1x4/2x2/u2"),
    Contender("auto, keep", "nested keep", plan="1x4/2x2/u2,keep=all"),
)
LONG = replace(MHA, length=16_384, q_heads=8, kv_heads=8, causal=True)
# A batch of 4, so that activations outweigh the gradients of the parameters, as they do where contexts are long.
GPT = Work(length=1024, q_heads=8, kv_heads=8, head_dim=16, causal=True, batch=4, model="gpt", layers=2)
DIT = replace(GPT, causal=False, model="dit")
MAIN = (
    *("ring, ours", "ring, textbook", "USP", "star2", "star4"),
    *("nested", "nested, groups", "nested, keep", "nested, keep, groups"),
)
RATIOS = ("ring, textbook", "USP", "star2", "star4", "nested", "nested, keep")  # whom the claims name
BESIDE = ("double ring", "torch ring, all-gather", "ring-flash-attn", "yunchang USP", "yunchang USP across")
SELDOM = ("torch ring, all-to-all", "star2 across nodes", "star4 across nodes")  # slow: on the smallest machine only
FEW = ("ring, textbook", "USP", "nested", "nested, keep")


def masked(causal: int, full: int) -> tuple[Work, Work]:
    """MHA with both masks, of these lengths.

    A causal mask halves the arithmetic and no bytes, so with equal lengths its links would be twice as fast. Lengths
    are chosen for links of less than 400 Mbit/s, above which two cores emulate them poorly, and for passes of seconds:
    starting and ending a pass costs the same at any length.
    """
    return replace(MHA, length=causal, causal=True), replace(MHA, length=full)


HEADLINE = masked(causal=1920, full=2048)
SHORT = masked(causal=1280, full=1024)
EVEN = masked(causal=3072, full=2304)  # where ring takes as long as computing


def limited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    """What runs where links are limited. 4 nodes of 8 ranks are the claims' machine and get everything."""
    everyone = (*PEERS, *plan_contenders(nodes, ranks))
    main, ratios, beside, few = (picked(everyone, *names) for names in (MAIN, RATIOS, BESIDE, FEW))
    if quick:
        return [*(Trial(work, main, BOUND_BY_LINKS, 3, 20.0) for work in SHORT), Trial(EVEN[1], few, 1.0, 2, 12.0)]
    if (nodes, ranks) == (4, 8):
        return headline_trials(everyone)
    if (nodes, ranks) == (4, 4):
        beside += picked(everyone, *SELDOM)
    trials = [
        Trial(SHORT[0], (*ratios, *beside), BOUND_BY_LINKS, 3, 15.0, at_least=3, brief=beside),
        Trial(SHORT[1], few, BOUND_BY_LINKS, 3, 8.0, at_least=3),
    ]
    if (nodes, ranks) == (4, 4):  # how costs grow with the sequence; and Ulysses, whose messages are small otherwise
        alike = picked(everyone, "Ulysses", "DeepSpeed Ulysses")
        trials += [Trial(replace(MHA, length=1536), few, BOUND_BY_LINKS, 2, 8.0)]
        trials += [Trial(replace(MHA, length=2048), (*few, *alike), BOUND_BY_LINKS, 2, 8.0)]
    return trials


def headline_trials(everyone: tuple[Contender, ...]) -> list[Trial]:
    """The claims' trials on 4 nodes of 8 ranks, with most repeats; then what is in the table beside them."""
    main, ratios, beside = (picked(everyone, *names) for names in (MAIN, RATIOS, BESIDE))
    claimed = (*ratios, *picked(main, "nested, groups"))
    star, others = picked(main, "star2"), tuple(contender for contender in main if contender not in ratios)
    trials = [Trial(work, claimed, PRESSURES[0], 3, 100.0, at_least=3, brief=star) for work in HEADLINE]
    brief = (*others, *beside)
    trials += [Trial(work, (*ratios, *brief), BOUND_BY_LINKS, 3, 40.0, at_least=3, brief=brief) for work in SHORT]
    slowed = picked(ratios, "ring, textbook", "star2", "star4", "nested", "nested, keep")
    trials += [Trial(SHORT[1], slowed, BOUND_BY_LINKS, 3, 15.0, slow_node=True, at_least=3)]
    trials += [Trial(work, ratios, 3.0, 3, 12.0, at_least=3) for work in SHORT]
    trials += [Trial(work, ratios, 1.0, 3, 25.0, at_least=3) for work in EVEN]
    grouped = (*picked(main, "ring, textbook"), *GROUPED)
    trials += [Trial(replace(GQA, causal=True), (*grouped, *star), BOUND_BY_LINKS, 3, 15.0, at_least=3, brief=star)]
    trials += [Trial(GQA, grouped, pressure, 3, 15.0, at_least=3) for pressure in (BOUND_BY_LINKS, 1.0)]
    steps = picked(main, "ring, textbook", "nested", "nested, keep")
    return trials + [Trial(work, steps, 3.0, 3, 20.0, at_least=3) for work in (GPT, DIT)]


def unlimited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    everyone = (*PEERS, *plan_contenders(nodes, ranks))
    if quick:
        return [Trial(SHORT[0], picked(everyone, *MAIN), None, 3, 8.0)]
    if (nodes, ranks) != (4, 8):
        return []
    return [
        Trial(LONG, picked(everyone, "nested"), None, 3, 40.0),
        Trial(SHORT[0], picked(everyone, *RATIOS), None, 3, 8.0, at_least=3),
    ]

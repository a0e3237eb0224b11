"""What is measured, as data: work, contenders, and trials that put contenders to the same work on the same links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt

from startrail.planner.cluster import ClusterSpec, Slow, find_cluster
from startrail.planner.topology import Machine
from startrail.schedule.plan import divisors

# How long textbook Ring Attention keeps a node's link busy, by closed form, in units of what computing takes.
BOUND_BY_LINKS = 8.0
# The claims' trials go further: there the two cores that emulate all ranks must not be what is measured.
PRESSURES = (24.0, BOUND_BY_LINKS, 3.0, 1.0)
PAYLOAD_SHARE = 0.975  # of a link's rate; the rest are headers of jumbo frames, TCP and gloo


@dataclass(frozen=True)
class Workload:
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

    work: Workload
    contenders: tuple[Contender, ...]
    pressure: float | None
    repeats: int
    seconds: float
    slow_node: bool = False
    at_least: int = 2
    brief: tuple[Contender, ...] = ()


BRIEF = 1  # repeats of a contender that is in a trial's ``brief``
COMPUTE = Contender("compute alone", role="compute", way="compute")
# The plan that ``SequenceParallel("auto")`` gets. The planner is asked once the trial's link rates are known.
AUTO = Contender("auto", role="auto", plan="auto")
PEERS = (
    Contender("ring, textbook", role="ring", way="textbook ring"),
    Contender("torch ring, all-to-all", role="peer", way="torch ring"),
    Contender("torch ring, all-gather", role="peer", way="torch gather"),
    Contender("ring-flash-attn", role="peer", way="ring-flash-attn"),
    Contender("yunchang USP", role="peer", way="yunchang"),
    Contender("yunchang USP across", role="peer", way="yunchang across"),
    Contender("DeepSpeed Ulysses", role="peer", way="deepspeed"),
)
OURS = ("heads", "auto", "nested", "nested keep")  # roles of the plans that are new here; the best of them is claimed

# Plans of ours with heads split over the nodes, by machine and number of heads, the best first: long trials repeat
# LEADING of them as often as everybody and show the rest once, and trials that no claim needs have LEADING only.
# Machines that are not here have what ``heads_first`` says.
LEADING = 2
OUTERMOST: dict[tuple[str, int], tuple[str, ...]] = {
    ("4x8", 16): (
        *("u4/u2/1x4,keep=all,groups=2", "u4/u2/2x2,keep=all,groups=2"),
        *("u4/u2/1x4,groups=2", "u4/2x4,groups=2", "u4/1x8", "u4/u4/1x2"),
    ),
    ("8x4", 16): ("u8/1x4,keep=all,groups=4", "u8/2x2,keep=all,groups=4", "u8/1x4,keep=all,groups=2", "u8/u2/1x2"),
    ("16x2", 16): ("u16/1x2,keep=all,groups=2", "u16/1x2,keep=all", "u16/1x2"),
    ("4x4", 16): ("u4/u2/1x2,keep=all,groups=2", "u4/u4"),
    ("2x8", 16): ("u2/u8", "u2/u4/1x2,keep=all,groups=2"),
    ("4x8", 8): ("u4/1x8,keep=all,groups=2", "u4/u2/1x4,keep=all"),
}


def balanced_team(nodes: int) -> int:
    """The team size that moves least between nodes for MHA: the divisor nearest to the square root.

    >>> [balanced_team(nodes) for nodes in (2, 4, 8, 16)]
    [1, 2, 2, 4]
    """
    return min(divisors(nodes), key=lambda team: (abs(team - isqrt(nodes)), team))


def heads_first(nodes: int, ranks: int, heads: int) -> str:
    """Heads split over the nodes as far as there are heads, then what is left of them inside the nodes; the rest of
    the nodes, and of a node, is teams and rings.

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


def heads_contender(plan: str) -> Contender:
    return Contender(f"heads {plan}", "heads", plan=plan)


def heads_contenders(nodes: int, ranks: int, heads: int) -> tuple[Contender, ...]:
    texts = OUTERMOST.get((f"{nodes}x{ranks}", heads), (heads_first(nodes, ranks, heads),))
    return tuple(map(heads_contender, texts))


def plan_contenders(nodes: int, ranks: int) -> tuple[Contender, ...]:
    """Our engine with the other plans that a claim or the table needs, on ``nodes`` of ``ranks`` each."""
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
        Contender("nested, keep", "nested keep", plan=f"{nested},keep=all"),
    )


def grouped_contenders(nodes: int, ranks: int) -> tuple[Contender, ...]:
    """For grouped-query attention: ``auto``, and USP by its own rule, heads split as far as there are KV heads."""
    heads = gcd(ranks, GQA.kv_heads)
    return Contender("USP", "usp", plan=f"1x{nodes}/1x{ranks // heads}/u{heads}"), AUTO


def lab_cluster(machine: Machine, rates: Sequence[int]) -> ClusterSpec:
    """``lab.toml`` with the size of ``machine`` and the link rate of each node, in bits per second."""
    fastest = max(rates)
    slow = tuple(Slow(0, node, bandwidth=rate / fastest) for node, rate in enumerate(rates) if rate < fastest)
    base = find_cluster(f"lab@{machine}")
    levels = (replace(base.levels[0], bandwidth=fastest / 8 * PAYLOAD_SHARE), *base.levels[1:])
    return replace(base, levels=levels, slow=slow)


def picked(contenders: Iterable[Contender], *names: str) -> tuple[Contender, ...]:
    return tuple(contender for contender in contenders if contender.name in names)


def masked(causal: int, full: int, batch: int = 1) -> tuple[Workload, Workload]:
    """MHA with both masks, of these lengths.

    A causal mask halves the arithmetic and no bytes, so with equal lengths its links would be twice as fast. Lengths
    are chosen for links of less than 500 Mbit/s, above which two cores emulate them poorly, and for passes of seconds:
    starting and ending a pass costs the same at any length. A batch makes messages larger and passes no longer: with
    heads over 16 ranks every rank sends each of 15 others one head of its few tokens, and headers, about 400 bytes a
    message, must stay below 3 % of that.
    """
    return replace(MHA, length=causal, causal=True, batch=batch), replace(MHA, length=full, batch=batch)


MHA = Workload(length=2048, q_heads=16, kv_heads=16, head_dim=32, causal=False)
HEADLINE = masked(causal=1280, full=1088, batch=4)
WIDE = masked(causal=1536, full=1664, batch=4)  # for more nodes and faster links, whose passes would be too short
SHORT = masked(causal=1024, full=896, batch=4)  # for 16 ranks, which hold twice the tokens
GROWING = tuple(replace(MHA, length=length, batch=2) for length in (768, 1536))
EVEN = masked(causal=3584, full=3200)  # where ring takes as long as computing
# Grouped keys are few bytes a token, and so have a batch, too.
GQA = replace(MHA, length=768, kv_heads=2, batch=4)
LONG = replace(MHA, length=16_384, q_heads=8, kv_heads=8, causal=True)
# A batch of 4, so that activations outweigh the gradients of the parameters, as they do where contexts are long.
GPT = Workload(length=1024, q_heads=8, kv_heads=8, head_dim=16, causal=True, batch=4, model="gpt", layers=2)
DIT = replace(GPT, causal=False, model="dit")

RATIOS = ("ring, textbook", "USP", "star4", "nested", "nested, keep")  # whom the claims name, beside heads outermost
FEW = ("ring, textbook", "nested, keep")
ULYSSES = ("yunchang USP across", "DeepSpeed Ulysses")  # peers that split heads over nodes: the claims name them, too
BESIDE = ("ring, ours", "star2", "double ring", "torch ring, all-gather", "ring-flash-attn", "yunchang USP")
SELDOM = ("torch ring, all-to-all", "star2 across nodes")  # slow: on the smallest machine only


class Lineup:
    """Everybody who can take part on one machine, and the trials that are made of them."""

    def __init__(self, nodes: int, ranks: int) -> None:
        self.nodes, self.ranks = nodes, ranks
        self.everyone = (*PEERS, *plan_contenders(nodes, ranks))

    def named(self, *names: str) -> tuple[Contender, ...]:
        return picked(self.everyone, *names)

    def heads(self, work: Workload = MHA) -> tuple[Contender, ...]:
        return heads_contenders(self.nodes, self.ranks, work.q_heads)

    def trial(
        self,
        work: Workload,
        names: Iterable[str],
        pressure: float | None,
        seconds: float,
        *,
        brief: Iterable[str] = (),
        all_heads: bool = False,
        repeats: int = 3,
        at_least: int = 2,
        slow_node: bool = False,
        plans: Iterable[str] = (),
    ) -> Trial:
        """Heads outermost, and ``plans`` of that kind, against the contenders of these names; those in ``brief`` take
        part once."""
        once = self.named(*brief)
        leading, rest = self.heads(work)[:LEADING], self.heads(work)[LEADING:] if all_heads else ()
        leading += tuple(map(heads_contender, plans))
        everybody = (*self.named(*names), *leading, *rest, *once)
        return Trial(work, everybody, pressure, repeats, seconds, slow_node, at_least, brief=(*once, *rest))


def limited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    """What runs where links are limited, the claims' trials first."""
    lineup = Lineup(nodes, ranks)
    if quick:
        trials = [lineup.trial(work, (*RATIOS, "star2"), BOUND_BY_LINKS, 18.0) for work in SHORT]
        return [*trials, lineup.trial(EVEN[1], FEW, 1.0, 10.0, repeats=2)]
    by_machine = {(4, 8): headline_trials, (8, 4): claims_trials, (16, 2): claims_trials, (4, 4): growth_trials}
    return by_machine.get((nodes, ranks), other_trials)(lineup)


def headline_trials(lineup: Lineup) -> list[Trial]:
    """4 nodes of 8 ranks get everything: the claims' trials, then the same table on faster links, and what is beside
    them."""
    steepest, *_ = PRESSURES
    peers = (*RATIOS, "star2", *ULYSSES)  # the slower their links, the less their times vary: once is enough
    fewer = ("ring, textbook", "star4", "nested, keep", *ULYSSES)
    trials = [lineup.trial(work, (), steepest, 150.0, brief=peers) for work in HEADLINE]
    trials += [lineup.trial(work, (), BOUND_BY_LINKS, 52.0, brief=fewer) for work in WIDE]
    trials += [lineup.trial(work, ("ring, textbook", "nested"), 3.0, 25.0) for work in (GPT, DIT)]
    trials += [lineup.trial(work, (*RATIOS, *ULYSSES), 3.0, 18.0, at_least=1) for work in HEADLINE]
    ungrouped = ("u4/u2/2x2,keep=all", "u4/2x4,keep=all")  # messages cost more than there is to hide
    trials += [lineup.trial(work, (*RATIOS, *ULYSSES), 1.0, 24.0, at_least=1, plans=ungrouped) for work in EVEN]
    slowed = ("ring, textbook", "star4", "nested, keep")
    trials += [lineup.trial(WIDE[1], slowed, BOUND_BY_LINKS, 24.0, slow_node=True, at_least=1)]
    grouped = (*lineup.named("ring, textbook"), *grouped_contenders(lineup.nodes, lineup.ranks))
    return [*trials, Trial(replace(GQA, causal=True), grouped, BOUND_BY_LINKS, 2, 10.0)]


def claims_trials(lineup: Lineup) -> list[Trial]:
    """More and smaller nodes: what is claimed of them."""
    steepest, *_ = PRESSURES
    return [lineup.trial(work, ULYSSES, steepest, 85.0, brief=FEW, all_heads=True, repeats=2) for work in WIDE]


def growth_trials(lineup: Lineup) -> list[Trial]:
    """4 nodes of 4, where 16 heads suffice for Ulysses: it, everybody else, and how costs grow with the sequence."""
    few = (*FEW, "USP", "nested")
    alike = ("Ulysses", *ULYSSES)
    return [
        lineup.trial(SHORT[0], alike, BOUND_BY_LINKS, 40.0, brief=(*RATIOS, *BESIDE, *SELDOM)),
        *(lineup.trial(work, FEW, BOUND_BY_LINKS, 5.0) for work in GROWING),
        lineup.trial(SHORT[1], (*few, *alike), BOUND_BY_LINKS, 18.0),
    ]


def other_trials(lineup: Lineup) -> list[Trial]:
    return [
        lineup.trial(SHORT[0], (*RATIOS, *ULYSSES), BOUND_BY_LINKS, 20.0),
        lineup.trial(SHORT[1], (*FEW, *ULYSSES), BOUND_BY_LINKS, 14.0),
    ]


def unlimited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    lineup = Lineup(nodes, ranks)
    if quick:
        return [lineup.trial(SHORT[0], RATIOS, None, 6.0)]
    if (nodes, ranks) != (4, 8):
        return []
    return [
        Trial(LONG, lineup.heads(LONG)[:1], None, 1, 50.0),
        lineup.trial(HEADLINE[0], FEW, None, 6.0),
    ]

"""Workloads, contenders, and trials in which contenders do the same work on the same links, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt

from startrail.bench.yardstick import Workload
from startrail.planner.cluster import ClusterSpec, SlowMember, find_cluster
from startrail.planner.topology import Machine
from startrail.schedule.places import divisors

# Pressure: the time that textbook Ring Attention keeps a node's link busy, by closed form, over its compute time.
BOUND_BY_LINKS = 8.0
# The claims' trials have slower links, so that the two cores which emulate all ranks are not the bottleneck.
PRESSURES = (24.0, BOUND_BY_LINKS, 3.0, 1.0)
PAYLOAD_SHARE = 0.975  # of a link's rate; the rest are headers of jumbo frames, TCP and gloo


@dataclass(frozen=True)
class Contender:
    """One implementation in a trial. ``way`` selects its adapter: ``plan`` is our engine, `peers` has the others.

    ``role`` is its part in the claims. With ``across``, ranks get their places round-robin over the nodes, so that the
    paper's teams span nodes.
    """

    name: str
    role: str
    way: str = "plan"
    plan: str = ""
    across: bool = False


@dataclass(frozen=True)
class Trial:
    """Contenders at the same work and the same link rates.

    Repeats are interleaved. They stop once the trial has taken ``seconds``, but not before ``at_least`` of them.
    Contenders in ``brief`` take part in the first repeat only. ``pressure`` None leaves the links unlimited;
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


BRIEF = 1  # repeats of a contender in ``brief``
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
OURS = ("heads", "auto", "nested", "nested keep")  # roles of our new plans; claims are about the best of them

# Our plans with heads split over the nodes, by machine and number of heads, the best first. Long trials repeat the
# first LEADING of them like every contender and run the rest once; other trials have the first LEADING only.
# Machines that are not listed use ``heads_first``.
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


def heads_contenders(nodes: int, ranks: int, heads: int) -> tuple[Contender, ...]:
    texts = OUTERMOST.get((f"{nodes}x{ranks}", heads), (heads_first(nodes, ranks, heads),))
    return with_heads_role(texts)


def with_heads_role(plans: Iterable[str]) -> tuple[Contender, ...]:
    return tuple(Contender(f"heads {plan}", "heads", plan=plan) for plan in plans)


def plan_contenders(nodes: int, ranks: int) -> tuple[Contender, ...]:
    """Our engine with the other plans of the claims and the tables, on ``nodes`` of ``ranks`` each."""
    team = balanced_team(nodes)
    nested = f"{team}x{nodes // team}/u{ranks}"
    return (
        Contender("ring, ours", "ring", plan=f"1x{nodes * ranks}"),
        Contender("double ring", "double ring", plan=f"1x{nodes}/1x{ranks}"),
        Contender("USP", "usp", plan=f"1x{nodes}/u{ranks}"),
        Contender("Ulysses", "ulysses", plan=f"u{nodes * ranks}"),
        *(Contender(star, "star", plan=star) for star in ("star2", "star4")),
        *(Contender(f"{star} across nodes", "star", plan=star, across=True) for star in ("star2", "star4")),
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
    slow = tuple(SlowMember(0, node, bandwidth=rate / fastest) for node, rate in enumerate(rates) if rate < fastest)
    base = find_cluster(f"lab@{machine}")
    levels = (replace(base.levels[0], bandwidth=fastest / 8 * PAYLOAD_SHARE), *base.levels[1:])
    return replace(base, levels=levels, slow=slow)


def both_masks(causal: int, full: int, batch: int = 1) -> tuple[Workload, Workload]:
    """MHA with both masks, at these lengths.

    A causal mask halves the arithmetic but not the bytes, so with equal lengths its links would be twice as fast.
    Lengths are chosen for links below 500 Mbit/s, because two cores emulate faster ones poorly, and for passes of
    seconds, because the start and end of a pass cost the same at any length. A batch makes messages larger: with heads
    over 16 ranks, every rank sends each of 15 others one head of its few tokens, and the headers, about 400 bytes per
    message, must stay below 3 % of that.
    """
    return replace(MHA, length=causal, causal=True, batch=batch), replace(MHA, length=full, batch=batch)


MHA = Workload(length=2048, q_heads=16, kv_heads=16, head_dim=32, causal=False)
HEADLINE = both_masks(causal=1280, full=1088, batch=4)
WIDE = both_masks(causal=1536, full=1664, batch=4)  # for more nodes and faster links, where passes would be too short
SHORT = both_masks(causal=1024, full=896, batch=4)  # for 16 ranks, which hold twice the tokens each
GROWING = tuple(replace(MHA, length=length, batch=2) for length in (768, 1536))
# For links where ring communicates as long as it computes: shorter ones would need links faster than the lab emulates.
EVEN = both_masks(causal=6144, full=4096)
# KV heads are few bytes per token here, so this has a batch as well.
GQA = replace(MHA, length=768, kv_heads=2, batch=4)
LONG = replace(MHA, length=16_384, q_heads=8, kv_heads=8, causal=True)
# A batch of 4, so that activations outweigh parameter gradients, as with long contexts.
GPT = Workload(length=1024, q_heads=8, kv_heads=8, head_dim=16, causal=True, batch=4, model="gpt", layers=2)
DIT = replace(GPT, causal=False, model="dit")

CLAIMED_CONTENDERS = ("ring, textbook", "USP", "star4", "nested", "nested, keep")  # with heads outermost
RING_AND_NESTED = ("ring, textbook", "nested, keep")
ULYSSES = ("yunchang USP across", "DeepSpeed Ulysses")  # peers that split heads over nodes; claimed as well
OTHER_CONTENDERS = ("ring, ours", "star2", "double ring", "torch ring, all-gather", "ring-flash-attn", "yunchang USP")
SLOW_CONTENDERS = ("torch ring, all-to-all", "star2 across nodes")  # on the smallest machine only


class TrialBuilder:
    """Makes trials from the contenders that can run on one machine."""

    def __init__(self, nodes: int, ranks: int) -> None:
        self.nodes, self.ranks = nodes, ranks
        self.everyone = (*PEERS, *plan_contenders(nodes, ranks))

    def named(self, *names: str) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.everyone if contender.name in names)

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
        """Plans with heads outermost, and ``plans``, against the named contenders; those in ``brief`` run once."""
        once = self.named(*brief)
        leading, rest = self.heads(work)[:LEADING], self.heads(work)[LEADING:] if all_heads else ()
        everyone = (*self.named(*names), *leading, *with_heads_role(plans), *rest, *once)
        return Trial(work, everyone, pressure, repeats, seconds, slow_node, at_least, brief=(*once, *rest))


def limited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    """Trials on limited links, the claims' trials first."""
    builder = TrialBuilder(nodes, ranks)
    if quick:
        trials = [builder.trial(work, (*CLAIMED_CONTENDERS, "star2"), BOUND_BY_LINKS, 18.0) for work in SHORT]
        return [*trials, builder.trial(EVEN[1], RING_AND_NESTED, 1.0, 10.0, repeats=2)]
    by_machine = {(4, 8): headline_trials, (8, 4): claims_trials, (16, 2): claims_trials, (4, 4): growth_trials}
    return by_machine.get((nodes, ranks), other_trials)(builder)


def headline_trials(builder: TrialBuilder) -> list[Trial]:
    """4 nodes of 8 ranks: the claims' trials, then the same table on faster links, then the other findings."""
    peers = (*CLAIMED_CONTENDERS, "star2", *ULYSSES)  # times vary little on slow links: one repeat is enough
    fewer = ("ring, textbook", "star4", "nested, keep", *ULYSSES)
    trials = [builder.trial(work, (), PRESSURES[0], 150.0, brief=peers) for work in HEADLINE]
    trials += [builder.trial(work, (), BOUND_BY_LINKS, 52.0, brief=fewer) for work in WIDE]
    trials += [builder.trial(work, ("ring, textbook", "nested"), 3.0, 25.0) for work in (GPT, DIT)]
    claimed = (*CLAIMED_CONTENDERS, *ULYSSES)
    trials += [builder.trial(work, claimed, 3.0, 18.0, at_least=1) for work in HEADLINE]
    ungrouped = ("u4/u2/2x2,keep=all", "u4/2x4,keep=all")  # here more messages cost more than overlap gains
    trials += [builder.trial(work, claimed, 1.0, 36.0, at_least=1, plans=ungrouped) for work in EVEN]
    slowed = ("ring, textbook", "star4", "nested, keep")
    trials += [builder.trial(WIDE[1], slowed, BOUND_BY_LINKS, 24.0, slow_node=True, at_least=1)]
    grouped = (*builder.named("ring, textbook"), *grouped_contenders(builder.nodes, builder.ranks))
    return [*trials, Trial(replace(GQA, causal=True), grouped, BOUND_BY_LINKS, 2, 10.0)]


def claims_trials(builder: TrialBuilder) -> list[Trial]:
    """The claims about more and smaller nodes."""
    return [
        builder.trial(work, ULYSSES, PRESSURES[0], 85.0, brief=RING_AND_NESTED, all_heads=True, repeats=2)
        for work in WIDE
    ]


def growth_trials(builder: TrialBuilder) -> list[Trial]:
    """4 nodes of 4, where 16 heads suffice for Ulysses: all contenders, and how costs grow with the sequence."""
    alike, others = ("Ulysses", *ULYSSES), (*CLAIMED_CONTENDERS, *OTHER_CONTENDERS, *SLOW_CONTENDERS)
    return [
        builder.trial(SHORT[0], alike, BOUND_BY_LINKS, 40.0, brief=others),
        *(builder.trial(work, RING_AND_NESTED, BOUND_BY_LINKS, 5.0) for work in GROWING),
        builder.trial(SHORT[1], (*RING_AND_NESTED, "USP", "nested", *alike), BOUND_BY_LINKS, 18.0),
    ]


def other_trials(builder: TrialBuilder) -> list[Trial]:
    return [
        builder.trial(SHORT[0], (*CLAIMED_CONTENDERS, *ULYSSES), BOUND_BY_LINKS, 20.0),
        builder.trial(SHORT[1], (*RING_AND_NESTED, *ULYSSES), BOUND_BY_LINKS, 14.0),
    ]


def unlimited_trials(nodes: int, ranks: int, quick: bool = False) -> list[Trial]:
    builder = TrialBuilder(nodes, ranks)
    if quick:
        return [builder.trial(SHORT[0], CLAIMED_CONTENDERS, None, 6.0)]
    if (nodes, ranks) != (4, 8):
        return []
    return [Trial(LONG, builder.heads(LONG)[:1], None, 1, 50.0), builder.trial(HEADLINE[0], RING_AND_NESTED, None, 6.0)]

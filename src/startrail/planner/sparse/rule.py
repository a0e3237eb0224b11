"""Decides between a zone's plan and ``direct`` by simulating both on a described cluster.

Fewer bytes are not always faster: where links are fast, many small messages and blocks can cost more than they save.

>>> from startrail.compile.attention import Attention
>>> from startrail.compile.problem import Split
>>> from startrail.schedule.plan import Plan
>>> rule, plan = SimulatedRule(find_cluster("h200@2x4")), Plan.parse("1x2/u4")
>>> problem = Attention.of(8 * 2048, 1, 32, 8, 128, causal=True, window=3353)
>>> for sparse in (rule, True):                                   # as simulated, and by bytes
...     split = Split(plan, 8, sparse=sparse)
...     (part,) = problem.parts(split, split.layout_of(problem.boundaries), 0)
...     print(part.chosen)
1x2/u4
direct
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from startrail.compile.attention import Attention
from startrail.compile.problem import Boundaries, Links, Problem, Rule, ScanRule, Split
from startrail.compile.scan import Scan
from startrail.geometry.layout import Zone
from startrail.geometry.mask import Mask
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import DTYPES, ClusterSpec, cluster_text, find_cluster
from startrail.planner.sparse.predict import SparseCall
from startrail.planner.states import predict_rows
from startrail.planner.topology import Machine
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import PASSES

MAX_RANKS = 64  # of a zone: more take seconds to simulate
HEAD_DIM, TILE = 128, 2048  # of the attention that links are compared with
MIN_TOKENS = 256  # per rank: with fewer, a call takes less time than its simulation could save


class SimulatedRule:
    """A rule for `compile.attention`. Like all rules it must give the same answer on all ranks: it depends on nothing
    but the cluster's description and its arguments.

    It simulates one document that fills the zone, with the tokens per rank rounded up to a power of two. So there are
    few kinds of calls however documents change, and each is simulated once.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._known: dict[object, bool] = {}

    def of_scans(self, split: Split, problem: Problem) -> bool | None:
        """True if ranks of a node should share units of states, for one document over all ranks; None if they are too
        many to simulate."""
        if not isinstance(problem, Scan) or split.world > MAX_RANKS:
            return None
        key = split.plan.sizes(split.world), split.layout, split.in_rank_order, problem.states, problem.itemsize
        if key not in self._known:
            whole = replace(problem, boundaries=Boundaries((0, 2 * split.world)))
            chain, shared = (
                predict_rows(self.cluster, split, replace(whole, inner=inner)).seconds for inner in (1, key[0][-1])
            )
            self._known[key] = shared < chain
        return self._known[key]

    def __str__(self) -> str:
        return f"as simulated on {self.cluster} ({crc32(cluster_text(self.cluster, '').encode()):08x})"

    def __call__(self, zone: Zone, mask: Mask, sizes: Sizes) -> bool | None:
        """True if ``direct`` is faster, None if it does not say: for masks without a window or chunks, few tokens, many
        ranks, and zones that the cluster's description does not fit."""
        window, rates = mask.window or mask.chunk, self.cluster.device.rates
        dtype = next((name for name, size in DTYPES.items() if size == sizes.itemsize and name in rates), None)
        if window is None or zone.size > MAX_RANKS or sizes.local < MIN_TOKENS or dtype is None:
            return None
        tokens = 1 << (sizes.local - 1).bit_length()
        starts = [runs[0][0] for runs in zone.runs if runs]
        key = replace(sizes, local=tokens), zone.size, window, mask.causal, starts == sorted(starts)
        if key not in self._known:
            ranks_per_node = self.cluster.levels[-1].size
            nodes = max(zone.size // ranks_per_node, 1)
            try:
                cluster = fit_cluster(self.cluster, Machine(nodes, zone.size // nodes))
            except ValueError:
                return None
            shape = zone.size * tokens, sizes.batch, sizes.q_heads, sizes.kv_heads, sizes.head_dim
            call = Attention.of(*shape, mask.causal, dtype, window)
            seconds = []
            for direct in (False, True):
                forced = SparseCall(cluster, sizes.plan, call, lambda *_, direct=direct: direct, key[-1])
                seconds.append(sum(forced.simulate(pass_).seconds for pass_ in PASSES))
            self._known[key] = seconds[1] < seconds[0]
        return self._known[key]


def rule_for(cluster: str, world: int) -> bool | Rule:
    """The rule for ranks of a described cluster (a name or a file), or True, with which bytes decide."""
    described = described_for(cluster, world)
    return True if described is None else SimulatedRule(described)


def described_for(cluster: str, world: int) -> ClusterSpec | None:
    """The part of a described cluster that ``world`` ranks fill; None if no cluster is described, or if they do not
    fill its nodes. All ranks must decide the same, so the number of ranks per node comes from the description only."""
    if not cluster or world == 1:
        return None
    described = find_cluster(cluster)
    nodes = max(world // described.levels[-1].size, 1)
    try:
        return None if world % nodes else fit_cluster(described, Machine(nodes, world // nodes))
    except ValueError:
        return None


def links_of(cluster: ClusterSpec | None) -> Links:
    """What documents are placed by: for each level, outermost first, the ranks of a member, and in query-key pairs that
    a rank computes meanwhile, how long a token's keys and values take to enter a member, in both passes and with their
    gradients back. Heads are assumed to be as many for keys as for queries. () if no cluster is described.

    >>> [links_of(find_cluster(name)) for name in ("h100-8x8", "boxes-10gbe", "nvl72@1x72")]
    [((8, 1260.0), (1, 4550.0)), ((2, 71600.0), (1, 7010.0)), ((72, 321.0), (1, 5200.0))]
    """
    if cluster is None:
        return ()
    dtype = next(name for name in ("bfloat16", "float16", "float32") if name in cluster.device.rates)
    rates = cluster.device.of(dtype)
    pair = 4 / rates.speed("forward", False, HEAD_DIM, TILE) + 10 / rates.speed("backward", False, HEAD_DIM, TILE)
    pair *= max(1.0, cluster.world / cluster.cores) if cluster.cores else 1.0
    token = 6 * DTYPES[dtype]  # bytes, keys and values twice and their gradients; per width of a head, as for pairs
    found = []
    for at, (level, ranks) in enumerate(zip(cluster.levels, cluster.spans, strict=True)):
        slowest = min((slow.bandwidth for slow in cluster.slow if slow.level == at), default=1.0)
        rate = (level.under_compute or level.bandwidth) * level.ways * (1 if level.shared else ranks) * slowest
        found.append((ranks, float(f"{token / rate / pair:.3g}")))
    return tuple(found)


def scan_rule(rule: bool | Rule) -> ScanRule | None:
    """That of the same cluster."""
    return rule.of_scans if isinstance(rule, SimulatedRule) else None

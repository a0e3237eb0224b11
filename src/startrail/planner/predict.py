"""Predicts the time of one attention call under a plan on a cluster, forward and backward, with the simulator.

>>> from startrail.schedule.plan import Plan
>>> from startrail.compile.attention import Attention
>>> from startrail.planner.cluster import find_cluster
>>> call = Attention.of(length=65536, batch=1, heads=32, kv_heads=32, head_dim=128, causal=True, dtype="bfloat16")
>>> cluster = find_cluster("a100-4x8")
>>> ring, heads = (predict(cluster, Plan.parse(text), call) for text in ("1x32", "u4/1x8"))
>>> ring.seconds > 2 * heads.seconds                          # one 100 Gbit/s link per node: the ring waits for it
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from startrail.compile.attention import Attention
from startrail.compile.problem import Boundaries
from startrail.planner.cluster import ClusterSpec
from startrail.planner.peers import STARTRAIL, Implementation
from startrail.planner.pricing import ComputeTask, Mark, PricedMessage, Prices, Task, call_tasks, plan_prices, tasks_of
from startrail.planner.simulator import OnTask, OnTransfer, Path, Route, SimulatedPass, Simulator
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program, build_program
from startrail.schedule.values import PASSES, Pass
from startrail.schedule.walk import EventHook, Message, Walker


@dataclass(frozen=True)
class Prediction:
    forward: SimulatedPass
    backward: SimulatedPass

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def waiting(self) -> float:
        return self.forward.waiting + self.backward.waiting

    @property
    def sent(self) -> tuple[float, ...]:
        """Bytes per rank (average), by level of the cluster."""
        return tuple(a + b for a, b in zip(self.forward.sent, self.backward.sent, strict=True))

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of the busiest link of each level."""
        return tuple(a + b for a, b in zip(self.forward.busy, self.backward.busy, strict=True))


def predict(
    cluster: ClusterSpec,
    plan: Plan,
    call: Attention,
    all_ranks: bool = False,
    order: Sequence[int] | None = None,
    engine: Implementation = STARTRAIL,
) -> Prediction:
    """Predict both passes. ``all_ranks`` simulates every rank; otherwise one stands for all. ``order``: the rank at
    each place of the plan, if not the identity; it implies ``all_ranks``. ``engine``: who runs it."""
    if not all_ranks and order is None and (fewer := shorter_rings(cluster, plan, call)):
        return _extrapolate(cluster, plan, call, engine, fewer)
    prices = plan_prices(cluster, plan, call, engine)
    if all_ranks or order is not None:
        return Prediction(*(_simulate_all_ranks(cluster, prices, pass_, order) for pass_ in PASSES))
    return Prediction(*(simulate_one_rank(cluster, prices, pass_) for pass_ in PASSES))


# --- very long rings

MAX_SHARDS = 256  # longer rings are extrapolated from shorter ones
LEAST_HOPS = 4  # of those
WINDOWED = 4  # times as many shards and hops under a window, where the first hops differ from the later ones


def _extrapolate(
    cluster: ClusterSpec, plan: Plan, call: Attention, engine: Implementation, fewer: tuple[int, int]
) -> Prediction:
    """The line through the predictions for two shorter rings on ``fewer`` nodes, with pieces of the same size: a ring
    of thousands of hops does the same at each of them."""
    (first, second), whole = fewer, cluster.levels[0].size
    # The window stays, so that it reaches as many blocks. One wider than half of the shortest sequence shrinks with it.
    window = call.mask.window
    is_wide = window is not None and 2 * window * whole > call.length * first

    def predict_on(nodes: int) -> list[SimulatedPass]:
        smaller = cluster.with_members(nodes)
        shorter = plan.family.shorter(plan, cluster.world // plan.heads, nodes, whole, LEAST_HOPS)
        assert shorter is not None
        length = call.tokens_per_rank(cluster.world) * smaller.world
        narrower = max(window * nodes // whole, 1) if window is not None and is_wide else window
        scaled = replace(call, boundaries=Boundaries((0, length)), mask=replace(call.mask, window=narrower))
        prices = plan_prices(smaller, shorter, scaled, engine)
        return [simulate_one_rank(smaller, prices, pass_) for pass_ in PASSES]

    def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
        return tuple(x + (y - x) * (whole - first) / (second - first) for x, y in zip(xs, ys, strict=True))

    passes = []
    for one, other in zip(predict_on(first), predict_on(second), strict=True):
        seconds, waiting = line(one[:2], other[:2])
        passes.append(SimulatedPass(seconds, waiting, line(one.sent, other.sent), line(one.busy, other.busy)))
    return Prediction(*passes)


def shorter_rings(cluster: ClusterSpec, plan: Plan, call: Attention) -> tuple[int, int] | None:
    """The numbers of nodes (outermost members) of two clusters with shorter rings, the second at least twice the first.
    None if the ring cannot be shortened, or if both together are not much shorter."""
    nodes, shards = cluster.levels[0].size, cluster.world // plan.heads
    times = 1 if call.mask.window is None else WINDOWED
    pair, possible = None, []
    for number in range(2, nodes // 2 if shards > times * MAX_SHARDS else 2):
        if pair is not None and shards * number > times * MAX_SHARDS * nodes:
            break
        if plan.family.shorter(plan, shards, number, nodes, times * LEAST_HOPS) is not None:
            possible.append(number)
            half = max((other for other in possible if 2 * other <= number), default=None)
            pair = (half, number) if half is not None else pair
    return pair if pair is not None and 2 * sum(pair) <= nodes else None


# --- all ranks

Hooks = Callable[[int], EventHook]  # the hook of each rank


def trace_prediction(cluster: ClusterSpec, plan: Plan, call: Attention, hooks: Hooks) -> Prediction:
    """Predict both passes with every rank simulated, and tell each rank's hook about its events, as the engine
    does. The backward pass begins when the forward pass has ended."""
    prices, start, passes = plan_prices(cluster, plan, call), 0.0, []
    for pass_ in PASSES:
        passes.append(_simulate_all_ranks(cluster, prices, pass_, None, hooks, start))
        start += passes[-1].seconds
    return Prediction(*passes)


def _simulate_all_ranks(
    cluster: ClusterSpec, prices: Prices, pass_: Pass, order: Sequence[int] | None, hooks: Hooks | None = None,
    start: float = 0.0,
) -> SimulatedPass:  # fmt: skip
    world = cluster.world
    programs = [build_program.__wrapped__(prices.sizes.plan, world, place, pass_) for place in range(world)]
    marks: list[list[Mark]] = [[] for _ in range(world)]
    tasks = [tasks_of(program, prices, marks[rank] if hooks else None) for rank, program in enumerate(programs)]
    ends: list[list[float]] = [[0.0] for _ in range(world)]
    on_task = (lambda rank, now: ends[rank].append(now)) if hooks else None
    simulated = simulate_tasks(cluster, tasks, order, on_task, prices.lanes_with_few_channels())
    if hooks is not None:
        for rank in range(world):
            _tell(hooks(rank), programs[rank], tasks[rank], marks[rank], [start + end for end in ends[rank]])
    return simulated


def simulate_tasks(
    cluster: ClusterSpec, tasks: Sequence[list[Task]], order: Sequence[int] | None = None,
    on_task: OnTask | None = None, few: dict[int, dict[int, float]] | None = None,
    on_transfer: OnTransfer | None = None,
) -> SimulatedPass:  # fmt: skip
    """Play the tasks of all ranks. ``few``: lanes with few channels, as `Prices.lanes_with_few_channels` has them."""
    world = cluster.world
    wires = _Wires(cluster, order or range(world), few or {})
    speeds = [wires.speed(place) for place in range(world)]
    simulator = Simulator(cluster, tasks, wires.capacity, wires.route, speeds, False, on_task, on_transfer)
    seconds = simulator.run()
    waiting = sum(rank.waiting for rank in simulator.ranks) / world
    sent = tuple(nbytes / world for nbytes in simulator.sent)
    return SimulatedPass(seconds, waiting, sent, wires.busiest(simulator.carried))


def _tell(hook: EventHook, program: Program, tasks: list[Task], marks: list[Mark], ends: list[float]) -> None:
    """Tell a hook about a rank's events. ``ends[n]`` is the time when the first n tasks had ended."""
    before = ends[0]
    for step, event, done, seconds in marks:
        now = ends[done]
        if seconds:  # part of a task, which shared cores may have slowed down
            task = tasks[done]
            assert isinstance(task, ComputeTask)
            now += (ends[done + 1] - now) * seconds / task.seconds
        hook(program, step, event, before, now)
        before = now


class _Wires:
    """Numbers all links of a cluster by level, member (or device) and direction."""

    def __init__(self, cluster: ClusterSpec, order: Sequence[int], few: dict[int, dict[int, float]]) -> None:
        self.cluster, self.order, self.few = cluster, order, few
        self.first: list[int] = []
        self.capacity: list[float] = []
        for at, level in enumerate(cluster.levels):
            self.first.append(len(self.capacity))
            if level.peer:  # one from every device to every other, numbered by both
                for rank in range(cluster.world):
                    others = (rank - rank % level.size + place for place in range(level.size))
                    shares = (min(_share(cluster, at, rank), _share(cluster, at, other)) for other in others)
                    self.capacity += [level.bandwidth * share for share in shares]
                continue
            span = cluster.spans[at] if level.shared else 1
            for link in range(cluster.world // span):
                share = _share(cluster, at, link * span)
                self.capacity += [level.bandwidth * share] * (2 if level.duplex else 1)
        self.paths: dict[tuple[int, int, int], tuple[tuple[tuple[int, float], ...], float, tuple[int, ...]]] = {}

    def route(self, place: int, message: PricedMessage) -> Path:
        ends, slower = (self.order[place], self.order[message.peer]), self.few.get(message.lane, {})
        if (key := (*ends, message.lane)) not in self.paths:
            levels = self.cluster.crossed(*ends)
            links = tuple((link, slower.get(at, 1.0)) for at in levels for link in self.links(at, *ends))
            latency = max((self.cluster.levels[level].latency for level in levels), default=0.0)
            self.paths[key] = links, latency, levels
        links, latency, levels = self.paths[key]
        nbytes = tuple(message.nbytes if at in levels else 0.0 for at in range(len(self.cluster.levels)))
        return Path(links, latency, nbytes)

    def links(self, at: int, rank: int, peer: int) -> tuple[int, ...]:
        """The link out of ``rank`` and the one into ``peer``. Peers have a link per direction, or one if not duplex."""
        level, span = self.cluster.levels[at], self.cluster.spans[at]
        if level.peer:
            one, other = (rank, peer) if level.duplex else (min(rank, peer), max(rank, peer))
            return (self.first[at] + one * level.size + other % level.size,)
        ways = 2 if level.duplex else 1
        out, into = (end // span if level.shared else end for end in (rank, peer))
        return self.first[at] + out * ways, self.first[at] + into * ways + ways - 1

    def speed(self, place: int) -> float:
        return self.cluster.speed(self.order[place])

    def busiest(self, carried: Sequence[float]) -> tuple[float, ...]:
        ends = [*self.first[1:], len(self.capacity)]
        return tuple(
            max(carried[link] / self.capacity[link] for link in range(start, stop))
            for start, stop in zip(self.first, ends, strict=True)
        )


def _share(cluster: ClusterSpec, level: int, rank: int) -> float:
    """The share of a link's bandwidth that slow members leave. ``rank`` is the first rank behind the link."""
    shares = [s.bandwidth for s in cluster.slow if s.level == level and rank // cluster.spans[level] == s.member]
    return min(shares, default=1.0)


# --- one rank for all

MAX_UNSAMPLED, INNER_SAMPLES = 16, 3  # ranks of a member; of more, so many between the first and the last are read


def simulate_one_rank(cluster: ClusterSpec, prices: Prices, pass_: Pass) -> SimulatedPass:
    return play_one_rank(cluster, prices, pass_)[1]


def play_one_rank(
    cluster: ClusterSpec, prices: Prices, pass_: Pass,
    on_task: OnTask | None = None, on_transfer: OnTransfer | None = None,
) -> tuple[int, SimulatedPass]:  # fmt: skip
    """The rank that stands for all, and its pass. Ranks run in step, so a slow member slows all ranks: links and
    devices are as fast as the slowest. There is one link per level, followed by one per peer if the last level connects
    peers."""
    prices.in_step = True
    chosen, tasks, paths = _representative(cluster, prices, pass_)
    levels = len(cluster.levels)
    capacity = [
        level.bandwidth * min((s.bandwidth for s in cluster.slow if s.level == at), default=1.0)
        for at, level in enumerate(cluster.levels)
    ]
    if cluster.levels[-1].peer:
        capacity += [capacity[-1]] * cluster.levels[-1].size
    speed = min((s.compute for s in cluster.slow), default=1.0)
    simulator = Simulator(cluster, [tasks], capacity, paths, [speed], True, on_task, on_transfer)
    seconds = simulator.run()
    carried = [nbytes / rate for nbytes, rate in zip(simulator.carried, capacity, strict=True)]
    busy = (*carried[: levels - 1], max(carried[levels - 1 :]))
    return chosen, SimulatedPass(seconds, simulator.ranks[0].waiting, tuple(simulator.sent), busy)


def _representative(cluster: ClusterSpec, prices: Prices, pass_: Pass) -> tuple[int, list[Task], Route]:
    """The rank that stands for all, its tasks, and the routes of its messages: how many messages share each link.
    That is known for lanes whose ranks are all behind the same link or all behind different ones. For other lanes
    (Ring Attention over nodes) it is counted in the programs of a member's ranks."""
    world, inner, last = cluster.world, cluster.levels[-1], len(cluster.levels) - 1
    known, few = _known_lanes(cluster, prices.sizes.plan), prices.lanes_with_few_channels()
    chosen, counted = prices.busiest(pass_), {}
    tasks = call_tasks(prices, world, chosen, pass_)
    if len(known) < len(prices.sizes.plan.levels):
        plan = prices.sizes.plan
        sampled = _sampled_ranks(cluster, plan)
        member = {rank: _sends(plan, world, rank, pass_) for rank in sampled}
        longest = max(map(len, member.values()))
        sends = _sends(plan, world, chosen, pass_)
        if len(sends) != longest:  # in the first and last member, starC places some ranks at their own place
            chosen = next(rank for rank, own in member.items() if len(own) == longest)
            tasks, sends = call_tasks(prices, world, chosen, pass_), member[chosen]
        alike = [(rank, own) for rank, own in member.items() if len(own) == longest]
        posts: dict[tuple[int, int], list[int]] = {}  # positions of the messages that a post sends over one lane
        for at, (post, message) in enumerate(sends):
            posts.setdefault((post, message.lane), []).append(at)
        for positions in posts.values():
            if sends[positions[0]][1].lane not in known:
                pairs = [[(rank, own[at][1].peer, sampled[rank]) for rank, own in alike] for at in positions]
                for at, path in zip(positions, _counted_paths(cluster, pairs), strict=True):
                    counted[sends[at][1].number] = path

    def route(_: int, message: PricedMessage) -> Path:
        links, latency, shares = known[message.lane] if message.lane in known else counted[message.number]
        links = tuple((link, load * few.get(message.lane, {}).get(link, 1.0)) for link, load in links) if few else links
        if inner.peer and links and links[-1][0] == last:
            links = (*links[:-1], (last + 1 + message.peer % inner.size, links[-1][1]))
        return Path(links, latency, tuple(share * message.nbytes for share in shares))

    return chosen, tasks, route


def _known_lanes(cluster: ClusterSpec, plan: Plan) -> dict[int, LaneRoute]:
    """Routes of the lanes whose ranks are all behind the same links, or all behind different ones."""
    sizes = plan.sizes(cluster.world)
    strides = [prod(sizes[lane + 1 :]) for lane in range(len(sizes))]
    return {
        lane: _full_path(cluster, stride)
        for lane, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if all(stride % span == 0 or span % (stride * size) == 0 for span in cluster.spans)
    }


LaneRoute = tuple[tuple[tuple[int, float], ...], float, tuple[float, ...]]  # links, latency, share of messages by level


def _full_path(cluster: ClusterSpec, stride: int) -> LaneRoute:
    levels = cluster.crossed(0, stride) if stride < cluster.world else ()
    alike = dict.fromkeys(levels, 1.0)
    return _lane_route(cluster, {at: float(cluster.spans[at]) for at in levels}, alike, alike)


def _sampled_ranks(cluster: ClusterSpec, plan: Plan) -> dict[int, float]:
    """Ranks of the middle member whose programs are read, each with the number of ranks that it stands for. Of a large
    member, where ranks or teams pass pieces on side by side, only a few of the inner ones are read: only the last send
    out of the member, and only the first receive from outside. A team is read in one seat, each time another one, and
    never the one that may keep its keys."""
    span = cluster.spans[0]
    first = cluster.levels[0].size // 2 * span
    width = plan.family.hop_width(plan)
    if width is None or span % width or span <= MAX_UNSAMPLED or len(cluster.levels) > 2:
        return dict.fromkeys(range(first, first + span), 1.0)
    units = span // width
    inner = min(INNER_SAMPLES, units - 2)
    weights = {0: 1.0, units - 1: 1.0}
    weights |= {1 + (units - 2) * (2 * at + 1) // (2 * inner): (units - 2) / inner for at in range(inner)}
    ranks = {}
    for at, (unit, weight) in enumerate(sorted(weights.items())):
        seat = (at + (at % width == (first // width + unit) % width)) % width
        ranks[first + unit * width + seat] = weight * width
    return ranks


def _sends(plan: Plan, world: int, rank: int, pass_: Pass) -> list[tuple[int, Message]]:
    """The messages that a rank sends, each with the number of its post."""
    program = build_program.__wrapped__(plan, world, rank, pass_)
    walker = Walker(program)
    posts = (walker.post(step.posts) for step in program.steps if step.posts)
    return [(at, message) for at, post in enumerate(posts) for message in post.messages if message.send]


def _counted_paths(cluster: ClusterSpec, posts: Sequence[Sequence[tuple[int, int, float]]]) -> list[LaneRoute]:
    """The routes of the messages that one post sends over a lane. For each of them, the ranks of a member that send it,
    as (rank, peer, number of such ranks). A device's own link carries those of its messages that cross the level: of a
    ring's hops all on the last device, of an exchange's the same share on every device."""
    own: dict[int, dict[int, float]] = {}  # by level and rank: messages of the post that cross
    for pairs in posts:
        for rank, peer, _ in pairs:
            for at in cluster.crossed(rank, peer):
                by_rank = own.setdefault(at, {})
                by_rank[rank] = by_rank.get(rank, 0.0) + 1.0
    busiest = {at: max(by_rank.values()) / len(posts) for at, by_rank in own.items()}
    paths = []
    for pairs in posts:
        crossing: dict[int, dict[int, float]] = {}
        for rank, peer, number in pairs:
            for at in cluster.crossed(rank, peer):
                members = crossing.setdefault(at, {})
                members[rank // cluster.spans[at]] = members.get(rank // cluster.spans[at], 0.0) + number
        total = sum(number for *_, number in pairs)
        shares = {at: sum(members.values()) / total for at, members in crossing.items()}
        most = {at: max(members.values()) for at, members in crossing.items()}
        paths.append(_lane_route(cluster, most, shares, busiest))
    return paths


def _lane_route(
    cluster: ClusterSpec, crossing: dict[int, float], shares: dict[int, float], own: dict[int, float]
) -> LaneRoute:
    """``crossing``: messages of a member that cross each level at the same time; ``shares``: as a share of all;
    ``own``: those of one device, per message that it sends."""
    links = tuple(
        (at, (number if cluster.levels[at].shared else own[at]) * (1 if cluster.levels[at].duplex else 2))
        for at, number in crossing.items()
    )
    latency = max((cluster.levels[at].latency for at in crossing), default=0.0)
    return links, latency, tuple(shares.get(at, 0.0) for at in range(len(cluster.levels)))

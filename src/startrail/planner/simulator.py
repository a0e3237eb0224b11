"""The clock: plays the tasks of all ranks against each other on a described cluster, and says how long they take.

A message starts when both ends have posted it, waits for the link's latency, and then shares every link that it crosses
evenly with the others there. Over NCCL, what a step posts on one lane is one batch, and a batch starts when the one
before has ended; over gloo every pair of ranks has connections of its own. Where all ranks share some cores (the lab),
blocks, copies and the handling of messages share those, too. So exposed communication comes out and is not assumed.

In worlds too large to play everybody, one rank stands for all (``representative``): in every family the ranks run the
same program seen from their own place, so that what it sends is received elsewhere at the time at which it receives the
like itself. The links are then shared with as many messages as its neighbours send over them at the same time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from startrail.planner.cluster import ClusterSpec
from startrail.planner.pricing import ComputeTask, PostTask, PricedMessage, Task, WaitTask

Route = Callable[[int, PricedMessage], "Path"]
TOGETHER = 1e-9  # seconds within which events count as one


class Path(NamedTuple):
    """The links that a message crosses, each with the number of its like that cross it at the same time."""

    links: tuple[tuple[int, float], ...]
    latency: float
    bytes_by_level: tuple[float, ...]


class Played(NamedTuple):
    """``waiting``: seconds that the average rank waited. ``sent``: bytes of the average rank by level of the cluster.
    ``busy``: seconds of the busiest link of each level."""

    seconds: float
    waiting: float
    sent: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(eq=False)
class _SimulatedTransfer:
    """A message under way; it ends when its bytes are across and, on shared cores, both sides have handled it."""

    ends: list[tuple[_SimulatedRank, int]]
    path: Path
    left: float
    parts: int = 1
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    queues: list[deque[_SimulatedTransfer]] = field(default_factory=list)
    batches: list[_SimulatedBatch] = field(default_factory=list)


@dataclass(eq=False)
class _SimulatedBatch:
    open: int
    queue: deque[_SimulatedBatch]
    ready: list[_SimulatedTransfer] = field(default_factory=list)


@dataclass(eq=False)
class _SimulatedRank:
    tasks: list[Task]
    number: int
    speed: float
    at: int = 0
    done: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    waiting: float = 0.0
    since: float = 0.0
    lanes: dict[int, deque[_SimulatedBatch]] = field(default_factory=dict)


class Clock:
    """``capacity``: bytes/s of every link; ``route`` says which a message crosses; ``speeds``: of every rank, as a
    share of its device's; ``alone``: one rank stands for all, and what it sends meets what it receives."""

    def __init__(
        self,
        cluster: ClusterSpec,
        tasks: Sequence[list[Task]],
        capacity: Sequence[float],
        route: Route,
        speeds: Sequence[float],
        alone: bool,
    ) -> None:
        self.cluster, self.capacity, self.route, self.alone = cluster, capacity, route, alone
        self.ranks = [
            _SimulatedRank(own, number, speed) for number, (own, speed) in enumerate(zip(tasks, speeds, strict=True))
        ]
        self.now, self.sequence = 0.0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.posted: dict[tuple[int, ...], tuple[deque[_End], deque[_End]]] = {}
        self.pairs: dict[tuple[int, ...], deque[_SimulatedTransfer]] = {}
        self.crossing: list[dict[_SimulatedTransfer, float]] = [{} for _ in capacity]
        self.carried = [0.0] * len(capacity)
        self.changed: set[int] = set()
        self.sent = [0.0] * len(cluster.levels)
        # one rank that stands for all has its share of the cores
        self.cores = _Cores(self, cluster.cores / cluster.world if alone else cluster.cores)

    def play(self) -> float:
        for rank in self.ranks:
            self.go_on(rank)
        self.share_links()
        events = self.events
        while events:
            self.now = events[0][0]
            until = self.now + TOGETHER
            while events and events[0][0] <= until:
                _, _, act, arguments = heapq.heappop(events)
                act(*arguments)
            if self.changed:
                self.share_links()
        for rank in self.ranks:
            if rank.at < len(rank.tasks):
                raise AssertionError(f"rank {rank.number} never got past task {rank.at}: {rank.tasks[rank.at]}")
        return self.now

    def later(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + seconds, self.sequence, act, arguments))

    # --- ranks

    def go_on(self, rank: _SimulatedRank) -> None:
        tasks = rank.tasks
        while rank.at < len(tasks):
            task = tasks[rank.at]
            if isinstance(task, ComputeTask):
                if self.cluster.cores:
                    self.cores.add(task.seconds / rank.speed, self.worked, rank)
                else:
                    self.later(task.seconds / rank.speed, self.worked, rank)
                return
            if isinstance(task, WaitTask):
                missing = {number for number in task.numbers if number not in rank.done}
                if missing:
                    rank.missing, rank.since = missing, self.now
                    return
            else:
                self.post(rank, task)
            rank.at += 1

    def worked(self, rank: _SimulatedRank) -> None:
        rank.at += 1
        self.go_on(rank)

    def arrived(self, rank: _SimulatedRank, number: int) -> None:
        rank.done.add(number)
        if number in rank.missing:
            rank.missing.remove(number)
            if not rank.missing:
                rank.waiting += self.now - rank.since
                rank.at += 1
                self.go_on(rank)

    # --- messages

    def post(self, rank: _SimulatedRank, task: PostTask) -> None:
        batches: dict[int, _SimulatedBatch] = {}
        for message in task.messages:
            batch = None
            if self.cluster.transport == "nccl":
                batch = batches.get(message.lane)
                if batch is None:
                    queue = rank.lanes.setdefault(message.lane, deque())
                    batch = batches[message.lane] = _SimulatedBatch(0, queue)
                    queue.append(batch)
                batch.open += 1
            if self.alone:
                key: tuple[int, ...] = (message.lane,)
            elif message.send:
                key = (message.lane, rank.number, message.peer)
            else:
                key = (message.lane, message.peer, rank.number)
            sends, receives = self.posted.setdefault(key, (deque(), deque()))
            mine, theirs = (sends, receives) if message.send else (receives, sends)
            end = _End(rank, message, batch)
            if theirs:
                other = theirs.popleft()
                self.meet(*((end, other) if message.send else (other, end)))
            else:
                mine.append(end)

    def meet(self, send: _End, receive: _End) -> None:
        """Both ends are posted: start, or queue up behind what must end before."""
        path = self.route(send.rank.number, send.message)
        for level, nbytes in enumerate(path.bytes_by_level):
            self.sent[level] += nbytes
        ends = [(send.rank, send.message.number), (receive.rank, receive.message.number)]
        transfer = _SimulatedTransfer(ends, path, send.message.nbytes)
        if send.batch is not None and receive.batch is not None:
            transfer.batches = [send.batch, receive.batch]
            if all(batch.queue[0] is batch for batch in transfer.batches):
                self.start(transfer)
            else:
                for batch in dict.fromkeys(transfer.batches):
                    batch.ready.append(transfer)
            return
        queue = self.pairs.setdefault((send.message.lane, send.rank.number, send.message.peer), deque())
        transfer.queues = [queue]
        queue.append(transfer)
        if len(queue) == 1:
            self.start(transfer)

    def start(self, transfer: _SimulatedTransfer) -> None:
        device = self.cluster.device
        handling = device.handle + (transfer.left / device.socket if device.socket else 0.0)
        latency = transfer.path.latency
        if self.cluster.cores and handling:
            transfer.parts += 1
            self.cores.add(2 * handling, self.part_ended, transfer)  # sent here and received there, or the other way
        else:
            latency += handling
        self.later(latency, self.flow, transfer)

    def flow(self, transfer: _SimulatedTransfer) -> None:
        if not transfer.path.links or not transfer.left:
            self.part_ended(transfer)
            return
        transfer.since = self.now
        for link, weight in transfer.path.links:
            self.crossing[link][transfer] = weight
            self.carried[link] += weight * transfer.left
            self.changed.add(link)

    def share_links(self) -> None:
        """Give all transfers that are touched by a change their rates."""
        links, self.changed = self.changed, set()
        touched: set[_SimulatedTransfer] = set()
        todo = list(links)
        while todo:  # whoever shares a link with somebody whose rate may change
            for transfer in self.crossing[todo.pop()]:
                if transfer not in touched:
                    touched.add(transfer)
                    for link, _ in transfer.path.links:
                        if link not in links:
                            links.add(link)
                            todo.append(link)
        for transfer, rate in self.fair_rates(links).items():
            if rate != transfer.rate:
                transfer.left -= transfer.rate * (self.now - transfer.since)
                transfer.rate, transfer.since = rate, self.now
                transfer.version += 1
                self.later(max(transfer.left, 0.0) / rate, self.across, transfer, transfer.version)

    def fair_rates(self, links: set[int]) -> dict[_SimulatedTransfer, float]:
        """Max-min fair: the fullest link shares itself out evenly, then the fullest of those with room left, and so on;
        what one cannot use for another link's sake is left to the others."""
        rates: dict[_SimulatedTransfer, float] = {}
        room = {link: self.capacity[link] for link in links if self.crossing[link]}
        weight = {link: sum(self.crossing[link].values()) for link in room}
        while room:
            fullest = min(room, key=lambda link: room[link] / weight[link])
            rate = room[fullest] / weight[fullest]
            for transfer in self.crossing[fullest]:
                if transfer in rates:
                    continue
                rates[transfer] = rate
                for link, load in transfer.path.links:
                    if link != fullest:
                        room[link] = max(room[link] - load * rate, 0.0)
                        weight[link] -= load
                        if weight[link] < 1e-9:
                            del room[link]
            del room[fullest]
        return rates

    def across(self, transfer: _SimulatedTransfer, version: int) -> None:
        if version != transfer.version:
            return
        for link, _ in transfer.path.links:
            del self.crossing[link][transfer]
            self.changed.add(link)
        self.part_ended(transfer)

    def part_ended(self, transfer: _SimulatedTransfer) -> None:
        transfer.parts -= 1
        if transfer.parts:
            return
        for queue in transfer.queues:
            queue.popleft()
            if queue:
                self.start(queue[0])
        for batch in transfer.batches:
            self.batch_shrinks(batch)
        for rank, number in transfer.ends:
            self.arrived(rank, number)

    def batch_shrinks(self, batch: _SimulatedBatch) -> None:
        batch.open -= 1
        if batch.open:
            return
        batch.queue.popleft()
        if batch.queue:
            for transfer in batch.queue[0].ready:
                if all(other.queue and other.queue[0] is other for other in transfer.batches):
                    self.start(transfer)


class _End(NamedTuple):
    rank: _SimulatedRank
    message: PricedMessage
    batch: _SimulatedBatch | None


class _Cores:
    """Cores that everybody shares: each of n pieces of work gets min(1, cores / n) of one."""

    def __init__(self, clock: Clock, number: float) -> None:
        self.clock, self.number = clock, number
        self.virtual, self.since, self.version, self.sequence = 0.0, 0.0, 0, 0
        self.work: list[tuple[float, int, Callable[..., None], object]] = []

    def rate(self) -> float:
        return min(1.0, self.number / len(self.work)) if self.work else 1.0

    def add(self, seconds: float, act: Callable[..., None], argument: object) -> None:
        self.catch_up()
        self.sequence += 1
        heapq.heappush(self.work, (self.virtual + seconds, self.sequence, act, argument))
        self.schedule()

    def catch_up(self) -> None:
        now = self.clock.now
        self.virtual += (now - self.since) * self.rate()
        self.since = now

    def schedule(self) -> None:
        self.version += 1
        if self.work:
            self.clock.later(max(self.work[0][0] - self.virtual, 0.0) / self.rate(), self.ended, self.version)

    def ended(self, version: int) -> None:
        if version != self.version:
            return
        self.catch_up()
        over = []
        while self.work and self.work[0][0] <= self.virtual + TOGETHER:
            over.append(heapq.heappop(self.work))
        self.schedule()
        for _, _, act, argument in over:
            act(argument)

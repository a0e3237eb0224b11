"""An event-driven simulation of the tasks of all ranks on a described cluster.

A message starts when both ends have posted it, waits for the link's latency, and then shares each link on its path
evenly with the other messages there. Over NCCL, the messages that a step posts on one lane form a batch, and a batch
starts when the previous one has ended; over gloo every pair of ranks has its own connections. Where all ranks share
some cores (the lab), blocks, copies and message handling share those too. Exposed communication is thus a result, not
an assumption.

In worlds too large to simulate every rank, one rank stands for all: in every family the ranks run the same program,
each from its own place, so another rank receives a message when this rank receives its counterpart. Each link is then
shared with the messages that its neighbours send over it at the same time.
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
OnTask = Callable[[int, float], None]  # the rank, and the time when its next task has ended
OnTransfer = Callable[[int, int, float, float], None]  # the receiver, its message's number, start and end
SIMULTANEOUS_SECONDS = 1e-9  # events this close count as simultaneous


class Path(NamedTuple):
    """The links that a message crosses, each with the number of such messages that cross it at the same time."""

    links: tuple[tuple[int, float], ...]
    latency: float
    bytes_by_level: tuple[float, ...]


class SimulatedPass(NamedTuple):
    """``waiting``: seconds that the average rank waited. ``sent``: bytes per rank (average), by level of the cluster.
    ``busy``: seconds of the busiest link of each level."""

    seconds: float
    waiting: float
    sent: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(eq=False)
class _SimulatedTransfer:
    """A message in flight. It ends when its bytes have arrived and, on shared cores, both sides have handled it."""

    ends: list[tuple[_SimulatedRank, int]]
    batches: list[_SimulatedBatch]
    path: Path
    left: float
    begun: float = 0.0
    parts: int = 1
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(eq=False)
class _SimulatedBatch:
    """Messages that run together once the batches before theirs in the queue have ended."""

    open: int
    queue: deque[_SimulatedBatch]
    ready: list[_SimulatedTransfer] = field(default_factory=list)


@dataclass(eq=False)
class _SimulatedRank:
    tasks: list[Task]
    number: int
    speed: float
    at: int = -1
    done: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    waiting: float = 0.0
    since: float = 0.0
    lanes: dict[int, deque[_SimulatedBatch]] = field(default_factory=dict)


class Simulator:
    """``capacity``: bytes/s of every link; ``route`` returns the links of a message; ``speeds``: of every rank,
    relative to its device; ``alone``: one rank stands for all, so its sends are matched with its own receives;
    ``on_task`` is called when a task ends, in the order of the rank's tasks, ``on_transfer`` when a message arrives."""

    def __init__(
        self,
        cluster: ClusterSpec,
        tasks: Sequence[list[Task]],
        capacity: Sequence[float],
        route: Route,
        speeds: Sequence[float],
        alone: bool,
        on_task: OnTask | None = None,
        on_transfer: OnTransfer | None = None,
    ) -> None:
        self.cluster, self.capacity, self.route, self.alone = cluster, capacity, route, alone
        self.on_task, self.on_transfer = on_task, on_transfer
        self.ranks = [
            _SimulatedRank(own, number, speed) for number, (own, speed) in enumerate(zip(tasks, speeds, strict=True))
        ]
        self.now, self.end, self.sequence = 0.0, 0.0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.posted: dict[tuple[int, ...], tuple[deque[_End], deque[_End]]] = {}
        self.pairs: dict[tuple[int, ...], deque[_SimulatedBatch]] = {}
        self.crossing: list[dict[_SimulatedTransfer, float]] = [{} for _ in capacity]
        self.carried = [0.0] * len(capacity)
        self.changed: set[int] = set()
        self.sent = [0.0] * len(cluster.levels)
        # a rank that stands for all has only its share of the cores
        self.cores = _Cores(self, cluster.cores / cluster.world if alone else cluster.cores)

    def run(self) -> float:
        for rank in self.ranks:
            self.advance(rank)
        self.share_links()
        events = self.events
        while events:
            self.now = events[0][0]
            until = self.now + SIMULTANEOUS_SECONDS
            while events and events[0][0] <= until:
                _, _, act, arguments = heapq.heappop(events)
                act(*arguments)
            if self.changed:
                self.share_links()
        for rank in self.ranks:
            if rank.at < len(rank.tasks):
                raise AssertionError(f"rank {rank.number} never got past task {rank.at}: {rank.tasks[rank.at]}")
        return self.end  # not the last event, which may be the old end of a transfer that became faster

    def schedule(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + seconds, self.sequence, act, arguments))

    # --- ranks

    def advance(self, rank: _SimulatedRank) -> None:
        """Run the rank's next tasks, up to one that takes time."""
        self.end_task(rank)
        while rank.at < len(rank.tasks):
            task = rank.tasks[rank.at]
            if isinstance(task, ComputeTask):
                run = self.cores.add if self.cluster.cores else self.schedule
                run(task.seconds / rank.speed, self.advance, rank)
                return
            if isinstance(task, WaitTask):
                missing = {number for number in task.numbers if number not in rank.done}
                if missing:
                    rank.missing, rank.since = missing, self.now
                    return
            else:
                self.post(rank, task)
            self.end_task(rank)
        self.end = self.now

    def end_task(self, rank: _SimulatedRank) -> None:
        if self.on_task is not None and rank.at >= 0:
            self.on_task(rank.number, self.now)
        rank.at += 1

    def arrive(self, rank: _SimulatedRank, number: int) -> None:
        rank.done.add(number)
        if number in rank.missing:
            rank.missing.remove(number)
            if not rank.missing:
                rank.waiting += self.now - rank.since
                self.advance(rank)

    # --- messages

    def post(self, rank: _SimulatedRank, task: PostTask) -> None:
        batches: dict[int, _SimulatedBatch] = {}
        for message in task.messages:
            batch = None
            if self.cluster.in_order:
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
            (sends if message.send else receives).append(_End(rank, message, batch))
            if sends and receives:
                self.match(sends.popleft(), receives.popleft())

    def match(self, send: _End, receive: _End) -> None:
        """Both ends are posted: start the transfer, or queue it after those that must end first."""
        path = self.route(send.rank.number, send.message)
        for level, nbytes in enumerate(path.bytes_by_level):
            self.sent[level] += nbytes
        ends = [(send.rank, send.message.number), (receive.rank, receive.message.number)]
        batches = [end.batch for end in (send, receive) if end.batch is not None]
        if not batches:  # over gloo each message is a batch, queued by pair of ranks
            queue = self.pairs.setdefault((send.message.lane, send.rank.number, send.message.peer), deque())
            batches = [_SimulatedBatch(1, queue)]
            queue.append(batches[0])
        transfer = _SimulatedTransfer(ends, batches, path, send.message.nbytes)
        if all(batch.queue[0] is batch for batch in batches):
            self.start(transfer)
        else:
            for batch in batches if batches[0] is not batches[-1] else batches[:1]:
                batch.ready.append(transfer)

    def start(self, transfer: _SimulatedTransfer) -> None:
        transfer.begun = self.now
        handling, latency = self.cluster.device.handle, transfer.path.latency
        for level, nbytes in zip(self.cluster.levels, transfer.path.bytes_by_level, strict=True):
            if level.socket:
                handling += nbytes / level.socket
        if self.cluster.cores and handling:
            transfer.parts += 1
            self.cores.add(2 * handling, self.end_part, transfer)  # on the sending and on the receiving side
        else:
            latency += handling
        self.schedule(latency, self.flow, transfer)

    def flow(self, transfer: _SimulatedTransfer) -> None:
        if not transfer.path.links or not transfer.left:
            self.end_part(transfer)
            return
        transfer.since = self.now
        for link, weight in transfer.path.links:
            self.crossing[link][transfer] = weight
            self.carried[link] += weight * transfer.left
            self.changed.add(link)

    def share_links(self) -> None:
        """Update the rates of all transfers that a change affects."""
        links, self.changed = self.changed, set()
        touched: set[_SimulatedTransfer] = set()
        todo = list(links)
        while todo:  # transfers that share a link with one whose rate may change
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
                self.schedule(max(transfer.left, 0.0) / rate, self.end_flow, transfer, transfer.version)

    def fair_rates(self, links: set[int]) -> dict[_SimulatedTransfer, float]:
        """Max-min fair: the fullest link is shared evenly, then the fullest of the remaining links, and so on.
        Bandwidth that a transfer cannot use because of another link goes to the other transfers."""
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

    def end_flow(self, transfer: _SimulatedTransfer, version: int) -> None:
        if version != transfer.version:
            return
        for link, _ in transfer.path.links:
            del self.crossing[link][transfer]
            self.changed.add(link)
        self.end_part(transfer)

    def end_part(self, transfer: _SimulatedTransfer) -> None:
        transfer.parts -= 1
        if transfer.parts:
            return
        if self.on_transfer is not None:
            receiver, number = transfer.ends[1]
            self.on_transfer(receiver.number, number, transfer.begun, self.now)
        for batch in transfer.batches:
            self.shrink_batch(batch)
        for rank, number in transfer.ends:
            self.arrive(rank, number)

    def shrink_batch(self, batch: _SimulatedBatch) -> None:
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
    """Cores shared by all ranks: each of n pieces of work gets min(1, cores / n) of a core."""

    def __init__(self, simulator: Simulator, number: float) -> None:
        self.simulator, self.number = simulator, number
        self.virtual, self.since, self.version, self.sequence = 0.0, 0.0, 0, 0
        self.work: list[tuple[float, int, Callable[..., None], object]] = []

    def rate(self) -> float:
        return min(1.0, self.number / len(self.work)) if self.work else 1.0

    def add(self, seconds: float, act: Callable[..., None], argument: object) -> None:
        self.update()
        self.sequence += 1
        heapq.heappush(self.work, (self.virtual + seconds, self.sequence, act, argument))
        self.schedule_next()

    def update(self) -> None:
        now = self.simulator.now
        self.virtual += (now - self.since) * self.rate()
        self.since = now

    def schedule_next(self) -> None:
        self.version += 1
        if self.work:
            self.simulator.schedule(max(self.work[0][0] - self.virtual, 0.0) / self.rate(), self.end_work, self.version)

    def end_work(self, version: int) -> None:
        if version != self.version:
            return
        self.update()
        ended = []
        while self.work and self.work[0][0] <= self.virtual + SIMULTANEOUS_SECONDS:
            ended.append(heapq.heappop(self.work))
        self.schedule_next()
        for _, _, act, argument in ended:
            act(argument)

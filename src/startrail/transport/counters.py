"""Counters of one rank: bytes and messages per lane, and time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from startrail.schedule.walk import EventHook

MAX_UNREAD = 512  # pairs of events that a stopwatch keeps


@dataclass
class Traffic:
    """Bytes and messages that this rank has sent over one lane."""

    bytes: int = 0
    hops: int = 0


class Stopwatch:
    """Adds up seconds: on the host's clock, or for a GPU with events on its stream, since the host runs ahead of it.
    Events are read on demand, so measuring never synchronizes, and used again, since the host pays for new ones."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._unread: list[tuple[torch.device, torch.Event, torch.Event]] = []
        self._spare: dict[torch.device, list[torch.Event]] = {}

    def start(self, device: torch.device) -> float | torch.Event:
        return time.perf_counter() if device.type != "cuda" else self._event(device)

    def stop(self, start: float | torch.Event, device: torch.device) -> None:
        if isinstance(start, float):
            self._seconds += time.perf_counter() - start
            return
        self._unread.append((device, start, self._event(device)))
        if len(self._unread) > MAX_UNREAD and self._unread[MAX_UNREAD // 2][2].query():
            self._read(MAX_UNREAD // 2)

    def seconds(self) -> float:
        if self._unread:
            self._unread[-1][2].synchronize()
            self._read(len(self._unread))
        return self._seconds

    def _read(self, count: int) -> None:
        for device, start, stop in self._unread[:count]:
            self._seconds += start.elapsed_time(stop) / 1000
            self._spare.setdefault(device, []).extend((start, stop))
        del self._unread[:count]

    def _event(self, device: torch.device) -> torch.Event:
        if not (spare := self._spare.get(device)):
            return _event(device)
        event = spare.pop()
        event.record()
        return event


def _event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


@dataclass
class Counters:
    """Traffic per lane, the total time in attention, and the part of it spent waiting for transfers. ``on_event`` is
    called with every event that the runner has handled, and its times on the host's clock (`startrail.view.trace`)."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    waiting: Stopwatch = field(default_factory=Stopwatch)
    total: Stopwatch = field(default_factory=Stopwatch)
    on_event: EventHook | None = None

    def count_sends(self, lane: str, nbytes: int, messages: int) -> None:
        traffic = self.traffic.get(lane)
        if traffic is None:
            traffic = self.traffic[lane] = Traffic()
        traffic.bytes += nbytes
        traffic.hops += messages

    def reset(self) -> None:
        self.traffic, self.waiting, self.total = {}, Stopwatch(), Stopwatch()

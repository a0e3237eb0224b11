"""Traces of attention for Perfetto and chrome://tracing: one file with all ranks, and arrows for transfers.

The engine and the simulator walk the same programs and tell a ``EventRecorder`` about the same events, so a measured
trace and a predicted one have the same labels in the same order on every rank; ``compare`` shows where their times
differ. Times are seconds in records, and microseconds in the file, as its format demands.

>>> from startrail.planner.cluster import find_cluster
>>> from startrail.schedule.plan import Plan
>>> from startrail.compile.attention import Attention
>>> from startrail.planner.predict import trace_prediction
>>> recorders = [EventRecorder(rank) for rank in range(2)]
>>> call = Attention.of(4096, 1, 8, 8, 64, causal=True)
>>> _ = trace_prediction(find_cluster("a100-4x8").resized([1, 2]), Plan.parse("1x2"), call, recorders.__getitem__)
>>> [record.label for record in recorders[0].records if record.call == 0]
['forward 0: post kv1<1@0 kv0>1@0', 'forward 0: 0x0', 'forward 1: wait kv1', 'forward 1: 0x1', 'forward 2: finish']
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from startrail.planner.units import seconds_text
from startrail.schedule.program import Program
from startrail.schedule.walk import Await, Combine, Compute, Event, Finish, Message, Post, Prepare

MICRO, NANO = 1e6, 1e9
LARGEST_SHOWN = 8  # differences that `compare` lists


class Record(NamedTuple):
    """One event of one rank. ``call`` counts the passes of the rank. ``posts`` and ``arrivals`` name messages; both
    ends of a message have the same name."""

    call: int
    pass_: str
    step: int
    kind: str
    label: str
    start: float
    end: float
    lanes: tuple[int, ...] = ()
    posts: tuple[str, ...] = ()
    arrivals: tuple[str, ...] = ()


class EventRecorder:
    """Collects the events of one rank; an ``EventHook``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.records: list[Record] = []
        self._call = -1
        self._parts: list[Program] = []  # of the pass that runs
        self._finished = 0
        self._messages: dict[tuple[int, int], Message] = {}
        self._arrived: set[tuple[int, int]] = set()  # one message may bring several pieces

    def __call__(self, program: Program, step: int, event: Event | Finish, start: float, end: float) -> None:
        part = self._part(program)
        if isinstance(event, Prepare):
            return  # a view or a cast, which is part of the block's time
        lanes: tuple[int, ...] = ()
        posts: list[str] = []
        arrivals: list[str] = []
        numbers: Sequence[int] = ()
        if isinstance(event, Post):
            kind, text = (
                "post",
                " ".join(f"{_text(m)}{'>' if m.send else '<'}{m.peer}@{m.lane}" for m in event.messages),
            )
            for message in event.messages:
                self._messages[part, message.number] = message
                if message.send:
                    posts.append(self._name(part, message))
            lanes = tuple(sorted({message.lane for message in event.messages}))
        elif isinstance(event, Await):
            kind, text, numbers = "wait", str(event.piece), event.messages
        elif isinstance(event, Combine):
            kind, text, numbers = "merge", str(event.piece), [event.message]
        elif isinstance(event, Compute):
            kind, text = "compute", str(event.block)
        else:
            kind, text, numbers = "finish", "", event.messages
        received = [self._messages[part, number] for number in dict.fromkeys(numbers)]
        new = [message for message in received if (part, message.number) not in self._arrived]
        self._arrived.update((part, message.number) for message in new)
        arrivals = [self._name(part, message) for message in new]
        lanes = lanes or tuple(sorted({message.lane for message in received}))
        body = " ".join(filter(None, ("" if kind == "compute" else kind, text)))
        label = f"{program.pass_} {step}: {body}"
        names = tuple(posts), tuple(arrivals)
        self.records.append(Record(self._call, str(program.pass_), step, kind, label, start, end, lanes, *names))
        if kind == "finish":
            self._end_part()

    def _part(self, program: Program) -> int:
        """The number of the program in its pass. A pass begins after all programs of the last one have finished."""
        if not self._parts:
            self._call += 1
            self._messages.clear()
            self._arrived.clear()
        if program not in self._parts:
            self._parts.append(program)
        return self._parts.index(program)

    def _end_part(self) -> None:
        self._finished += 1
        if self._finished == len(self._parts):
            self._parts, self._finished = [], 0

    def _name(self, part: int, message: Message) -> str:
        ends = (self.rank, message.peer) if message.send else (message.peer, self.rank)
        return f"{self._call}.{part}.{message.lane}.{ends[0]}>{ends[1]}.{message.tag}"


def _text(message: Message) -> str:
    return "+".join(map(str, message.pieces))


def chrome_trace(records: Sequence[Sequence[Record]], title: str) -> dict[str, Any]:
    """All ranks' records as one trace. Each rank is a process with a track of events; transfers are arrows from the
    post of the sender to the event of the receiver that needed the message, and spans on a track per level."""
    first = min((record.start for own in records for record in own), default=0.0)
    every = (name for own in records for record in own for name in (*record.posts, *record.arrivals))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(every), start=1)}  # ids must be numbers
    events: list[dict[str, Any]] = []
    posted: dict[str, int] = {}
    arrived: list[tuple[int, str, int]] = []
    for rank, own in enumerate(records):
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "events"}})
        end = 0
        for record in own:  # in nanoseconds, at least one each: an arrow needs a slice to end at
            start = max(round((record.start - first) * NANO), end)
            end = max(round((record.end - first) * NANO), start + 1)
            args = {"call": record.call, "step": record.step, "kind": record.kind, "lanes": record.lanes}
            span = {"ts": start / 1000, "dur": (end - start) / 1000, "args": args}
            events.append({"ph": "X", "pid": rank, "tid": 0, "cat": record.pass_, "name": record.label, **span})
            common = {"pid": rank, "tid": 0, "cat": "transfer", "name": "transfer"}
            for name in record.posts:
                posted[name] = start
                events.append({"ph": "s", "id": numbers[name], **common, "ts": start / 1000})
            for name in record.arrivals:
                arrived.append((rank, name, end - 1))
                events.append({"ph": "f", "bp": "e", "id": numbers[name], **common, "ts": (end - 1) / 1000})
    for rank, name, end in arrived:
        if name in posted and posted[name] <= end:
            _, _, lane, ends, _ = name.split(".")
            span = {"pid": rank, "cat": f"level {lane}", "id": numbers[name], "name": f"level {lane}: {ends}"}
            events += [{"ph": "b", **span, "ts": posted[name] / 1000}, {"ph": "e", **span, "ts": end / 1000}]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "ranks": len(records)}}


class TraceFile(NamedTuple):
    """What ``compare`` needs of a file: the title, and each rank's slices in order."""

    title: str
    slices: dict[int, list[dict[str, Any]]]


def read_trace(path: Path) -> TraceFile:
    try:
        data = json.loads(path.read_text("utf-8"))
        title, ranks = data["otherData"]["title"], int(data["otherData"]["ranks"])
        slices: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(ranks)}
        for event in data["traceEvents"]:
            if event["ph"] == "X":
                slices[event["pid"]].append(event)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a trace that startrail wrote") from None
    return TraceFile(title, {rank: sorted(own, key=lambda e: e["args"]["call"]) for rank, own in slices.items()})


def first_calls(slices: Iterable[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """By pass: the slices of each call."""
    calls: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for each in slices:
        calls[each["cat"], each["args"]["call"]].append(each)
    by_pass: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for (pass_, _), own in calls.items():
        by_pass[pass_].append(own)
    return by_pass


def compare(predicted: TraceFile, measured: TraceFile) -> str:
    """Where two traces of one program differ: per pass, per level and per step. Times of a trace with several calls
    of a pass are means over the calls, and all times are means over the ranks."""
    if predicted.slices.keys() != measured.slices.keys():
        raise ValueError(f"one trace has {len(predicted.slices)} ranks, the other {len(measured.slices)}")
    lines = [f"predicted: {predicted.title}", f"measured:  {measured.title}"]
    sides = [{rank: first_calls(own) for rank, own in trace.slices.items()} for trace in (predicted, measured)]
    common = [pass_ for pass_ in ("forward", "backward") if all(pass_ in side[0] for side in sides)]
    if not common:
        raise ValueError("the traces have no pass in common")
    for pass_ in common:
        for rank in predicted.slices:
            _check_labels(rank, pass_, *(side[rank][pass_] for side in sides))
        lines += ["", *_compare_pass(pass_, *([side[rank][pass_] for rank in predicted.slices] for side in sides))]
    return "\n".join(lines)


def _check_labels(rank: int, pass_: str, predicted: list[list[Any]], measured: list[list[Any]]) -> None:
    expected = [each["name"] for each in predicted[0]]
    for call in measured:
        found = [each["name"] for each in call]
        if found != expected:
            at = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
            texts = [names[at] if at < len(names) else "nothing" for names in (expected, found)]
            raise ValueError(
                f"the traces are of different programs: rank {rank}, {pass_}, event {at}: "
                f"predicted {texts[0]!r}, measured {texts[1]!r}"
            )


def _compare_pass(pass_: str, predicted: list[list[list[Any]]], measured: list[list[list[Any]]]) -> list[str]:
    def average(side: list[list[list[Any]]], wanted: Callable[[Any], bool]) -> float:
        return mean(mean(sum(e["dur"] for e in call if wanted(e)) for call in calls) for calls in side) / MICRO

    def total(side: list[list[list[Any]]]) -> float:
        return mean(mean(call[-1]["ts"] + call[-1]["dur"] - call[0]["ts"] for call in calls) for calls in side) / MICRO

    def row(name: str, one: float, other: float) -> str:
        ratio = f"{other / one:6.2f}x" if one > 0 else "      -"
        return f"  {name:34s} {seconds_text(one):>11s} {seconds_text(other):>11s} {ratio} {_signed(other - one):>12s}"

    def both(name: str, wanted: Callable[[Any], bool]) -> str:
        return row(name, average(predicted, wanted), average(measured, wanted))

    lanes = sorted({lane for calls in predicted for e in calls[0] for lane in e["args"]["lanes"]})
    lines = [f"{pass_:36s} {'predicted':>11s} {'measured':>11s} {'ratio':>7s} {'difference':>12s}"]
    lines.append(row("whole pass", total(predicted), total(measured)))
    for kind, name in (("compute", "computing blocks"), ("post", "packing and posting"), ("finish", "finishing")):
        lines.append(both(name, lambda e, kind=kind: e["args"]["kind"] == kind))  # type: ignore[misc]
    for lane in lanes:
        lines.append(
            both(
                f"level {lane}: waiting and merging",
                lambda e, lane=lane: e["args"]["kind"] in ("wait", "merge") and lane in e["args"]["lanes"],  # type: ignore[misc]
            )
        )
    steps = sorted({e["args"]["step"] for calls in predicted for e in calls[0]})
    parts = []
    for step in steps:
        one, other = (average(side, lambda e, step=step: e["args"]["step"] == step) for side in (predicted, measured))  # type: ignore[misc]
        parts.append((abs(other - one), step, one, other))
    parts.sort(reverse=True)
    lines.append(f"  steps that differ most ({min(len(parts), LARGEST_SHOWN)} of {len(parts)})")
    lines += [row(f"  step {step}", one, other) for _, step, one, other in parts[:LARGEST_SHOWN]]
    return lines


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + seconds_text(abs(seconds))

"""``Transport``: what the engine asks of the messages between ranks. No caller knows which backend carries them.

One pass of an attention call uses it like this:

    transport = open_transport(consensus, counters, place, name, timeout, device, programs)    # kept for later calls
    transport.begin_pass(program, Compare.DURING, direct_levels)    # also compares the call with all ranks
    pending = transport.post(step, part, postings)                  # starts all messages of a step, and waits for none
    pending[0].wait()                                               # when a block needs the bytes
    transport.end_pass(program, results)                            # the results are NaN if transfers were aborted

Each of these raises ``ValueError`` if ranks made different calls, or a ``PeerError`` that names rank, step and peer.
After any error: ``transport.abandon(error)``, and drop the transport. The next call opens another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.agreement.errors import PeerError
from startrail.schedule.program import Program
from startrail.schedule.walk import Message, WalkStep


class Together(NamedTuple):
    """Messages that complete together: ``groups`` of their indices. ``of_buffer`` says of each buffer whether it is
    sent, and which groups must complete before it may be read, or reused if it is sent."""

    groups: tuple[tuple[int, ...], ...]
    of_buffer: tuple[tuple[bool, tuple[int, ...]], ...]

    @classmethod
    def of(cls, messages: Sequence[Message], keys: Sequence[object], buffers: Sequence[int]) -> Together:
        """Messages with equal ``keys`` complete together. ``buffers`` are numbers, counted from 0."""
        groups: dict[object, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(key, []).append(index)
        numbers = {key: number for number, key in enumerate(groups)}
        sends = [False] * len(set(buffers))
        waits: list[dict[int, None]] = [{} for _ in sends]
        for message, key, buffer in zip(messages, keys, buffers, strict=True):
            sends[buffer] = message.send
            waits[buffer][numbers[key]] = None
        return cls(tuple(map(tuple, groups.values())), tuple(zip(sends, map(tuple, waits), strict=True)))


class MessageSet:
    """The messages of one step, made once for each compiled call. ``sent`` is what they send: lane, bytes, messages.

    >>> messages = [Message(send, 0, peer, (), 0, 0) for send in (False, True) for peer in (1, 2)]
    >>> made = MessageSet(messages, nbytes=[4, 4, 8, 8], buffers=[0, 0, 1, 1])   # two receives in a buffer, two sends
    >>> made.sent, made.by_lane.groups, made.by_buffer.groups
    (((0, 16, 2),), ((0, 1, 2, 3),), ((0, 1), (2, 3)))
    >>> made.by_lane.of_buffer, made.by_buffer.of_buffer
    (((False, (0,)), (True, (0,))), ((False, (0,)), (True, (1,))))
    """

    def __init__(self, messages: Sequence[Message], nbytes: Sequence[int], buffers: Sequence[int]) -> None:
        self.messages = tuple(messages)
        self.by_lane = Together.of(messages, [message.lane for message in messages], buffers)
        self.by_buffer = Together.of(messages, buffers, buffers)
        # lanes in order, the same on every rank
        self.lanes = sorted((messages[group[0]].lane, number) for number, group in enumerate(self.by_lane.groups))
        sent: dict[int, list[int]] = {}
        for message, size in zip(messages, nbytes, strict=True):
            if message.send:
                of_lane = sent.setdefault(message.lane, [0, 0])
                of_lane[0] += size
                of_lane[1] += 1
        self.sent = tuple((lane, size, number) for lane, (size, number) in sent.items())


class Pending(Protocol):
    """Posted messages that complete together."""

    is_waited_for: bool

    def wait(self) -> None:
        """Wait once, and count the time. Raises ``PeerError`` if they can never complete."""


class Compare(Enum):
    """When a call is compared with all ranks: never (it has been, through the store), while it runs, or before anything
    is sent (its documents are new, so ranks that disagree would not even send the same messages)."""

    NEVER = 0
    DURING = 1
    BEFORE = 2


def nothing_usable() -> str:
    """What it means for the program if ``confirm`` raises."""
    return f"global rank {dist.get_rank()}: nothing computed since the last check may be used"


def unusable(reason: object) -> PeerError:
    return PeerError(f"{nothing_usable()}: {reason}")


class Transport:
    """The messages of one ``SequenceParallel`` on one kind of device. This class itself is for a single rank, which has
    no peers: it does nothing.

    ``posts_receives_early``: a message is sent only once its receive is posted, so the engine posts receives as soon as
    it can. ``has_all_to_all``: one operation can exchange equal parts between all ranks of a lane, a rank's own part
    included. ``compares_on_device``: ranks compare digests of data on a GPU without a host that waits for them.
    ``running``: a pass has begun and not ended, where an error on one rank leaves the others with wrong results.
    """

    posts_receives_early = False
    has_all_to_all = False
    compares_on_device = False
    running = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin_pass(self, program: Program, compare: Compare, direct_levels: Iterable[int] = ()) -> None:
        """Start a pass, whose first program is ``program``, of the call that the consensus has started. Compares the
        call with all ranks if asked to. Programs of the plan ``direct`` need the lanes of these levels and further in,
        which are opened now unless they exist."""

    def together(self, messages: MessageSet) -> Together:
        """Which of these messages complete together."""
        raise AssertionError("a single rank has no peers")

    def post(
        self, step: WalkStep, part: int, messages: MessageSet, payloads: Sequence[Tensor],
        at_once: tuple[Tensor, Tensor] | None = None,
    ) -> Sequence[Pending]:  # fmt: skip
        """Start the messages of one step of program number ``part``. Returns what to wait for: one object for each
        group of ``together``. Until then their bytes must be left alone.

        ``at_once``: all that the messages over heads bring and send, with the part that stays on this rank, so that
        they can be one all-to-all (only with ``has_all_to_all``).
        """
        raise AssertionError("a single rank has no peers")

    def end_pass(self, program: Program, results: Iterable[Tensor]) -> None:
        """End a pass, whose last program is ``program``. Raises if the results cannot be trusted. If that is found out
        later, on the device only, they are NaN."""

    def compare_call(self) -> None:
        """Compare the current call, which sends no messages of its own, with all ranks, and wait where that is
        possible."""

    def confirm(self) -> None:
        """Wait until all passes so far have completed on the devices of all ranks. Raise if any was aborted."""

    def abandon(self, error: BaseException) -> None:
        """Clean up after an error on this rank. Nothing may be posted afterwards."""

    def close(self, error: BaseException | None) -> None:
        """Close all groups, together with all ranks. After an ``error`` on this rank, without them."""


class Rehearsal(Transport):
    """Stands in for a transport, and sends and receives nothing: a pass launches all its kernels, on whatever its
    buffers hold."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.device)
        self.together = transport.together  # type: ignore[method-assign]
        self.posts_receives_early, self.has_all_to_all = transport.posts_receives_early, transport.has_all_to_all

    def post(
        self, step: WalkStep, part: int, messages: MessageSet, payloads: Sequence[Tensor],
        at_once: tuple[Tensor, Tensor] | None = None,
    ) -> list[Pending]:  # fmt: skip
        return [Arrived() for _ in self.together(messages).groups]


class Arrived:
    """Nothing to wait for."""

    is_waited_for = True

    def wait(self) -> None:
        pass

"""gloo, between CPUs: it matches messages by tag, and its waits fail when a peer is gone or late.

It has a connection for each pair of ranks and a thread for each group, so all lanes over heads share one group. A
message is sent only once its receive is posted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist
from torch import Tensor

from startrail.agreement.comparison import DigestComparison
from startrail.agreement.errors import PeerError
from startrail.agreement.watchdog import start_thread
from startrail.schedule.program import Program
from startrail.transport.interface import Compare, MessageSet, Together
from startrail.transport.lanes import Lanes


class Gloo(Lanes):
    backend = "gloo"
    posts_receives_early = True
    _comparison: DigestComparison | None = None

    def _open_lanes(self) -> None:
        heads = self.place.head_lanes
        for lane in range(len(self.place.sizes)):
            if lane not in heads[1:]:
                self._open_lane(lane, self.place.lane_ranks(lane), str(lane))
            elif heads[0] in self.lanes:  # the outermost one's group has these ranks, too
                self.lanes[lane] = self.lanes[heads[0]]

    def begin_pass(self, program: Program, compare: Compare, direct_levels: Iterable[int] = ()) -> None:
        self.begin_call()
        self._compare(compare)
        for level in direct_levels:
            self.open_direct(level)

    def together(self, messages: MessageSet) -> Together:
        return messages.by_buffer

    def _post(
        self, messages: MessageSet, payloads: Sequence[Tensor], first_tag: int, at_once: tuple[Tensor, Tensor] | None
    ) -> list[list[dist.Work]]:
        """Directly to the backend: torch's own checks cost more than a small message."""
        works = []
        for message, payload in zip(messages.messages, payloads, strict=True):
            group, places = self.lanes[message.lane]
            post = group.send if message.send else group.recv
            works.append(post([payload], places[message.peer], first_tag + message.tag))
        return [[works[index] for index in group] for group in messages.by_buffer.groups]

    def end_pass(self, program: Program, results: Iterable[Tensor]) -> None:
        self._finish_comparison()  # it also finds ranks that disagree but send each other nothing

    def compare_call(self) -> None:
        self.begin_call()
        self._compare(Compare.BEFORE)

    def abandon(self, error: BaseException) -> None:
        if (comparison := self._comparison) is not None:
            self.abort("aborted after an error on this or another rank")
            if not comparison.work.is_completed():  # closing its group, here or in garbage collection, waits for that
                start_thread(partial(_outlive, comparison.work, list(self.opened.groups)), "startrail-closing")

    # --- comparing the current call with all ranks: an all-reduce over every level's lane

    def _compare(self, compare: Compare) -> None:
        if compare is not Compare.NEVER:
            groups = dict.fromkeys(lane.group for number, lane in self.lanes.items() if number < len(self.place.sizes))
            self._comparison = DigestComparison(list(groups), self.tag + 1)
        if compare is Compare.BEFORE:
            self._finish_comparison()

    def _finish_comparison(self) -> None:
        if self._comparison is None:
            return
        consensus, failed = self.consensus, True
        what = f"comparing {consensus.current} with all ranks"
        abort = partial(self.abort, "aborted after an error on this or another rank")
        consensus.begin_wait(what, abort, consensus.place_of_call())
        try:
            is_same = self._comparison.finish(lambda: self.aborted)
            if self.aborted:
                raise RuntimeError(self.aborted)
            failed = False
        except RuntimeError as error:
            explained = self.explain_wait(f"rank {self.place.rank}: {what} failed", error)
            if isinstance(explained, PeerError) and consensus.find_reason() is None:
                explained = PeerError(f"{consensus.missing_ranks()} did not start {consensus.current}: {explained}")
            raise explained from error
        finally:
            consensus.end_wait(failed)
        self._comparison = None
        if not is_same:
            consensus.compare()
            raise ValueError(f"ranks disagree about {consensus.current}")


def _outlive(work: dist.Work, groups: list[dist.ProcessGroup]) -> None:
    """Keep ``groups`` until ``work`` has ended."""
    with suppress(RuntimeError):
        work.wait()

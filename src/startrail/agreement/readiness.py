"""Waiting for ranks whose kernels take long to compile, which is no reason to give them up."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from startrail.agreement.errors import PeerError
from startrail.agreement.timing import TIMING

if TYPE_CHECKING:
    from startrail.agreement.consensus import Consensus
    from startrail.agreement.ledger import CallLedger


class Readiness:
    """Waits until all ranks are ready for a call. ``run`` is called in a thread, and ends soon once it is
    ``cancelled``."""

    def __init__(self, consensus: Consensus, ledger: CallLedger) -> None:
        self.consensus, self.ledger, self.call = consensus, ledger, consensus.current
        self.limit = max(ledger.timeout, timedelta(seconds=TIMING.compiling))
        self.cancelled = threading.Event()

    def __str__(self) -> str:
        return "for the other ranks to compile their kernels"

    def run(self) -> None:
        consensus, ledger, pause = self.consensus, self.ledger, TIMING.poll
        end, failed = time.monotonic() + self.limit.total_seconds(), True
        ledger.mark_ready(self.call.key)
        consensus.begin_wait(self, self.cancelled.set)
        try:
            while not ledger.are_all_ready(self.call.key) and not self.cancelled.wait(pause):
                pause = min(2 * pause, TIMING.longest_poll)
                if reason := consensus.abandoned(ledger, self.call.epoch):
                    raise reason
                if time.monotonic() > end:
                    raise PeerError(f"not all ranks have compiled their kernels within {self.limit}")
            if consensus._reason is not None:
                raise consensus._reason
            failed = False
        finally:
            consensus.end_wait(failed)

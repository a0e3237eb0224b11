"""Compares a digest of a call between ranks without the store. It has one size whatever the ranks are about to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.agreement.timing import TIMING

DIGEST_LIMIT = 2**31  # above all digests; a multiple of it may be added on a device


class DigestComparison:
    """Finds out whether all ranks have the same ``digest`` (from 1 to below ``DIGEST_LIMIT``), by an all-reduce of the
    maxima of it and of its negative, over one group after the other; together these connect all ranks. Starting it
    waits for nothing."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], digest: int, device: torch.device | str = "cpu") -> None:
        self.digest, self.extremes = digest, self._digests(digest, device)
        self._groups = list(groups)
        self.work = self._start()

    def _digests(self, digest: int, device: torch.device | str) -> Tensor:
        """The negative digest and the digest."""
        return torch.arange(-digest, digest + 1, 2 * digest, device=device)

    def _start(self) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._groups.pop(0).allreduce([self.extremes], options)

    def is_same(self) -> bool:
        """True if all ranks have this one's digest, once the result is known. Ranks that abort NCCL's transfers pass on
        what is left of an earlier comparison, in which all ranks may have had another digest."""
        low, high = self.extremes.tolist()
        return bool(low + high == 0 and high % DIGEST_LIMIT == self.digest)

    def finish(self, is_aborted: Callable[[], object]) -> bool:
        """Wait for the result, on the host. True if all ranks have the same digest. Raises ``RuntimeError`` soon after
        ``is_aborted``: gloo does not end a send that begins just after its peer has closed the connection."""
        self._wait(is_aborted)
        while self._groups:
            self.work = self._start()
            self._wait(is_aborted)
        return self.is_same()

    def _wait(self, is_aborted: Callable[[], object]) -> None:
        while True:
            try:
                self.work.wait(timedelta(seconds=TIMING.watch_interval))
                return
            except RuntimeError:
                if is_aborted():
                    raise
                if self.work.is_completed():
                    self.work.wait()  # the error is its own, or that it ended just after the wait was given up
                    return

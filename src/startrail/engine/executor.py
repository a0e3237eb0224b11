"""The executor: runs one rank's programs over torch.distributed, one for each zone of its tokens.

It does no rank arithmetic: a program says which peer comes when. `part_run` handles the events of its walk
(`startrail.schedule.walk`) with buffers, messages and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.comm.consensus import Consensus
from startrail.comm.counters import Counters
from startrail.comm.lanes import Lanes
from startrail.comm.transfers import TransferContext, TransferMonitor
from startrail.comm.watchdog import watch
from startrail.engine.buffers import BufferPool
from startrail.engine.part_run import Inputs, PartRun, PassContext
from startrail.kernels.device import on_device


class Executor:
    """Runs programs for one rank. It keeps only buffers between calls. After an error it must not be used again: its
    lanes may be closed, and transfers may still write to its buffers."""

    def __init__(self, lanes: Lanes | None, consensus: Consensus, counters: Counters) -> None:
        self._transfers = None if lanes is None else TransferContext(lanes, consensus, counters)
        self.counters = counters
        self.pool = BufferPool()
        self.running = False  # a pass has begun and not ended
        self.monitor = TransferMonitor(self.transfers) if lanes is not None and lanes.is_monitored else None
        if self.monitor is not None:
            watch(self.monitor)

    @property
    def device(self) -> torch.device | None:
        """The device of the lanes; None without lanes."""
        return None if self._transfers is None else self._transfers.lanes.device

    @property
    def transfers(self) -> TransferContext:
        assert self._transfers is not None, "a single rank has no peers"
        return self._transfers

    @property
    def lanes(self) -> Lanes:
        return self.transfers.lanes

    def abandon(self, error: BaseException) -> None:
        """Clean up after an error, before the executor is dropped.

        Where waits never fail, this ends transfers that might otherwise never end: those of a pass that broke off, and
        all transfers if a peer may be gone. In any other case transfers of earlier passes still arrive.
        """
        if self.monitor is not None and (self.running or not isinstance(error, ValueError)):
            self.monitor.abandon()

    def close(self, error: BaseException | None) -> None:
        """Close the lanes, together with all ranks. After an ``error`` on this rank, close them without the others."""
        if self._transfers is not None:
            if error is not None and self.monitor is not None:
                self.monitor.abandon()
            self.lanes.close()

    def run(self, context: PassContext, inputs: Sequence[Inputs], kept: Tensor) -> list[dict[str, tuple[Tensor, ...]]]:
        """Run one pass. ``inputs`` are this rank's local tensors of each part by kind: q, kv = (k, v),
        do = (lse, delta, dout).

        The forward pass leaves pieces in ``kept`` for its backward pass. Returns local results of each part by kind:
        out = (lse, out), dq, dkv = (dk, dv).
        """
        with on_device(context.device):
            return self._run(context, inputs, kept)

    def _run(self, context: PassContext, inputs: Sequence[Inputs], kept: Tensor) -> list[dict[str, tuple[Tensor, ...]]]:
        if context.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("attention over several ranks cannot be captured in a CUDA graph: its buffers change")
        total, device = self.counters.total, context.device
        start = total.start(device)
        self.running = True
        if self.monitor is not None:
            self.monitor.begin_pass(context.tag + 1, context.parts[0].program)
        runs = [PartRun(self, context, part, of_part, kept) for part, of_part in enumerate(inputs)]
        try:
            for part, step in context.order:
                runs[part].run_step(step)
            results = [run.finish() for run in runs]
        finally:
            for run in runs:
                run.close()
        if self._transfers is not None:
            made = (x for part in results for tensors in part.values() for x in tensors)
            self.lanes.mark_if_aborted([context.largest, *made])
        if self.monitor is not None and (reason := self.monitor.end_pass()):
            program = context.parts[-1].program
            raise self.transfers.explain(program, len(program.steps) - 1, "comparing calls", RuntimeError(reason))
        self.pool.settle()
        total.stop(start, device)
        self.running = False
        return results

"""The executor: runs one rank's programs over torch.distributed, one for each zone of its tokens.

It does no rank arithmetic: a program says which peer comes when. `part_run` handles the events of its walk
(`startrail.schedule.walk`) with buffers, messages and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.engine.buffers import BufferPool
from startrail.engine.part_run import Inputs, PartRun, PassContext
from startrail.kernels.device import on_device
from startrail.transport.base import Transport
from startrail.transport.counters import Counters


class Executor:
    """Runs programs for one rank. It keeps only buffers between calls. After an error it must not be used again: its
    lanes may be closed, and transfers may still write to its buffers."""

    def __init__(self, transport: Transport, counters: Counters) -> None:
        self.transport, self.counters = transport, counters
        self.pool = BufferPool()

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
        levels = [part.direct_level for part in context.parts if part.direct_level is not None]
        self.transport.begin_pass(context.parts[0].program, context.compare, levels)
        runs = [PartRun(self, context, part, of_part, kept) for part, of_part in enumerate(inputs)]
        try:
            for part, step in context.order:
                runs[part].run_step(step)
            results = [run.finish() for run in runs]
        finally:
            for run in runs:
                run.close()
        made = (x for part in results for tensors in part.values() for x in tensors)
        self.transport.end_pass(context.parts[-1].program, [context.largest, *made])
        self.pool.settle()
        total.stop(start, device)
        return results

"""After transfers are aborted nothing computed from them can be used, although on a GPU no wait ever raises.

The ranks run on a ``LazyStream``, so the host queues whole training steps before it can know of a lost peer.
"""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail import _compat
from startrail.comm import process_groups as groups
from startrail.comm import transfers
from startrail.comm import lanes
from startrail.comm.timing import TIMING
from startrail.engine.batch import BatchGeometry
from startrail.kernels import cpu
from startrail.launch.local import run_local
from tests import like_nccl
from tests.helpers import dense, error_of, eventually, qkv, tensors, worst
from tests.lazy_stream import LazyEvent, LazyStream


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(lanes, "record_event", lambda device: LazyEvent())
    monkeypatch.setattr(cpu, "_is_finite", lambda x: True)  # these two read values on CPUs only
    monkeypatch.setattr(BatchGeometry, "poison_hidden_rows", lambda *arguments: None)


def step(sequence, weight):
    """One training step: queues a forward and a backward pass; returns the output and the gradient."""
    x = torch.linspace(-1, 1, 3 * 16 * 8).view(1, 3, 16, 8)
    out = sequence.attention(x @ weight, x @ weight, x @ weight, causal=True)
    return out, *torch.autograd.grad(out.square().sum(), weight)


@pytest.mark.parametrize("plan, lost", [("1x3", "killed"), ("u3", "stalled"), ("3x1", "stalled")])
def test_steps_queued_after_a_peer_was_lost_are_nan(plan, lost):
    def on_rank(rank):
        sp = startrail.SequenceParallel(plan, timeout=2)
        sequence = sp.sequence(48)
        with LazyStream() as stream:
            weight = torch.eye(8).requires_grad_()
            for _ in range(2):
                _, grad = step(sequence, weight)
            sp.check()
            healthy = grad.isfinite().all().item()
            if rank == 1:
                if lost == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(20)
                os._exit(1)
            start = time.monotonic()
            out, grad = step(sequence, weight)
            stepped = weight.detach() - grad
            queued, seconds = stream.unfinished, time.monotonic() - start
            text = error_of(sp.check)
            stream.synchronize()
            rows, elements = out.isnan().any(-1).all().item(), stepped.isfinite().all().item()
        return healthy, queued > 0 and seconds < 1.5, text, rows, elements, like_nccl.open_batches()

    results = run_local(on_rank, 3, deadline=60, expendable=frozenset({1}))
    for rank in (0, 2):
        healthy, ahead, text, poisoned, finite, depth = results[rank]
        assert healthy and ahead, "the host must not wait in these tests"
        assert text.startswith(f"PeerError: global rank {rank}: nothing computed since the last check may be used: "), text
        assert poisoned, "every row of the output is NaN"
        assert not finite, "and so are weights that were updated from it"
        assert depth == 0

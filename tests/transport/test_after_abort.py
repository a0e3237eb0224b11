"""After transfers are aborted nothing computed from them can be used, although on a GPU no wait ever raises.

The ranks run on a ``LazyStream``, so the host queues whole training steps before it can know of a lost peer.
"""

import gc
import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import startrail
from startrail import _compat
from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import watch
from startrail.engine import attention
from startrail.kernels import CpuKernel, cpu
from startrail.launch.local import RankError, run_local
from startrail.transport import nccl
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import dense, error_of, eventually, qkv, tensors, worst
from tests.lazy_stream import LazyEvent, LazyStream


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(like_nccl, "LEAKS", True)
    monkeypatch.setattr(nccl, "record_event", lambda device: LazyEvent())
    monkeypatch.setattr(cpu, "_is_finite", lambda x: True)  # these two read values on CPUs only
    monkeypatch.setattr(attention, "_poison_hidden_rows", lambda *arguments: None)


def step(sequence, weight):
    """One training step: queues a forward and a backward pass; returns the output and the gradient."""
    x = torch.linspace(-1, 1, 3 * 16 * 8).view(1, 3, 16, 8)
    out = sequence.attention(x @ weight, x @ weight, x @ weight, causal=True)
    return out, *torch.autograd.grad(out.square().sum(), weight)


@pytest.mark.parametrize("plan, lost", [("1x3", "killed"), ("u3", "stalled"), ("3x1", "stalled")])
def test_steps_queued_after_a_peer_was_lost_are_nan(plan, lost):
    def on_rank(rank):
        sp = startrail.SequenceParallel(plan, timeout=5)
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
        return healthy, queued > 0 and seconds < 4, text, rows, elements, like_nccl.open_batches()

    results = run_local(on_rank, 3, deadline=60, expendable=frozenset({1}))
    for rank in (0, 2):
        healthy, ahead, text, poisoned, finite, depth = results[rank]
        assert healthy and ahead, "the host must not wait in these tests"
        assert text.startswith(f"PeerError: global rank {rank}: nothing computed since the last check may be used: "), (
            text
        )
        assert poisoned, "every row of the output is NaN"
        assert not finite, "and so are weights that were updated from it"
        assert depth == 0


def test_the_flag_is_set_before_the_first_transfer_is_aborted():
    """Whatever was queued behind a transfer runs as soon as it is aborted, and must find the flag set."""
    made, seen = object.__new__(nccl.Nccl), []

    def abort():
        row = torch.ones(1, 1, 1, 4)
        made._flag.mark([row], made.device)
        seen.append(row.isnan().any().item())

    made._lock, made._flag, made.opened = threading.Lock(), nccl.AbortFlag(), SimpleNamespace(abort=abort)
    made.aborted, made.device = None, torch.device("cpu")
    made.abort("rank 7 is gone")
    assert seen == [True]


def test_check_raises_on_a_rank_whose_peers_have_aborted(monkeypatch):
    """It does not join them without an error: what it has queued meanwhile is NaN."""
    monkeypatch.setattr(TIMING, "slow_wait", 0.2)

    def on_rank(rank):
        store = _compat.default_store()
        sp = startrail.SequenceParallel("1x2", timeout=3)
        sequence = sp.sequence(32)
        with LazyStream():
            weight = torch.eye(8).requires_grad_()
            for _ in range(2):
                _, grad = step(sequence, weight)
            sp.check()
            if rank == 1:
                store.wait(["given up"])
                _, grad = step(sequence, weight)
            text = error_of(sp.check)
            store.set("given up", "1")
        return text, grad.isnan().any().item(), is_exact(sp)

    for rank, (text, lost, exact) in enumerate(run_local(on_rank, 2, deadline=60)):
        assert text.startswith(f"PeerError: global rank {rank}: nothing computed since the last check may be"), text
        assert lost == (rank == 1)
        assert exact, "both go on together"


def test_a_rank_that_ignores_its_own_error_drops_the_step_as_the_others_do():
    """Their hosts were ahead of it, so only the check tells them."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sequence = sp.sequence(32)
        with LazyStream():
            weight = torch.eye(8).requires_grad_()
            step(sequence, weight)
            sp.check()
            plain = CpuKernel.forward

            def forward(*arguments):
                if rank == 1:
                    raise startrail.PeerError("planted")
                return plain(*arguments)

            CpuKernel.forward = forward
            ignored = error_of(lambda: step(sequence, weight))
            CpuKernel.forward = plain
            return ignored, error_of(sp.check), error_of(sp.check), is_exact(sp)

    for rank, (ignored, text, again, exact) in enumerate(run_local(on_rank, 2, deadline=60)):
        assert rank == 0 or ignored == "PeerError: planted"
        assert text.startswith(f"PeerError: global rank {rank}: nothing computed since the last check may be used: ")
        assert again == "no error", "nothing was computed since"
        assert exact, "both go on together"


def is_exact(sp):
    """True if a forward and a backward pass give the right results."""
    q, k, v, dout = tensors(48)
    truth = dense(q, k, v, dout, is_causal=True)
    sequence = sp.sequence(48)
    inputs = [sequence.shard(x, 2).requires_grad_() for x in (q, k, v)]
    out = sequence.attention(*inputs, causal=True)
    grads = torch.autograd.grad(out, inputs, sequence.shard(dout, 2))
    return worst([out, *grads], [sequence.shard(x, 2) for x in truth]) < 2e-6


def transport_of(sp):
    return sp._session._runner.transport


def test_a_batch_that_raises_is_ended():
    """NCCL would launch nothing of what this thread posts later, and report it as completed."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sequence, inputs = sp.sequence(32), qkv()
        sequence.attention(*inputs)
        transport_of(sp).lanes[0].group.abort()  # its next send raises
        text = error_of(lambda: sequence.attention(*inputs))
        return text, like_nccl.open_batches(), is_exact(sp)

    for rank, (text, depth, exact) in enumerate(run_local(on_rank, 2, deadline=60)):
        assert text.startswith(f"PeerError: rank {rank}, forward step 0 of plan 1x2: posting "), text
        assert depth == 0
        assert exact, "the next call works"


def test_a_pass_on_aborted_lanes_raises_peer_error():
    """The watchdog aborts lanes between two calls; the second one finds communicators that refuse everything."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sequence, inputs = sp.sequence(32), qkv()
        sequence.attention(*inputs)
        transport_of(sp).abort("rank 7 is gone")
        return error_of(lambda: sequence.attention(*inputs)), is_exact(sp)

    for rank, (text, exact) in enumerate(run_local(on_rank, 2, deadline=60)):
        assert text.startswith(f"PeerError: rank {rank}, forward step 0 of plan 1x2: starting the pass failed: "), text
        assert text.endswith("rank 7 is gone")
        assert exact, "the next call works"


def test_dropped_instances_close_when_their_ranks_meet():
    """Closing a communicator waits for its other ranks, which may drop their instances much later."""

    def on_rank(rank):
        store = _compat.default_store()
        kept = startrail.SequenceParallel("1x2", timeout=20)
        assert is_exact(kept)
        made = list(like_nccl.GROUPS)
        if rank == 1:
            store.wait(["dropped"])
        dropped, kept = time.monotonic(), None
        gc.collect()
        seconds = time.monotonic() - dropped
        store.set("dropped", "1")
        before = [group.history for group in made if group.history]
        sp = startrail.SequenceParallel("1x2", timeout=20)
        return seconds, before, is_exact(sp), [group.history for group in made]

    for seconds, before, exact, after in run_local(on_rank, 2, deadline=60):
        assert seconds < 15 and not before, "garbage collection closes nothing"
        assert exact and after == [["shutdown"]] * 2


def test_close():
    def on_rank(rank):
        with startrail.SequenceParallel("1x2", timeout=20) as sp:
            sequence, inputs = sp.sequence(32), qkv()
            sequence.attention(*inputs)
        closed = [group.history for group in like_nccl.GROUPS]
        texts = [error_of(lambda: sp.sequence(32)), error_of(lambda: sequence.attention(*inputs))]
        del like_nccl.GROUPS[:]

        def fail_on_one_rank():
            with startrail.SequenceParallel("1x2", timeout=30) as sp:
                assert is_exact(sp)
                if rank == 0:
                    raise ValueError("a mistake")

        start = time.monotonic()
        texts.append(error_of(fail_on_one_rank))
        return closed, texts, time.monotonic() - start, [group.history for group in like_nccl.GROUPS]

    for rank, (closed, texts, seconds, history) in enumerate(run_local(on_rank, 2, deadline=60)):
        assert closed == [["shutdown"]] * 2
        assert texts[:2] == ["ValueError: this SequenceParallel is closed"] * 2
        assert texts[2].startswith("ValueError: a mistake"), texts
        assert seconds < 15, "well before the timeout"
        assert rank == 1 or all(events[0] == "abort" for events in history), "it waits for no other rank"


def test_the_watchdogs_event_queries_do_not_break_a_graph_capture(monkeypatch):
    """CUDA fails a capture if another thread queries an event, unless that thread has said that it is not concerned."""
    modes = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802, the driver's name
            modes.append((mode._obj.value, threading.current_thread().name))

    monkeypatch.setattr(_compat.ctypes, "CDLL", {"libcuda.so.1": Driver()}.__getitem__)
    monkeypatch.setattr(nccl, "on_device", lambda device: nullcontext())
    transport = object.__new__(nccl.Nccl)
    transport.device, transport.aborted = torch.device("cuda", 0), None
    transport.pending, transport.comparisons = (), ()
    watch(transport)
    assert eventually(lambda: (1, "startrail-watchdog") in modes, 20)


def test_an_error_that_torchs_watchdog_finds_first_ends_the_process():
    """NCCL reports errors other than timeouts to torch's watchdog, which ends the process with SIGABRT. The launcher
    names the rank and the signal; a rank that lives on raises ``PeerError``."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        sequence, inputs = sp.sequence(32), qkv()
        sequence.attention(*inputs)
        if rank == 1:
            for lane in transport_of(sp).lanes.values():
                lane.group.break_with("NCCL error: remote process exited", ends_process=True)
        return error_of(lambda: [sequence.attention(*inputs) for _ in range(2)])

    with pytest.raises(RankError, match="rank 1 was killed by SIGABRT"):
        run_local(on_rank, 2, deadline=60)
    text, _ = run_local(on_rank, 2, deadline=60, expendable=frozenset({1}))
    # Rank 1 dies during the first call or, having sent everything, before the second one.
    waits = "kv1 from rank 1 (global rank 1)", "comparing the call with all ranks did not end within 0:00:02 (rank 1: "
    assert text.startswith("PeerError: rank 0, forward step ") and any(wait in text for wait in waits), text

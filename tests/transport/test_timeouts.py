"""A timeout is for peers that are late. It does not count work that is queued on this rank's own device, nor kernels
that are compiled for the first pass."""

import math
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import startrail
from startrail.agreement.timing import TIMING
from startrail.agreement.watchdog import Looks
from startrail.engine import attention
from startrail.kernels import CpuKernel, cpu
from startrail.launch.local import run_local
from startrail.transport import nccl
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import error_of, qkv
from tests.lazy_stream import LazyEvent, LazyStream, second_stream
from tests.lazy_stream import run as on_stream


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(nccl, "record_event", lambda device: LazyEvent())
    monkeypatch.setattr(cpu, "_is_finite", lambda x: True)  # these two read values on CPUs only
    monkeypatch.setattr(attention, "_poison_hidden_rows", lambda *arguments: None)
    monkeypatch.setattr(TIMING, "slow_wait", 0.2)


def run_behind(seconds, timeout, lost):
    """Two ranks queue a pass behind ``seconds`` of other work on their devices, and check it. One may be ``lost``."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=timeout)
        sequence, inputs = sp.sequence(32), qkv()
        sequence.attention(*inputs)
        sp.check()
        ledger, polls = sp._session.consensus.ledger, []
        newest_epoch = ledger.newest_epoch
        ledger.newest_epoch = lambda: polls.append(time.monotonic()) or newest_epoch()
        if lost and rank == 1:
            time.sleep(seconds + 5 * timeout)
            return "lost", 0.0, 0
        with LazyStream():
            on_stream(lambda: time.sleep(seconds))
            start = time.monotonic()
            sequence.attention(*inputs)
            text = error_of(sp.check)
        return text, time.monotonic() - start, len(polls)

    return run_local(on_rank, 2, deadline=60)


def test_a_device_that_is_busy_for_longer_than_the_timeout_aborts_nothing():
    """And the watchdogs ask the store nothing meanwhile."""
    for text, seconds, polls in run_behind(seconds=4.5, timeout=3, lost=False):
        assert text == "no error"
        assert seconds > 4
        assert polls == 0


def test_a_lost_peer_is_found_the_timeout_after_the_device_came_to_its_transfer():
    (text, seconds, _), _ = run_behind(seconds=2.5, timeout=1.5, lost=True)
    assert "did not end within 0:00:01.5" in text
    assert seconds > 3.8


@pytest.mark.parametrize("reason", ["the first window", "an error"])
def test_new_lanes_are_connected_beside_what_the_device_has_to_do(reason, monkeypatch):
    """Their first transfers, for which the host waits, do not count the time of the work that is queued."""
    monkeypatch.setattr(nccl, "on_stream", lambda purpose: nullcontext() if purpose is None else second_stream())
    monkeypatch.setattr(nccl, "side_stream", lambda device, purpose: purpose if purpose == "connecting" else None)

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        sequence, inputs = sp.sequence(32), qkv()
        sequence.attention(*inputs)
        window = 4 if reason == "the first window" else None
        if reason == "an error":  # on all ranks, which closes their lanes
            error_of(lambda: sequence.attention(*qkv(dim=300)))
        with LazyStream():
            on_stream(lambda: time.sleep(5))
            start = time.monotonic()
            text = error_of(lambda: sequence.attention(*inputs, causal=True, window=window))
            connected = time.monotonic() - start
            return text, connected, error_of(sp.check), time.monotonic() - start

    for text, connected, checked, seconds in run_local(on_rank, 2, deadline=60):
        assert text == checked == "no error", (text, checked)
        assert connected < 4 < seconds, "the host does not wait for the device"


class Posted(NamedTuple):
    name: str
    work: object = SimpleNamespace(is_completed=lambda: False)

    def __str__(self):
        return self.name


@pytest.mark.parametrize("order", [("stuck", "not begun"), ("not begun", "stuck")])
def test_a_stuck_transfer_is_found_behind_one_that_has_not_begun(order):
    """That one is on another stream of the program, which has much to do."""
    seconds, aborted = {"stuck": 100.0, "not begun": 0.0}, []

    class Clock(nccl.DeviceClock):
        def __init__(self, seconds):
            self._event = None
            self._since = time.monotonic() - seconds if seconds else math.inf

    transport = object.__new__(nccl.Nccl)
    transport.device, transport.timeout, transport.aborted = torch.device("cpu"), timedelta(seconds=50), None
    transport.pending = [nccl.Waiting(Posted(name), Clock(seconds[name])) for name in order]
    transport.comparisons, transport._looks, transport.abort = (), Looks(), aborted.append
    transport.check()
    assert aborted == ["stuck did not end within 0:00:50"]


class SlowToCompile(CpuKernel):
    """Its first call on rank 0 takes longer than the timeout."""

    compiles = True
    rank = 0
    calls = 0

    def forward(self, *arguments):
        type(self).calls += 1
        if type(self).calls == 1 and self.rank == 0:
            time.sleep(5)
        return super().forward(*arguments)


@pytest.mark.parametrize("plan", ["1x3", "u3", "3x1"])
def test_kernels_are_compiled_before_a_wait_that_is_timed(plan, monkeypatch):
    """No rank gives up on the one whose kernels take longer than the timeout, and the results are right."""
    monkeypatch.setattr(attention, "kernel_for", lambda device, dtype, *_: SlowToCompile(dtype))

    def on_rank(rank):
        SlowToCompile.rank = rank
        sp = startrail.SequenceParallel(plan, timeout=2.5)
        sequence = sp.sequence(48)
        whole = [torch.linspace(-1, 1, 3 * 48 * 8).view(1, 3, 48, 8).roll(i, 2) for i in range(3)]
        inputs = [sequence.shard(x, 2).requires_grad_() for x in whole]
        found = []
        for _ in range(2):  # the second pass is not rehearsed
            before = SlowToCompile.calls
            out, largest = sequence.attention(*inputs, causal=True, return_largest=True)
            grads = torch.autograd.grad(out.sum(), inputs)
            found.append([SlowToCompile.calls - before, *(x.tolist() for x in (out, largest, *grads))])
        sp.check()
        return found

    for first, second in run_local(on_rank, 3, deadline=60):
        assert first[0] == 2 * second[0]
        assert first[1:] == second[1:]


def test_a_communicator_that_one_rank_never_makes_raises_on_the_others():
    """NCCL makes a communicator without a timeout, in a call that nothing ends."""

    def on_rank(rank):
        if rank == 2:
            sp = startrail.SequenceParallel("1x3", timeout=30)

            def too_late(*arguments):
                time.sleep(6)
                raise ValueError("no room for a communicator")

            nccl.Nccl._connect = too_late
        else:
            sp = startrail.SequenceParallel("1x3", timeout=2)
        start = time.monotonic()
        text = error_of(lambda: sp.sequence(48).attention(*qkv()))
        return text, time.monotonic() - start

    *others, (text, _) = run_local(on_rank, 3, deadline=60)
    assert "no room for a communicator" in text
    for text, seconds in others:
        assert text.startswith("PeerError: ") and "no connection over all ranks within 0:00:02" in text, text
        assert seconds < 20

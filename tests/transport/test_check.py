"""``sp.check()`` on a stand-in for NCCL: all ranks keep a step, or all drop it.

The stand-in is as unkind as NCCL: when a rank aborts, pending work of its peers may complete with stale bytes.
"""

import random
import time

import pytest
import torch

import startrail
from startrail import _compat
from startrail.agreement.timing import TIMING
from startrail.engine import attention
from startrail.kernels import CpuKernel
from startrail.launch.local import run_local
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import FULL, dense, error_of, qkv, tensors, worst


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(like_nccl, "LEAKS", True)
    monkeypatch.setattr(TIMING, "slow_wait", 0.2)


@pytest.mark.parametrize("seed", range(12 if FULL else 3))
def test_all_ranks_keep_the_same_steps(seed):
    """A rank is stuck between its last pass and the check (a file system, a log, a stopped process), for about as long
    as the others wait. It must not keep a step that they have dropped, nor drop one that they keep."""

    def on_rank(rank):
        rng = random.Random(seed)
        sp = startrail.SequenceParallel("1x3", timeout=(1.0, 1.5, 2.0)[(rank + seed) % 3])
        kept = []
        for step in range(5):
            late, seconds = rng.randrange(3), rng.choice([0, 0.9, 1.5, 2.1, 3])
            try:
                sequence = sp.sequence(48)
                sequence.shard(torch.full((48,), step), 0)  # a rank that is a batch ahead does not pass for another
                sequence.attention(*qkv())
                if rank == late:
                    time.sleep(seconds)
                sp.check()
                kept.append(step)
            except (startrail.PeerError, ValueError):
                pass
        return kept

    kept = run_local(on_rank, 3, deadline=100)
    assert kept[0] == kept[1] == kept[2], kept


def test_a_rank_that_was_stuck_drops_the_step_that_the_others_dropped():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=1)
        for _ in range(2):
            sp.sequence(48).attention(*qkv())
            sp.check()
        sp.sequence(48).attention(*qkv())
        store = _compat.default_store()
        if rank == 2:
            store.wait(["rank 0 gave up", "rank 1 gave up"])
        text = error_of(sp.check)
        store.set(f"rank {rank} gave up", "1")
        store.wait(["rank 2 gave up"])
        sp.sequence(48).attention(*qkv())
        return text, error_of(sp.check)

    for rank, (text, after) in enumerate(run_local(on_rank, 3, deadline=60)):
        assert text.startswith(f"PeerError: global rank {rank}: nothing computed since the last check may be used"), (
            text
        )
        assert after == "no error", "all go on together"


@pytest.mark.parametrize("after", ["a pass", "a check"])
def test_stale_bytes_of_an_earlier_comparison_do_not_pass(after):
    """Rank 0 gives up first, which completes rank 1's comparison with the result of the one before: consistent, but of
    a pass, or of another check. Rank 1 decides first."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=1 if rank == 0 else 20)
        if rank < 2:
            consensus, store = sp._session.consensus, _compat.default_store()
            plain, asked = consensus.decide, []

            def decide(is_done):
                asked.append(is_done)
                while rank == 0 and len(asked) == 3 and not store.check(["rank 1 has decided"]):
                    time.sleep(0.05)  # waiting in the store would hold up its other uses
                try:
                    return plain(is_done)
                finally:
                    if rank == 1 and len(asked) == 3:
                        store.set("rank 1 has decided", "1")

            consensus.decide = decide
        for _ in range(2):
            sp.sequence(48).attention(*qkv())
            sp.check()
        if after == "a pass":
            sp.sequence(48).attention(*qkv())
        if rank == 2:
            time.sleep(4)
        start = time.monotonic()
        return error_of(sp.check), time.monotonic() - start

    for text, seconds in (found := run_local(on_rank, 3, deadline=60)):
        assert text.startswith("PeerError: "), found
        assert seconds < 15, "well before the others' timeout"


def test_a_rank_that_gave_up_keeps_a_step_that_another_has_seen_complete():
    """The first rank's word counts, whatever the others find out later."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sp.sequence(32).attention(*qkv())
        transport = sp._session._runner.transport
        if rank == 1:
            plain = transport._compare_and_wait

            def complete_too_late(digest):
                plain(digest)
                _compat.default_store().wait(["decided"])
                transport.abort("aborted a moment later")
                raise RuntimeError(transport.aborted)

            transport._compare_and_wait = complete_too_late
        text = error_of(sp.check)
        _compat.default_store().set("decided", "1")
        return text

    assert run_local(on_rank, 2, deadline=60) == ["no error"] * 2


class Stuck(CpuKernel):
    """Its first block of a pass takes ``seconds``, once they are set."""

    seconds = 0

    def forward(self, *arguments):
        seconds, Stuck.seconds = Stuck.seconds, 0
        time.sleep(seconds)
        return super().forward(*arguments)


def test_a_pass_that_has_completed_with_stale_bytes_is_dropped(monkeypatch):
    """Rank 2 is stuck in the middle of a pass. Rank 0 gives up on it, which completes rank 1's transfer from rank 0
    with what its buffer held: its results are wrong, and nothing but the check says so."""
    monkeypatch.setattr(attention, "kernel_for", lambda device, dtype, *_: Stuck(dtype))

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=1 if rank == 0 else 20)
        sequence = sp.sequence(48)
        sequence.attention(*qkv())
        sp.check()
        Stuck.seconds = 4 if rank == 2 else 0
        whole, outs = tensors(48), []
        text = error_of(lambda: outs.append(sequence.attention(*(sequence.shard(x, 2) for x in whole[:3]))))
        truth = sequence.shard(dense(*whole)[0], 2)
        return text, [worst([out], [truth]) for out in outs], error_of(sp.check)

    (gave_up, *_), (text, (error,), checked), _ = run_local(on_rank, 3, deadline=60)
    assert gave_up.startswith("PeerError: ") and text == "no error"
    assert 1e-3 < error < 100, "wrong, but finite"
    assert checked.startswith("PeerError: global rank 1: nothing computed since the last check may be used"), checked


def test_checks_leave_no_keys():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sp.sequence(32).attention(*qkv())
        ledger = sp._session.consensus.ledger
        for _ in range(5):
            sp.check()
        sp.sequence(32).attention(*qkv())
        return [ledger.store.check([f"0/check {number}"]) for number in range(1, 6)]

    for found in run_local(on_rank, 2, deadline=60):
        assert found[:4] == [False] * 4

"""Ranks that make different calls, or lose a peer, raise long before the timeout, and can go on after any error."""

import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.agreement.gather import gather_texts
from startrail.launch.local import run_local
from startrail.step_checks import check_same_parameters
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import dense, error_of, free_port, qkv, tensors, worst


def timed(function):
    start = time.monotonic()
    return error_of(function), time.monotonic() - start


def is_exact(sp, length=24):
    """True if a forward and a backward pass give the right results."""
    q, k, v, dout = tensors(length)
    truth = dense(q, k, v, dout, is_causal=True)
    sequence = sp.sequence(length)
    inputs = [sequence.shard(x, 2).requires_grad_() for x in (q, k, v)]
    out = sequence.attention(*inputs, causal=True)
    grads = torch.autograd.grad(out, inputs, sequence.shard(dout, 2))
    return worst([out, *grads], [sequence.shard(x, 2) for x in truth]) < 2e-6


@pytest.mark.parametrize("every_call", [False, True])
def test_backward_passes_in_different_orders_raise(every_call):
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=30, check_every_call=every_call)
        inputs = [x.requires_grad_() for x in qkv()]
        is_exact(sp)  # later calls are not compared beforehand
        sequence = sp.sequence(32)
        outs = [sequence.attention(*inputs) for _ in range(2)]
        for out in outs:
            out.square().sum().backward()
        first, second = (sequence.attention(*inputs) for _ in range(2))
        text, seconds = timed((second if rank else first).square().sum().backward)
        return text, seconds, is_exact(sp)

    for text, seconds, after in run_local(on_rank, 2, deadline=60):
        assert text.startswith("ValueError: ranks disagree about one attention call: rank 0: backward"), text
        assert text.count("backward of call 0.") == 2
        assert seconds < 15
        assert after, "the instance works again"


def test_skipping_a_batch_raises_at_the_next_call():
    def on_rank(rank):
        sp = startrail.SequenceParallel("2x1", timeout=30)
        texts = []
        for batch in range(3):
            sequence = sp.sequence(32)
            if (rank, batch) == (1, 1):
                continue  # as after an error that the program caught
            texts.append(timed(lambda sequence=sequence: sequence.attention(*qkv())))
            if texts[-1][0] != "no error":
                break
        return texts

    ranks = run_local(on_rank, 2, deadline=60)
    for texts in ranks:
        assert texts[0][0] == "no error"
        assert "sequence 2 of this kind" in texts[1][0] and "sequence 3 of this kind" in texts[1][0], texts
        assert texts[1][1] < 15


def skip_batches(rank, sp, reused, layers, skipped):
    """The first error of a rank that skips some batches or layers: (batch, layer), its text and the seconds it took."""
    shared = sp.sequence(32)
    inputs = [x.requires_grad_() for x in qkv()]
    for batch in range(4):
        if (rank, batch) in skipped:
            continue  # before it makes the sequence, which would count as one
        sequence = shared if reused else sp.sequence(32)
        sequence.shard(torch.arange(32) * batch, 0)
        for layer in range(layers):
            if (rank, batch, layer) not in skipped:
                text, seconds = timed(lambda sequence=sequence: sequence.attention(*inputs))
                if text != "no error":
                    return (batch, layer), text, seconds
    return (4, 0), "no error", 0.0


def load_ahead(rank, sp):
    """Loader threads can be ahead by different numbers of batches: that is not an error."""
    ready, sequences, texts = queue.Queue(maxsize=1 + 2 * rank), [sp.sequence(32) for _ in range(2)], []

    def load():
        for batch in range(6):
            sequences[batch % 2].shard(torch.arange(32) + batch, 0)
            ready.put(sequences[batch % 2])

    thread = threading.Thread(target=load)
    thread.start()
    for batch in range(6):
        sequence = ready.get()
        sequence.shard(torch.arange(32) * (batch + 2), 0)  # labels, sharded in this thread
        texts += [error_of(lambda sequence=sequence: sequence.attention(*qkv())) for _ in range(2)]
    thread.join()
    return (6, 0), "; ".join(sorted(set(texts))), 0.0


def differ_in_order(rank, sp):
    sequence, inputs = sp.sequence(32), [x.requires_grad_() for x in qkv()]
    outs = [sequence.attention(*inputs) for _ in range(2)]
    return (0, 0), *timed(outs[rank].square().sum().backward)


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
def test_the_first_differing_call_raises_whatever_a_rank_skips(backend, monkeypatch):
    """Even if shapes, documents and the number of sequences agree: batches differ in their token ids."""
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)

    def on_rank(rank):
        results = []
        for scenario in (
            lambda sp: skip_batches(rank, sp, reused=False, layers=1, skipped={(1, 1)}),
            lambda sp: skip_batches(rank, sp, reused=True, layers=1, skipped={(1, 1)}),
            lambda sp: skip_batches(rank, sp, reused=True, layers=3, skipped={(1, 1, 1)}),
            lambda sp: differ_in_order(rank, sp),
            lambda sp: skip_batches(rank, sp, reused=True, layers=2, skipped={(0, 3), (1, 3)}),
            lambda sp: load_ahead(rank, sp),
        ):
            results.append(scenario(startrail.SequenceParallel("1x2", timeout=30)))
            dist.barrier()
        return results

    for rank, (batch, reused, layer, order, correct, ahead) in enumerate(run_local(on_rank, 2, deadline=90)):
        assert [first[0] for first in (batch, reused, layer)] == ([(2, 0)] * 3 if rank else [(1, 0), (1, 0), (1, 2)])
        for _, text, seconds in (batch, reused, layer):
            assert "they were given different data: all must shard the same batches" in text, text
            assert text.startswith("ValueError: ranks disagree about one attention call") and seconds < 10
        assert order[1].count("backward of call 0.") == 2 and order[2] < 10, order
        assert correct[1] == ahead[1] == "no error", "correct ranks raise nothing"


class BrokenError(Exception):
    pass


def test_an_error_on_one_rank_ends_the_call_on_all_ranks_and_the_next_call_works():
    """First in the forward pass, then in the backward pass, when all calls are known."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2", timeout=30)
        sp._session.runner_on(torch.device("cpu"))
        dist.barrier()  # all ranks are connected: a rank that still connects would report that instead
        texts = []
        for pass_ in ("forward", "backward"):
            kernel = type(startrail.kernels.kernel_for(torch.device("cpu"), torch.float32, 16))
            method = getattr(kernel, pass_)

            def fail(self, *arguments, method=method, **options):
                if rank == 2:
                    raise BrokenError("out of memory")
                return method(self, *arguments, **options)

            setattr(kernel, pass_, fail)
            try:
                texts.append(timed(lambda: is_exact(sp)))
            except BrokenError:
                texts.append(("Broken", 0.0))
            setattr(kernel, pass_, method)
            texts.append(is_exact(sp))
        return texts

    for rank, (forward, exact, backward, exact_again) in enumerate(run_local(on_rank, 4, deadline=90)):
        assert exact and exact_again
        for (text, seconds), pass_ in ((forward, "forward"), (backward, "backward")):
            if rank == 2:
                assert text == "Broken"
            else:
                assert text.startswith("PeerError: rank"), text
                assert "rank 2 raised BrokenError: out of memory" in text or f"{pass_} step" in text, text
                assert seconds < 15


def test_an_instance_works_after_one_rank_is_late_for_the_first_call():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        if rank:
            time.sleep(3)
        texts = [error_of(lambda: is_exact(sp))]
        while texts[-1] != "no error" and len(texts) < 8:
            texts.append(error_of(lambda: is_exact(sp)))
        return texts, is_exact(sp)

    (first, exact), (late, late_exact) = run_local(on_rank, 2, deadline=60)
    assert first[0].startswith("PeerError: rank 1 did not start attention call 1 (forward: "), first
    assert first[1:] == late == ["no error"], "the late rank joins the second attempt"
    assert exact and late_exact


def test_a_new_instance_on_one_rank_only_raises():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=40)
        assert is_exact(sp)
        error_of(lambda: sp.sequence(32).attention(*qkv(dim=300)))
        if rank:
            sp = startrail.SequenceParallel("1x2", timeout=40)
        return timed(lambda: is_exact(sp))

    for text, seconds in run_local(on_rank, 2, deadline=60):
        assert text.startswith("ValueError: rank ") and "of number 1 of their SequenceParallels" in text, text
        assert "make a new SequenceParallel on all of these ranks, or on none" in text
        assert seconds < 12


@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_dead_peer_raises_peer_error(when):
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=3)
        if when == "after it":
            is_exact(sp)
            dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [error_of(lambda: is_exact(sp)) for _ in range(2)]

    for rank, texts in enumerate(run_local(on_rank, 3, deadline=60, expendable=frozenset({1}))):
        for text in texts if rank != 1 else ():
            assert text.startswith("PeerError: "), text
        if rank != 1:
            assert "rank 1 did not start" in texts[1]


def test_a_dead_peer_raises_peer_error_in_every_collective():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=3)
        sequence, model = sp.sequence(24), torch.nn.Linear(2, 2)
        sequence.attention(*qkv(8))
        local = torch.ones(8, requires_grad=True)
        whole, rolled = sequence.unshard(local, 0).sum(), sequence.roll(local, -1, 0).sum()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(8)
        return [
            timed(function)
            for function in (
                lambda: sequence.unshard(x, 0),
                lambda: sequence.roll(x, -1, 0),
                whole.backward,
                rolled.backward,
                lambda: sequence._max_over_ranks(torch.zeros(1, 4)),
                lambda: gather_texts("here"),
                lambda: check_same_parameters(model.named_parameters()),
                lambda: startrail.global_mean(x.sum(), 8),
                lambda: startrail.sum_gradients(model.parameters(), check=False),
            )
        ]

    for rank, errors in enumerate(run_local(on_rank, 3, deadline=60, expendable=frozenset({1}), timeout=3)):
        wanted = ["rank 1 did not start unshard 4 (unshard of", "rank 1 did not start roll 1 (roll of"]
        for what in ("tokens", "tokens", "logits", "texts", "parameters", "mean", "gradients"):
            wanted.append(f"{what}: a rank is gone or late: ")
        for (text, seconds), part in zip(errors or (), wanted, strict=rank != 1):
            assert text.startswith("PeerError: ") and part in text, text
            assert seconds < 10


def test_a_rank_that_does_not_reconnect_is_reported_within_the_timeout():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        is_exact(sp)
        error_of(lambda: sp.sequence(32).attention(*qkv(dim=300)))  # on all ranks, which closes their lanes
        if rank:
            time.sleep(12)
            return None
        return timed(lambda: sp._session.runner_on(torch.device("cpu")))

    text, seconds = run_local(on_rank, 2, deadline=60, expendable=frozenset({1}))[0]
    assert text.startswith("PeerError: global rank 0: no connection to ranks [0, 1] within 0:00:02"), text
    assert seconds < 11


STORE_HOST = """
    import os, signal, sys, time
    import torch, torch.distributed as dist, startrail
    from startrail.agreement.timing import TIMING
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, how = dist.get_rank(), sys.argv[1]
    TIMING.store_answer, TIMING.explanation = 0.5, 1.0
    TIMING.slow_wait, TIMING.thread_join, TIMING.last_join, TIMING.abort = 0.4, 0.5, 2.0, 2.0
    sp = startrail.SequenceParallel("1x2", timeout=3)
    x = torch.randn(1, 2, 8, 8)
    while True:
        try:
            sp.sequence(16).attention(x, x, x)
            break
        except startrail.PeerError:  # on a busy machine, one starts later than the other waits
            pass
    dist.barrier()
    if rank == 0:
        print("pid", os.getpid(), flush=True)
        time.sleep(300)
    time.sleep(1)
    start = time.monotonic()
    try:
        sp.sequence(16).attention(x, x, x, causal=True)  # a new kind of call, so it is compared
    except startrail.PeerError as error:
        print(f"PeerError after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_store_host_that_dies_or_hangs_raises_peer_error_without_an_abort(tmp_path, how):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(STORE_HOST))
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    env["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        line = next(line for line in ranks[0].stdout if line.startswith("pid"))
        os.kill(int(line.split()[1]), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        text, _ = ranks[1].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "PeerError after" in text, text
    assert ranks[1].returncode == 0, text
    assert "terminate called" not in text


def test_long_waits_log_what_they_wait_for():
    def on_rank(rank):
        import logging

        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        sp = startrail.SequenceParallel("1x2", timeout=30)
        is_exact(sp)
        dist.barrier()
        logging.getLogger("startrail").addHandler(handler)
        if rank:
            time.sleep(2)
        is_exact(sp)
        return lines

    waiting, _ = run_local(on_rank, 2, deadline=60)
    what = r"rank 0 still waits after \d+ seconds: forward step \d, receiving kv1 from rank 1 \(global rank 1\)"
    assert sum(re.match(what, line) is not None for line in waiting) == 1, waiting  # others if the machine is busy


def test_many_kinds_of_calls_leak_nothing():
    """A short soak; `python -m tests.soak` runs 20,000 calls."""
    from tests.soak import PLANS, WORLD, grown, soak

    for before, after in run_local(lambda rank: soak(calls=40 * len(PLANS), warm=20 * len(PLANS)), WORLD, deadline=120):
        assert not grown(before, after), (before, after)


def test_errors_in_a_loader_thread_are_raised_there():
    sp = startrail.SequenceParallel("1x1")
    texts = []
    with sp._session.call():
        thread = threading.Thread(target=lambda: texts.append(error_of(lambda: sp.sequence(0))))
        thread.start()
        thread.join()
    assert texts == ["ValueError: length=0 must be a whole number of tokens, length >= 1"]

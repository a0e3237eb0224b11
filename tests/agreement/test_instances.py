"""Which instances of ``SequenceParallel`` belong together, however many each rank makes; processes that are no rank."""

import os
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.agreement import ledger as ledgers
from startrail.agreement.ledger import CallLedger, CallRecord, Entry
from startrail.engine import op_key
from startrail.engine.batch import Boundaries
from startrail.launch.local import run_local
from tests.helpers import dense, error_of, qkv, tensors, worst


def is_exact(sp, length=24):
    """True if a forward and a backward pass give the right results."""
    q, k, v, dout = tensors(length, heads=6, kv_heads=3)
    truth = dense(q, k, v, dout, is_causal=True)
    sequence = sp.sequence(length)
    inputs = [sequence.shard(x, 2).requires_grad_() for x in (q, k, v)]
    out = sequence.attention(*inputs, causal=True)
    grads = torch.autograd.grad(out, inputs, sequence.shard(dout, 2))
    return worst([out, *grads], [sequence.shard(x, 2) for x in truth]) < 2e-6


def use_instances(rank, seed):
    """Make instances and call them in the same order as the other ranks, but make others in between, some of which are
    called as well: a mistake of this rank alone, or of all ranks. What each right call gave."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    extra, used, results = [], [], []
    for _ in range(6):
        for _ in range(own.choice([0, 0, 1, 3])):
            extra.append(startrail.SequenceParallel(own.choice(["1x3", "u3"]), timeout=20))
            extra[-1].explain(48, heads=3)
        if own.random() < 0.3:
            extra.clear()
        if len(used) < 3 and shared.random() < 0.6:
            used.append(startrail.SequenceParallel(shared.choice(["1x3", "u3"]), timeout=20))
        if used and shared.random() < 0.2:
            del used[0]
        mistake, odd = shared.random(), shared.randrange(3)
        if mistake < 0.3:  # in the first call of an instance that all ranks, or two different ones, have made
            wrong = startrail.SequenceParallel("1x3" if mistake < 0.15 or rank == odd else "u3", timeout=20)
            error_of(lambda: wrong.sequence(48).attention(*qkv(16, 3, 3, 8 if mistake > 0.15 else 300)))  # noqa: B023
        for sp in used:
            results.append(error_of(lambda: results.append(is_exact(sp, 48))))  # noqa: B023
    return results


def test_ranks_may_make_different_numbers_of_instances():
    """They belong together in the order in which all ranks first agree on a call of theirs."""
    for seed in range(4):
        for results in run_local(lambda rank, seed=seed: use_instances(rank, seed), 3, deadline=120):
            assert results and set(results) <= {True, "no error"}, (seed, results)


def test_an_instance_that_one_rank_called_in_vain_does_no_harm():
    def on_rank(rank):
        kept = startrail.SequenceParallel("1x2", timeout=20)
        assert is_exact(kept)
        texts = []
        if rank == 0:
            alone = startrail.SequenceParallel("1x2", timeout=1)
            texts.append(error_of(lambda: is_exact(alone)))
        dist.barrier()
        new = startrail.SequenceParallel("1x2", timeout=20)
        return texts, [error_of(lambda sp=sp: is_exact(sp)) for sp in (kept, new, kept, new)]

    (alone, ours), (_, theirs) = run_local(on_rank, 2, deadline=60)
    assert alone[0].startswith("PeerError: rank 1 did not start attention call 1"), alone
    assert ours == theirs == ["no error"] * 4


@pytest.mark.parametrize("world", [4096, 65_536])
def test_a_call_of_many_ranks_is_complete_and_matches_only_if_all_agree(world, monkeypatch):
    """All ranks on one store, one after the other. Every bit of the sum of their digests has to fit."""
    store = dist.HashStore()
    monkeypatch.setattr(ledgers, "default_store", lambda: store)
    ledger = CallLedger("group", 0, world, timedelta(seconds=1))
    monkeypatch.setattr(ledgers, "_digest", {"largest": 2**28 - 1, "other": 2**28 - 2, "small": 1}.__getitem__)
    monkeypatch.setattr(ledgers.json, "dumps", lambda entry: "")
    for call, odd in (("largest", None), ("largest", world - 1), ("largest", 7), ("small", None), ("small", 7)):
        key = f"{call} {odd}"
        for rank in range(world):
            assert not ledger.is_complete(key)
            ledger.rank = rank
            ledger.write(key, Entry("other" if rank == odd else call, [], False), compared=False)
            ledger._entries.clear()
        assert ledger.is_complete(key)
        assert ledger.matches(key, call) == (odd is None)
        assert not ledger.matches(key, "other")


def test_digests_of_records_have_28_bits():
    digests = [ledgers._digest(CallRecord(f"call {number}")) for number in range(1000)]
    assert max(digests) < 2**28 and len(set(digests)) == 1000


def test_loader_threads_may_make_sequences_of_different_boundaries_in_different_orders():
    """Numbers tell apart sequences of equal boundaries only: 3,000 kinds, of which some would share one of 4,096
    counters."""

    def on_rank(rank):
        sp, kinds = startrail.SequenceParallel("1x2", timeout=20), [(0, 1 + i, 4096) for i in range(3000)]
        order = list(range(len(kinds)))
        random.Random(rank).shuffle(order)
        numbers = {}
        thread = threading.Thread(
            target=lambda: numbers.update({i: sp._session.make_sequence(Boundaries(kinds[i])).op_key[0] for i in order})
        )
        thread.start()
        thread.join()
        return [int(numbers[i]) for i in range(len(kinds))]

    first, second = run_local(on_rank, 2, deadline=60)
    assert first == second == [1] * 3000


def test_numbers_of_sequences_do_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(op_key, "REMEMBERED", 8)
    numbers = op_key.SequenceNumbers()
    for length in range(1, 100):
        assert numbers.next(Boundaries((0, length))) == 1
        assert numbers.next(Boundaries((0, 1000))) == length
    assert len(numbers._made) == 8


def test_a_forked_process_cannot_make_calls_and_does_not_harm_its_rank():
    """A data loader's worker may make sequences and shard, but no calls. When it ends, its rank goes on."""

    def in_child(sp):
        sequence = sp.sequence(32)
        sharded = sequence.shard(torch.arange(32), 0).tolist()
        calls = [
            lambda: sequence.attention(*qkv()),
            lambda: sequence.unshard(torch.ones(16), 0),
            lambda: sp.sequence(0),
            lambda: sequence.shard(torch.arange(31), 0),
            lambda: startrail.global_mean(torch.ones(()), 1),
            sp.check,
            sp.close,
        ]
        return [sharded, *(error_of(call) for call in calls)]

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        before = is_exact(sp)
        startrail.global_mean(torch.ones(()), 1)
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writing, repr(in_child(sp)).encode())
                del sp
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            sharded, *texts = eval(pipe.read())
        os.wait()
        return before, texts, is_exact(sp), startrail.global_mean(torch.ones(()), 1).item(), len(sharded)

    for before, texts, after, mean, local in run_local(on_rank, 2, deadline=60):
        attend, unshard, empty, shard, mean_, check, close = texts
        assert before and after and (mean, local) == (1.0, 16)
        for text in (attend, unshard, mean_, check):
            assert text.startswith("ValueError: process ") and "was forked from process" in text, text
        assert empty == "ValueError: length=0 must be a whole number of tokens, length >= 1"
        assert shard.startswith("ValueError: a tensor of shape (31,)")
        assert close == "no error"

"""Ranks with different data, different arguments of a collective, or different collectives raise, and none crashes."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import startrail
from startrail._compat import default_store
from startrail.agreement.consensus import Consensus
from startrail.agreement.gather import gather_texts, gather_values
from startrail.agreement.waits import Meeting, PublishedWait, read_wait
from startrail.engine import op_key
from startrail.launch.local import run_local
from startrail.transport import process_groups as groups
from startrail.transport import torch_collectives
from startrail.transport.gloo import Gloo
from startrail.transport.interface import Compare
from tests import like_nccl
from tests.helpers import error_of, qkv

DIFFERENT_DATA = "they were given different data: all must shard the same batches"


def first_error(rank, sp, shard, skipped, reused=False):
    """The batch at which a rank that skips some finds out, and how; ``shard`` prepares a batch."""
    shared = sp.sequence(32)
    for batch in range(4):
        if (rank, batch) not in skipped:  # a skipped batch makes no sequence either
            sequence = shared if reused else sp.sequence(32)
            shard(sequence, batch)
            text = error_of(lambda sequence=sequence: sequence.attention(*qkv()))
            if text != "no error":
                return batch, text
    return None, "no error"


def shard_floats(sequence, batch):
    """Patches of an image, as a DiT has them: no ids, and not contiguous."""
    data = torch.randn(32, 1, 4, generator=torch.Generator().manual_seed(batch))
    sequence.shard(data.transpose(0, 1), 1)


def shard_positions_first(sequence, batch):
    sequence.shard(torch.arange(32), 0)
    sequence.shard((torch.arange(32) * 7 + batch) % 32, 0)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
def test_a_skipped_batch_raises_whatever_is_sharded(backend, on_host, monkeypatch):
    """``on_host=False``: as if the data were on a GPU, where no host reads its digest before ranks disagree."""
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    monkeypatch.setattr(op_key, "is_on_host", lambda x: on_host)

    def on_rank(rank):
        results = []
        for shard in (shard_floats, shard_positions_first):
            for reused in (False, True):
                sp = startrail.SequenceParallel("1x2", timeout=30)
                results.append(first_error(rank, sp, shard, {(1, 1)}, reused))
                dist.barrier()
        results.append(first_error(rank, startrail.SequenceParallel("1x2", timeout=30), shard_floats, {(0, 2), (1, 2)}))
        return results

    for rank, (*skipped, correct) in enumerate(run_local(on_rank, 2, deadline=90)):
        for batch, text in skipped:
            assert batch == 1 + rank and text.startswith("ValueError: ranks disagree") and DIFFERENT_DATA in text, text
        assert correct == (None, "no error")


def test_digests_on_a_device_are_not_read_by_the_host(monkeypatch):
    """On a GPU, reading one would wait for the device."""
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(op_key, "is_on_host", lambda x: False)

    def on_rank(rank):
        sp, digests = startrail.SequenceParallel("1x2", timeout=30), []

        class Unread(torch.Tensor):
            def __int__(self):
                raise AssertionError("the host has read a digest")

            item = __index__ = __int__  # the result of a comparison is read by tolist, when it is there

        quick_digest = op_key.quick_digest
        op_key.quick_digest = lambda x: digests.append(quick_digest(x).as_subclass(Unread)) or digests[-1]
        return [first_error(rank, sp, shard_positions_first, set()), len(digests)]

    assert run_local(on_rank, 2, deadline=60) == [[(None, "no error"), 8]] * 2


def load(rank, sp, wrong, fresh):
    """A loader's thread that is further ahead on rank 1, and shards positions first; rank 1 gets a ``wrong`` batch."""
    ready, texts, shared = queue.Queue(maxsize=1 + 3 * rank), [], sp.sequence(32)

    def run():
        for batch in range(5):
            sequence = sp.sequence(32) if fresh else shared
            shard_positions_first(sequence, 9 if (rank, batch) == (1, wrong) else batch)
            ready.put(sequence)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        sequence = ready.get()
        texts += [error_of(lambda sequence=sequence: sequence.attention(*qkv())) for _ in range(2)]
    thread.join()
    return texts


def test_loader_threads_count_all_tensors_of_a_batch_and_may_be_ahead():
    def on_rank(rank):
        results = []
        for wrong, fresh in ((None, True), (None, False), (2, True)):
            results.append(load(rank, startrail.SequenceParallel("1x2", timeout=30), wrong, fresh))
            dist.barrier()
        return results

    for fresh, reused, wrong in run_local(on_rank, 2, deadline=60):
        assert fresh == reused == ["no error"] * 10
        assert wrong[:4] == ["no error"] * 4 and DIFFERENT_DATA in wrong[4], wrong
        assert wrong[6:] == ["no error"] * 4


@pytest.mark.parametrize("known", [False, True])
def test_ranks_that_disagree_about_a_collective_raise_on_all_ranks_and_go_on(known):
    """gloo would end the process. ``known``: each rank's call has been agreed on before."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2", timeout=30)
        sequence, odd, texts = sp.sequence(32), rank == 2, []
        x = torch.ones(2, 8, 3)
        calls = [
            (lambda: sequence.unshard(x, 1), lambda: sequence.unshard(torch.ones(2, 8, 4), 1)),
            (lambda: sequence.unshard(x, 1), lambda: sequence.unshard(x.double(), 1)),
            (lambda: sequence.unshard(x, 1), lambda: sequence.unshard(torch.ones(2, 7, 3), 1)),
            (lambda: sequence.roll(x, -1, 1), lambda: sequence.roll(x, 1, 1)),
            (lambda: sequence.roll(x, -1, 1), lambda: sequence.roll(torch.ones(1, 8, 3), -1, 1)),
            (lambda: sequence.unshard(x, 1), lambda: sequence.roll(x, -1, 1)),
            (lambda: sequence.unshard(x, 1), lambda: sequence.attention(*qkv(8))),
            (lambda: sequence.unshard(x, 1), lambda: sequence.unshard([1, 2], 1)),
        ]
        for usual, other in calls:
            if known:
                sequence.attention(*qkv(8))
                error_of(usual)
                error_of(other)
            start = time.monotonic()
            texts.append((error_of(other if odd else usual), time.monotonic() - start))
            whole = sequence.unshard(torch.full((8,), float(rank)), 0)
            assert sorted(whole.tolist()) == sorted(8 * [0.0, 1.0, 2.0, 3.0]), "all ranks can go on"
        return texts

    parts = [
        "(2, 8, 4) float32",
        "float64",
        "(2, 7, 3)",
        "shift=1",
        "(1, 8, 3)",
        "rank 2: roll",
        "rank 2: forward",
        "list",
    ]
    for texts in run_local(on_rank, 4, deadline=90):
        for (text, seconds), part in zip(texts, parts, strict=True):
            assert text.startswith("ValueError: ranks disagree about one ") and part in text, text
            assert "; rank" in text and "rank 2: " in text and seconds < 10


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("late", [1, 3])
def test_a_rank_that_is_late_raises_in_the_same_calls_as_the_others(known, late):
    """They disagree without it, go on, and disagree again. ``known``: all ranks have made a call before."""

    def on_rank(rank):
        sp, store, texts = startrail.SequenceParallel("1x3", timeout=30), default_store(), []
        sequence = sp.sequence(24)
        if known:
            sequence.attention(*qkv(8))
        if rank == 2:
            store.wait([f"{late} calls"])
        for call in (1, 2, 3, 4):
            x = torch.ones(8, call, dtype=torch.float64 if rank == 1 else torch.float32)
            texts.append(error_of(lambda x=x: sequence.unshard(x, 0)))
            if rank == 0:
                store.set(f"{call} calls", "1")
        return texts, error_of(lambda: sequence.attention(*qkv(8)))

    for texts, after in run_local(on_rank, 3, deadline=60):
        for call, text in enumerate(texts, 1):
            assert text.startswith("ValueError: ranks disagree") and f"unshard of (8, {call}) float32" in text, texts
        assert after == "no error"


def test_ranks_that_disagree_about_losses_or_gradients_raise_on_all_ranks():
    def on_rank(rank):
        torch.manual_seed(0)

        def model(*widths):
            return nn.Sequential(*(nn.Linear(2, width) for width in widths))

        def sum_gradients(*widths, dtype=torch.float32, **options):
            startrail.sum_gradients(model(*widths).to(dtype).parameters(), **options)

        frozen = model(2, 2)
        frozen[0].bias.requires_grad_(rank != 1)
        one, pair = torch.ones(()), torch.ones(2)
        return [
            error_of(lambda: sum_gradients(*(2, 2, 2)[: 3 - (rank == 1)], check=False)),
            error_of(lambda: sum_gradients(2, 3 if rank == 1 else 2)),
            error_of(lambda: sum_gradients(2, dtype=torch.float64 if rank == 1 else torch.float32)),
            error_of(lambda: startrail.sum_gradients(frozen.parameters(), check=False)),
            error_of(lambda: startrail.global_mean(pair if rank == 1 else one, 1)),
            error_of(lambda: startrail.global_mean(one, 1) if rank == 1 else sum_gradients(2)),
            error_of(lambda: startrail.global_mean(pair, 1)),
            error_of(lambda: startrail.global_mean(torch.tensor(6.0), 1)),
        ]

    for count, shape, dtype, frozen, loss, call, not_one, right in run_local(on_rank, 3, deadline=60):
        start = "ValueError: ranks disagree about "
        assert count == f"{start}sum_gradients: ranks 0, 2: 5 of 6 is (2, 2) torch.float32; rank 1: 4 in all"
        assert shape.startswith(f"{start}sum_gradients: ranks 0, 2: 3 of 4 is (2, 2)") and "3 of 4 is (3, 2)" in shape
        assert (
            "rank 1: 1 of 2 is (2, 2) torch.float64" in dtype
            and "rank 1: 2 of 4 is (2,) torch.float32 frozen" in frozen
        )
        assert (
            loss == f"{start}global_mean: ranks 0, 2: 1 of 1 is a loss () torch.float32; rank 1: "
            "1 of 1 is a loss (2,) torch.float32"
        )
        assert call == f"{start}one call: ranks 0, 2: sum_gradients; rank 1: global_mean"
        assert not_one.startswith("ValueError: loss_sum must be one number") and right == "no error"


def test_a_timeout_says_what_every_rank_waits_for():
    """A collective that one rank skips, and two instances that ranks call in different orders."""

    def on_rank(rank):
        first, second = (startrail.SequenceParallel("1x3", timeout=2) for _ in range(2))
        a, b, x = first.sequence(24), second.sequence(24), torch.ones(8)
        for sequence in (a, b):
            sequence.attention(*qkv(8))
        dist.barrier()
        if rank == 1:  # skips unshard, and waits for the others elsewhere
            skipped = error_of(lambda: gather_texts("here"))
            default_store().set("rank 1 has timed out", "1")
        else:
            skipped = error_of(lambda: a.unshard(x, 0))
            default_store().wait(["rank 1 has timed out"])
        order = error_of(lambda: (b if rank == 1 else a).attention(*qkv(8)))
        return skipped, order

    for rank, (skipped, order) in enumerate(run_local(on_rank, 3, deadline=60, timeout=6)):
        assert skipped.startswith("PeerError: ") and order.startswith("PeerError: "), (skipped, order)
        if rank == 1:
            assert "gathering texts: a rank is gone or late" in skipped
            assert "ranks 0, 2: no longer waiting in unshard 2 (unshard of (8,) float32 cpu, dim=0" in skipped
            assert "ranks 0, 2: " in order and "waiting in attention call 1 (forward" in order, order
        else:
            assert "rank 1 did not start unshard 2 (" in skipped and "rank 1: waiting in gathering texts" in skipped
            assert "rank 1: " in order and "waiting in attention call 2 (forward" in order, order


def test_compiled_collectives_also_agree():
    """If the graph ran the collective without comparing, gloo would end the process. Results and gradients are those
    of eager mode."""

    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x2", timeout=30).sequence(16, (0, 9, 16))
        x, odd = torch.randn(2, 8, 3, requires_grad=True), torch.ones(2, 8, 3 + rank)
        same, texts = [], []
        for move in (lambda x: sequence.unshard(x, 1), lambda x: sequence.roll(x, -1, 1)):
            compiled = torch.compile(move, backend="aot_eager")
            outs = compiled(x), move(x)
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
            same += [torch.equal(*outs), torch.equal(*grads)]
            texts.append(error_of(lambda: compiled(odd)))  # noqa: B023
            same.append(torch.equal(compiled(x), outs[1]))
        return same, texts

    for same, texts in run_local(on_rank, 2, deadline=120):
        assert same == [True] * 6, same
        for text, name in zip(texts, ("unshard", "roll"), strict=True):
            assert text.startswith(f"ValueError: ranks disagree about one {name}"), text
            assert "(2, 8, 3) float32" in text and "(2, 8, 4) float32" in text, text


@pytest.mark.parametrize("known", [False, True])
def test_ranks_that_wait_for_all_others_in_different_calls_raise(known):
    """Long before the timeout: each waits for ranks that wait for it. ``known``: all calls were made before, so they
    are not compared through the store."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=60)
        sequence, x = sp.sequence(24), torch.ones(8)
        for _ in range(1 + known):
            sequence.attention(*qkv(8))
            sequence.unshard(x, 0)
            startrail.global_mean(x.sum(), 8) if known else None
        start = time.monotonic()
        text = error_of(lambda: startrail.global_mean(x.sum(), 8) if rank == 1 else sequence.unshard(x, 0))
        seconds = time.monotonic() - start
        after = [error_of(lambda: sequence.unshard(x, 0)), error_of(lambda: startrail.global_mean(x.sum(), 8))]
        return text, seconds, after

    results = run_local(on_rank, 3, deadline=100, timeout=60)
    assert any(text.startswith("ValueError: rank ") for text, _, _ in results), results
    for text, seconds, after in results:
        assert " waits for all ranks at global_mean 0." in text or " at global_mean 0." in text, text
        assert "unshard 0." in text and " of number 1 of their SequenceParallels" in text, text
        assert seconds < 20 and after == ["no error"] * 2, after


def test_a_rank_that_went_on_to_another_call_is_not_what_one_waits_for():
    """It has been where the other one still waits, for messages that are on their way."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=30)
        sp.sequence(16).attention(*qkv(8))
        consensus, found = sp._session.consensus, []
        ledger, current = consensus.ledger, consensus.current
        consensus.current = current._replace(number=current.number + 1)  # about which no rank has written
        for latest in (current.number + 1, current.number):
            if rank == 1:
                started = {ledger.name: (current.epoch, latest)}
                meeting = Meeting("elsewhere", ledger.ranks, 1, "another", 0, 1, started)
                PublishedWait("another call", meeting=meeting).publish()
            dist.barrier()
            found.append(consensus._meeting_elsewhere(ledger, "here"))
            dist.barrier()
        return found

    (passed, missing), _ = run_local(on_rank, 2, deadline=60)
    assert passed is None and missing.place == "elsewhere"


def test_ranks_that_exchange_no_messages_also_detect_a_mismatch():
    """Whichever rank differs, at whichever level: packed documents may need no message between some ranks."""

    def compared(rank, plan):
        sp = startrail.SequenceParallel(plan, timeout=30)
        sp.sequence(32).attention(*qkv(8))
        transport = sp._session.runner_on(torch.device("cpu")).transport

        def compare(odd):
            transport.tag = 7 + (rank == odd)
            transport._compare(Compare.BEFORE)

        return [error_of(lambda: compare(odd)) for odd in (*range(4), None)]  # noqa: B023

    for by_plan in run_local(lambda rank: [compared(rank, plan) for plan in ("u2/1x2", "u2/u2")], 4, deadline=60):
        for *different, same in by_plan:
            assert all(text.startswith("ValueError: ranks disagree about attention call 1") for text in different)
            assert same == "no error"


@pytest.mark.parametrize("layout", ["zones", "zigzag", "contiguous"])
def test_collectives_with_gradients_on_some_ranks_only_raise_on_all(layout):
    """The others would wait for these ranks in the backward pass. With gradients everywhere, all ranks take part in
    it, also those whose tokens need nothing from others."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", layout=layout, timeout=20)
        sequence = sp.sequence(16, (0, 9, 16))
        errors, gradients = [], []

        def attend(x):
            q, k, v = x.expand(3, 1, 1, 4, -1).mT
            return sequence.attention(q, k, v, causal=True).mT

        def refused(move):
            x = torch.randn(sequence.local, requires_grad=rank == 0)
            errors.append(error_of(lambda: move(x)))

        for move in (lambda x: sequence.unshard(x, 0), lambda x: sequence.roll(x, -1, 0), attend):
            before = sp.traffic()
            refused(move)
            assert sp.traffic() == before, "nothing is sent before the ranks agree"
            dist.barrier()
            x = torch.randn(sequence.local, requires_grad=True)
            out = move(x)
            gradients.append(torch.autograd.grad(out, x, torch.ones_like(out))[0])
        with torch.no_grad():
            attend(torch.randn(sequence.local))  # all ranks know both kinds of calls now
        assert sp.traffic()["level 0"]["hops"], "what is right is sent"
        refused(attend)
        dist.barrier()
        return errors, [tuple(gradient.shape) for gradient in gradients], sequence.local

    for errors, shapes, local in run_local(on_rank, 2):
        for text in errors:
            assert text.startswith("ValueError: ranks disagree about one"), text
            assert "(only some need gradients, but all must take part in the backward pass" in text, text
            assert text.count("with gradients") == 1, text
        assert len(errors) == 4 and shapes == [(local,)] * 3


def test_what_one_rank_alone_gets_wrong_is_refused_on_all():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=30)
        sequence, odd = sp.sequence(32), rank == 1
        q, k, v = qkv()

        def attend(x):
            return sequence.attention(x, k, v)

        texts = [
            error_of(lambda: sequence.attention(q, k, v, window=0 if odd else 4)),
            error_of(lambda: sequence.attention(q, k, v, chunk=-1 if odd else 4)),
            error_of(lambda: sp.sequence(32, blocks=[(3, 1)] if odd else None).attention(q, k, v)),
        ]
        sequence.attention(q, k, v)
        texts.append(error_of(lambda: sequence.attention(q, k, v, window=0 if odd else None)))
        texts.append(error_of(lambda: torch.func.jvp(attend, (q,), (q,)) if odd else attend(q)))
        return texts, error_of(lambda: sequence.attention(q, k, v))

    for (window, chunk, blocks, later, dual), after in run_local(on_rank, 2, deadline=60):
        for text in (window, later):
            assert text == "ValueError: rank 1: window=0 must be at least 1 (with 1, each token sees only itself)"
        assert chunk == "ValueError: rank 1: chunk=-1 must be at least 1 token"
        assert blocks.startswith("ValueError: rank 1: blocks must be runs")
        assert dual.startswith("ValueError: rank 1: attention has no forward-mode derivative")
        assert after == "no error"


def test_ranks_that_wait_for_one_whose_shard_raised_say_so():
    """``shard`` sends nothing, so it raises on its own rank, which may try again. If it skips its call, the error of
    the others names it and the cause; the next call works."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=1)
        inputs, texts = qkv(8), []
        for shard in ("shard", "shard_labels"):  # in a new kind of call, and in a known one
            sequence = sp.sequence(16)
            odd = error_of(lambda s=sequence, n=shard: getattr(s, n)(torch.arange(16 - rank).unsqueeze(0), dim=1))
            texts.append(odd if rank else error_of(lambda s=sequence: s.attention(*inputs)))
            dist.barrier()
            sequence = sp.sequence(16)
            texts += [error_of(lambda s=sequence: s.attention(*inputs)) for _ in range(2)]
            noted = read_wait(1)
        return *texts, noted

    ranks = run_local(on_rank, 2, deadline=60)
    wrong = "a tensor of shape (1, 15) has 15 tokens in dimension 1, but the sequence has 16"
    labels = f"{wrong}: pass the labels of all tokens, neither shifted nor split"
    assert [ranks[1][0], ranks[1][3]] == [f"ValueError: {wrong}", f"ValueError: {labels}"]
    assert ranks[0][0].startswith("PeerError: rank 1 did not start attention call 1"), ranks[0][0]
    assert ranks[0][0].endswith(f"(rank 1: raised in shard: {wrong})"), ranks[0][0]
    assert f" (rank 1: raised in shard_labels: {labels}): " in ranks[0][3], ranks[0][3]
    for texts in ranks:
        assert {*texts[1:3], *texts[4:6]} == {"no error"}
        assert texts[-1] == ("", None), "the next call withdraws the note"


def test_a_known_collective_on_a_gpu_is_not_compared_by_the_host(monkeypatch):
    """The comparison would wait for the device: only the first call of a kind is compared there."""

    def on_rank(rank):
        asked = []

        def counted(compare):
            return lambda *given: asked.append(given) or compare(*given)

        monkeypatch.setattr(Consensus, "compare", counted(Consensus.compare))
        monkeypatch.setattr(Gloo, "compare_call", counted(Gloo.compare_call))
        gpu = SimpleNamespace(type="cuda")
        for _ in range(3):
            torch_collectives.agree("sum_gradients", ["(2, 2)"], None, gpu)
        on_gpu = len(asked)
        for _ in range(3):
            torch_collectives.agree("sum_gradients", ["(2, 2)"], None, SimpleNamespace(type="cpu"))
        return on_gpu, len(asked) - on_gpu

    assert run_local(on_rank, 2, deadline=60) == [(1, 3)] * 2


OPTIONS = dict(sparse=False, windows=True, check_every_call=True)  # of an instance


def test_ranks_with_different_options_raise_on_all_ranks():
    """Each option is different on one rank. Their programs, layouts or collectives would differ as well: ranks would
    wait for each other, end each other's process, or be wrong without an error (sinks)."""

    def on_rank(rank):
        odd, texts = rank == 1, {}
        for name, other in OPTIONS.items():
            sp = startrail.SequenceParallel("u2/1x2", timeout=20, **({name: other} if odd else {}))
            x = torch.ones(1, 4, 16, 8)
            sequence = sp.sequence(64, [0, 20, 30, 64])
            texts[name] = error_of(lambda s=sequence, x=x: s.attention(x, x, x, window=3))
        sequence = startrail.SequenceParallel("u2/1x2", timeout=20).sequence(64)
        texts["sinks"] = error_of(lambda: sequence.attention(x, x, x, sinks=None if odd else torch.ones(4)))
        ids = torch.ones(16, dtype=torch.long)
        texts["fill_value"] = error_of(lambda: sequence.roll(ids, -1, 0, fill_value=0.5 if odd else 1))
        parameter = torch.nn.Parameter(torch.ones(2))
        texts["check"] = error_of(lambda: startrail.sum_gradients([parameter], check=not odd))
        parameter.grad = torch.full((2,), float(rank))
        startrail.sum_gradients([parameter])
        return texts, parameter.grad.tolist(), error_of(lambda: sequence.attention(x, x, x))

    for texts, total, last in run_local(on_rank, 4, deadline=60):
        for name, text in texts.items():
            assert text.startswith("ValueError: ranks disagree about ") and name in text, text
        assert total == [6.0, 6.0] and last == "no error"


def test_gathered_values_are_those_of_each_rank():
    def given(rank):
        tensors = dict(ids=torch.arange(3 * rank + 1), mask=torch.tensor([[True, False]] * rank), one=torch.tensor(1.5))
        return (dict(tensors, half=torch.ones(rank, 2, dtype=torch.bfloat16)), [rank, "text", None], {"deep": (-0.5,)})

    def on_rank(rank):
        wrong = []
        for owner, values in enumerate(gather_values(given(rank), None, torch.device("cpu"))):
            tensors, *others = values
            expected, *expected_others = given(owner)
            same = [x.dtype == tensors[name].dtype and x.equal(tensors[name]) for name, x in expected.items()]
            if not all(same) or others != expected_others:
                wrong.append((owner, values))
        return wrong, error_of(lambda: gather_values([object()], None, torch.device("cpu")))

    for wrong, text in run_local(on_rank, 3):
        assert wrong == []
        assert text == "ValueError: values of type object cannot be sent to the other ranks"

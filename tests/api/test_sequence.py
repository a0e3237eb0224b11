"""Layers share the work of one sequence, and ranks with different sequences raise."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail._compat import PrefixStore
from startrail.agreement.ledger import CallLedger
from startrail.compile.call import CompiledCall
from startrail.compile.problem import Split
from startrail.engine.batch import PREPARED_CALLS
from startrail.engine.session import RECENT_BATCHES
from startrail.geometry import blocks
from startrail.launch.local import run_local
from tests.helpers import dense, error_of, qkv, tensors, worst


@pytest.mark.parametrize("plan", ["2x2/u2", "u2/2x2", "1x8", "star2/u2"])
def test_layers_that_share_a_sequence_use_no_store_and_compute_each_tile_once(plan):
    def on_rank(rank):
        asked, tiles = [], []
        for name in ("write", "matches", "is_complete", "read", "read_failure", "newest_epoch"):
            original = getattr(CallLedger, name)

            def counted(self, *arguments, original=original, name=name, **options):
                asked.append(name)
                return original(self, *arguments, **options)

            setattr(CallLedger, name, counted)
        tiles_of = blocks.tiles_of

        def counted_tiles(*block):
            tiles.append(block)
            return tiles_of(*block)

        blocks.tiles_of = counted_tiles
        sp = startrail.SequenceParallel(plan)

        def step(sequence):
            """Two layers, forward and backward."""
            x = [y.requires_grad_() for y in qkv(sequence.local)]
            first = sequence.attention(*x, causal=True)
            sequence.attention(first, *x[1:], causal=True).square().sum().backward()

        counts = []
        for documents in (None, None, [0, 5, 128], [0, 5, 128], [0, 77, 128]):
            step(sp.sequence(128, documents))
            dist.barrier()
            counts.append((len(asked), len(tiles), len(set(tiles))))
            asked.clear()
            tiles.clear()
        return counts

    for first, again, packed, packed_again, others in run_local(on_rank, 8):
        assert first[0] > 0 and first[1] == first[2] > 0
        assert again == packed_again == (0, 0, 0), "the store is not used, and no tile computed"
        assert packed[0] == others[0] == 0, "new documents do not use the store either"
        assert packed[1] == packed[2] > 0 and others[1] == others[2] > 0, "each tile is computed once"


def test_batches_of_other_lengths_and_data_use_no_store():
    def on_rank(rank):
        requests = []
        for name in ("set", "add", "get", "check", "delete_key"):
            method = getattr(PrefixStore, name)

            def counted(self, *arguments, name=name, method=method):
                requests.append((name, *arguments))
                return method(self, *arguments)

            setattr(PrefixStore, name, counted)
        sp = startrail.SequenceParallel("u2/1x2")
        found = []
        for length, end in ((64, 64), (64, 3), (72, 9), (80, 80), (64, 64)):
            requests.clear()
            sequence = sp.sequence(length, [0, end, length])
            x = sequence.shard(torch.randn(1, 4, length, 8), 2).requires_grad_()
            for _ in range(2):
                sequence.attention(x, x, x).sum().backward()
            sequence.unshard(x, 2)
            found.append(list(requests))
        return found

    for first, *others in run_local(on_rank, 4):
        assert first
        assert others == [[]] * 4


def test_ranks_with_different_documents_raise_before_anything_is_sent():
    def on_rank(rank):
        sp = startrail.SequenceParallel("u2", timeout=30)
        sp.sequence(32).attention(*qkv(16))
        sp.reset_counters()
        text = error_of(lambda: sp.sequence(32, [0, 8 + rank, 32]).attention(*qkv(16)))
        return text, sp.traffic()

    for text, traffic in run_local(on_rank, 2, deadline=60):
        assert "rank 0: forward" in text and "documents (0, 8, 32)" in text and "documents (0, 9, 32)" in text
        assert traffic == {}


def test_sequences_of_several_lengths_are_used_in_turn():
    lengths = (40, 64, 17)
    data = {length: tensors(length) for length in lengths}
    truth = {length: dense(*data[length], is_causal=True) for length in lengths}

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/2x1")
        sequences = {length: sp.sequence(length) for length in lengths}
        outs, errors = {}, []
        for length in lengths:  # all forward passes, then all backward passes in another order
            inputs = [sequences[length].shard(x, 2).requires_grad_() for x in data[length][:3]]
            outs[length] = inputs, sequences[length].attention(*inputs, causal=True)
        for length in sorted(lengths):
            inputs, out = outs[length]
            grads = torch.autograd.grad(out, inputs, sequences[length].shard(data[length][3], 2))
            errors.append(worst([out, *grads], [sequences[length].shard(x, 2) for x in truth[length]]))
        return max(errors)

    assert max(run_local(on_rank, 4)) < 2e-6


def test_a_sequence_in_use_is_kept_when_one_rank_makes_many_others():
    def on_rank(rank):
        sp = startrail.SequenceParallel("u2", timeout=30)
        sequence = sp.sequence(32, [0, 7, 32])
        sequence.attention(*qkv(16))
        for length in range(40, 100) if rank == 0 else ():  # as a loader that reads ahead would
            sp.sequence(length)
        write, writes = CallLedger.write, []
        CallLedger.write = lambda self, *given, **options: (writes.append(given), write(self, *given, **options))
        sequence.attention(*qkv(16))
        sp.sequence(32, [0, 7, 32]).attention(*qkv(16))
        return len(writes)

    assert run_local(on_rank, 2, deadline=60) == [0, 0]


def test_the_simulator_decides_where_a_cluster_is_described(monkeypatch):
    """Ranks whose descriptions differ, and who might decide differently, raise."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("STARTRAIL_CLUSTER")
    length, window = 1024, 9
    data = tensors(length)
    visible = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    truth = dense(*data, attn_mask=visible)

    def on_rank(rank):
        found = []
        for cluster in (None, "lab", "pcie-8", "h200"):  # one level instead of two; no rates in float32
            sp = startrail.SequenceParallel("1x2/u2", cluster=cluster)
            sequence = sp.sequence(length)
            q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
            out = sequence.attention(q, k, v, causal=True, window=window)
            grads = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
            error = worst([out, *grads], [sequence.shard(x, 2) for x in truth])
            (route,) = sequence.compiled(q, k, v, causal=True, window=window).parts
            text = sp.explain(length, heads=4, head_dim=16, dtype=torch.float32, window=window)
            found.append((error, route.by_rule, text.splitlines()[-1]))
        other = startrail.SequenceParallel("1x2/u2", cluster="lab" if rank else None, timeout=30)
        problem = error_of(lambda: other.sequence(64).attention(*qkv(16), causal=True, window=window))
        return found, problem

    by_bytes = "1x2/u2 or direct: by bytes, outermost level first"
    for found, problem in run_local(on_rank, 4, deadline=60):
        errors, by_rule, texts = zip(*found, strict=True)
        assert max(errors) < 2e-6
        assert by_rule == (False, True, False, False)
        assert texts[0] == texts[2] == texts[3] == by_bytes and "as simulated on lab" in texts[1]
        assert "as simulated on lab" in problem and "rank 0" in problem


def test_documents_are_placed_by_the_described_cluster(monkeypatch):
    """Ranks whose descriptions differ, and who might place documents elsewhere, raise."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("STARTRAIL_CLUSTER")
    documents = (0, 3000, 5600, 8200, 9000)

    def on_rank(rank):
        texts, tokens = [], []
        for cluster in (None, "h100-8x8", "boxes-10gbe"):
            sp = startrail.SequenceParallel("1x2/1x2", cluster=cluster, sparse=False)
            texts.append(str(sp._session.settings.split))
            tokens.append(sp.sequence(9000, documents).local)
        other = startrail.SequenceParallel("1x2/1x2", cluster="lab" if rank else None, sparse=False, timeout=30)
        sequence = other.sequence(64, (0, 60, 64))
        return texts, tokens, error_of(lambda: sequence.attention(*qkv(sequence.local), causal=True))

    for (default, fast, slow), tokens, problem in run_local(on_rank, 4, deadline=60):
        assert "links" not in default and "links 4: " in fast and "links 2: " in slow
        assert all(2250 <= each < 2400 for each in tokens)
        assert "links" in problem and "rank 0" in problem


def test_roll_keeps_the_dtype_and_refuses_a_fill_value_that_it_does_not_hold():
    sequence = startrail.SequenceParallel("1x1").sequence(4)
    assert sequence.roll(torch.tensor([True, True, False, True]), -1, 0).tolist() == [True, False, True, False]
    ids = torch.arange(4, dtype=torch.int16)
    assert sequence.roll(ids, 1, 0, fill_value=7).dtype == torch.int16
    with pytest.raises(ValueError, match=r"fill_value=0.5 is not a value of torch.int16"):
        sequence.roll(ids, 1, 0, fill_value=0.5)


def test_a_sequence_that_is_used_again_keeps_few_of_many_masks():
    """Memory would grow with every new window, sink or scale."""
    sequence, q = startrail.SequenceParallel("1x1").sequence(512), qkv(512)
    counts = []
    for window in range(1, 401):
        sequence.attention(*q, causal=True, window=window)
        if window % 100 == 0:
            gc.collect()
            counts.append(sum(isinstance(each, CompiledCall) for each in gc.get_objects()))
    assert 0 < max(counts) <= PREPARED_CALLS + RECENT_BATCHES, counts


def test_other_threads_make_sequences_while_one_with_many_documents_is_laid_out(monkeypatch):
    """A million documents take a while, in which layers must be able to run."""
    begun, may_go = threading.Event(), threading.Event()
    layout_of = Split.layout_of

    def slow(split, boundaries):
        if boundaries.documents[-1] == 77:
            begun.set()
            assert may_go.wait(10)
        return layout_of(split, boundaries)

    monkeypatch.setattr(Split, "layout_of", slow)
    sp, made = startrail.SequenceParallel("1x1"), []
    loader = threading.Thread(target=lambda: made.append(sp.sequence(77, [0, 30, 77]).attention(*qkv(77))))
    loader.start()
    assert begun.wait(10)
    sequence = sp.sequence(16)
    sequence.shard(torch.arange(16), 0)
    sequence.attention(*qkv())
    assert loader.is_alive()
    may_go.set()
    loader.join()
    assert len(made) == 1

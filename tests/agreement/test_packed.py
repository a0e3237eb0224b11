"""Sequences cut into other documents are about the same batch: what one has sharded is compared for the other too."""

import functools
import queue
import random
import threading
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.engine import op_key
from startrail.launch.local import run_local
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import FULL, causal_mask, dense, error_of, qkv, tensors, worst

LENGTH, BATCHES, DOCUMENTS = 48, 4, [0, 9, 48]
DIFFERENT_DATA = "they were given different data: all must shard the same batches"


class Program(NamedTuple):
    """One training loop. ``parent`` and ``packed``: how often the sequence and its packed one are made. ``sharded_by``:
    the tokens are sharded by the parent before or after packing, or by the packed sequence. ``plain_layer``: a layer
    attends over the parent as well. ``cut_twice``: the packed sequence is cut again."""

    parent: str  # "once" or "per batch"
    packed: str  # "once", "per batch" or "per layer"
    sharded_by: str  # "parent first", "parent" or "packed"
    plain_layer: bool
    cut_twice: bool

    @property
    def is_possible(self) -> bool:
        return self.parent == "once" or self.packed != "once"


PROGRAMS = [
    program
    for values in product(
        ["once", "per batch"], ["once", "per batch", "per layer"], ["parent first", "parent", "packed"],
        [False, True], [False, True],
    )
    if (program := Program(*values)).is_possible
]  # fmt: skip


def steps(sp, program, skipped):
    """The calls of all batches that are not skipped, one after the other, with the number of the batch."""

    def pack(sequence):
        packed = sequence.packed(DOCUMENTS)
        return packed.packed([*DOCUMENTS[:-1], 20, LENGTH]) if program.cut_twice else packed

    parent = sp.sequence(LENGTH)
    packed = pack(parent)
    for batch in range(BATCHES):
        if batch in skipped:
            continue  # before any sequence is made, which would count
        tokens = torch.arange(LENGTH) * 7 + batch
        if program.parent == "per batch":
            parent = sp.sequence(LENGTH)
        if program.sharded_by == "parent first":
            parent.shard(tokens, 0)
        if program.packed == "per batch" or program.parent == "per batch":
            packed = pack(parent)
        if program.sharded_by != "parent first":
            (parent if program.sharded_by == "parent" else packed).shard(tokens, 0)

        for is_plain in [False, program.plain_layer, False]:
            if program.packed == "per layer" and program.sharded_by != "packed":
                packed = pack(parent)
            layer = parent if is_plain else packed
            yield batch, functools.partial(layer.attention, *qkv())


def first_error(sp, program, skipped):
    """(batch, text) of the first call that raises."""
    for batch, attend in steps(sp, program, skipped):
        if (text := error_of(attend)) != "no error":
            return batch, text
    return None, "no error"


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
def test_a_rank_that_skips_batches_raises_at_its_next_call_on_a_packed_sequence(backend, monkeypatch):
    """Whichever rank skips whatever number of batches, wherever the tokens were sharded. Ranks that skip the same
    batches, or none, raise nothing. On the stand-in for NCCL, digests stay on the device until ranks disagree."""
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
        monkeypatch.setattr(op_key, "is_on_host", lambda x: False)
    rng = random.Random(0)
    drawn = PROGRAMS if FULL else rng.sample(PROGRAMS, 14)
    cases = []
    for program in drawn:
        first = rng.randrange(BATCHES - 1)
        skipped = set(range(first, rng.randrange(first + 1, BATCHES)))
        skipping_ranks = rng.choice([{0}, {1}, {2}, {0, 2}, {0, 1, 2}, set()])
        cases.append((program, skipped, skipping_ranks))

    def on_rank(rank):
        results = []
        for program, skipped, skipping_ranks in cases:
            sp = startrail.SequenceParallel("1x3", timeout=30)
            results.append(first_error(sp, program, skipped if rank in skipping_ranks else set()))
            dist.barrier()
        return results

    for rank, results in enumerate(run_local(on_rank, 3, deadline=60)):
        for (program, skipped, skipping_ranks), (batch, text) in zip(cases, results, strict=True):
            what = f"rank {rank}, {program}, {skipping_ranks} skip {skipped}: batch {batch}, {text}"
            if len(skipping_ranks) in (0, 3):
                assert text == "no error", what
            else:
                expected = max(skipped) + 1 if rank in skipping_ranks else min(skipped)
                assert batch == expected and DIFFERENT_DATA in text, what


def test_packed_sequences_of_loader_threads_are_compared_and_may_be_ahead():
    """Each rank's loader is ahead by another number of batches. It cuts one sequence that it keeps, or one per batch,
    and shards by either. That is no error, unless a rank's loader leaves out a batch. (Of what a loader shards by a
    sequence that it keeps, only the first tensor counts.)"""
    cases = [case for case in product([False, True], repeat=3) if case != (False, False, True)]

    def load(sp, ready, per_batch, by_packed, skipped):
        parent = sp.sequence(LENGTH)
        for batch in range(6):
            if batch in skipped:
                continue
            parent = sp.sequence(LENGTH) if per_batch else parent
            if not by_packed:
                parent.shard(torch.arange(LENGTH) + batch, 0)
            packed = parent.packed(DOCUMENTS)
            if by_packed:
                packed.shard(torch.arange(LENGTH) + batch, 0)
            ready.put(packed)
        ready.put(None)

    def on_rank(rank):
        texts = []
        for per_batch, by_packed, skipping in cases:
            sp = startrail.SequenceParallel("1x2", timeout=30)
            ready, skipped = queue.Queue(maxsize=1 + 5 * rank), {3} if rank and skipping else set()
            loader = threading.Thread(target=load, args=(sp, ready, per_batch, by_packed, skipped), daemon=True)
            loader.start()
            found = "no error"
            while (packed := ready.get()) is not None:
                if found == "no error":
                    found = error_of(lambda packed=packed: [packed.attention(*qkv(LENGTH // 2)) for _ in range(2)])
            texts.append(found)
            dist.barrier()
        return texts

    for texts in run_local(on_rank, 2, deadline=90):
        for (*how, skipping), text in zip(cases, texts, strict=True):
            assert DIFFERENT_DATA in text if skipping else text == "no error", (how, text)


@pytest.mark.parametrize("layout", ["zones", "contiguous"])
def test_one_sequence_cut_into_new_documents_in_every_batch_is_exact(layout):
    q, k, v, dout = tensors(48)

    def on_rank(rank):
        sp, errors = startrail.SequenceParallel("1x3", layout=layout, timeout=30), []
        parent = sp.sequence(48, [0, 20, 48])
        for cut in (5, 9, 17, 30):
            parent.shard(torch.arange(48) + cut, 0)
            packed = parent.packed(sorted({0, 20, cut, 48}))
            inputs = [packed.shard(x, 2).requires_grad_() for x in (q, k, v)]
            out = packed.attention(*inputs, causal=True)
            grads = torch.autograd.grad(out, inputs, packed.shard(dout, 2))
            truth = dense(q, k, v, dout, attn_mask=causal_mask(48, packed.documents.tolist()))
            errors.append(worst([out, *grads], [packed.shard(x, 2) for x in truth]))
        return max(errors)

    assert max(run_local(on_rank, 3, deadline=60)) < 1e-5

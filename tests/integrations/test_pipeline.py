"""Pipelines whose stages split their sequences: loss and gradients of one process, for two schedules."""

import runpy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import startrail
from startrail import _compat
from startrail.integrations.pipeline import Microbatches
from startrail.launch.local import run_local
from tests.helpers import ROOT, error_of

RECIPE = runpy.run_path(str(ROOT / "examples" / "recipes" / "pipeline.py"), run_name="recipe")
LENGTH, DOCUMENTS, VOCAB = (RECIPE[name] for name in ("LENGTH", "DOCUMENTS", "VOCAB"))


def alone():
    """Document by document, with torch's own attention."""

    class Plain:
        def attention(self, q, k, v, causal):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    model = RECIPE["Stage"](0, 1, {0: Plain()}).double()
    ids = torch.randint(VOCAB, (len(DOCUMENTS), LENGTH), generator=torch.Generator().manual_seed(1))
    losses, count = [], 0
    for row, cuts in zip(ids, DOCUMENTS, strict=True):
        for start, stop in pairwise(cuts):
            logits = model(row[start:stop].unsqueeze(0), 0)[0, :-1]
            losses.append(F.cross_entropy(logits, row[start + 1 : stop], reduction="sum"))
            count += stop - start - 1
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.item(), {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize("plan, rounds", [("1x2", 1), ("u2", 2), ("1x2", 2)])
def test_loss_and_gradients_are_those_of_one_process(plan, rounds):
    torch.set_num_threads(1)
    expected, truth = alone()

    def on_rank(rank):
        loss, stages = RECIPE["step"](plan, rounds)
        named = {name: x for stage in stages for name, x in stage.named_parameters()}
        off = {name: float((x.grad - truth[name]).norm() / truth[name].norm()) for name, x in named.items()}
        return loss, {name: x for name, x in off.items() if not x < 2e-6}, [*named]

    found = run_local(on_rank, 4)
    assert {name for _, _, names in found for name in names} == truth.keys()
    for loss, wrong, _ in found:
        assert loss == pytest.approx(expected, rel=1e-6) and wrong == {}


def test_mistakes():
    """Each is one line, on all ranks of the pipeline, before a stage runs."""

    def on_rank(rank):
        groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
        sequence, pipeline = groups[rank // 2], groups[2 + rank % 2]
        plans = error_of(
            lambda: Microbatches(startrail.SequenceParallel(("1x2", "u2")[rank // 2], group=sequence), pipeline)
        )
        sp = startrail.SequenceParallel("1x2", group=sequence)
        microbatches = Microbatches(sp, pipeline)
        cuts = [0, 10, 40] if rank < 2 else [0, 20, 40]
        documents = error_of(lambda: microbatches.start([sp.sequence(40, cuts)]))
        counts = error_of(lambda: microbatches.start([sp.sequence(40), sp.sequence(48)]))
        none = error_of(lambda: microbatches.start([]))
        early = error_of(lambda: microbatches[torch.tensor([0])])
        numbers = microbatches.start([sp.sequence(40), sp.sequence(40, [0, 10, 40])])
        few = error_of(lambda: microbatches[numbers])
        return plans, documents, counts, none, early, few, numbers.tolist()

    for plans, documents, counts, none, early, few, fine in run_local(on_rank, 4):
        assert early.startswith("ValueError: a stage runs microbatches [0] at once, but 0 were started: call start()")
        assert few.startswith("ValueError: a stage runs microbatches [0, 1] at once, but 2 were started")
        assert plans.startswith(
            "ValueError: the stages of a pipeline must have the same plan: stage rank 0: 1x2 on rank"
        )
        assert "stage rank 1: u2 on rank" in plans
        assert documents.startswith("ValueError: the stages of a pipeline must have the same documents: stage rank 0: ")
        assert "[0, 10, 40]; stage rank 1: 1 microbatches with documents [0, 20, 40]" in documents
        assert counts == (
            "ValueError: microbatches must have equally many tokens on a rank, got 20 or 24 on rank 0: "
            "pad the sequences"
        )
        assert none == "ValueError: a step needs at least one microbatch, got none"
        assert fine == [0, 1]


def test_ranks_of_different_speed_all_raise():
    """With unequal shares, documents can change the tokens of some ranks only."""

    def on_rank(rank):
        groups = [dist.new_group(list(ranks)) for ranks in ((0, 1, 2), (0,), (1,), (2,))]
        sp = startrail.SequenceParallel("1x3", group=groups[0])
        microbatches = Microbatches(sp, groups[1 + rank])
        sequences = [sp.sequence(48, shares=shares) for shares in ([2, 1, 1], [2, 2, 4])]
        local = [sequence.local for sequence in sequences]
        return len(set(local)), error_of(lambda: microbatches.start(sequences))

    alike, texts = zip(*run_local(on_rank, 3), strict=True)
    assert set(alike) == {1, 2}, "some ranks have equally many"
    assert len(set(texts)) == 1 and "microbatches must have equally many tokens on a rank" in texts[0]


def test_groups_that_move_no_tensors_of_the_cpu():
    """NCCL's: plans and documents are then compared in a GPU's tensors."""
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    for devices, chosen in (([gpu], gpu), ([cpu], cpu), ([gpu, cpu], cpu)):
        assert _compat.device_of_group(SimpleNamespace(_device_types=devices)) == chosen

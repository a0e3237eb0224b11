"""Mistakes of post-training that one process does not know: each is one line, before weights change."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("peft", reason="peft is not installed (make setup installs it)")

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.tiny import tiny, tokens

IDS = tokens(1, 40)


def adapted():
    torch.manual_seed(3)
    return get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_a_reference_that_is_not_attached():
    """It would see this rank's tokens only."""
    sp = startrail.SequenceParallel("1x1")
    policy, reference = attach(adapted(), sp), tiny("llama")
    batch = shard_batch(sp, IDS, IDS)
    assert policy(**batch).loss.isfinite()
    assert error_of(lambda: reference(**batch)).startswith(
        "ValueError: LlamaAttention: the batch is this rank's part of a sequence, but the model is not attached: "
    )
    assert reference(IDS, labels=IDS).loss.isfinite(), "ordinary batches still run"
    assert attach(reference, sp)(**batch).loss.isfinite()
    assert "not attached" in error_of(lambda: detach(policy)(**shard_batch(sp, IDS, IDS)))


def test_what_ranks_do_differently():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        found = {}

        def step(model, batch):
            trained = [x for x in model.parameters() if x.requires_grad]
            before = [x.detach().clone() for x in trained]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            try:
                model(**batch).loss.backward()
                optimizer.step()
            finally:
                assert all(map(torch.equal, before, trained)), "the error comes before weights change"

        # weights that were not the same to begin with: another seed of the adapter on each rank
        model = adapted()
        if rank:
            with torch.no_grad():
                next(x for x in model.parameters() if x.requires_grad).add_(1)
        found["seed"] = error_of(lambda: step(attach(model, sp), shard_batch(sp, IDS, IDS)))
        # gradients that DDP averages although a sequence needs their sum
        model = DistributedDataParallel(attach(adapted(), sp))
        found["average"] = error_of(lambda: step(model, shard_batch(sp, IDS, IDS)))
        # another batch on each rank
        found["batch"] = error_of(
            lambda: step(attach(tiny("llama"), sp), shard_batch(sp, IDS[:, : 40 - 4 * rank], None))
        )
        # groups of heads that are not equally large
        grouped = startrail.SequenceParallel("u2,groups=3,exchange=twice")
        found["groups"] = error_of(lambda: step(attach(tiny("llama"), grouped), shard_batch(grouped, IDS, IDS)))
        return found

    for found in run_local(on_rank, 2, deadline=100):
        assert found["seed"].startswith(
            "ValueError: parameter model.layers.0.self_attn.q_proj.lora_A.default.weight is not "
        )
        assert "set the same seed on every rank before the model is built" in found["seed"]
        assert found["average"].startswith(
            "ValueError: gradients are averaged over 2 ranks, but must be summed (DDP divides by its number of ranks): "
        )
        assert found["batch"].startswith(
            "ValueError: ranks disagree about one attention call: rank 0: forward: q (1, 4, 20"
        )
        assert "groups=3 divides neither the 2 query and 1 key/value heads of a rank nor" in found["groups"]

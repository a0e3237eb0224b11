"""Bamba's z loss: the loss and gradients of one process, row by row, or document by document."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import torch
import transformers
from torch.distributed.fsdp import fully_shard

import startrail
from startrail.integrations import without_logits
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.one_process import BATCHES, summed
from tests.integrations.tiny import SMALL, differences, gradients, tiny

WEIGHT = 0.7
UPSTREAM = 1.3  # the loss is used in another one


def bamba():
    model = tiny("bamba")
    model.z_loss_coefficient = model.config.z_loss_coefficient = WEIGHT
    return model


def pieces(batch):
    """(ids, labels) of rows without padding, of documents if they are packed."""
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row].bool()
        positions = batch.get("position_ids", torch.ones_like(ids[None]))[0]
        starts = (positions == 0).nonzero().flatten().tolist() or [0]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            inside = real[start:stop]
            yield ids[start:stop][inside][None], labels[start:stop][inside][None]


def alone(batch):
    model, found = tiny("bamba"), list(pieces(batch))
    model.z_loss_coefficient = 0.0
    tokens, learnt = (sum(x) for x in zip(*((i.numel(), (y[:, 1:] != -100).sum()) for i, y in found), strict=True))
    loss = 0.0
    for ids, labels in found:
        output = model(ids, labels=labels, num_items_in_batch=learnt, use_cache=False)
        loss = loss + output.loss + WEIGHT * output.logits.logsumexp(-1).square().sum() / tokens
    (UPSTREAM * loss).backward()
    return loss.item(), gradients(model)


def test_the_reference_is_the_loss_of_transformers():
    batch, model = BATCHES["uneven"], bamba()
    loss = model(**batch, use_cache=False).loss
    (UPSTREAM * loss).backward()
    true, grads = alone(batch)
    assert true == pytest.approx(loss.item(), rel=1e-6) and differences(gradients(model), grads, 3e-6) == []


@pytest.mark.parametrize("plan", ["1x3", "u2/1x2"])
def test_loss_and_gradients_are_those_of_one_process(plan, monkeypatch):
    """In chunks of 8 tokens, with all logits, with layers that are recomputed, and with FSDP."""
    torch.set_num_threads(1)
    monkeypatch.setattr(without_logits, "CHUNK_BYTES", 8 * SMALL["vocab_size"] * 4)
    kinds = ("uneven", "packed", "right")
    truths = {kind: alone(BATCHES[kind]) for kind in kinds}

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel(plan), []
        for kind, (true, grads) in truths.items():
            for options in ({}, dict(logits=True), dict(offload=True), "fsdp"):
                model = attach(bamba(), sp, **({} if options == "fsdp" else options))
                if options == "fsdp":
                    for part in (*model.model.layers, model.lm_head, model):
                        fully_shard(part)
                loss = model(**shard_batch(sp, **BATCHES[kind])).loss
                (UPSTREAM * startrail.gradient_factor(model) * loss).backward()
                if options != "fsdp":
                    startrail.sum_gradients(model.parameters(), sp.group)
                found = {name: x.full_tensor() if options == "fsdp" else x for name, x in gradients(model).items()}
                lines = differences(found, grads, 1e-5)
                if summed(loss) != pytest.approx(true, rel=1e-6):
                    lines.append(f"loss {summed(loss)}, one process {true}")
                assert model.z_loss_coefficient == WEIGHT
                wrong += [f"{kind} {options}: {line}" for line in lines]
        return wrong

    world = startrail.Plan.parse(plan).size
    assert run_local(on_rank, world) == [[]] * world


def test_every_z_loss_of_transformers_is_known():
    """The others are of routers, in models with an encoder."""
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if "z_loss" in path.read_text()}
    assert "bamba" in found and found <= {"bamba", "nllb_moe", "switch_transformers"}


def test_another_z_loss_is_refused(monkeypatch):
    """``attach`` compares the loss of a few tokens with what it would compute."""
    model = bamba()
    forward = type(model).forward

    def with_another(self, **options):
        output = forward(self, **options)
        output.loss = None if output.loss is None else output.loss + 0.01 * output.logits.logsumexp(-1).square().mean()
        return output

    monkeypatch.setattr(type(model), "forward", with_another)
    text = error_of(lambda: attach(model, startrail.SequenceParallel("1x1")))
    assert text.startswith("ValueError: BambaForCausalLM: its loss is not the sum over shift_labels"), text

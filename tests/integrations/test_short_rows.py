"""Rows of few tokens, ranks with padding only, and batches without labels, where new memory holds NaN."""

import random

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import torch

import startrail
from startrail.integrations.transformers import attach
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations.one_process import many_ranks, one_process
from tests.integrations.tiny import padded, tiny

NAMES = ("gemma2", "gpt-oss", "opt", "llama4")  # a softcap, sinks, learned positions, chunks; experts in two
CASES = 80 if FULL else 20


def random_batch(chance, name):
    longest = chance.choice((1, 2, 4, 12, 40))
    lengths = [chance.randint(1, longest) for _ in range(chance.randint(1, 3))]
    batch = padded(lengths, chance.choice(("right", "left")))
    share = chance.choice((0, 0.5, 1, 1))
    learnt = torch.tensor([[chance.random() < share for _ in row] for row in batch["labels"]])
    if name == "gemma2":  # eager attention, in which padding on the left sees all keys
        learnt &= batch["attention_mask"].cumsum(1) > 1
    return dict(batch, labels=batch["labels"].masked_fill(~learnt, -100))


def mistakes(ours, truth):
    """The gradients that are off. One process has NaN where a batch has no labels."""
    truth = {name: x.nan_to_num() for name, x in truth.items()}
    norm = torch.stack([x.norm() for x in truth.values()]).norm()
    return [name for name, x in truth.items() if not (ours[name] - x).norm() <= 1e-5 * norm]


@pytest.mark.parametrize("plan", ["1x5", "u2/1x2"])
def test_gradients_are_those_of_one_process(plan):
    chance = random.Random(0)
    cases = []
    for name in chance.choices(NAMES, k=CASES):
        tile = chance.choice((None, 1, 5)) if name != "opt" else None  # whose MLP is no module
        options = dict(tile_mlp=tile, offload=chance.random() < 0.3)
        cases.append((name, random_batch(chance, name), options, chance.random() < 0.5))
    truths = [one_process(name, batch)[1] for name, batch, _, _ in cases]

    def on_rank(rank):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        sp, wrong = startrail.SequenceParallel(plan), []
        for (name, batch, options, recompute), truth in zip(cases, truths, strict=True):
            model = attach(tiny(name), sp, **options)
            if recompute:
                model.gradient_checkpointing_enable()
            _, found = many_ranks(model, sp, batch)
            lengths = batch["attention_mask"].sum(1).tolist()
            wrong += [f"{name} {lengths} {options}, recompute {recompute}: {line}" for line in mistakes(found, truth)]
        return wrong

    assert run_local(on_rank, startrail.Plan.parse(plan).size) == [[]] * startrail.Plan.parse(plan).size


def test_ranks_of_different_speed():
    """Gradients are those of one process, and a batch too short for the shares is refused on all ranks."""
    batch = padded((40, 25), "right")
    truths = [one_process(name, batch)[1] for name in NAMES]

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("u2/1x2", shares=(1, 0.3, 0.6, 1)), []
        for name, truth in zip(NAMES, truths, strict=True):
            wrong += mistakes(many_ranks(attach(tiny(name), sp), sp, batch)[1], truth)
        return wrong, error_of(lambda: many_ranks(attach(tiny(NAMES[0]), sp), sp, padded((2,), "right")))

    found = run_local(on_rank, 4)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert {error for _, error in found} == {
        "ValueError: 2 tokens leave none for rank 1, of shares (1.0, 0.3, 0.6, 1.0): models need one on every rank"
    }

"""Hugging Face models of every kind of attention: the loss and every gradient of one process."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import FULL
from tests.integrations.one_process import BATCHES, Truth, batch_of, compare, many_ranks, one_process, truth_of
from tests.integrations.tiny import InFloat64, differences, families, tiny, tokens

PLANS = {2: ["1x2"], 4: ["u2/1x2", "2x2"], 8: ["u2/2x2"]}
# All families run on the first plan of four ranks, and these two (windows, sinks and experts; chunks) on all plans.
ON_ALL_PLANS = ("gpt-oss", "llama4")


def families_of(plan):
    return families() if FULL or plan == PLANS[4][0] else ON_ALL_PLANS


@pytest.fixture(scope="module")
def truths():
    torch.set_num_threads(1)
    return {(name, kind): truth_of(name, batch_of(name, kind)) for name in families() for kind in BATCHES}


@pytest.mark.parametrize("world", sorted(PLANS))
def test_loss_and_gradients_are_those_of_one_process(world, truths):
    def on_rank(rank):
        wrong = []
        for plan in PLANS[world]:
            sp = startrail.SequenceParallel(plan)
            for name in families_of(plan):
                model = attach(tiny(name), sp)
                for kind in BATCHES:
                    lines = compare(*many_ranks(model, sp, batch_of(name, kind)), truths[name, kind])
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_chunks_count_as_in_one_process():
    """transformers 5.22 counts the chunks of packed documents from the row's first token, 5.23 from each document's."""
    sp = startrail.SequenceParallel("1x1")
    ids = tokens(2, 40)
    for first, second in (((0, 25), (0, 15)), ((0, 20), (5, 20))):  # other documents; the same, at other positions
        rows = [[*range(start, start + count), *range(40 - count)] for start, count in (first, second)]
        batch = dict(input_ids=ids, labels=ids, position_ids=torch.tensor(rows))
        alone = tiny("llama4")(**batch, use_cache=False).loss.item()
        split = attach(tiny("llama4"), sp)(**shard_batch(sp, **batch)).loss.item()
        assert split == pytest.approx(alone, rel=1e-6)


# Families that take several steps; test-all has one per kind of layer, and more steps. In float32, gpt-oss diverges
# after some steps (losses 1e-3 apart): where two experts tie except for rounding, its router picks another one.
STEPPING = [("gpt-oss", torch.float64), ("llama4", torch.float64), ("gemma3", torch.float32)]
if FULL:
    STEPPING += [(name, torch.float64) for name in ("qwen3", "gemma3", "deepseek-v3")]
STEPS = 20 if FULL else 4
STEPS_ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-13}


def test_in_float64_every_family_is_the_same_and_stays_so_for_several_steps():
    """The differences in float32 are rounding: in float64, loss, gradients and later weights agree to 1e-13."""
    alone = {name: one_process(name, batch_of(name, "left"), torch.float64) for name in families()}
    truths = {name: Truth(loss, grads, grads) for name, (loss, grads) in alone.items()}

    def steps(model, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            ids = tokens(2, 37 + number % 3, seed=number)
            with InFloat64() if model.dtype == torch.float64 else nullcontext():
                losses.append(run(model, dict(input_ids=ids, labels=ids)))
            optimizer.step()
        return losses, {name: x.detach() for name, x in model.named_parameters()}

    def run_alone(model, batch):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    expected = {(name, dtype): steps(tiny(name, dtype), run_alone) for name, dtype in STEPPING}

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        found = {}
        for name, truth in truths.items():
            model = attach(tiny(name, torch.float64), sp)
            with InFloat64():
                found[name] = compare(*many_ranks(model, sp, batch_of(name, "left")), truth)
        for (name, dtype), (true_losses, true_weights) in expected.items():
            model = attach(tiny(name, dtype), sp)
            losses, weights = steps(model, lambda model, batch: many_ranks(model, sp, batch)[0])
            off = max(abs(a / b - 1) for a, b in zip(losses, true_losses, strict=True))
            lines = [] if off <= STEPS_ALLOWED[dtype] else [f"losses: {off:.1e}"]
            found[name, dtype] = lines + differences(weights, true_weights, STEPS_ALLOWED[dtype])
        return {name: lines for name, lines in found.items() if lines}

    assert run_local(on_rank, 4) == [{}] * 4

"""Vision-language models: images embedded whole, the language model split. Loss and gradients of one process."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import transformers as hf

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.one_process import ALLOWED, Truth, compare, summed
from tests.integrations.seeing import batch_of_images, models, tiny_seeing
from tests.integrations.tiny import SMALL, InFloat64, backward, differences, gradients, tokens

PLANS = {2: ["1x2"], 4: ["u2/1x2", "2x2"], 8: ["u2/2x2"]}
ROWS = {"uneven": [(9, 5, 8)], "padded": [(9, 5, 7), (4, 3)], "same length": [(5, 9), (9, 5)]}
PACKED = [(9, 5, 7), (4, 3), (6, 6)]
ALLOWED_IN_FLOAT64 = 1e-12
ZERO = "vision_tower.encoder.layers.0.self_attn.k_proj.bias"  # its gradient is 0: a bias of keys shifts all logits


def loss_and_gradients(model, batch, double):
    model.zero_grad()
    with InFloat64() if double else nullcontext():
        loss = model(**batch, use_cache=False).loss
        backward(loss)
    return loss, gradients(model)


def one_process(name, rows, dtype=torch.float32):
    loss, grads = loss_and_gradients(
        tiny_seeing(name, dtype), batch_of_images(name, rows, dtype), dtype == torch.float64
    )
    return loss.item(), grads


def many_ranks(model, sp, batch, double=False):
    loss, _ = loss_and_gradients(model, shard_batch(sp, **batch), double)
    startrail.sum_gradients(model.parameters(), sp.group)
    return summed(loss), gradients(model)


def packed(name, dtype=torch.float32, positions=False):
    """The rows of ``PACKED`` one after the other. The first token of each is not learnt. With ``positions``, those of
    the text and of three axes, which begin anew in each row."""
    batch = batch_of_images(name, PACKED, dtype)
    real = batch["attention_mask"].bool()
    lengths = real.sum(1).tolist()
    joined = {key: x[real].unsqueeze(0) for key, x in batch.items() if x.shape == real.shape}
    del joined["attention_mask"]
    joined["labels"][0, torch.tensor(lengths).cumsum(0)[:-1]] = -100
    joined |= {key: x for key, x in batch.items() if x.shape != real.shape}
    if not positions:
        return dict(joined, documents=[0, *torch.tensor(lengths).cumsum(0).tolist()])
    text = torch.cat([torch.arange(length) for length in lengths]).view(1, 1, -1)
    grid = {key: batch[key] for key in ("image_grid_thw", "mm_token_type_ids", "attention_mask")}
    axes, _ = tiny_seeing(name).model.get_rope_index(batch["input_ids"], **grid)
    return dict(joined, position_ids=torch.cat([text, axes[:, real].unsqueeze(1)]))


def without_zero(tensors):
    return {name: x for name, x in tensors.items() if not name.endswith(ZERO)}


@pytest.fixture(scope="module")
def truths():
    torch.set_num_threads(1)
    cases = {**ROWS, "packed": PACKED}
    return {
        (name, kind): Truth(*one_process(name, rows), one_process(name, rows, torch.float64)[1])
        for name in models()
        for kind, rows in cases.items()
    }


@pytest.mark.parametrize("world", sorted(PLANS))
def test_loss_and_gradients_are_those_of_one_process(world, truths):
    def on_rank(rank):
        wrong = []
        for plan in PLANS[world]:
            sp = startrail.SequenceParallel(plan)
            for name in models():
                model = attach(tiny_seeing(name), sp)
                batches = {kind: batch_of_images(name, rows) for kind, rows in ROWS.items()}
                batches["packed"] = packed(name)
                for kind, batch in batches.items():
                    lines = compare(*many_ranks(model, sp, batch), truths[name, kind])
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
                if name != "gemma3":
                    lines = compare(*many_ranks(model, sp, packed(name, positions=True)), truths[name, "packed"])
                    wrong += [f"{plan} {name} packed by positions: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_in_float64_and_for_twenty_steps():
    alone = {name: one_process(name, ROWS["padded"], torch.float64) for name in models()}

    def steps(model, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(20):
            run(model, batch_of_images("gemma3", [(9, 5, 4 + number % 3), (3, 4 + number % 2)], torch.float64))
            optimizer.step()
        return {name: x.detach() for name, x in model.named_parameters()}

    expected = steps(
        tiny_seeing("gemma3", torch.float64), lambda model, batch: loss_and_gradients(model, batch, double=True)
    )

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        found = {}
        for name, (loss, grads) in alone.items():
            tile = None if "moe" in name else 5  # which hides routers
            model = attach(tiny_seeing(name, torch.float64), sp, tile_mlp=tile, offload=True)
            batch = batch_of_images(name, ROWS["padded"], torch.float64)
            ours, own = many_ranks(model, sp, batch, double=True)
            found[name] = differences(own, without_zero(grads), ALLOWED_IN_FLOAT64)
            found[name] += [] if abs(ours / loss - 1) < ALLOWED_IN_FLOAT64 else [f"loss {ours}, one process {loss}"]
        model = attach(tiny_seeing("gemma3", torch.float64), sp)
        weights = steps(model, lambda model, batch: many_ranks(model, sp, batch, double=True))
        found["steps"] = differences(weights, without_zero(expected), ALLOWED_IN_FLOAT64)
        return {name: lines for name, lines in found.items() if lines}

    assert run_local(on_rank, 4) == [{}] * 4


def test_text_alone_and_what_is_refused():
    sp = startrail.SequenceParallel("1x1")
    ids = tokens(2, 11) % 50 + 3
    for name in models():
        batch = dict(input_ids=ids, labels=ids)
        expected = tiny_seeing(name)(**batch, use_cache=False).loss
        ours = attach(tiny_seeing(name), sp)(**shard_batch(sp, **batch)).loss
        assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    gemma = tiny_seeing("gemma3")
    gemma.model.language_model.layers[0].self_attn.sliding_window = 3
    gemma.config.text_config.sliding_window = 3
    batch = batch_of_images("gemma3", ROWS["uneven"])
    text = error_of(lambda: attach(gemma, sp)(**shard_batch(sp, **batch)))
    assert "an image of 4 tokens is longer than the layer's window of 3" in text
    text = error_of(lambda: attach(tiny_seeing("gemma3"), sp)(**shard_batch(sp, **batch, blocks=[(0, 2)])))
    assert "the model's images are the blocks (10, 14), (21, 25), but the batch has (0, 2)" in text
    typed = {key: batch[key] for key in ("input_ids", "labels", "token_type_ids")}
    text = error_of(lambda: attach(tiny_seeing("gemma3"), sp)(**shard_batch(sp, **typed)))
    assert "token_type_ids without images: leave them out, and pass blocks=" in text
    for name in models():
        model, batch = attach(tiny_seeing(name), sp), batch_of_images(name, ROWS["uneven"])
        model(**shard_batch(sp, **batch))
        embeds = torch.randn(*batch["input_ids"].shape, 32)
        text = error_of(lambda: model.model.language_model(inputs_embeds=embeds, use_cache=False))  # noqa: B023
        assert "self_attn: called without a batch: call the whole model that is attached" in text, (name, text)
    siglip = models()["gemma3"][1].vision_config
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**SMALL), vision_config=siglip, image_token_id=60)
    model = hf.LlavaForConditionalGeneration(config)
    text = error_of(lambda: attach(model, sp))
    assert "LlavaForConditionalGeneration: of the models with more than text, only gemma3, qwen2_5_vl" in text
    assert "Its language model does: attach(model.model.language_model, sp)" in text
    llama = model.model.language_model
    embeds = torch.randn(1, 11, 32)
    expected = llama(inputs_embeds=embeds, use_cache=False).last_hidden_state
    ours = attach(llama, sp)(**shard_batch(sp, inputs_embeds=embeds), use_cache=False).last_hidden_state
    assert (ours - expected).norm() <= ALLOWED[torch.float32] * expected.norm()

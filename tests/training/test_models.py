"""The models on one process: shapes, sizes, what positions mean, and the sampler."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import startrail
from startrail.training.data.texts import TextData
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS
from startrail.training.models.dit import DiT, flow_matching_loss, patchify, sample, unpatchify
from startrail.training.models.gpt import GPT
from tests.helpers import write_words

CAUSAL = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
TINY_GPT, TINY_DIT = GPT_CONFIGS["gpt-tiny"], DIT_CONFIGS["dit-tiny"]


@pytest.mark.parametrize(
    "name, size",
    [
        ("gpt-3b", 3e9),
        ("gpt-7b", 7e9),
        ("gpt-tiny", 1e6),
        ("gpt-hybrid-tiny", 1.05e6),
        ("dit-1b", 1e9),
        ("dit-tiny", 1.2e6),
    ],
)
def test_named_shapes_have_the_size_in_their_name(name, size):
    with torch.device("meta"):
        model = GPT(GPT_CONFIGS[name]) if name in GPT_CONFIGS else DiT(DIT_CONFIGS[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / size - 1) < 0.1, f"{name} has {count:,} parameters"


@pytest.mark.parametrize(
    "config, change, message",
    [
        (TINY_GPT, dict(heads=6), "width 128 is not a multiple of 6 heads"),
        (TINY_GPT, dict(kv_heads=3), "8 query heads are not a multiple of 3 key/value heads"),
        (TINY_GPT, dict(heads=128, kv_heads=1), "head dim 128 / 128 = 1 is odd"),
        (TINY_GPT, dict(layers=0), "layers 0 must be at least 1"),
        (TINY_GPT, dict(attention_every=5), "attention_every 5 leaves 4 layers without attention"),
        (TINY_GPT, dict(rotary_base=1.0), "rotary_base 1.0 must be more than 1"),
        (TINY_DIT, dict(width=102, heads=6), "a width that is a multiple of 4, got 102"),
        (TINY_DIT, dict(heads=7), "width 128 is not a multiple of 7 heads"),
        (TINY_DIT, dict(patch=-1), "patch -1 must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_values(config, change, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


def test_gpt_sees_the_past_only_and_only_relative_positions():
    torch.manual_seed(0)
    model = GPT(TINY_GPT).double()
    tokens = torch.randint(256, (2, 12))
    positions = torch.arange(12)
    hidden = model(tokens, positions, CAUSAL)
    changed = tokens.clone()
    changed[:, 7] += 1
    assert torch.equal(model(changed % 256, positions, CAUSAL)[:, :7], hidden[:, :7])
    far = model(tokens, positions + 1_000_000, CAUSAL)
    torch.testing.assert_close(far, hidden, rtol=0, atol=1e-8)
    torch.testing.assert_close(model(tokens, positions.expand(2, -1), CAUSAL), hidden)
    assert (model(tokens, 2 * positions, CAUSAL) - hidden).abs().max() > 1e-3, "positions must matter"


def test_tied_and_untied_outputs():
    tied, untied = GPT(TINY_GPT), GPT(replace(TINY_GPT, tied=False))
    assert tied.output_weight is tied.embedding.weight
    assert untied.output_weight is not untied.embedding.weight
    assert untied.logits(torch.ones(3, 128)).shape == (3, 256)


def test_a_compiled_gpt_is_not_recompiled_for_batches_with_other_documents(tmp_path):
    torch.manual_seed(0)
    model = GPT(replace(TINY_GPT, layers=2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    data = TextData(write_words(tmp_path), startrail.SequenceParallel("1x1").sequence(600), packed=True)
    packings = set()
    for index in range(5):
        batch = data.batch(index)
        packings.add(tuple(batch.sequence.documents.tolist()))
        arguments = batch.tokens, batch.sequence.positions(), partial(batch.sequence.attention, causal=True)
        torch.testing.assert_close(compiled(*arguments), model(*arguments))
    assert len({len(documents) for documents in packings}) > 1, "also in number"
    assert (len(packings), counter.frame_count) == (5, 1)


def test_parameters_built_without_memory_can_be_initialised_later():
    with torch.device("meta"):
        models = GPT(TINY_GPT), DiT(TINY_DIT)
    for model in models:
        model.to_empty(device="cpu").reset_parameters()
        fresh = type(model)(model.config)
        for (name, late), early in zip(model.named_parameters(), fresh.parameters(), strict=True):
            same = (late.float().std() - early.float().std()).abs() <= 0.1 * early.std()
            assert same, name


def test_patchify_and_back():
    images = torch.randn(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4], images[1, :, 4:8, 4:8].flatten()), "patch 4 is in row 1, column 1"
    assert torch.equal(unpatchify(patches, 4, 2, 3), images)
    with pytest.raises(ValueError, match="8 x 12 pixels cannot be divided into patches of 5 x 5"):
        patchify(images, 5)
    with pytest.raises(ValueError, match="6 patches are not 2 rows x 4 columns = 8"):
        unpatchify(patches, 4, 2, 4)


def test_a_fresh_dit_predicts_zero_and_so_its_sampler_returns_the_noise():
    model = DiT(TINY_DIT)
    noise = torch.randn(2, TINY_DIT.tokens, TINY_DIT.patch_dim)
    patches = sample(model, noise, torch.tensor([0, 9]), torch.arange(256), F.scaled_dot_product_attention, steps=3)
    assert torch.equal(patches, noise)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        sample(model, noise, torch.tensor([0, 9]), torch.arange(256), F.scaled_dot_product_attention, steps=0)


def test_the_sampler_follows_the_exact_velocity_home():
    """One image in the world: from anywhere on the line, (point - image) / t is the velocity, and Euler is exact."""
    image, noise = torch.randn(2, 1, 4, 12, dtype=torch.float64)

    def velocity(patches, positions, time, label, attention):
        return (patches - image) / time.view(-1, 1, 1)

    patches = sample(velocity, noise, torch.tensor([0]), torch.arange(4), F.scaled_dot_product_attention, steps=5)
    torch.testing.assert_close(patches, image)


def test_flow_matching_counts_real_patches_only():
    patches, noise = torch.randn(2, 2, 4, 12)
    real = torch.tensor([True, True, True, False])
    model = DiT(replace(TINY_DIT, rows=2, columns=2))
    arguments = (torch.rand(2), torch.tensor([1, 2]), torch.arange(4), real, F.scaled_dot_product_attention)
    loss_sum, count = flow_matching_loss(model, patches, noise, *arguments)
    assert count == 2 * 3 * 12
    torch.testing.assert_close(loss_sum, (noise - patches)[:, :3].square().sum())


def test_time_class_and_place_reach_the_output():
    torch.manual_seed(0)
    model = DiT(TINY_DIT)
    for parameter in model.parameters():  # zero modulations would let nothing through
        torch.nn.init.normal_(parameter, std=0.05)
    patches, where = torch.randn(1, 8, 12), torch.arange(8)

    def run(positions=where, time=0.3, label=1):
        return model(patches, positions, torch.tensor([time]), torch.tensor([label]), F.scaled_dot_product_attention)

    for other in (run(time=0.31), run(label=2), run(positions=where + 1), run(positions=where + 16)):
        assert (other - run()).abs().max() > 1e-5

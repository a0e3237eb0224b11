"""Models and runs: read from files, from Hugging Face, and from recipes."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from startrail.planner.workload import find_model, from_hugging_face, read_model, read_run
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS, GPTConfig
from startrail.training.recipes import find
from tests.planner.shapes import LLAMA


def test_recipes_and_planner_share_the_shapes_of_models():
    assert {
        "gpt-3b": GPTConfig(vocab=50_304, width=2560, layers=32, heads=32, kv_heads=32, hidden=6912),
        "gpt-7b": GPTConfig(vocab=50_304, width=4096, layers=32, heads=32, kv_heads=32, hidden=11_008),
        "gpt-tiny": GPTConfig(vocab=256, width=128, layers=4, heads=8, kv_heads=4, hidden=512, tied=True),
        "gpt-hybrid-tiny": replace(GPT_CONFIGS["gpt-tiny"], attention_every=4),
    } == GPT_CONFIGS
    assert {name: (c.width, c.layers, c.heads) for name, c in DIT_CONFIGS.items()} == {
        "dit-1b": (1536, 24, 24),
        "dit-tiny": (128, 4, 8),
    }
    for name, config in DIT_CONFIGS.items():
        assert find_model(name).hidden == 4 * config.width  # true of a DiT by definition


@pytest.mark.parametrize(
    "extra, kinds",
    [
        ({}, {None: 4}),
        ({"sliding_window": 16}, {16: 4}),
        ({"sliding_window": 16, "use_sliding_window": False}, {None: 4}),
        ({"sliding_window": 16, "sliding_window_pattern": 4}, {16: 3, None: 1}),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, {None: 3, 16: 1}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, {8: 2, None: 2}),
    ],
)
def test_a_hugging_face_config_has_sliding_and_full_layers(extra, kinds):
    model = from_hugging_face(LLAMA | extra, "mine", "config.json")
    assert Counter(model.windows) == kinds
    assert (model.heads, model.kv_heads, model.head_dim, model.matrices) == (4, 2, 16, 3)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads 3"),
        ({"num_local_experts": 8}, "num_local_experts = 8: experts of llama are not supported"),
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512: latents of llama are not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention' are not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must list each of the 4 layers"),
    ],
)
def test_an_unsupported_config_is_refused(extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hugging_face(LLAMA | extra, "mine", "config.json")


@pytest.mark.parametrize(
    "table, message",
    [
        ({"length": "128k", "bach": 2}, "no key 'bach'; did you mean 'batch'?"),
        ({"batch": 2}, "'length' is missing"),
        ({"length": 0}, "length = 0 is not a whole number of at least 1"),
        ({"length": 8, "zero": 1}, "zero = 1 is not one of 0, 2, 3"),
        ({"length": 8, "dtype": "fp8"}, "dtype = 'fp8' is not one of float32, bfloat16, float16"),
        ({"length": 8, "recompute": "yes"}, "recompute = 'yes' is not true or false"),
    ],
)
def test_a_mistake_in_a_run_names_the_key(table, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_run(table, "run.toml")


def test_a_model_whose_heads_do_not_fit_is_refused():
    table = dict(kind="gpt", vocab=9, width=10, layers=1, heads=4, hidden=8)
    with pytest.raises(ValueError, match=re.escape("m.toml: width = 10 is not a multiple of heads = 4")):
        read_model(table, "m", "m.toml")


def test_a_recipe_knows_its_job():
    for name in ("gpt-tiny", "dit-tiny"):
        recipe = find(name).with_({"data_parallel": 2, "batch": 3, "loss_chunk": 77})
        job = recipe.job("float32")
        assert replace(job.model, layers=1, windows=()) == replace(find_model(name), layers=1, windows=())
        assert (job.run.batch, job.run.length, job.run.loss_chunk) == (6, recipe.tokens, 77)
        assert (job.data_parallel, job.run.zero, job.run.recompute) == (2, recipe.zero, recipe.recompute)

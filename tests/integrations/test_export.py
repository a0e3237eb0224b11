"""An exported GPT is a Llama: transformers loads it, and computes the same logits."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from startrail.training.checkpoints.export import llama_config, llama_name
from startrail.training.models.gpt import GPT
from startrail.training.recipes import find


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(tied, tmp_path):
    recipe = find("gpt-tiny").with_({"tied": tied, "layers": 2, "kv_heads": 2})
    torch.manual_seed(0)
    model = GPT(recipe.config).double()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms that are not 1
    (tmp_path / "config.json").write_text(json.dumps(llama_config(recipe)))
    tensors = {llama_name(name): tensor.detach() for name, tensor in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = torch.randint(recipe.config.vocab, (2, 40))
    dense = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    ours = model.logits(model(tokens, torch.arange(40), dense))
    # transformers keeps angles in float32
    torch.testing.assert_close(loaded(tokens).logits, ours, rtol=1e-4, atol=1e-5)


def test_other_models_are_not_llamas():
    for name, reason in (("dit-tiny", "is not a GPT"), ("gpt-hybrid-tiny", "has gated delta nets, and a Llama has")):
        with pytest.raises(ValueError, match=rf"{name} {reason}.*: export it to a file that ends in .safetensors"):
            llama_config(find(name))

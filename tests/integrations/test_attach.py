"""``attach`` and ``detach``: models that are refused, versions, several models, and masks."""

import copy
import gc
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    masking_utils,
)
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

import startrail
from startrail.integrations import layer_masks, probe, versions
from startrail.integrations.layer_masks import LayerKind, read_layer_kind
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.integrations.versions import is_checkpointing
from startrail.kernels import kernel_for
from tests.helpers import ROOT, error_of
from tests.integrations.tiny import SMALL, families, packed, tiny, tokens


def test_what_cannot_be_run_is_refused_when_it_is_attached():
    sp = startrail.SequenceParallel("1x1")
    model = tiny("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    text = error_of(lambda: attach(model, sp))
    assert text == "ValueError: model.layers.0.self_attn: attention dropout 0.1: set it to 0 in the model's config"
    assert model.config._attn_implementation == "sdpa" and not hasattr(model, "_startrail"), "as it was"

    class OddAttention(type(model.model.layers[1].self_attn)):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options, position_bias=torch.zeros(1))

    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = OddAttention
    assert "model.layers.1.self_attn: position_bias" in error_of(lambda: attach(model, sp))
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU without flash-attn
        patch.setattr(layer_masks, "kernel_for", lambda device, *x: kernel_for(torch.device("cuda"), *x))
        text = error_of(lambda: attach(tiny("gemma2"), sp))
    assert text.startswith("ValueError: model.layers.0.self_attn: softcap=0.5: of all GPU kernels only flash-attn")
    OddAttention.forward = lambda self, hidden_states, **options: (hidden_states, None)  # not through the interface
    assert "model.layers.1.self_attn does not call attention" in error_of(lambda: attach(model, sp))
    model = tiny("mistral")
    model.config.layer_types = ["full_attention", "linear_attention"]
    text = error_of(lambda: attach(model, sp))
    assert "layers 1 (1 of 2) are 'linear_attention': their state would have to pass from rank to rank" in text
    assert (
        "holds and receives 128 bytes per token of the whole sequence, per layer and pass (16 MiB for 131,072" in text
    )
    model = tiny("llama")

    class ShiftedMLP(type(model.model.layers[1].mlp)):
        def forward(self, x):
            return super().forward(x + 0.01 * x.roll(1, 1))

    model.model.layers[1].mlp.__class__ = ShiftedMLP
    text = error_of(lambda: attach(model, sp))
    assert text.startswith(
        "ValueError: model.layers.1.mlp.gate_proj: a token's result depends on other tokens outside attention"
    )
    assert "sequence.unshard(x, 1) before it" in text
    griffin = dict(lru_width=32, block_types=["recurrent", "attention"], attention_window_size=8)

    class Changed(RecurrentGemmaRecurrentBlock):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options)

    for dtype in (torch.float32, torch.bfloat16):  # whose rounding hides what new weights do
        model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SMALL, **griffin)).to(dtype)
        model.model.layers[0].temporal_block.__class__ = Changed
        with pytest.MonkeyPatch.context() as patch:  # since 5.23 the config tells
            patch.setattr(probe, "check_config", lambda model: None)
            text = error_of(lambda: attach(model, sp))  # noqa: B023
        assert "model.layers.0.temporal_block.rg_lru: a token's result depends on other tokens" in text
        assert "in 1 RecurrentGemmaRglru: model.layers.0.temporal_block.rg_lru." in text
    model = GPT2LMHeadModel(GPT2Config(**families()["gpt2"][1].to_diff_dict() | dict(add_cross_attention=True)))
    assert "transformer.h.0.crossattention" in error_of(lambda: attach(model, sp))
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
    model = BartForConditionalGeneration(BartConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    assert "a decoder that attends to an encoder's states is not supported" in error_of(lambda: attach(model, sp))
    model = tiny("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    assert "its loss is not the sum over shift_labels" in error_of(lambda: attach(model, sp))
    assert "already" in error_of(lambda: attach(attach(tiny("llama"), sp), sp))
    assert "needs a transformers model" in error_of(lambda: attach(torch.nn.Linear(2, 2), sp))


def test_a_model_whose_positions_begin_elsewhere_needs_positions():
    """In RoBERTa they begin behind the id of padding, which other models do not do."""
    sp, batch = startrail.SequenceParallel("1x1"), packed(9, 4)
    torch.manual_seed(0)
    options = dict(is_decoder=True, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = RobertaForCausalLM(RobertaConfig(**SMALL | options))
    ids = batch["input_ids"].clamp(min=1)
    whole = dict(input_ids=ids, labels=ids)
    expected = model(**whole).loss.item()
    attach(model, sp)
    text = error_of(lambda: model(**shard_batch(sp, **whole)))
    assert text.startswith("ValueError: RobertaForCausalLM does not count positions from 0: pass position_ids= to")
    counted = torch.arange(1, 14).unsqueeze(0)  # padding has id 0
    ours = model(**shard_batch(sp, **whole, position_ids=counted)).loss.item()
    assert ours == pytest.approx(expected, rel=1e-6)
    assert model(**shard_batch(sp, **batch)).loss.isfinite()


def test_two_models_with_two_plans_and_generation_afterwards():
    shared = families()["llama"][1]
    first, second = (LlamaForCausalLM(shared) for _ in range(2))
    one, two = startrail.SequenceParallel("1x1"), startrail.SequenceParallel("u1")
    ids = tokens(1, 8)
    before = first.generate(ids, max_new_tokens=4, do_sample=False)
    attach(first, one)
    attach(second, two)
    assert shared._attn_implementation != first.config._attn_implementation != second.config._attn_implementation
    for model, sp in ((first, one), (second, two)):
        model(**shard_batch(sp, ids, ids)).loss.backward()
    assert one.timings()["total"] > 0 and two.timings()["total"] > 0
    assert torch.equal(detach(first).generate(ids, max_new_tokens=4, do_sample=False), before)
    name = second.config._attn_implementation
    assert "_attn_implementation" not in second.config.to_json_string()
    third = copy.deepcopy(second)
    third.gradient_checkpointing_enable()
    assert is_checkpointing(third) and not is_checkpointing(second), "what a copy does, it does alone"
    del model, second
    gc.collect()
    third(**shard_batch(two, ids, ids)).loss.backward()
    detach(third).generate(ids, max_new_tokens=1)
    del third
    gc.collect()
    assert name not in AttentionInterface._global_mapping, "nothing is left in transformers' tables"


def test_a_version_that_was_not_tested_warns_once(monkeypatch):
    oldest = ".".join(map(str, versions.TESTED[0]))
    assert f'"transformers>={oldest},<6"' in (ROOT / "pyproject.toml").read_text(), "what pip installs was tested"
    monkeypatch.setattr(versions.transformers, "__version__", "5.99.0")
    with pytest.warns(UserWarning, match="tested with transformers"):
        attach(tiny("llama"), startrail.SequenceParallel("1x1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(tiny("llama"), startrail.SequenceParallel("1x1"))


def test_kinds_of_masks_are_read_from_what_they_are_made_of():
    assert read_layer_kind(masking_utils.sliding_window_causal_mask_function(5)) == LayerKind(True, 5)
    assert read_layer_kind(masking_utils.sliding_window_bidirectional_mask_function(5)) == LayerKind(False, 6)
    assert read_layer_kind(masking_utils.chunked_causal_mask_function(8, torch.zeros(1))) == LayerKind(True, None, 8)
    odd = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.causal_mask_function)
    with pytest.raises(ValueError, match=r"unsupported mask function or_masks"):
        read_layer_kind(odd)
